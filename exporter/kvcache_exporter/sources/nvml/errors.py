"""NVML's errors by name, what the names mean for a reading, and the sentences that people read about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pynvml  # type: ignore[import-untyped]

from kvcache_exporter.errors import SourceError

_ERROR_NAMES: dict[int, str] = {
    code: constant.removeprefix("NVML_ERROR_").lower()
    for constant, code in vars(pynvml).items()
    if constant.startswith("NVML_ERROR_")
}

SESSION_ERRORS = frozenset({"uninitialized", "driver_not_loaded", "lib_rm_version_mismatch", "unknown"})
"""After these, calls of the same session keep failing although a new session may work (driver reloaded, devices given back)."""

LOST_ERRORS = frozenset({"gpu_is_lost", "reset_required", "gpu_not_found"})
"""How NVML says that a GPU fell off the bus, is out of use until it is reset, or is not there any more."""

NOT_SUPPORTED = frozenset({"not_supported", "function_not_found", "vgpu_ecc_not_supported"})
"""How a GPU, a driver that lacks the function, and a virtual GPU say that they do not have a figure: normal, and no failure."""

_EXPLANATIONS = {
    "driver_not_loaded": "the NVIDIA kernel driver is not loaded on this machine",
    "lib_rm_version_mismatch": (
        "the NVML library that this process loaded is not of the version of the kernel driver; "
        "if the driver was upgraded, restart the exporter to load the new library"
    ),
    "no_permission": "this process may not open the GPU devices",
    "unknown": (
        "unknown error; in a container this mostly means that its access to the GPU devices was taken away "
        "(systemctl daemon-reload does that), and restarting the container gives it back"
    ),
    "hung": "its calls do not return, which mostly means that the NVIDIA kernel driver hangs and the machine needs a reboot",
}


class NoNvmlLibraryError(SourceError):
    """NVML's library could not be loaded, the normal state of a machine without NVIDIA GPUs; `reason` is `library_not_found`."""


def error_name(error: Exception) -> str:
    """Return NVML's name of an error in lower case; `invalid_answer` for what pynvml itself could not understand."""
    if isinstance(error, pynvml.NVMLError):
        return _ERROR_NAMES.get(error.value, f"error_{error.value}")
    return "invalid_answer"


def source_error(name: str, what: str) -> SourceError:
    """Return the error `name` as one sentence that says `what` failed."""
    return SourceError(name, f"NVML: {what}: {_EXPLANATIONS.get(name, name.replace('_', ' '))}")


def call(function: str, call: Callable[[], Any]) -> Any:  # noqa: ANN401 - pynvml has no annotations
    """Make a call without which there is no reading; raises NoNvmlLibraryError, or SourceError that names `function`."""
    try:
        return call()
    except Exception as error:
        name = error_name(error)
        if name == "library_not_found":
            # pynvml drops the loader's own words, which tell a missing library from an empty or foreign one.
            raise NoNvmlLibraryError(name, f"NVML is not available on this machine: {error.__context__ or error}") from error
        raise source_error(name, f"{function} failed") from error


class Asked:
    """Answers to calls that can each fail alone.

    `errors` has the names of those that did, but not of those not supported; `failed` tells it of the last call.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.failed = False

    def ask(self, call: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - pynvml has no annotations
        """Return what `call` answers, None when it fails or is not supported."""
        self.failed = False
        try:
            return call(*arguments)
        except Exception as error:
            name = error_name(error)
            if name not in NOT_SUPPORTED:
                self.errors.append(name)
                self.failed = True
            return None
