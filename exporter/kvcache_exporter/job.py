"""One call that may hang, in a thread of its own: never two at once, never in anyone's way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvcache_exporter.errors import KVCacheExporterError, SourceError

T = TypeVar("T")


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """How one call ended: `value`, or `error` when it failed."""

    value: T | None
    error: KVCacheExporterError | None
    duration_seconds: float


def attempt(call: Callable[[], T]) -> Outcome[T]:
    """Run `call` and keep what it returned or raised.

    A defect in it becomes a SourceError (`internal`): one source must not stop all.
    """
    started = time.monotonic()
    value: T | None = None
    error: KVCacheExporterError | None = None
    try:
        value = call()
    except KVCacheExporterError as known:
        error = known
    except Exception as defect:
        error = SourceError("internal", f"unexpected {type(defect).__name__}: {defect}")
    return Outcome(value, error, time.monotonic() - started)


class Job(Generic[T]):
    """Runs `call` in a daemon thread, so that a call which never returns (NVML on a dead driver) holds up no exit either."""

    def __init__(self, name: str, call: Callable[[], T]) -> None:
        self._name = name
        self._call = call
        self._done = threading.Event()
        self._done.set()
        self._outcome: Outcome[T] | None = None

    def start(self) -> bool:
        """Begin a call, unless the one before has not returned yet; tells whether it began. An outcome not taken is dropped."""
        if not self._done.is_set():
            return False
        self._outcome = None
        self._done.clear()
        threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return True

    def finish(self, timeout_seconds: float) -> Outcome[T] | None:
        """Wait for the call in flight and take its outcome; None when it takes longer."""
        if not self._done.wait(max(0.0, timeout_seconds)):
            return None
        outcome, self._outcome = self._outcome, None
        return outcome

    def _run(self) -> None:
        self._outcome = attempt(self._call)
        self._done.set()
