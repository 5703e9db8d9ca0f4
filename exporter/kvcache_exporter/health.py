"""Health of every source: up or down, since when, how often it failed and why. Logs changes, not repetitions."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from types import MappingProxyType

from kvcache_exporter.errors import KVCacheExporterError, SourceError, UnsupportedModelError
from kvcache_exporter.snapshot import SourceHealth

log = logging.getLogger(__name__)


@dataclass
class _Record:
    up: bool = False
    last_success_at: float | None = None
    duration_seconds: float | None = None
    errors: Counter[str] = field(default_factory=Counter)
    message: str | None = None


class HealthBook:
    """Keeps one record a source. A source that was never tried has none, and so no series."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], _Record] = {}

    def success(self, target: str, source: str, *, at: float, duration_seconds: float) -> None:
        """Note that the source gave a reading at `at` (Unix seconds)."""
        record = self._record(target, source)
        if not record.up:
            log.info("source up", extra={"fields": {"target": target, "source": source}})
        record.up = True
        record.message = None
        record.last_success_at = at
        record.duration_seconds = duration_seconds

    def failure(self, target: str, source: str, error: KVCacheExporterError, *, duration_seconds: float) -> None:
        """Note that the source gave nothing, and why."""
        record = self._record(target, source)
        reason = reason_of(error)
        if record.up or record.message != str(error):
            fields = {"target": target, "source": source, "reason": reason, "error": str(error)}
            log.warning("source down", extra={"fields": fields})
        record.up = False
        record.message = str(error)
        record.duration_seconds = duration_seconds
        record.errors[reason] += 1

    def count(self, target: str, source: str, reason: str, number: int) -> None:
        """Count faults inside a reading that is otherwise good, such as single samples that cannot be true."""
        if number:
            self._record(target, source).errors[reason] += number

    def keep_targets(self, names: Collection[str]) -> None:
        """Forget all other targets; sources of the machine stay."""
        self._records = {key: record for key, record in self._records.items() if not key[0] or key[0] in names}

    def snapshot(self) -> tuple[SourceHealth, ...]:
        """Return the records as they are now, in order."""
        return tuple(
            SourceHealth(
                target=target,
                source=source,
                up=record.up,
                last_success_at=record.last_success_at,
                duration_seconds=record.duration_seconds,
                errors=MappingProxyType(dict(sorted(record.errors.items()))),
                message=record.message,
            )
            for (target, source), record in sorted(self._records.items())
        )

    def _record(self, target: str, source: str) -> _Record:
        return self._records.setdefault((target, source), _Record())


def reason_of(error: KVCacheExporterError) -> str:
    """Return the `reason` label of an error."""
    if isinstance(error, SourceError):
        return error.reason
    return "unsupported_model" if isinstance(error, UnsupportedModelError) else "internal"
