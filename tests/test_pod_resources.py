"""Which containers have which GPUs, asked of a real gRPC server on a unix socket."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest

from kvcache_exporter.errors import SourceError
from kvcache_exporter.gpu_owners import ContainerGpus
from kvcache_exporter.sources.pod_resources import PodResources
from pod_resources_server import KubeletServer, Pod, encode

A = "GPU-4d1e1d2c-21f5-4bd0-a3e0-2d9e7f2b0a11"
B = "GPU-9bbd2c6f-0c9e-4f8e-8b5e-8f0a5c1c7e22"
MIG = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"
OLD_MIG = f"MIG-{A}/1/0"

# A call that must answer has long; one that must run out of time has little.
AMPLE_SECONDS = 20.0
SHORT_SECONDS = 0.3


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[KubeletServer]:
    with KubeletServer(tmp_path) as server:
        yield server


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for a unix socket, and which everyone may enter."""
    with tempfile.TemporaryDirectory(prefix="kubelet-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


def listed(path: Path) -> tuple[ContainerGpus, ...]:
    return PodResources(path, timeout_seconds=AMPLE_SECONDS).list()


def failure(path: Path, timeout_seconds: float = AMPLE_SECONDS) -> SourceError:
    with pytest.raises(SourceError) as caught:
        PodResources(path, timeout_seconds=timeout_seconds).list()
    return caught.value


def given(kubelet: KubeletServer, resource: str, ids: Sequence[str]) -> ContainerGpus | None:
    """What a container is said to have that was given these devices."""
    kubelet.pods = [Pod("ml", "vllm-0", {"engine": [(resource, ids)]})]
    containers = listed(kubelet.socket)
    return containers[0] if containers else None


def test_containers_with_gpus_are_listed_in_the_order_of_the_kubelet(kubelet: KubeletServer) -> None:
    kubelet.pods = [
        Pod("zoo", "web-1", {"nginx": []}),
        Pod("ml", "vllm-1", {"engine": [("nvidia.com/gpu", [B, A])], "sidecar": [], "draft": [("nvidia.com/gpu", ["GPU-c"])]}),
        Pod("batch", "vllm-0", {"engine": [("example.com/nic", ["nic0"]), ("nvidia.com/mig-1g.10gb", [MIG])]}),
    ]
    assert listed(kubelet.socket) == (
        ContainerGpus("ml", "vllm-1", "engine", (B, A)),
        ContainerGpus("ml", "vllm-1", "draft", ("GPU-c",)),
        ContainerGpus("batch", "vllm-0", "engine", (MIG,)),
    )


def test_a_node_without_pods_has_no_containers_with_gpus(kubelet: KubeletServer) -> None:
    assert listed(kubelet.socket) == ()


def test_devices_of_several_numa_nodes_and_resources_belong_to_one_container(kubelet: KubeletServer) -> None:
    entries = [("nvidia.com/gpu", [A]), ("nvidia.com/gpu", [B, A]), ("nvidia.com/mig-3g.40gb", [MIG])]
    kubelet.pods = [Pod("ml", "vllm-0", {"engine": entries})]
    assert listed(kubelet.socket) == (ContainerGpus("ml", "vllm-0", "engine", (A, B, MIG)),)


@pytest.mark.parametrize(
    "resource", ["nvidia.com/gpu", "nvidia.com/gpu.shared", "nvidia.com/mig-1g.5gb", "nvidia.com/mig-2g.20gb.shared"]
)
def test_a_resource_that_is_a_gpu_is_read(kubelet: KubeletServer, resource: str) -> None:
    assert given(kubelet, resource, [A]) == ContainerGpus("ml", "vllm-0", "engine", (A,))


@pytest.mark.parametrize(
    "resource", ["amd.com/gpu", "nvidia.com/GPU-memory", "nvidia.com/mig-", "nvidia.com/gpu2", "a.nvidia.com/gpu", "gpu", ""]
)
def test_a_resource_that_is_no_nvidia_gpu_is_left_out(kubelet: KubeletServer, resource: str) -> None:
    assert given(kubelet, resource, [A]) is None


@pytest.mark.parametrize(
    ("device_id", "device"),
    [
        (f"{A}::3", A),
        (f"{MIG}::0", MIG),
        (f"{OLD_MIG}::12", OLD_MIG),
        ("nvidia0/vgpu1", "nvidia0"),
        ("nvidia0/gi1/vgpu2", "nvidia0/gi1"),
    ],
)
def test_a_share_of_a_gpu_is_that_gpu_shared(kubelet: KubeletServer, device_id: str, device: str) -> None:
    assert given(kubelet, "nvidia.com/gpu", [device_id]) == ContainerGpus("ml", "vllm-0", "engine", (device,), shared=True)


def test_several_shares_of_a_gpu_are_one_device(kubelet: KubeletServer) -> None:
    ids = [f"{B}::7", f"{A}::0", f"{B}::1"]
    assert given(kubelet, "nvidia.com/gpu.shared", ids) == ContainerGpus("ml", "vllm-0", "engine", (B, A), shared=True)


@pytest.mark.parametrize(
    "device_id",
    [A, MIG, OLD_MIG, "0", "nvidia0", "nvidia0/gi1", "tegra", f"{A}::", f"{A}::x", f"{A}:1", "::1", "nvidia0/vgpu", "gpu ü"],
)
def test_any_other_device_is_left_as_it_is_named(kubelet: KubeletServer, device_id: str) -> None:
    assert given(kubelet, "nvidia.com/gpu", [device_id]) == ContainerGpus("ml", "vllm-0", "engine", (device_id,))


def test_an_answer_larger_than_the_default_limit_of_grpc_is_read(kubelet: KubeletServer) -> None:
    gpus = [ContainerGpus("ml", f"vllm-{number}", "engine", (f"GPU-{number:0100000}",)) for number in range(50)]
    kubelet.pods = [Pod(one.namespace, one.pod, {one.container: [("nvidia.com/gpu", one.devices)]}) for one in gpus]
    assert len(encode(kubelet.pods)) > 4 * 1024 * 1024
    assert listed(kubelet.socket) == tuple(gpus)


def test_an_answer_larger_than_any_kubelet_sends_is_refused(kubelet: KubeletServer) -> None:
    kubelet.answer = bytes(16 * 1024 * 1024 + 1)
    error = failure(kubelet.socket)
    assert error.reason == "resource_exhausted"
    assert "too large" in str(error)


def test_a_path_may_have_any_characters(folder: Path) -> None:
    place = folder / "100% #1 ?ü"
    place.mkdir()
    with KubeletServer(folder) as kubelet:
        kubelet.pods = [Pod("ml", "vllm-0", {"engine": [("nvidia.com/gpu", [A])]})]
        (place / "link").symlink_to(kubelet.socket)
        assert listed(place / "link") == (ContainerGpus("ml", "vllm-0", "engine", (A,)),)


def test_a_relative_path_is_of_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with KubeletServer(folder) as kubelet:
        assert listed(Path(kubelet.socket.name)) == ()


@pytest.mark.parametrize("path", ["kubelet.sock", "no/kubelet.sock", "file/kubelet.sock"])
def test_no_socket_is_missing(folder: Path, path: str) -> None:
    (folder / "file").touch()
    error = failure(folder / path)
    assert error.reason == "missing"
    assert str(folder / path) in str(error)
    assert "hostPath" in str(error)


def test_a_socket_on_which_nobody_listens_any_more_is_unavailable(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "kubelet.sock"))
    error = failure(folder / "kubelet.sock")
    assert error.reason == "unavailable"
    assert "nobody listens" in str(error)


def test_a_path_too_long_for_a_socket_is_an_error_of_the_source(folder: Path) -> None:
    path = folder / ("x" * 120)
    assert str(path) in str(failure(path))


@pytest.mark.parametrize("closed", ["kubelet.sock", "."])
def test_a_socket_that_this_user_may_not_open_is_no_permission(folder: Path, closed: str) -> None:
    """Root may open everything, so that the client then runs as another user."""
    with KubeletServer(folder) as kubelet:
        code = f"""
import os
from pathlib import Path
from kvcache_exporter.errors import SourceError
from kvcache_exporter.sources.pod_resources import PodResources
source = PodResources(Path({str(kubelet.socket)!r}), timeout_seconds={AMPLE_SECONDS})
source.list()  # imports all that the other user may not be allowed to read
os.chmod({str(folder / closed)!r}, 0)
if os.getuid() == 0:
    os.setuid(65534)
try:
    source.list()
except SourceError as error:
    print(os.getuid(), error.reason, error)
"""
        client = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        (folder / closed).chmod(0o700)
    user, reason, message = client.stdout.split(" ", 2)
    assert user != "0"
    assert reason == "no_permission"
    assert f"user {user} may not open {kubelet.socket}" in message
    assert client.stderr == ""


def test_a_kubelet_that_answers_too_late_is_a_timeout(kubelet: KubeletServer) -> None:
    kubelet.delay_seconds = 60
    started = time.monotonic()
    error = failure(kubelet.socket, SHORT_SECONDS)
    assert time.monotonic() - started < AMPLE_SECONDS
    assert error.reason == "timeout"
    assert "0.3 s" in str(error)


@contextlib.contextmanager
def listener(path: Path, greeting: bytes) -> Iterator[None]:
    """A server that takes every connection, sends `greeting`, and says nothing more."""
    taken = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                taken.append(server.accept()[0])
                taken[-1].sendall(greeting)

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in taken:
        connection.close()


def test_a_socket_that_takes_connections_and_is_silent_is_a_timeout(folder: Path) -> None:
    with listener(folder / "kubelet.sock", b""):
        started = time.monotonic()
        assert failure(folder / "kubelet.sock", SHORT_SECONDS).reason == "timeout"
    assert time.monotonic() - started < AMPLE_SECONDS


def test_a_socket_that_does_not_speak_grpc_is_an_error_of_the_source(folder: Path) -> None:
    with listener(folder / "kubelet.sock", b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"):
        assert failure(folder / "kubelet.sock", 2.0).reason in {"unavailable", "timeout"}


@pytest.mark.parametrize("answer", [b"\xff\xff\xff", encode([Pod("ml", "vllm-0", {"engine": []})])[:-3], b"\x0a\x03\x0a\x01\xff"])
def test_an_answer_that_is_no_list_of_pods_is_a_parse_error(kubelet: KubeletServer, answer: bytes) -> None:
    kubelet.answer = answer
    assert failure(kubelet.socket).reason == "parse"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (grpc.StatusCode.UNAVAILABLE, "as the test wants it"),
        (grpc.StatusCode.UNIMPLEMENTED, "1.20"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "too often"),
        (grpc.StatusCode.INTERNAL, "as the test wants it"),
    ],
)
def test_another_status_is_an_error_of_its_name(kubelet: KubeletServer, status: grpc.StatusCode, words: str) -> None:
    kubelet.status = status
    error = failure(kubelet.socket)
    assert error.reason == status.name.lower()
    assert words in str(error)
    assert "\n" not in str(error)


def test_the_call_after_a_failure_answers(kubelet: KubeletServer) -> None:
    kubelet.pods = [Pod("ml", "vllm-0", {"engine": [("nvidia.com/gpu", [A])]})]
    source = PodResources(kubelet.socket, timeout_seconds=AMPLE_SECONDS)
    for status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL):
        kubelet.status = status
        with pytest.raises(SourceError):
            source.list()
        kubelet.status = None
        assert source.list()[0].devices == (A,)


def test_a_kubelet_that_restarts_between_two_calls_is_not_noticed(kubelet: KubeletServer) -> None:
    source = PodResources(kubelet.socket, timeout_seconds=AMPLE_SECONDS)
    for device in (A, B, "GPU-c"):
        kubelet.pods = [Pod("ml", "vllm-0", {"engine": [("nvidia.com/gpu", [device])]})]
        assert source.list()[0].devices == (device,)
        kubelet.stop()
        kubelet.start()


def test_a_kubelet_that_was_down_is_read_at_the_first_call_after(kubelet: KubeletServer) -> None:
    """A channel of gRPC that is kept would wait for a second or more, since its connection has failed just before."""
    source = PodResources(kubelet.socket, timeout_seconds=AMPLE_SECONDS)
    assert source.list() == ()
    kubelet.stop()
    for _ in range(3):
        with pytest.raises(SourceError, match="there is no"):
            source.list()
    kubelet.start()
    assert source.list() == ()


def test_the_socket_at_the_path_counts_though_an_older_server_lives_on(folder: Path) -> None:
    with KubeletServer(folder) as old:
        source = PodResources(old.socket, timeout_seconds=AMPLE_SECONDS)
        assert source.list() == ()
        with KubeletServer(folder) as new:
            assert new.socket == old.socket
            new.pods = [Pod("ml", "vllm-0", {"engine": [("nvidia.com/gpu", [A])]})]
            assert source.list()[0].devices == (A,)
            assert (old.calls, new.calls) == (1, 1)


def test_no_connection_stays_open_between_calls(kubelet: KubeletServer) -> None:
    def open_files() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    source = PodResources(kubelet.socket, timeout_seconds=AMPLE_SECONDS)
    source.list()
    before = open_files()
    for _ in range(20):
        source.list()
    deadline = time.monotonic() + AMPLE_SECONDS
    while open_files() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert open_files() <= before


def test_close_ends_a_call_in_flight(kubelet: KubeletServer) -> None:
    kubelet.delay_seconds = 60
    source = PodResources(kubelet.socket, timeout_seconds=60)
    caught: list[SourceError] = []

    def call() -> None:
        try:
            source.list()
        except SourceError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    deadline = time.monotonic() + AMPLE_SECONDS
    while not kubelet.calls and time.monotonic() < deadline:
        time.sleep(0.01)
    source.close()
    thread.join(AMPLE_SECONDS)
    assert [error.reason for error in caught] == ["cancelled"]


def test_close_does_nothing_without_a_call(kubelet: KubeletServer) -> None:
    source = PodResources(kubelet.socket, timeout_seconds=AMPLE_SECONDS)
    source.close()
    assert source.list() == ()
    source.close()
    assert source.list() == ()


@pytest.mark.parametrize("package", ["grpc", "google.protobuf"])
def test_without_a_package_of_the_extra_the_module_is_there_and_says_what_to_install(
    kubelet: KubeletServer, package: str
) -> None:
    code = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == {package!r} or name.startswith({package!r} + "."):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
from pathlib import Path
from kvcache_exporter.errors import SourceError
from kvcache_exporter.sources.pod_resources import PodResources
source = PodResources(Path({str(kubelet.socket)!r}), timeout_seconds={AMPLE_SECONDS})
try:
    source.list()
except SourceError as error:
    print(error.reason, error)
source.close()
"""
    client = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert client.stdout.startswith("not_installed ")
    assert "kvcache-exporter[kubelet]" in client.stdout
    assert f"'{package}" in client.stdout


def test_the_module_imports_neither_grpc_nor_protobuf() -> None:
    code = (
        "import sys, kvcache_exporter.sources.pod_resources; print([m for m in ('grpc', 'google.protobuf') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
