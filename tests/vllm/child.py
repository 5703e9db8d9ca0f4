"""A program that a comparison starts, with its output kept line by line, and that never outlives the comparison."""

from __future__ import annotations

import bisect
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TypeVar

_T = TypeVar("_T")
_LINES_SHOWN_ON_ERROR = 30
_TIDY_SECONDS = 5.0


class Child:
    """A program in its own process group; leaving the `with` kills the whole group.

    `lines` grows as (Unix seconds at which the line came, line). When the `with` is left by an error, the last ones are shown.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
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

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.kill()
        if error is not None:
            sys.stderr.writelines(f"{line}\n" for _, line in self.lines[-_LINES_SHOWN_ON_ERROR:])

    def lines_since(self, at: float) -> list[tuple[float, str]]:
        """The lines that came after `at` (Unix seconds)."""
        return self.lines[bisect.bisect_right(self.lines, at, key=lambda line: line[0]) :]

    @property
    def is_alive(self) -> bool:
        """Whether the program itself still runs."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the program at once, and what it started after it had a moment to notice and tidy its shared memory."""
        self._process.kill()
        self._process.wait()
        deadline = time.monotonic() + _TIDY_SECONDS
        while _group_exists(self._process.pid):
            if time.monotonic() > deadline:
                os.killpg(self._process.pid, signal.SIGKILL)
                break
            time.sleep(0.05)
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self.lines.append((time.time(), line.rstrip("\n")))


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


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
