"""A program that a comparison starts, with its output kept line by line, and that never outlives the comparison."""

from __future__ import annotations

import bisect
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import requests

_T = TypeVar("_T")
_C = TypeVar("_C", bound="Child")
_LINES_SHOWN_ON_ERROR = 30
_TIDY_SECONDS = 20.0


class Child:
    """A program in its own process group, ready when the `with` is entered; leaving it ends the whole group.

    `lines` grows as (Unix seconds at which the line came, line). When the `with` is left by an error, the last ones are shown.
    """

    start_seconds: float

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._name = Path(command[0]).name
        self.lines: list[tuple[float, str]] = []
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self: _C) -> _C:
        try:
            wait_for(f"answer of {self._name}", self._ready_or_none, seconds=self.start_seconds)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._end_group()
        if error is not None:
            sys.stderr.writelines(f"{line}\n" for _, line in self.lines[-_LINES_SHOWN_ON_ERROR:])

    def is_ready(self) -> bool:
        """Whether the program answers; requests.RequestException means no."""
        raise NotImplementedError

    def lines_since(self, at: float) -> list[tuple[float, str]]:
        """The lines that came after `at` (Unix seconds)."""
        return self.lines[bisect.bisect_right(self.lines, at, key=lambda line: line[0]) :]

    def kill(self) -> None:
        """Kill the program itself, at once; what it started may live on until the `with` is left."""
        self._process.kill()
        self._process.wait()

    def _ready_or_none(self) -> bool | None:
        if self._process.poll() is not None:
            raise RuntimeError(f"{self._name} ended while it started")
        try:
            return self.is_ready() or None
        except requests.RequestException:
            return None

    def _end_group(self) -> None:
        """End the program and what it started; killed is only what has not tidied up and ended after a while."""
        deadline = time.monotonic() + _TIDY_SECONDS
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
            while time.monotonic() < deadline:
                self._process.poll()
                os.killpg(self._process.pid, 0)
                time.sleep(0.05)
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self.lines.append((time.time(), line.rstrip("\n")))


def free_port() -> int:
    """A port of the loopback address that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for(what: str, read: Callable[[], _T | None], *, seconds: float, every: float = 0.2) -> _T:
    """Call `read` until it gives something. Raises TimeoutError that names `what`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        result = read()
        if result is not None:
            return result
        time.sleep(every)
    raise TimeoutError(f"no {what} within {seconds:g} s")
