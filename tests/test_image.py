"""The image as it is written: Dockerfile, what reaches the builder, and the locks. `e2e/test_image_build.py` runs it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import tomli
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dockerfile import BUILD_LOCK, DOCKERFILE, REPOSITORY, RUNTIME_LOCK, build_context, pins, stages

# Extras for people who work on the project. Every other extra is in the image.
EXTRAS_OF_DEVELOPERS = {"bench", "dashboards", "test"}
# Each Python that may install from the locks.
PYTHONS = ("3.10", "3.11", "3.12", "3.13")

each_lock = pytest.mark.parametrize("lock", [BUILD_LOCK, RUNTIME_LOCK], ids=lambda lock: lock.stem)


def pyproject() -> dict[str, Any]:
    return tomli.loads((REPOSITORY / "pyproject.toml").read_text())


def values(stage: int, name: str) -> list[str]:
    return [instruction.value for instruction in stages()[stage] if instruction.name == name]


def pins_for(lock: Path, python: str) -> dict[str, str]:
    """Version of each package that the lock has for a Python on Linux, by name."""
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    for_python = [pin for pin in pins(lock) if pin.marker is None or pin.marker.evaluate(environment)]
    versions: dict[str, str] = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in for_python}
    assert len(versions) == len(for_python), "two pins of one package"
    return versions


def unsatisfied(wanted: list[str], versions: dict[str, str]) -> list[str]:
    def is_met(requirement: Requirement) -> bool:
        version = versions.get(canonicalize_name(requirement.name))
        return version is not None and requirement.specifier.contains(version)

    return [text for text in wanted if not is_met(Requirement(text))]


def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    # A file of its own, so that no setting of whoever runs this hides a finding.
    config = tmp_path / "hadolint.yaml"
    config.write_text("trustedRegistries: [docker.io]\n")
    hadolint = Path(sys.executable).with_name("hadolint")
    options = ("--no-color", "--failure-threshold", "style", "--disable-ignore-pragma", "--config", config)
    answer = subprocess.run([hadolint, *options, DOCKERFILE], capture_output=True, text=True, check=False)
    assert (answer.stdout + answer.stderr, answer.returncode) == ("", 0)


def test_both_stages_start_from_one_base_that_names_its_patch_release() -> None:
    assert [values(stage, "FROM") for stage in range(3)] == [[], ["${PYTHON_IMAGE} AS build"], ["${PYTHON_IMAGE}"]]
    (base,) = values(0, "ARG")
    assert re.fullmatch(r"PYTHON_IMAGE=docker\.io/library/python:3\.13\.\d+-slim-[a-z]+(@sha256:[0-9a-f]{64})?", base)


def test_runs_as_a_number_and_without_a_shell() -> None:
    """Kubernetes can tell that a number is not root; a shell as process 1 would keep SIGTERM to itself."""
    (user,) = values(2, "USER")
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", user)
    assert values(2, "ENTRYPOINT") == ['["kvcache-exporter"]']
    assert values(2, "CMD") == ['["serve"]']
    assert values(2, "STOPSIGNAL") == ["SIGTERM"]
    assert values(2, "EXPOSE") == ["9948"]


def test_takes_no_gpu_by_itself() -> None:
    (env,) = (instruction.pairs for instruction in stages()[2] if instruction.name == "ENV")
    assert "NVIDIA_VISIBLE_DEVICES" not in env
    assert env["NVIDIA_DRIVER_CAPABILITIES"] == "utility"


def test_labels_say_what_pyproject_says() -> None:
    (labels,) = (instruction.pairs for instruction in stages()[2] if instruction.name == "LABEL")
    project = pyproject()["project"]
    assert {name.removeprefix("org.opencontainers.image."): value for name, value in labels.items()} == {
        "title": project["name"],
        "description": project["description"],
        "licenses": project["license"],
        "source": "https://github.com/kvcache-exporter/kvcache-exporter",
        "version": "${VERSION}",
        "revision": "${REVISION}",
        "created": "${CREATED}",
    }
    assert values(2, "ARG") == ["VERSION", "REVISION", "CREATED"]


def test_what_changes_with_each_commit_comes_after_what_does_not() -> None:
    """Else every build installs everything anew."""
    build = [instruction.value for instruction in stages()[1]]
    install = next(place for place, value in enumerate(build) if "runtime.lock" in value and value.startswith("python"))
    assert install < build.index("exporter ./exporter")
    final = [instruction.name for instruction in stages()[2]]
    assert final[-4:] == ["ARG", "ARG", "ARG", "LABEL"]


def test_builder_gets_what_is_copied_and_nothing_else() -> None:
    context = build_context()
    copied = [source for instruction in stages()[1] if instruction.name == "COPY" for source in instruction.words[:-1]]
    assert [source for source in copied if not (REPOSITORY / source).exists()] == []
    assert set(copied) <= context | {"exporter"}
    needless = {path for path in context if not any(PurePosixPath(path).is_relative_to(source) for source in copied)}
    # Docker sends .dockerignore and the Dockerfile always.
    assert needless <= {".dockerignore", "Dockerfile", "requirements"}
    source = {str(file.relative_to(REPOSITORY)) for file in (REPOSITORY / "exporter" / "kvcache_exporter").rglob("*.py")}
    assert source <= context
    assert [path for path in context if path.endswith(".pyc") or "__pycache__" in path] == []


@pytest.mark.parametrize("python", PYTHONS)
def test_locks_hold_what_pyproject_asks_for(python: str) -> None:
    """After a change to the dependencies: `make lock`."""
    facts = pyproject()
    project = facts["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(text for name in extras.keys() - EXTRAS_OF_DEVELOPERS for text in extras[name])]
    assert unsatisfied(wanted, pins_for(RUNTIME_LOCK, python)) == []
    assert unsatisfied(facts["build-system"]["requires"], pins_for(BUILD_LOCK, python)) == []


def test_unsatisfied_tells_what_is_missing_and_what_is_too_old() -> None:
    assert unsatisfied(["Click>=8.1", "requests>=2.31", "urllib3"], {"click": "8.0", "urllib3": "2.8.0"}) == [
        "Click>=8.1", "requests>=2.31",
    ]  # fmt: skip


def test_build_requirements_are_those_of_pyproject() -> None:
    lines = (REPOSITORY / "requirements" / "build.in").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == pyproject()["build-system"]["requires"]


@each_lock
def test_lock_pins_by_version_and_hash(lock: Path) -> None:
    entries = re.split(r"^(?=[a-z0-9])", lock.read_text(), flags=re.MULTILINE)[1:]
    assert len(entries) == len(pins(lock)) > 4
    for entry in entries:
        assert re.match(r"[a-z0-9.-]+==[\w.]+ (; [^\\]+)?\\\n", entry), entry
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", entry), entry


@each_lock
def test_lock_names_no_index_and_how_it_is_made(lock: Path) -> None:
    """Where packages come from is for whoever builds the image to say; the hashes hold everywhere."""
    text = lock.read_text()
    assert re.search(r"://|--(extra-)?index|--find-links|--trusted", text) is None
    assert "make lock" in text.splitlines()[1]


def test_every_package_is_installed_by_hash() -> None:
    installs = re.findall(r"pip (?:--python \S+ )?(?:install|wheel) [^&]+", "&&".join(values(1, "RUN")))
    assert len(installs) == 4
    for install in installs:
        assert "--no-deps" in install
        assert "--require-hashes" in install or "--no-index" in install, install
