"""Time of each query of the boards and of the rules on a real Prometheus that holds a simulated fleet.

Run it as `python tests/bench/fleet.py`, or say how large: `--nodes 50 200 --engines 8 --minutes 360`. Each size gets blocks of
its own: promtool makes them from the fleet's series (fleet_data.py), and from the recording rules. Every query is then asked over
the HTTP API, as Grafana and the rule manager would ask it, one at a time. `make suite` gets the programs.

With `--live`, a Prometheus with the rules then scrapes as many nodes for seven minutes, and says itself how long the rules took.

Most of the time goes into the blocks: 1,000 nodes and an hour took thirteen minutes on two cores, and 38 GB of disk for the text.
What is given for more nodes than were simulated is a straight line through the two largest sizes, and no measurement.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))

from dashboards.queries import Board, Prometheus, Series, open_view, read_board
from fleet_data import JOB, served, write_openmetrics

from lab import free_port, wait_until
from promtool import ROOT, RULES, Expression

PROGRAMS = ROOT / ".cache" / "prometheus" / "bin"
# What Prometheus puts into one block.
BLOCK_SECONDS = 7200
# As many points as Grafana asks for on a panel of usual width.
POINTS = 300
# What a browser has under way to one host.
AT_ONCE = 6
EXTRAPOLATED_NODES = 1000
# The longest window in the expressions of most rules, and how many evaluations are looked at after it.
WARM_UP_SECONDS = 300
EVALUATIONS = 8


@dataclass(frozen=True)
class Request:
    """A call of the HTTP API: `path` below /api/v1/."""

    path: str
    parameters: Mapping[str, object]

    def url(self, address: str) -> str:
        return f"{address}/api/v1/{self.path}?{urllib.parse.urlencode(self.parameters)}"


@dataclass(frozen=True)
class Question:
    """What is timed: `group` is the title of a board or the name of a group of rules, `kind` tells how it is asked."""

    group: str
    title: str
    kind: str
    request: Request

    @property
    def key(self) -> tuple[str, str]:
        """What it is called at every size; the request has other times in it."""
        return self.group, self.title


@dataclass(frozen=True)
class Timing:
    """Seconds of each round, the series of the answer, and the samples that Prometheus read for it (0 where it does not tell)."""

    question: Question
    seconds: Sequence[float]
    series: int
    samples: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Size:
    """What came of a fleet of so many nodes; `load_seconds` is all of a board, by its title, as a browser asks for it."""

    nodes: int
    series: int
    samples: int
    block_bytes: int
    resident_bytes: int
    load_seconds: Mapping[str, float]
    timings: Mapping[tuple[str, str], Timing]
    live: Live | None


@dataclass(frozen=True)
class Live:
    """What a Prometheus says that scrapes the fleet: seconds of evaluations by group, and of rules by (group, rule)."""

    groups: Mapping[str, Sequence[float]]
    rules: Mapping[tuple[str, str], Sequence[float]]
    series: int
    alerts: int
    resident_bytes: int
    cpu_share: float


class Recorder(Prometheus):
    """Remembers what is asked."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.requests: list[Request] = []

    def instant(self, expression: str, at: float) -> list[Series]:
        self.requests.append(Request("query", {"query": expression, "time": at}))
        return super().instant(expression, at)

    def over(self, expression: str, start: float, end: float, step: float) -> list[Series]:
        self.requests.append(Request("query_range", {"query": expression, "start": start, "end": end, "step": step}))
        return super().over(expression, start, end, step)

    def label_values(self, label: str, selector: str, start: float, end: float) -> list[str]:
        matched = {"match[]": selector} if selector else {}
        self.requests.append(Request(f"label/{label}/values", {**matched, "start": start, "end": end}))
        return super().label_values(label, selector, start, end)


@contextmanager
def prometheus(data: Path, configuration: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """A Prometheus on these blocks: its address and process id."""
    port = free_port()
    config = data.parent / "prometheus.yml"
    config.write_text(yaml.safe_dump(configuration))
    command: list[str | Path] = [
        PROGRAMS / "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={data}",
        f"--web.listen-address=127.0.0.1:{port}",
        # Else it would make larger blocks of these while it is timed.
        f"--storage.tsdb.min-block-duration={BLOCK_SECONDS}s",
        f"--storage.tsdb.max-block-duration={BLOCK_SECONDS}s",
        "--storage.tsdb.retention.time=1y",
    ]
    with (data.parent / "prometheus.log").open("ab") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        address = f"http://127.0.0.1:{port}"
        try:
            wait_until(lambda: ready(address), seconds=120)
            yield address, process.pid
        finally:
            process.terminate()


def ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/-/ready", timeout=5):
            return True
    except OSError:
        return False


def create_blocks_from(*arguments: object) -> None:
    """Run promtool; what it tells of its work is not part of the report."""
    command = [str(part) for part in (PROGRAMS / "promtool", "tsdb", "create-blocks-from", *arguments)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def make_blocks(folder: Path, nodes: int, engines: int, start: int, end: int, step: int) -> Path:
    """Blocks of the fleet and of what the recording rules make of it."""
    data = folder / "data"
    for block in range(start // BLOCK_SECONDS * BLOCK_SECONDS, end, BLOCK_SECONDS):
        # One file and one run of promtool a block: it would read the text of all of them for each.
        page = folder / "fleet.om"
        with page.open("w") as file:
            scrapes = [float(at) for at in range(max(block, start), min(block + BLOCK_SECONDS, end), step)]
            write_openmetrics(file, nodes, engines, scrapes)
        create_blocks_from("openmetrics", page, data)
        page.unlink()
    for number, rules in enumerate(recording_levels()):
        file_of_rules = folder / f"rules{number}.yaml"
        file_of_rules.write_text(yaml.safe_dump({"groups": [{"name": "records", "interval": f"{step}s", "rules": rules}]}))
        new = folder / f"recorded{number}"
        with prometheus(data, {}) as (address, _):
            span = f"--start={start + step}", f"--end={end - 1}"
            create_blocks_from("rules", f"--url={address}", *span, f"--output-dir={new}", file_of_rules)
        for block_folder in new.iterdir():
            shutil.move(block_folder, data)
    return data


@cache
def rule_groups() -> list[Mapping[str, Any]]:
    """The groups of the rules, as they were when the first size began."""
    groups: list[Mapping[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]
    return groups


def recording_levels() -> list[list[Mapping[str, Any]]]:
    """The recording rules, each after those that it reads: promtool sees only what is there when it starts."""
    left = {rule["record"]: rule for group in rule_groups() for rule in group["rules"] if "record" in rule}
    levels = []
    while left:
        level = [
            rule
            for rule in left.values()
            if not any(selector.metric in left for selector in Expression.of(rule["expr"]).selectors)
        ]
        levels.append(level)
        for rule in level:
            del left[rule["record"]]
    return levels


def settle(data: Path, blocks: int) -> None:
    """Wait until Prometheus has merged the recorded series into the blocks of the fleet, where it would have recorded them."""
    wait_until(lambda: len(list(data.glob("*/meta.json"))) == blocks, seconds=3600)
    # It deletes the old ones, and reads the new ones, within its next round.
    time.sleep(5)


def board_questions(address: str, board: Board, start: int, end: int, step: int) -> Iterator[Question]:
    """All that a board asks when one opens it."""
    recorder = Recorder(address)
    points_step = max(1, math.ceil((end - start) / POINTS / step)) * step
    view = open_view(board, recorder, start=start, end=end, step=points_step, scrape_seconds=step)
    asked = [variable for variable in board.variables if variable.kind == "query"]
    for variable, request in zip(asked, recorder.requests, strict=True):
        yield Question(board.title, variable.name, "variable", request)
    for panel in board.panels:
        for query in panel.queries:
            view.answers(query)
            title = f"{panel.title} [{query.ref_id}]" if len(panel.queries) > 1 else panel.title
            yield Question(board.title, title, "instant" if query.instant else "range", recorder.requests[-1])


def rule_questions(end: int) -> Iterator[Question]:
    """All that the rules ask at the end of what is there."""
    for group in rule_groups():
        for rule in group["rules"]:
            request = Request("query", {"query": rule["expr"], "time": end})
            yield Question(group["name"], rule.get("record") or rule["alert"], "rule", request)


def ask(url: str) -> tuple[float, bytes]:
    """Seconds until the whole answer is there, and the answer."""
    started = time.perf_counter()
    with urllib.request.urlopen(url, timeout=300) as response:
        body: bytes = response.read()
    return time.perf_counter() - started, body


def answer(url: str) -> Any:
    return json.loads(ask(url)[1])["data"]


def time_questions(address: str, asked: Sequence[Question], rounds: int) -> list[Timing]:
    """Each question once a round, so that none finds what it has just read itself."""
    seconds: list[list[float]] = [[] for _ in asked]
    for _ in range(rounds):
        for question, times in zip(asked, seconds, strict=True):
            times.append(ask(question.request.url(address))[0])
    return [timing(address, question, times) for question, times in zip(asked, seconds, strict=True)]


def timing(address: str, question: Question, seconds: Sequence[float]) -> Timing:
    """The times with what is in the answer, asked once more for its statistics."""
    data = answer(question.request.url(address) + "&stats=all")
    if isinstance(data, list):
        return Timing(question, seconds, len(data), 0)
    return Timing(question, seconds, len(data["result"]), data["stats"]["samples"]["totalQueryableSamples"])


def load_seconds(address: str, asked: Sequence[Question], rounds: int) -> float:
    """Median seconds until a board has all of its answers."""
    urls = [question.request.url(address) for question in asked]
    seconds = []
    with ThreadPoolExecutor(AT_ONCE) as browser:
        for _ in range(rounds):
            started = time.perf_counter()
            list(browser.map(ask, urls))
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measure(folder: Path, nodes: int, boards: Sequence[Board], arguments: argparse.Namespace) -> Size:
    """Make the fleet, and time everything on it."""
    end = int(time.time()) // BLOCK_SECONDS * BLOCK_SECONDS
    start = end - 60 * arguments.minutes
    data = make_blocks(folder, nodes, arguments.engines, start, end, arguments.step)
    with prometheus(data, {}) as (address, process_id):
        settle(data, math.ceil((end - start) / BLOCK_SECONDS))
        asked_by_boards = [list(board_questions(address, board, start, end, arguments.step)) for board in boards]
        asked = [*itertools.chain.from_iterable(asked_by_boards), *rule_questions(end)]
        timings = time_questions(address, asked, arguments.rounds)
        loads = {board[0].group: load_seconds(address, board, arguments.rounds) for board in asked_by_boards}
        resident = psutil.Process(process_id).memory_info().rss
    blocks = [json.loads(meta.read_text())["stats"] for meta in data.glob("*/meta.json")]
    live = measure_live(folder, nodes, arguments.engines, arguments.step) if arguments.live else None
    return Size(
        nodes=nodes,
        series=max(block["numSeries"] for block in blocks),
        samples=sum(block["numSamples"] for block in blocks),
        block_bytes=sum(file.stat().st_size for file in data.glob("*/**/*") if file.is_file()),
        resident_bytes=resident,
        load_seconds=loads,
        timings={timing.question.key: timing for timing in timings},
        live=live,
    )


def measure_live(folder: Path, nodes: int, engines: int, step: int) -> Live:
    """Let a Prometheus scrape the fleet and evaluate the rules."""
    started = time.time()
    seconds = WARM_UP_SECONDS + (EVALUATIONS + 1) * step
    # To make the pages and to start takes a while, too.
    scrapes = [started + passed for passed in range(0, 2 * seconds, step)]
    groups: dict[str, list[float]] = {}
    rules: dict[tuple[str, str], list[float]] = {}
    with served(nodes, engines, scrapes) as targets:
        configuration = {
            "global": {"scrape_interval": f"{step}s", "evaluation_interval": f"{step}s"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": JOB, "static_configs": targets}],
        }
        with prometheus(folder / "live", configuration) as (address, process_id):
            process = psutil.Process(process_id)
            time.sleep(WARM_UP_SECONDS)
            before = sum(process.cpu_times()[:2])
            for _ in range(EVALUATIONS):
                time.sleep(step)
                for group in answer(Request("rules", {}).url(address))["groups"]:
                    groups.setdefault(group["name"], []).append(group["evaluationTime"])
                    for rule in group["rules"]:
                        rules.setdefault((group["name"], rule["name"]), []).append(rule["evaluationTime"])
            cpu = sum(process.cpu_times()[:2]) - before
            return Live(
                groups=groups,
                rules=rules,
                series=answer(Request("status/tsdb", {}).url(address))["headStats"]["numSeries"],
                alerts=len(answer(Request("alerts", {}).url(address))["alerts"]),
                resident_bytes=process.memory_info().rss,
                cpu_share=cpu / (EVALUATIONS * step),
            )


def is_extrapolated(sizes: Sequence[Size]) -> bool:
    return len(sizes) > 1 and sizes[-1].nodes < EXTRAPOLATED_NODES


def column_heads(sizes: Sequence[Size]) -> str:
    return " ".join([f"{size.nodes:>8}" for size in sizes] + [f"{f'~{EXTRAPOLATED_NODES}':>8}"] * is_extrapolated(sizes))


def print_row(sizes: Sequence[Size], seconds: Sequence[float], rest: str) -> None:
    """Milliseconds of each size, and where a line through the two largest ones comes to."""
    cells = [f"{value * 1e3:8.1f}" for value in seconds]
    if is_extrapolated(sizes):
        slope = (seconds[-1] - seconds[-2]) / (sizes[-1].nodes - sizes[-2].nodes)
        cells.append(f"{(seconds[-1] + slope * (EXTRAPOLATED_NODES - sizes[-1].nodes)) * 1e3:8.0f}")
    print(" ".join(cells), rest)


def print_tables(sizes: Sequence[Size]) -> None:
    """The fleets; then the queries of each board, the slowest first, and the groups of rules."""
    print(f"{'nodes':>6} {'series':>9} {'samples':>12} {'blocks MiB':>11} {'resident MiB':>13}")
    for size in sizes:
        print(
            f"{size.nodes:>6} {size.series:>9,} {size.samples:>12,} {size.block_bytes / 2**20:>11.0f} "
            f"{size.resident_bytes / 2**20:>13.0f}"
        )
    print(f"\nMedian milliseconds at so many nodes. Worst, series and samples read are those of {sizes[-1].nodes} nodes.")
    if is_extrapolated(sizes):
        print(f"~{EXTRAPOLATED_NODES} is not measured: it is where a straight line through the two columns before it comes to.")
    head = column_heads(sizes)
    slowest_first = sorted(sizes[-1].timings.values(), key=lambda timing: -timing.median)
    for board in sizes[-1].load_seconds:
        print(f"\n{head} {'worst':>8} {'series':>7} {'samples':>11}  {board}")
        for timing in slowest_first:
            question = timing.question
            if question.group == board:
                numbers = f"{max(timing.seconds) * 1e3:8.1f} {timing.series:>7} {timing.samples:>11,}"
                medians = [size.timings[question.key].median for size in sizes]
                print_row(sizes, medians, f"{numbers}  {question.title} ({question.kind})")
        rest = f"{'':28}  all of it, {AT_ONCE} queries at a time"
        print_row(sizes, [size.load_seconds[board] for size in sizes], rest)
    print(f"\n{head}  groups of rules, each rule asked for over the HTTP API, and the slowest of these")
    for name in [group["name"] for group in rule_groups()]:
        rules = [timing for timing in slowest_first if timing.question.group == name]
        total = [sum(size.timings[rule.question.key].median for rule in rules) for size in sizes]
        print_row(sizes, total, f" {name}: {rules[0].question.title}, {rules[0].median * 1e3:.1f} ms")


def print_live(sizes: Sequence[Size]) -> None:
    """What Prometheus says of the rules while it scrapes."""
    lives = [size.live for size in sizes if size.live is not None]
    print(
        f"\n{'nodes':>6} {'series':>9} {'alerts':>7} {'resident MiB':>13} {'CPUs':>6}  while it scrapes and evaluates the rules"
    )
    for size, live in zip(sizes, lives, strict=True):
        print(f"{size.nodes:>6} {live.series:>9,} {live.alerts:>7} {live.resident_bytes / 2**20:>13.0f} {live.cpu_share:>6.2f}")
    print(f"\n{column_heads(sizes)} {'worst':>8}  groups of rules, as evaluated, and the slowest of these")
    last = lives[-1]
    for name in last.groups:
        rule = max((key for key in last.rules if key[0] == name), key=lambda key: statistics.median(last.rules[key]))
        slowest = f"{rule[1]}, {statistics.median(last.rules[rule]) * 1e3:.1f} ms"
        medians = [statistics.median(live.groups[name]) for live in lives]
        print_row(sizes, medians, f"{max(last.groups[name]) * 1e3:8.1f}  {name}: {slowest}")


def main() -> None:
    """Measure each size, print one report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[50, 200], help="sizes of the fleet (default: 50 200)")
    parser.add_argument("--engines", type=int, default=8, help="engines of a node, each on a GPU (default: 8)")
    parser.add_argument("--minutes", type=int, default=60, help="span of the series, and of the board (default: 60)")
    parser.add_argument("--step", type=int, default=15, help="seconds between scrapes (default: 15)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each query is timed (default: 5)")
    parser.add_argument("--boards", type=Path, nargs="+", default=[ROOT / "dashboards" / "fleet.json"], metavar="FILE")
    parser.add_argument("--live", action="store_true", help="scrape the fleet, too, for seven minutes a size")
    arguments = parser.parse_args()
    boards = [read_board(file) for file in arguments.boards]
    sizes = []
    for nodes in sorted(arguments.nodes):
        with tempfile.TemporaryDirectory(prefix="fleet-") as folder:
            sizes.append(measure(Path(folder), nodes, boards, arguments))
    print_tables(sizes)
    if arguments.live:
        print_live(sizes)


if __name__ == "__main__":
    main()
