"""What the boards find in a real Prometheus: beside the demo, one exporter for each vLLM version of which there are pages."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from dashboards.queries import Board, Prometheus, Query, View, open_view, read_board
from dashboards.simulated_fleet import ROOT, NodeGpus, exporter_for, prometheus_of

from kvcache_exporter.config import TargetConfig
from kvcache_exporter.simulator import LLAMA_3_1_8B_CONFIG, EngineParameters, SimulatedEngineServer
from lab import TINY_LLAMA, Upstream, capture, models_answer

BOARDS = {name: read_board(ROOT / "dashboards" / f"{name}.json") for name in ("engine", "node", "fleet")}
DEMO = "demo"
# The newest page with traffic of each version; of 0.31.0 there is none but an idle one.
PAGES = {
    "0.8.5": "0.8.5_v1.driven",
    "0.11.2": "0.11.2_v1.driven",
    "0.20.0": "0.20.0_v1.driven",
    "0.29.0": "0.29.0_nearfull_waiting",
    "0.31.0": "0.31.0_idle",
    "0.32.0": "0.32.0_moderate",
}
LENGTH = "2048"
SCRAPE_SECONDS = 1.0
RANGE_SECONDS = 60.0
NEW_A_SECOND = 4.0
_COUNTER = re.compile(rb"^(?P<name>vllm:\w+)_(?P<kind>total|bucket|sum|count)\{(?P<labels>.*)\} (?P<value>\S+)$", re.MULTILINE)
_BOUND = re.compile(rb',?le="([^"]*)"')


def queries_of(board: Board) -> Iterator[tuple[str, Query]]:
    """Each query with a name: the title of its panel, and where that has several its legend, or its letter if that has labels."""
    for panel in board.panels:
        for query in panel.queries:
            which = query.legend if query.legend and "{{" not in query.legend else query.ref_id
            yield (f"{panel.title} [{which}]" if len(panel.queries) > 1 else panel.title), query


def view_of(name: str, prometheus_url: str, subject: str) -> View:
    """A board that looks at the demo or at a version: whichever of target, instance and model it lets one choose."""
    end = time.time()
    return open_view(
        BOARDS[name],
        Prometheus(prometheus_url),
        start=end - RANGE_SECONDS,
        end=end,
        step=SCRAPE_SECONDS,
        scrape_seconds=SCRAPE_SECONDS,
        chosen={"target": (subject,), "instance": (subject,), "model": (subject,), "length": (LENGTH,)},
    )


def unanswered(view: View) -> set[str]:
    """Names of the queries that give no series."""
    return {name for name, query in queries_of(view.board) if not view.answers(query)}


@contextmanager
def scraped(folder: Path, programs: Path) -> Iterator[str]:
    """Run the engines, an exporter for each and a Prometheus; gives its URL. Targets, instances and models have one name each."""
    with ExitStack() as stack:
        demo = stack.enter_context(SimulatedEngineServer(model_name=DEMO))
        settings = {
            DEMO: TargetConfig(DEMO, demo.url, model_config=LLAMA_3_1_8B_CONFIG, max_num_seqs=EngineParameters().max_num_seqs)
        }
        for version in PAGES:
            upstream = stack.enter_context(Upstream())
            stack.enter_context(_driven(upstream, version))
            settings[version] = TargetConfig(version, upstream.url, model_config=TINY_LLAMA, max_num_seqs=64)
        exporters = {name: stack.enter_context(exporter_for((target,), NodeGpus((name,)))) for name, target in settings.items()}
        yield stack.enter_context(prometheus_of(exporters, folder, scrape_seconds=SCRAPE_SECONDS, programs=programs))


@contextmanager
def _driven(upstream: Upstream, version: str) -> Iterator[None]:
    """Serve the page of a version, with the version as the name of its model and more traffic each second."""
    page = capture(PAGES[version]).replace(b'model_name="tiny"', f'model_name="{version}"'.encode())
    models = models_answer(name=version)
    upstream.page(page, models=models)
    closing = threading.Event()

    def drive() -> None:
        seconds = 0
        while not closing.wait(1.0):
            seconds += 1
            upstream.page(after(page, seconds), models=models)

    thread = threading.Thread(target=drive, daemon=True)
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join()


def after(page: bytes, seconds: int) -> bytes:
    """The page some seconds later: counters have grown, those and histograms too in which nothing was on the page."""
    bounds: dict[bytes, list[float]] = {}
    untouched = set()
    for name, kind, labels, value in _COUNTER.findall(page):
        if kind == b"bucket" and (bound := float(_BOUND.findall(labels)[0])) not in bounds.setdefault(name, []):
            bounds[name].append(bound)
        if kind == b"count" and float(value) == 0:
            untouched.add((name, labels))

    def later(match: re.Match[bytes]) -> bytes:
        name, kind, labels = match["name"], match["kind"], match["labels"]
        value = float(match["value"]) * (1 + seconds)
        if kind == b"total" and value == 0:
            value = NEW_A_SECOND * seconds
        elif kind != b"total" and (name, _BOUND.sub(b"", labels).strip(b",")) in untouched:
            typical = sorted(bounds[name])[len(bounds[name]) * 2 // 5]
            value = NEW_A_SECOND * seconds * (typical if kind == b"sum" else 1.0)
            if kind == b"bucket" and float(_BOUND.findall(labels)[0]) < typical:
                value = 0.0
        return b"%s_%s{%s} %r" % (name, kind, labels, value)

    return _COUNTER.sub(later, page)
