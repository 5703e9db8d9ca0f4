"""Devices read one after the other, although a call for one of them may never return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class DeviceWalk(Generic[T]):
    """Calls `read` for each device in a thread of its own, leaving behind a thread that hangs, and its device with it.

    A call into a driver that hangs cannot be ended from outside. As long as one has not returned, its device is not called again,
    so there is never more than one thread for a device.
    """

    def __init__(self, read: Callable[[int], T], *, timeout_seconds: float) -> None:
        self._read = read
        self._timeout_seconds = timeout_seconds
        self._hung: dict[int, threading.Thread] = {}

    @property
    def hung(self) -> frozenset[int]:
        """Indexes of the devices with a call that has not returned."""
        return frozenset(index for index, thread in self._hung.items() if thread.is_alive())

    def read_all(self, count: int) -> dict[int, T]:
        """Return the results by index of all devices below `count` but those that hang.

        Waits `timeout_seconds` for each device that begins to hang, and not at all for those that hung before. What `read` raises
        is raised here.
        """
        still = self.hung
        self._hung = {index: thread for index, thread in self._hung.items() if index in still}
        left = [index for index in range(count) if index not in still]
        results: dict[int, T] = {}
        while left:
            run = _Run(self._read, left)
            stuck = run.wait(self._timeout_seconds)
            results.update(run.results)
            if stuck is None:
                break
            self._hung[stuck] = run.thread
            left = left[left.index(stuck) + 1 :]
        return results


class _Run(Generic[T]):
    """One thread and what it has read so far; it ends after the device that it is in once nobody waits for it any more."""

    def __init__(self, read: Callable[[int], T], indexes: Sequence[int]) -> None:
        self.results: dict[int, T] = {}
        self._read = read
        self._indexes = indexes
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._abandoned = False
        self._defect: Exception | None = None
        self._at = indexes[0]
        self._since = time.monotonic()
        # A daemon, since it may never end and must not hold up the exit.
        self.thread = threading.Thread(target=self._work, name="nvml devices", daemon=True)
        self.thread.start()

    def wait(self, timeout_seconds: float) -> int | None:
        """Wait for the end of the run; returns the device in which it takes longer than the timeout, if there is one."""
        while True:
            with self._lock:
                left = self._since + timeout_seconds - time.monotonic()
                if left <= 0 and not self._done.is_set():
                    self._abandoned = True
                    return self._at
            if self._done.wait(left):
                if self._defect is not None:
                    raise self._defect
                return None

    def _work(self) -> None:
        try:
            for index in self._indexes:
                if not self._enter(index):
                    return
                result = self._read(index)
                if not self._keep(index, result):
                    return
        except Exception as defect:
            self._defect = defect
        finally:
            self._done.set()

    def _enter(self, index: int) -> bool:
        with self._lock:
            self._at = index
            return not self._abandoned

    def _keep(self, index: int, result: T) -> bool:
        with self._lock:
            if not self._abandoned:
                self.results[index] = result
                self._since = time.monotonic()
            return not self._abandoned
