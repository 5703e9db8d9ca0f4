"""Samples of a Prometheus text page, straight from its bytes.

Reads text format 0.0.4 and the OpenMetrics text format as far as a sample line goes (exemplars are passed over). It sits in the
poll loop, where prometheus_client's own parser would take most of the time: that one builds every family of a page of which a
tenth is wanted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from kvcache_exporter.errors import SourceError

# Unrolled quoting and disjoint alternatives: linear time on any input, and no memory per character of a giant label.
_QUOTED = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_SAMPLE = re.compile(
    rb"[ \t]*([a-zA-Z_:][a-zA-Z0-9_:]*)[ \t]*"
    rb"(?:\{([^\"}]*(?:" + _QUOTED + rb"[^\"}]*)*)\}[ \t]*|[ \t])[ \t]*"
    rb"([-+.0-9a-zA-Z]+)(?:[ \t]+-?[0-9.]+(?:[eE][-+]?[0-9]+)?)?(?:[ \t]+\#[^\n]*)?[ \t\r]*"
)
_LABEL = re.compile(rb"[ \t]*([a-zA-Z_][a-zA-Z0-9_]*)[ \t]*=[ \t]*(" + _QUOTED + rb")[ \t]*(?:,|$)")
_ESCAPE = re.compile(rb"\\(.)")
_ESCAPED = {b"n": b"\n", b'"': b'"', b"\\": b"\\"}

# Label sets come back on every page: about 50 an engine are wanted. Longer ones than any engine writes are not kept.
_KEPT_LABEL_SETS = 2048
_KEPT_BYTES = 2048


class Sample(NamedTuple):
    """One line: its full name (suffixes included), its labels unescaped, its value (NaN and infinities as Python floats).

    `labels` is shared with other lines that have the same ones.
    """

    name: str
    labels: Mapping[str, str]
    value: float


def samples(body: bytes, wanted: re.Pattern[bytes]) -> Iterator[Sample]:
    """Yield the samples whose name matches `wanted` in full, in the order of the page.

    Raises SourceError (`parse`) at the first line that is no sample, wanted or not: half a page is no page.
    """
    name_before, is_wanted = b"", False
    for number, line in enumerate(body.split(b"\n"), 1):
        if not line or line[:1] == b"#":
            continue
        match = _SAMPLE.fullmatch(line)
        if match is None:
            if line.strip() and not line.lstrip().startswith(b"#"):
                raise _broken(number, line)
            continue
        name = match[1]
        if name != name_before:
            name_before, is_wanted = name, wanted.fullmatch(name) is not None
        if is_wanted:
            try:
                blob = match[2] or b""
                labels = _labels(blob) if len(blob) <= _KEPT_BYTES else _parse_labels(blob)
                yield Sample(name.decode("ascii"), labels, float(match[3]))
            except ValueError:
                raise _broken(number, line) from None


def _parse_labels(blob: bytes) -> Mapping[str, str]:
    """Labels between the braces; raises ValueError when they are not a comma-separated list of name="value"."""
    labels = {}
    position = 0
    while blob[position:].strip():
        match = _LABEL.match(blob, position)
        if match is None:
            raise ValueError(blob)
        value = match[2][1:-1]
        if b"\\" in value:
            value = _ESCAPE.sub(lambda escape: _ESCAPED.get(escape[1], escape[0]), value)
        labels[match[1].decode("ascii")] = value.decode("utf-8", errors="replace")
        position = match.end()
    return labels


_labels = lru_cache(_KEPT_LABEL_SETS)(_parse_labels)


def _broken(number: int, line: bytes) -> SourceError:
    shown = line[:80].decode("utf-8", errors="replace")
    return SourceError("parse", f"line {number} of the page is not a Prometheus sample: {shown!r}; the whole page is dropped")
