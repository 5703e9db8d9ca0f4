"""Which GPUs a process sees: the rules of CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES, on GPUs that NVML lists.

NVML itself shows every GPU of the machine whatever these variables say (CUDA C++ programming guide, "CUDA Environment
Variables"; NVIDIA container toolkit, "GPU enumeration").
"""

from __future__ import annotations

from collections.abc import Sequence

_NO_GPUS = frozenset({"", "none", "void"})


def visible_devices(uuids: Sequence[str], cuda: str | None, nvidia: str | None = None) -> tuple[str, ...] | None:
    """The uuids that a process sees, in its own order, when these are the values of its variables; None where it cannot be told.

    `uuids` are those of the machine's GPUs in NVML's order. `cuda` is CUDA_VISIBLE_DEVICES, `nvidia` NVIDIA_VISIBLE_DEVICES; None
    is not set. The first beats the second: it is what a process in a container gives its CUDA on top of what the container has.
    """
    if cuda is not None:
        return resolve_devices(uuids, [entry.strip() for entry in cuda.split(",")])
    if nvidia is None or nvidia.strip() in _NO_GPUS:
        return None
    if nvidia.strip() == "all":
        return tuple(uuids)
    return resolve_devices(uuids, [entry.strip() for entry in nvidia.split(",")])


def resolve_devices(uuids: Sequence[str], entries: Sequence[str]) -> tuple[str, ...]:
    """The uuids that a list of indexes and uuids names, in the order of the list.

    As CUDA does, the list ends at its first entry that names no GPU, and one given twice names none at all. A GPU may be named by
    the beginning of its uuid where only one begins so. A MIG instance is taken by its word: NVML lists it under its parent.
    """
    found: list[str] = []
    for entry in entries:
        uuid = _resolve(uuids, entry)
        if uuid is None:
            break
        found.append(uuid)
    return tuple(found) if len(set(found)) == len(found) else ()


def _resolve(uuids: Sequence[str], entry: str) -> str | None:
    if entry.isascii() and entry.isdigit():
        index = int(entry)
        return uuids[index] if index < len(uuids) else None
    if entry.startswith("MIG-"):
        return entry
    matches = [uuid for uuid in uuids if entry.startswith("GPU-") and uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None
