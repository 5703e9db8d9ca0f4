"""Xid errors: what the driver reports of a GPU's faults while the exporter looks, from an NVML event set.

A new set has no history, so only what happens while it exists is counted. NVML API reference, "Event Handling Methods".
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pynvml  # type: ignore[import-untyped]

from kvcache_exporter.sources.nvml.errors import LOST_ERRORS, Asked, error_name

_NO_XIDS: Mapping[int, int] = MappingProxyType({})

# A set that always has another event must not hold up the reading; the rest waits for the next one.
_MOST_EVENTS = 1000


class XidEvents:
    """Counts Xids by GPU since it was made. `collect` and `close` are for the thread that reads, `register` for any."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[int]] = {}
        # The rest belongs to the session; handles are the addresses of NVML's own objects, None if one is NULL.
        self._set: Any = None
        self._unsupported = False
        self._uuids: dict[int | None, str] = {}
        self._registered: set[int | None] = set()
        self._without_events: set[int | None] = set()

    def collect(self) -> list[str]:
        """Count the events since the last call, opening a set if there is none; returns the names of errors."""
        asked = Asked()
        if self._set is None and not self._unsupported:
            self._set = asked.ask(pynvml.nvmlEventSetCreate)
            self._unsupported = self._set is None and not asked.failed
        if self._registered:
            self._drain(asked)
        return asked.errors

    def register(self, handle: Any, uuid: str, asked: Asked) -> None:  # noqa: ANN401 - a pointer type of pynvml
        """Have the events of a GPU sent to the set; one that has no such events is asked once in a session."""
        address = _address(handle)
        # Events name their GPU by its handle. Asking such a GPU for its uuid may fail: it has just reported a fault.
        self._uuids[address] = uuid
        if self._set is None or address in self._registered or address in self._without_events:
            return
        if asked.ask(_register, handle, self._set):
            self._registered.add(address)
        elif not asked.failed:
            self._without_events.add(address)

    def counts(self, uuid: str) -> Mapping[int, int]:
        """Return how often each Xid was seen on this GPU."""
        counts = self._counts.get(uuid)
        return _NO_XIDS if counts is None else MappingProxyType(dict(counts))

    def close(self) -> None:
        """Give the set back, before the session ends; the counts stay. Never raises."""
        if self._set is not None:
            Asked().ask(pynvml.nvmlEventSetFree, self._set)
        self._set = None
        self._unsupported = False
        self._uuids.clear()
        self._registered.clear()
        self._without_events.clear()

    def _drain(self, asked: Asked) -> None:
        for _ in range(_MOST_EVENTS):
            try:
                event = pynvml.nvmlEventSetWait_v2(self._set, 0)
            except Exception as error:
                name = error_name(error)
                # Timeout: no further event. A lost GPU makes this call fail too, and is reported by its own calls.
                if name != "timeout" and name not in LOST_ERRORS:
                    asked.errors.append(name)
                return
            uuid = self._uuids.get(_address(event.device))
            if uuid is not None:
                self._counts.setdefault(uuid, Counter())[event.eventData] += 1


def _register(handle: Any, event_set: Any) -> bool:  # noqa: ANN401 - pointer types of pynvml
    pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, event_set)
    return True


def _address(handle: Any) -> int | None:  # noqa: ANN401 - a pointer type of pynvml
    return ctypes.cast(handle, ctypes.c_void_p).value
