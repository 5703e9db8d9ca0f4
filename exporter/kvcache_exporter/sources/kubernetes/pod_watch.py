"""Keeps the pods of a node up to date, in a thread of its own: list, watch, and list again when a watch cannot go on."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcache_exporter.engine_pod import PodReading
from kvcache_exporter.errors import KVCacheExporterError, SourceError
from kvcache_exporter.sources.kubernetes.pods_api import ExpiredError, PodEvent, PodsApi

_LONGEST_RETRY_SECONDS = 30.0
_MOST_DOUBLINGS = 10
# Errors that nobody has asked for; older ones are dropped.
_KEPT_ERRORS = 100


@dataclass(frozen=True)
class PodsReading:
    """The pods of now; while `is_current` is False, which is when the API cannot be asked, those of before.

    `listed_in_seconds` is how long the last list took, None before the first; `errors` are those since the last reading.
    """

    pods: tuple[PodReading, ...]
    is_current: bool
    listed_in_seconds: float | None
    errors: tuple[KVCacheExporterError, ...]


class PodWatch:
    """The pods of one PodsApi that `read_pod` has something to say of (it returns None for the rest).

    `retry_seconds` is how long to wait after a first failure; twice as long after each further one, half a minute at most.
    """

    def __init__(
        self,
        api: PodsApi,
        read_pod: Callable[[Mapping[str, Any]], PodReading | None],
        *,
        retry_seconds: float = 1.0,
    ) -> None:
        self._api = api
        self._read_pod = read_pod
        self._retry_seconds = retry_seconds
        self._lock = threading.Lock()
        self._pods: dict[str, PodReading] = {}
        self._is_current = False
        self._listed_in_seconds: float | None = None
        self._errors: deque[KVCacheExporterError] = deque(maxlen=_KEPT_ERRORS)
        self._stop = threading.Event()

    def start(self) -> None:
        """Begin, in a daemon thread."""
        threading.Thread(target=self._run, name="pods", daemon=True).start()

    def close(self) -> None:
        """Make no further request."""
        self._stop.set()

    def read(self) -> PodsReading:
        """Return what is known now, without waiting for anything."""
        with self._lock:
            errors = tuple(self._errors)
            self._errors.clear()
            return PodsReading(tuple(self._pods.values()), self._is_current, self._listed_in_seconds, errors)

    def _run(self) -> None:
        failures = 0
        from_cache = True
        while not self._stop.is_set():
            delay = 0.0
            try:
                version = self._list(from_cache=from_cache)
                from_cache = True
                while not self._stop.is_set():
                    version = self._follow(version)
                    failures = 0
            except ExpiredError:
                # A cache that lags behind would answer the same old version again.
                from_cache = False
                # The first time is what happens after a quiet hour, no failure.
                if failures:
                    delay = self._delay(failures)
            except KVCacheExporterError as error:
                delay = self._failed(error, failures)
            except Exception as defect:
                delay = self._failed(SourceError("internal", f"unexpected {type(defect).__name__}: {defect}"), failures)
            failures += 1
            self._stop.wait(delay)

    def _failed(self, error: KVCacheExporterError, failures: int) -> float:
        with self._lock:
            self._is_current = False
            self._errors.append(error)
        return self._delay(failures)

    def _delay(self, failures: int) -> float:
        """Seconds to wait: exporters of all nodes lose their API server at once, and must not come back at once."""
        longest: float = min(self._retry_seconds * 2.0 ** min(failures, _MOST_DOUBLINGS), _LONGEST_RETRY_SECONDS)
        return longest * random.uniform(0.5, 1.0)  # noqa: S311  # no secret

    def _list(self, *, from_cache: bool) -> str:
        began = time.monotonic()
        listed = self._api.list(from_cache=from_cache)
        readings = {pod["metadata"]["uid"]: self._read_pod(pod) for pod in listed.pods}
        with self._lock:
            self._pods = {uid: reading for uid, reading in readings.items() if reading is not None}
            self._is_current = True
            self._listed_in_seconds = time.monotonic() - began
        return listed.resource_version

    def _follow(self, version: str) -> str:
        """Watch once; returns the version to go on from."""
        began = time.monotonic()
        for event in self._api.watch(version):
            if self._stop.is_set():
                break
            version = event.resource_version
            self._apply(event)
        # A proxy that ends every watch at once is not to be asked in a tight loop.
        self._stop.wait(self._retry_seconds - (time.monotonic() - began))
        return version

    def _apply(self, event: PodEvent) -> None:
        if event.kind == "BOOKMARK":
            return
        uid = event.pod["metadata"]["uid"]
        reading = None if event.kind == "DELETED" else self._read_pod(event.pod)
        with self._lock:
            if reading is None:
                self._pods.pop(uid, None)
            else:
                self._pods[uid] = reading
