"""Pytest fixtures for the scripted NVML library."""

from __future__ import annotations

import ctypes
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_nvml import FakeNvml, build_library


@pytest.fixture(scope="session")
def fake_nvml_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the compiled library; tests that need it are skipped on a machine without a C compiler."""
    if shutil.which("cc") is None:
        pytest.skip("the scripted NVML library needs a C compiler named cc")
    return build_library(tmp_path_factory.mktemp("fake-nvml"))


@pytest.fixture
def fake_nvml(fake_nvml_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNvml]:
    """Have pynvml use the scripted library in this process, at first with a machine without GPUs.

    Loading it by its path is enough: dlopen gives pynvml the library already loaded under the name that it asks for. pynvml never
    lets go of it; between the tests of this fixture, the library says of itself that it was not found.
    """
    library = ctypes.CDLL(str(fake_nvml_library))
    fake = FakeNvml(library=fake_nvml_library, script=tmp_path / "nvml-script")
    fake.show({})
    monkeypatch.setenv("FAKE_NVML_SCRIPT", str(fake.script))
    yield fake
    fake.show({})
    while fake.hanging:
        time.sleep(0.01)
    while fake.sessions:
        library.nvmlShutdown()
