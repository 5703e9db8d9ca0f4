"""Which processes are an engine's: real processes that listen and have children, looked up in the real /proc."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from kvcache_exporter.gpu_owners import EnginePlace, EngineProcess
from kvcache_exporter.sources.processes import ProcessTable, sees_host_processes
from lab import free_port

# Listens, starts its workers under the titles that it is given, and tells their pids.
SERVER = """
import socket, subprocess, sys
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
workers = [subprocess.Popen([title, "-c", sys.argv[3]], executable=sys.executable, **pipes) for title in sys.argv[4:]]
for worker in workers:
    worker.stdout.readline()
print(*(worker.pid for worker in workers), flush=True)
input()
"""
WORKER = "print(flush=True); input()"
ENGINE_WITH_A_WORKER = """
import subprocess
subprocess.Popen(["VLLM::Worker_TP0", "-c", "input()"], executable="/proc/self/exe", stdin=subprocess.PIPE)
print(flush=True)
input()
"""


class Servers:
    """Starts engines that look like vLLM's to /proc, and ends them."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def start(
        self,
        *titles: str,
        host: str = "127.0.0.1",
        port: int | None = None,
        prefix: tuple[str, ...] = (),
        code: str = WORKER,
    ) -> Server:
        port = free_port() if port is None else port
        process = subprocess.Popen(
            [*prefix, sys.executable, "-c", SERVER, host, str(port), code, *titles],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        assert process.stdin is not None
        assert process.stdout is not None
        self._stack.enter_context(process.stdin)
        self._stack.enter_context(process.stdout)
        return Server(process, port, tuple(map(int, process.stdout.readline().split())))


class Server:
    """One that runs: its port, its process and the pids of its workers, in the order of their titles."""

    def __init__(self, process: subprocess.Popen[str], port: int, workers: tuple[int, ...]) -> None:
        self.process = process
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.workers = workers


@pytest.fixture
def servers() -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack)


def at(urls: dict[str, str]) -> dict[str, EnginePlace]:
    """Engines that are known by their address alone."""
    return {name: EnginePlace(url) for name, url in urls.items()}


def test_workers_are_children_of_the_process_that_listens(servers: Servers) -> None:
    one, other = servers.start("VLLM::EngineCore"), servers.start("VLLM::EngineCore")
    pids = {*one.workers, *other.workers, os.getpid()}
    assert ProcessTable().engines_of(at({"one": one.url, "other": other.url}), pids) == {
        "one": (EngineProcess(one.workers[0]),),
        "other": (EngineProcess(other.workers[0]),),
    }


def test_titles_tell_ranks(servers: Servers) -> None:
    titles = ("VLLM::Worker_DP1_PP0_TP3_EP7", "VLLM::EngineCore_DP0", "VLLM::Worker_PCP1_TP2_DCP1", "python_TP9")
    server = servers.start(*titles)
    (processes,) = ProcessTable().engines_of(at({"t": server.url}), server.workers).values()
    assert {process.pid: process for process in processes} == {
        server.workers[0]: EngineProcess(server.workers[0], 1, 0, 3),
        server.workers[1]: EngineProcess(server.workers[1], 0),
        server.workers[2]: EngineProcess(server.workers[2], None, None, 2),
        server.workers[3]: EngineProcess(server.workers[3]),
    }


def test_worker_without_a_rank_in_its_title_has_that_of_its_engine(servers: Servers) -> None:
    """As vLLM 0.32 names them with data parallelism: VLLM::EngineCore_DP1, and below it VLLM::Worker_TP0."""
    server = servers.start("VLLM::EngineCore_DP1", code=ENGINE_WITH_A_WORKER)
    (worker,) = psutil.Process(server.workers[0]).children()
    found = ProcessTable().engines_of(at({"t": server.url}), [worker.pid])
    assert found == {"t": (EngineProcess(worker.pid, data_parallel_rank=1, tensor_parallel_rank=0),)}


def test_server_that_holds_the_memory_itself_is_found(servers: Servers) -> None:
    server = servers.start(host="0.0.0.0")
    assert ProcessTable().engines_of(at({"t": server.url}), [server.process.pid]) == {"t": (EngineProcess(server.process.pid),)}


def test_engine_that_does_not_run_has_no_process_and_one_elsewhere_no_entry(servers: Servers) -> None:
    server = servers.start("VLLM::EngineCore")
    urls = {"down": f"http://127.0.0.1:{free_port()}", "elsewhere": "http://192.0.2.7:8000", "no such": "http://engine.invalid:1"}
    assert ProcessTable().engines_of(at(urls), server.workers) == {"down": ()}


def test_process_that_listens_elsewhere_on_the_same_port_is_another(servers: Servers) -> None:
    """127.0.0.2 is this machine too, and not where the engine listens."""
    server = servers.start("VLLM::EngineCore")
    assert ProcessTable().engines_of(at({"t": f"http://localhost:{server.port}"}), server.workers)["t"] != ()
    assert ProcessTable().engines_of(at({"t": f"http://127.0.0.2:{server.port}"}), server.workers).get("t", ()) == ()


def test_process_that_has_ended_is_left_out_and_its_pid_is_nobody_afterwards(servers: Servers) -> None:
    server = servers.start("VLLM::EngineCore", "VLLM::EngineCore")
    table = ProcessTable()
    assert len(table.engines_of(at({"t": server.url}), server.workers)["t"]) == 2
    server.process.kill()
    server.process.wait()
    assert table.engines_of(at({"t": server.url}), [*server.workers, 4_194_303]) == {"t": ()}


def test_engine_that_starts_to_listen_later_is_found_then(servers: Servers) -> None:
    server = servers.start("VLLM::EngineCore")
    port = free_port()
    table = ProcessTable()
    urls = {"t": f"http://127.0.0.1:{port}"}
    assert table.engines_of(at(urls), server.workers) == {"t": ()}
    later = servers.start("VLLM::EngineCore", port=port)
    assert table.engines_of(at(urls), later.workers) == {"t": (EngineProcess(later.workers[0]),)}


CONTAINER_ID = "0b7a4d3c19e2" * 5 + "beef"


@pytest.fixture
def container_cgroup() -> Iterator[Path]:
    """A cgroup that is called as containerd calls a container's."""
    for hierarchy in (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup")):
        cgroup = hierarchy / f"cri-containerd-{CONTAINER_ID}.scope"
        try:
            cgroup.mkdir()
        except OSError:
            continue
        if (cgroup / "cgroup.procs").exists():
            break
        cgroup.rmdir()
    else:
        pytest.skip("no cgroup can be made here")
    try:
        yield cgroup
    finally:
        cgroup.rmdir()


def test_engine_in_a_container_is_found_by_the_id_of_the_container(container_cgroup: Path, servers: Servers) -> None:
    """Its address is the pod's, where another process of the machine may listen on the same port."""
    inside, outside = servers.start("VLLM::Worker_TP1", "VLLM::Worker_TP0"), servers.start("VLLM::EngineCore")
    for pid in inside.workers:
        (container_cgroup / "cgroup.procs").write_text(str(pid))
    places = {
        "ml/vllm-0": EnginePlace(outside.url, CONTAINER_ID),
        "ml/vllm-1": EnginePlace(outside.url, "f" * 64),
        "fixed": EnginePlace(outside.url),
    }
    try:
        found = ProcessTable().engines_of(places, {*inside.workers, *outside.workers})
    finally:
        for pid in inside.workers:
            (container_cgroup.parent / "cgroup.procs").write_text(str(pid))
    assert found == {
        "ml/vllm-0": tuple(
            EngineProcess(pid, tensor_parallel_rank=rank) for pid, rank in sorted(zip(inside.workers, (1, 0), strict=True))
        ),
        "ml/vllm-1": (),
        "fixed": (EngineProcess(outside.workers[0]),),
    }


def test_same_port_in_the_network_of_another_container_is_another(servers: Servers) -> None:
    unshare = ("unshare", "--map-root-user", "--net", "--")
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network namespace can be made here")
    ours = servers.start("VLLM::EngineCore")
    theirs = servers.start("VLLM::EngineCore", host="0.0.0.0", port=ours.port, prefix=unshare)
    found = ProcessTable().engines_of(at({"t": ours.url}), {*ours.workers, *theirs.workers})
    assert found == {"t": (EngineProcess(ours.workers[0]),)}


LOOK_AS_NOBODY = """
import os, sys
from kvcache_exporter.errors import SourceError
from kvcache_exporter.gpu_owners import EnginePlace
from kvcache_exporter.sources.processes import ProcessTable
if os.getuid() == 0:
    "the codec of host names, which nobody could load".encode("idna")
    os.setgid(65534)
    os.setuid(65534)
try:
    print(ProcessTable().engines_of({"t": EnginePlace(sys.argv[1])}, [int(sys.argv[2])]))
except SourceError as error:
    print(error.reason, "|", error)
"""


def test_process_of_another_user_may_be_the_engine_and_the_sentence_says_what_is_missing(servers: Servers) -> None:
    pid = servers.start("VLLM::EngineCore").workers[0] if os.getuid() == 0 else 1
    run = subprocess.run(
        [sys.executable, "-c", LOOK_AS_NOBODY, f"http://127.0.0.1:{free_port()}", str(pid)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.startswith(f"no_permission | the sockets of process {pid}, which holds GPU memory, may not be looked at")
    assert "CAP_SYS_PTRACE" in run.stdout


def test_pids_of_the_host_are_seen_only_in_its_namespace(tmp_path: Path) -> None:
    namespace = tmp_path / "pid"
    assert not sees_host_processes(namespace)
    namespace.symlink_to("pid:[4026531836]")
    assert sees_host_processes(namespace)
    namespace.unlink()
    namespace.symlink_to("pid:[4026532201]")
    assert not sees_host_processes(namespace)
