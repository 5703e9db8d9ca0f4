"""Captures: the pages that were polled, kept in a file, so that what the exporter said can be worked out again.

A capture is JSON lines, gzip'd, one poll a line:

    {"t": 1795973352.99, "target": "llama", "status": 200, "metrics": "# HELP vllm:num_requests_running ..."}
    {"t": 1795973357.99, "target": "llama", "status": -1}

`t` is when (Unix seconds), and any status but 200 a poll that gave no page.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from kvcache_exporter.errors import SourceError

log = logging.getLogger(__name__)

SUFFIX = ".jsonl.gz"

_OK = 200
_FAILED = -1
# Beyond any clock, milliseconds and all.
_MOST_SECONDS = 1e15
_GZIP_MAGIC = b"\x1f\x8b"
# Of a member as any writer begins it: deflate, and no flags or a file name.
_MEMBER = re.compile(rb"\x1f\x8b\x08[\x00\x08]")
_CHUNK_BYTES = 1 << 16
# A step up in level costs as much time again and saves 3 %.
_LEVEL = 6


class Recorder:
    """Appends polls to a capture, from any thread.

    The poll that hands a page over waits for nothing: a thread of its own compresses and writes. Each line is a gzip member of
    its own, in one write: whenever the process is killed the file is whole, and a file that is there is carried on. That makes
    it 3 % larger than one member would be, since a page is longer than what deflate looks back on.

    `clock` gives Unix seconds. Pages that wait for a slow disk take `max_pending_bytes` at most; further ones are left out.
    Raises OSError when the file cannot be opened, ValueError (a sentence) when it is not one to append to.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time, max_pending_bytes: int = 64 << 20) -> None:
        if not path.name.endswith(SUFFIX):
            raise ValueError(f"{path} is not called *{SUFFIX}, which is what a capture is")
        self._path = path
        self._clock = clock
        self._max_pending_bytes = max_pending_bytes
        self._pending: deque[tuple[float, str, bytes | None]] = deque()
        self._pending_bytes = 0
        self._lost = 0
        self._closed = False
        self._changed = threading.Condition()
        self._failing = False
        # Unbuffered: one write() a line.
        self._file = path.open("a+b", buffering=0)
        try:
            self._file.seek(0)
            if self._file.read(len(_GZIP_MAGIC)) not in (b"", _GZIP_MAGIC):
                raise ValueError(f"{path} is there and is not gzip'd: give another name, since a capture is appended to")
        except BaseException:
            self._file.close()
            raise
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def page(self, target: str, body: bytes) -> None:
        """Record a page that `target` has answered with just now."""
        self._add(target, body)

    def missed(self, target: str) -> None:
        """Record that a poll of `target` has given no page."""
        self._add(target, None)

    def close(self, timeout_seconds: float = 1.0) -> None:
        """Write what is pending, for `timeout_seconds` at most, and record nothing from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_seconds)

    def _add(self, target: str, body: bytes | None) -> None:
        size = 0 if body is None else len(body)
        with self._changed:
            if self._closed:
                return
            if self._pending and self._pending_bytes + size > self._max_pending_bytes:
                self._lost += 1
                return
            self._pending.append((self._clock(), target, body))
            self._pending_bytes += size
            self._changed.notify()

    def _run(self) -> None:
        with self._file:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._pending or self._closed)
                    if not self._pending:
                        return
                    at, target, body = self._pending.popleft()
                    self._pending_bytes -= 0 if body is None else len(body)
                    lost, self._lost = self._lost, 0
                if lost:
                    log.warning("pages not recorded", extra={"fields": {"file": self._path, "pages": lost, "error": "slow disk"}})
                self._write(_line(at, target, body))

    def _write(self, line: bytes) -> None:
        member = gzip.compress(line, _LEVEL)
        try:
            end = self._file.seek(0, os.SEEK_END)
            written = self._file.write(member)
            if written != len(member):
                # The disk got full on the way: half a member would spoil what comes behind it.
                self._file.truncate(end)
                raise OSError(f"only {written} of {len(member)} bytes could be written")
        except OSError as error:
            if not self._failing:
                fields = {"file": self._path, "error": error.strerror or str(error)}
                log.error("cannot record; polls go on, and each page is tried", extra={"fields": fields})
            self._failing = True
            return
        if self._failing:
            log.info("recording again", extra={"fields": {"file": self._path}})
        self._failing = False


def _line(at: float, target: str, body: bytes | None) -> bytes:
    poll: dict[str, object] = {"t": round(at, 3), "target": target, "status": _FAILED if body is None else _OK}
    if body is not None:
        # As the reader of pages takes label values; no other part of a page holds anything but ASCII.
        poll["metrics"] = body.decode("utf-8", errors="replace")
    return json.dumps(poll, ensure_ascii=False).encode("utf-8") + b"\n"


@dataclass(frozen=True)
class CapturedPoll:
    """One line of a capture: when (`t`, seconds), of which target (None where the line names none), and the page.

    `page` is None for a poll that failed. `line` is its number, from 1.
    """

    line: int
    t: float
    target: str | None
    page: bytes | None


def read_capture(path: Path, on_problem: Callable[[str], None]) -> Iterator[CapturedPoll]:
    """Yield the polls of a capture as they come, gzip'd or plain.

    A line that is none, and a gzip'd file that is cut off or damaged on the way, is one sentence to `on_problem`; the rest goes
    on. Raises SourceError (`missing`) when the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(_lines(file, on_problem), 1):
                if line.strip():
                    try:
                        yield _poll(number, line)
                    except ValueError as error:
                        on_problem(f"line {number} {error}")
    except OSError as error:
        raise SourceError("missing", f"{path} cannot be read: {error.strerror or error}") from error


def _poll(number: int, line: bytes) -> CapturedPoll:
    """Raises ValueError, whose text goes on from "line 7"."""
    try:
        poll = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON, or not all of it") from None
    if not isinstance(poll, dict):
        raise ValueError("is not an object")
    t, target, status = poll.get("t"), poll.get("target"), poll.get("status", _OK)
    if isinstance(t, bool) or not isinstance(t, (int, float)) or not abs(t) < _MOST_SECONDS:
        raise ValueError("has no `t`, the seconds of the poll")
    if target is not None and not isinstance(target, str):
        raise ValueError("has a `target` that is not a name")
    if isinstance(status, bool) or not isinstance(status, int):
        raise ValueError("has a `status` that is not a whole number")
    if status != _OK:
        return CapturedPoll(number, t, target, None)
    page = poll.get("metrics", poll.get("body"))
    if not isinstance(page, str):
        raise ValueError("has no `metrics`, the page")
    return CapturedPoll(number, t, target, page.encode("utf-8", errors="replace"))


def _lines(file: BufferedReader, on_problem: Callable[[str], None]) -> Iterator[bytes]:
    """Lines of a file, plain or gzip'd, told apart by how it begins. The last one may lack its end."""
    if file.peek(len(_GZIP_MAGIC))[: len(_GZIP_MAGIC)] != _GZIP_MAGIC:
        yield from file
        return
    parts: list[bytes] = []
    for piece in _inflate(file, on_problem):
        *whole, rest = piece.split(b"\n")
        for line in whole:
            yield b"".join((*parts, line))
            parts.clear()
        parts.append(rest)
    yield b"".join(parts)


def _inflate(file: BufferedReader, on_problem: Callable[[str], None]) -> Iterator[bytes]:
    """What a file of gzip members holds, in pieces; behind a damaged member it goes on with the next that can be found."""
    start, rest = 0, b""
    while rest or file.peek(1):
        member = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
        position = start
        try:
            while not member.eof:
                chunk = rest or file.read1(_CHUNK_BYTES)
                if not chunk:
                    raise EOFError
                position += len(chunk)
                rest = b""
                yield member.decompress(chunk)
        except (zlib.error, EOFError):
            on_problem(f"the file is cut off or damaged behind byte {start}: what can be unpacked is read")
            # Ends the line that was cut off.
            yield b"\n"
            start = _find_member(file, start + 1)
            file.seek(start)
        else:
            rest = member.unused_data
            start = position - len(rest)


def _find_member(file: BufferedReader, start: int) -> int:
    """Where the first gzip member at or behind `start` may begin; the end of the file where there is none."""
    file.seek(start)
    before = b""
    while chunk := file.read(_CHUNK_BYTES):
        window = before + chunk
        match = _MEMBER.search(window)
        if match is not None:
            return start - len(before) + match.start()
        start += len(chunk)
        before = window[-3:]
    return start
