"""Recording polls and reading them back, whatever happened to the file in between."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from random import Random

import pytest

from kvcache_exporter.capture import CapturedPoll, Recorder, read_capture
from kvcache_exporter.errors import SourceError
from lab import Clock, wait_until


def recorder(path: Path, now: float = 1000.0, **settings: int) -> Recorder:
    return Recorder(path, clock=Clock(now), **settings)


def record(path: Path, *pages: bytes | None, target: str = "t", now: float = 1000.0) -> None:
    """A recorder from start to end."""
    to = recorder(path, now)
    for page in pages:
        if page is None:
            to.missed(target)
        else:
            to.page(target, page)
    to.close(timeout_seconds=10)


def read(path: Path) -> tuple[list[CapturedPoll], list[str]]:
    problems: list[str] = []
    return list(read_capture(path, problems.append)), problems


def pages(path: Path) -> list[bytes | None]:
    polls, problems = read(path)
    assert problems == []
    return [poll.page for poll in polls]


def line(t: float = 1, **more: object) -> bytes:
    return json.dumps({"t": t, "metrics": "a 1\n", **more}).encode() + b"\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.jsonl.gz"


def test_what_is_recorded_is_read_back(file: Path) -> None:
    record(file, b'a{b="\xc3\xa9"} 1\n', None, b'a{b="\xff"} 2\n')
    assert read(file) == (
        [
            CapturedPoll(1, 1000, "t", b'a{b="\xc3\xa9"} 1\n'),
            CapturedPoll(2, 1000, "t", None),
            CapturedPoll(3, 1000, "t", 'a{b="\N{REPLACEMENT CHARACTER}"} 2\n'.encode()),
        ],
        [],
    )


def test_a_capture_is_gzipped_json_lines(file: Path) -> None:
    record(file, b"a 1\n", None)
    with gzip.open(file, "rt") as stream:
        assert [json.loads(text) for text in stream] == [
            {"t": 1000.0, "target": "t", "status": 200, "metrics": "a 1\n"},
            {"t": 1000.0, "target": "t", "status": -1},
        ]


def test_a_file_that_is_there_is_carried_on(file: Path) -> None:
    record(file, b"a 1\n")
    record(file, b"a 2\n", now=2000.0)
    assert [(poll.t, poll.page) for poll in read(file)[0]] == [(1000, b"a 1\n"), (2000, b"a 2\n")]


def test_many_threads(file: Path) -> None:
    to = recorder(file)

    def work(name: str) -> None:
        for number in range(50):
            to.page(name, f"a {number}\n".encode())

    threads = [threading.Thread(target=work, args=(f"t{index}",)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    to.close(timeout_seconds=10)
    polls, problems = read(file)
    assert problems == []
    for index in range(8):
        assert [poll.page for poll in polls if poll.target == f"t{index}"] == [f"a {n}\n".encode() for n in range(50)]


def test_a_killed_process_leaves_a_whole_file(file: Path) -> None:
    code = f"""
import pathlib, time
from kvcache_exporter.capture import Recorder
r = Recorder(pathlib.Path({str(file)!r}))
while True:
    r.page("t", b"a 1\\n" * 9000)
    time.sleep(0.001)
"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        wait_until(lambda: file.exists() and file.stat().st_size > 5000)
        process.send_signal(signal.SIGKILL)
    record(file, b"a 2\n")
    assert len(gzip.decompress(file.read_bytes()).splitlines()) == len(pages(file))
    assert pages(file)[-2:] == [b"a 1\n" * 9000, b"a 2\n"]


def test_a_full_disk_is_logged_once_and_leaves_no_half_page(file: Path) -> None:
    """The limit on a file's size stands in for the disk: as there, the last write that fits is cut off."""
    code = f"""
import logging, os, pathlib, resource, signal
from kvcache_exporter.capture import Recorder
logging.basicConfig(format="%(message)s %(fields)s", level="INFO")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
r = Recorder(pathlib.Path({str(file)!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, resource.RLIM_INFINITY))
for _ in range(10):
    r.page("t", os.urandom(4000))
r.missed("t")
while r._pending:
    pass
resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, resource.RLIM_INFINITY))
r.page("t", b"a 1\\n")
r.close(10)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, *rest = done.stderr.splitlines()
    assert first.startswith("cannot record; polls go on, and each page is tried")
    assert str(file) in first
    assert all(text.startswith(("cannot record", "recording again")) for text in rest)
    assert done.stderr.count("cannot record") <= done.stderr.count("recording again") + 1
    assert len(done.stderr.splitlines()) < 6
    assert 3 <= len(pages(file)) < 11
    assert pages(file)[-1] == b"a 1\n"


def test_a_slow_disk_costs_pages_not_memory_or_time(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()
    write = Recorder._write

    def slow_write(self: Recorder, line: bytes) -> None:
        goes_on.wait(10)
        write(self, line)

    monkeypatch.setattr(Recorder, "_write", slow_write)
    to = recorder(file, max_pending_bytes=1000)
    to.page("t", b"a 0\n")
    wait_until(lambda: not to._pending)
    for number in range(1, 9):
        to.page("t", f"a {number}\n".encode() * 100)
    goes_on.set()
    to.close(timeout_seconds=10)
    assert pages(file) == [b"a 0\n", b"a 1\n" * 100, b"a 2\n" * 100]
    (logged,) = caplog.records
    assert logged.getMessage() == "pages not recorded"
    assert vars(logged)["fields"]["pages"] == 6


def test_closing_waits_no_longer_than_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(Recorder, "_write", lambda _self, _line: goes_on.wait(10))
    to = recorder(file)
    to.page("t", b"a 1\n")
    to.close(timeout_seconds=0.01)
    to.page("t", b"a 2\n")
    assert len(to._pending) == 0
    goes_on.set()
    to.close(timeout_seconds=10)


def test_another_name_or_another_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.json is not called \*\.jsonl\.gz"):
        Recorder(tmp_path / "a.json")
    assert not (tmp_path / "a.json").exists()
    other = tmp_path / "b.jsonl.gz"
    other.write_text("mine\n")
    with pytest.raises(ValueError, match="is there and is not gzip'd"):
        Recorder(other)
    assert other.read_text() == "mine\n"
    with pytest.raises(OSError, match="No such file"):
        Recorder(tmp_path / "no" / "c.jsonl.gz")


def test_plain_lines_are_read_too(tmp_path: Path) -> None:
    plain = tmp_path / "a.jsonl"
    plain.write_bytes(line(1) + b"\n" + line(2, target="x")[:-1])
    assert [(poll.line, poll.target) for poll in read(plain)[0]] == [(1, None), (3, "x")]


def test_a_series_of_a_recorded_engine_names_its_page_body(file: Path) -> None:
    rows = [{"t": 1.5, "dur": 0.1, "status": 200, "body": "a 1\n"}, {"t": 2.5, "dur": 0.1, "status": -1, "body": ""}]
    file.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    assert [(poll.t, poll.page) for poll in read(file)[0]] == [(1.5, b"a 1\n"), (2.5, None)]


@pytest.mark.parametrize("at", [2, 5, 12, 200, -30, -9, -1])
def test_a_file_that_is_cut_off(file: Path, at: int) -> None:
    """One member for all lines, as other writers make it: what can be unpacked is read, the line that is cut off is not."""
    lines = b"".join(line(number, metrics="".join(f'a{{b="{number * i}"}} {i}\n' for i in range(40))) for number in range(20))
    file.write_bytes(gzip.compress(lines)[:at])
    polls, problems = read(file)
    assert [poll.t for poll in polls] == list(range(len(polls)))
    assert (len(polls) > 0) == (at == 200 or at < 0)
    assert problems[0] == "the file is cut off or damaged behind byte 0: what can be unpacked is read"
    assert problems[1:] in ([], [f"line {len(polls) + 1} is not JSON, or not all of it"])


@pytest.mark.parametrize("kept", [3, 11, 30, 60])
def test_pages_behind_one_that_was_cut_off_are_read(file: Path, kept: int) -> None:
    """As when the machine lost power while a page was written, and the exporter came back."""
    file.write_bytes(gzip.compress(line(1)) + gzip.compress(line(2, metrics=f"{list(range(999))}"))[:kept])
    record(file, b"a 3\n", b"a 4\n")
    polls, problems = read(file)
    assert [poll.page for poll in polls] == [b"a 1\n", b"a 3\n", b"a 4\n"]
    assert problems[0].startswith("the file is cut off or damaged behind byte ")
    assert len(problems) <= 2


def test_damage_far_into_a_long_member_is_found_behind_any_chunk(file: Path) -> None:
    member = gzip.compress(line(1, metrics=Random(1).randbytes(300_000).hex()))
    assert len(member) > 4 << 16
    file.write_bytes(member[:-50_000] + gzip.compress(line(2)))
    polls, problems = read(file)
    assert [poll.t for poll in polls] == [2]
    assert problems[0] == "the file is cut off or damaged behind byte 0: what can be unpacked is read"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"{", "is not JSON, or not all of it"),
        (b"\xff", "is not JSON, or not all of it"),
        (b"[" * 100_000, "is not JSON, or not all of it"),
        (b"[1]", "is not an object"),
        (b'{"metrics": ""}', "has no `t`, the seconds of the poll"),
        (b'{"t": true, "metrics": ""}', "has no `t`, the seconds of the poll"),
        (b'{"t": NaN, "metrics": ""}', "has no `t`, the seconds of the poll"),
        (b'{"t": 1e999, "metrics": ""}', "has no `t`, the seconds of the poll"),
        (b'{"t": 1' + b"0" * 400 + b', "metrics": ""}', "has no `t`, the seconds of the poll"),
        (b'{"t": 1}', "has no `metrics`, the page"),
        (b'{"t": 1, "metrics": 2}', "has no `metrics`, the page"),
        (b'{"t": 1, "metrics": "", "status": "ok"}', "has a `status` that is not a whole number"),
        (b'{"t": 1, "metrics": "", "target": 1}', "has a `target` that is not a name"),
    ],
)
def test_a_broken_line_is_a_sentence_and_the_rest_goes_on(tmp_path: Path, text: bytes, problem: str) -> None:
    plain = tmp_path / "a.jsonl"
    plain.write_bytes(line(1) + text + b"\n" + line(3))
    polls, problems = read(plain)
    assert [poll.t for poll in polls] == [1, 3]
    assert problems == [f"line 2 {problem}"]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="cannot be read: No such file"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(SourceError, match="cannot be read: Is a directory"):
        read(tmp_path)
