"""The Dockerfile's own steps, run without a container engine, and what they yield, run as the image would run it.

A folder stands for the root of the image. A copy of this Python in its usr/local stands for the base image, which has no
bytecode of the standard library either. Packages come by the locks' hashes from where pip is set to get them.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from dockerfile import REPOSITORY, RUNTIME_LOCK, Instruction, build_context, pins, stages
from lab import free_port, wait_until

# Nobody has these: the image must not depend on who runs it.
UID = GID = 23456
IS_ROOT = os.geteuid() == 0

# The program as process 1 of a pid namespace, on a root that nobody can write to.
AS_PROCESS_1 = (
    "unshare",
    "--mount",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
    *(() if IS_ROOT else ("--map-root-user",)),
)
READ_ONLY_ROOT = ("sh", "-c", 'mount -o remount,bind,ro / && exec "$@"', "sh")
WITHOUT_CAPABILITIES = ("setpriv", "--no-new-privs", "--inh-caps=-all", "--bounding-set=-all")
AS_ANYBODY = (*WITHOUT_CAPABILITIES, f"--reuid={UID}", f"--regid={GID}", "--clear-groups") if IS_ROOT else ()


@dataclass
class Image:
    """The root of an image that is being built, and what its instructions have set so far."""

    root: Path
    context: Path
    workdir: str = "/"
    env: dict[str, str] = field(default_factory=lambda: {"PATH": "/usr/local/bin:/usr/bin:/bin"})
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def here(self, text: str) -> str:
        """Put the image's own folders under the root: what is in /usr/bin is this machine's."""
        return re.sub(r"(?<![\w.])/(opt|source|usr/local)(?=/|\s|$|:)", rf"{self.root}/\1", text)

    def apply(self, instruction: Instruction) -> None:
        """Do what a builder does on one instruction."""
        if instruction.name == "WORKDIR":
            self.workdir = instruction.value
            self._workdir().mkdir(parents=True, exist_ok=True)
        elif instruction.name == "ENV":
            path = self.env["PATH"]
            self.env |= {name: value.replace("$PATH", path) for name, value in instruction.pairs.items()}
        elif instruction.name == "COPY" and not instruction.value.startswith("--from="):
            self._copy(*instruction.words)
        elif instruction.name == "RUN":
            environment = self._from_outside() | self.environment()
            answer = subprocess.run(
                ["/bin/sh", "-c", self.here(instruction.value)],
                cwd=self._workdir(), env=environment, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert answer.returncode == 0, answer.stdout + answer.stderr
        elif instruction.name == "ENTRYPOINT":
            self.entrypoint = instruction.words
        elif instruction.name == "CMD":
            self.command = instruction.words

    def environment(self) -> dict[str, str]:
        """All that a program in the image finds in its environment, and where this Python's own library has been copied to."""
        return {name: self.here(value) for name, value in self.env.items()} | {"LD_LIBRARY_PATH": f"{self.root}/usr/local/lib"}

    def site_packages(self) -> Path:
        (folder,) = (self.root / "opt" / "kvcache-exporter" / "lib").glob("python3.*/site-packages")
        return folder

    def _workdir(self) -> Path:
        return Path(self.here(self.workdir))

    def _copy(self, *words: str) -> None:
        target = self._workdir() / words[-1]
        for source in (self.context / word for word in words[:-1]):
            if source.is_dir():
                shutil.copytree(source, target)
            else:
                target.mkdir(exist_ok=True)
                shutil.copy(source, target)

    @staticmethod
    def _from_outside() -> dict[str, str]:
        """Where this machine gets packages from."""
        return {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name.lower().endswith("_proxy")}


def copy_python(root: Path) -> None:
    """Make usr/local of the base image: this Python with pip, without bytecode and without tests."""
    version = f"python3.{sys.version_info.minor}"
    local = root / "usr" / "local"
    ignored = shutil.ignore_patterns("__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "config-*")
    shutil.copytree(sysconfig.get_path("stdlib"), local / "lib" / version, ignore=ignored)
    (local / "bin").mkdir()
    shutil.copy(Path(sys.executable).resolve(), local / "bin" / version)
    (local / "bin" / "python").symlink_to(version)
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        shutil.copy(Path(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")), local / "lib")
    environment = {"PATH": "/usr/bin:/bin", "LD_LIBRARY_PATH": str(local / "lib")}
    ensurepip = (local / "bin" / "python", "-m", "ensurepip", "--default-pip")
    subprocess.run(ensurepip, env=environment, check=True, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    # Not pytest's folder, which only its owner may enter.
    with tempfile.TemporaryDirectory(prefix="kvcache-exporter-image-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        context = folder / "context"
        for path in sorted(build_context()):
            if (REPOSITORY / path).is_file():
                (context / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(REPOSITORY / path, context / path)
        root = folder / "root"
        copy_python(root)
        _, build, final = stages()
        builder = Image(root, context)
        for instruction in build:
            builder.apply(instruction)
        # The last stage starts from the base anew, without what Python has kept while it built.
        for cache in [*(root / "usr").rglob("__pycache__")]:
            shutil.rmtree(cache)
        built = Image(root, context)
        for instruction in final:
            built.apply(instruction)
        for place in (root, *root.rglob("*")):
            if not place.is_symlink():
                place.chmod(place.stat().st_mode & ~0o222)
        yield built
        for place in (root, *root.rglob("*")):
            if place.is_dir() and not place.is_symlink():
                place.chmod(0o755)


def is_allowed(*command: str) -> bool:
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture(params=["as it is", "as process 1 on a read-only root"])
def wrapper(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Command line before the image's own, which takes away what a container would not have."""
    if request.param == "as it is":
        return AS_ANYBODY
    as_process_1 = (*AS_PROCESS_1, *READ_ONLY_ROOT, *(AS_ANYBODY or WITHOUT_CAPABILITIES))
    if not is_allowed(*as_process_1, "true"):
        pytest.skip("namespaces may not be made here")
    return as_process_1


@contextmanager
def started(image: Image, wrapper: Sequence[str], *arguments: str, **settings: str) -> Iterator[subprocess.Popen[str]]:
    command = [*wrapper, *image.entrypoint, *(arguments or image.command)]
    environment = image.environment() | settings
    with subprocess.Popen(command, cwd="/", env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def is_alive(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def test_serves_for_anybody_and_ends_on_sigterm(image: Image, wrapper: tuple[str, ...]) -> None:
    """No home, no capabilities, nothing to write to, and no init above it that would hand signals on."""
    port = free_port()
    settings = {
        "KVCACHE_EXPORTER_SERVE_VLLM_URL": "http://127.0.0.1:9",
        "KVCACHE_EXPORTER_SERVE_LISTEN_ADDRESS": f"127.0.0.1:{port}",
    }
    with started(image, wrapper, **settings) as process:
        wait_until(lambda: is_alive(port) or process.poll() is not None, seconds=20)
        assert is_alive(port), process.stderr and process.stderr.read()
        pid = process.pid
        if wrapper[:1] == AS_PROCESS_1[:1]:
            pid = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
            assert re.search(r"^NSpid:\t\d+\t1$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        status = Path(f"/proc/{pid}/status").read_text()
        assert re.search(rf"^Uid:\t{UID if IS_ROOT else os.geteuid()}\t", status, re.MULTILINE)
        assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
        asked = time.monotonic()
        os.kill(pid, signal.SIGTERM)
        assert process.wait(timeout=5) == 0
        assert time.monotonic() - asked < 2
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_says_what_is_missing_when_nothing_is_given(image: Image) -> None:
    with started(image, AS_ANYBODY) as process:
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "--vllm-url" in errors


def test_all_code_is_there_as_bytecode_that_no_time_stamp_outdates(image: Image) -> None:
    sources = [*image.site_packages().rglob("*.py"), *(image.root / "usr/local/lib").glob("python3.*/[a-h]*.py")]
    assert len(sources) > 400
    tag = sys.implementation.cache_tag
    compiled = [source.parent / "__pycache__" / f"{source.stem}.{tag}.pyc" for source in sources]
    assert [file for file in compiled if not file.exists()] == []
    # The second word of a file says how it is checked: 1 is by hash, and never.
    assert {file.read_bytes()[4:8] for file in compiled} == {b"\1\0\0\0"}


def test_holds_what_the_lock_holds_and_no_tools(image: Image) -> None:
    packages = importlib.metadata.distributions(path=[str(image.site_packages())])
    locked = {canonicalize_name(pin.name) for pin in pins(RUNTIME_LOCK) if pin.marker is None or pin.marker.evaluate()}
    assert {canonicalize_name(package.name) for package in packages} == locked | {"kvcache-exporter"}
