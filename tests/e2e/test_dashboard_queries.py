"""Every query of every board against a real Prometheus: on a simulated engine, and on pages of each supported vLLM version."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from dashboard_queries import BOARDS, DEMO, PAGES, scraped, unanswered, view_of

# What was not seen of an engine within this time is not seen.
SEEN_SECONDS = 45.0
KNOWN_BLOCKS = tuple(name for name in (DEMO, *PAGES) if name != "0.8.5")


@dataclass(frozen=True)
class Gap:
    """Queries of a board that find nothing there, and why. One that finds something fails, too."""

    board: str
    why: str
    queries: tuple[str, ...]
    versions: tuple[str, ...] = (DEMO, *PAGES)


GAPS = (
    Gap("node", "no Xid error came", ("Do GPUs report errors? [B]",)),
    Gap("engine", "every part of the memory is known", ("What fills the GPUs of this engine? [unknown]",), KNOWN_BLOCKS),
    Gap("node", "every part of the memory is known", ("What fills GPU $gpu? [unknown]",), KNOWN_BLOCKS),
    Gap("fleet", "everything answers", ("Which sources fail?", "Which exporters are down?")),
    Gap(
        "engine",
        "the engine reports no capacity in tokens to compare with before 0.24",
        ("Is the computed capacity the one that the engine reports?",),
        ("0.8.5", "0.11.2", "0.20.0"),
    ),
    Gap(
        "engine",
        "prefix-cache counters are in blocks before 0.9",
        ("What does the prefix cache save? [A]", "What does the prefix cache save? [B]"),
        ("0.8.5",),
    ),
    Gap(
        "engine",
        "the page has no count of blocks before 0.9",
        (
            "How many more requests fit?",
            "What binds?",
            "When is it full?",
            "How much room is left?",
            "How many more fit, by length, and how many run and wait? [A]",
            "How many more fit, by length, and how many run and wait? [B]",
            "How many more fit, by length, and how many run and wait? [C]",
            "How many more fit, by length, and how many run and wait? [D]",
            "How full is the cache, in blocks? [A]",
            "How full is the cache, in blocks? [B]",
            "How full is the cache, in bytes? [A]",
            "How full is the cache, in bytes? [B]",
            "Is more asked for than fits?",
            "How long until it is full?",
            "What bound, and in which state was it? [A]",
            "How much room was left?",
            "How long are the requests? [A]",
            "How long are the requests? [B]",
            "What fills the GPUs of this engine? [kv_cache]",
            "What fills the GPUs of this engine? [overhead]",
            "How much of the memory bandwidth does decoding take?",
            "How many requests of $length tokens does the empty engine hold?",
            "How many more requests of $length tokens fit now?",
            "How much cache does one request of $length tokens take?",
        ),
        ("0.8.5",),
    ),
    Gap(
        "node",
        "the page has no count of blocks before 0.9",
        (
            "Which engine is short?",
            "How many more typical requests fit on each engine?",
            "What fills GPU $gpu? [kv_cache]",
            "What fills GPU $gpu? [overhead]",
        ),
        ("0.8.5",),
    ),
    Gap(
        "fleet",
        "the page has no count of blocks before 0.9",
        (
            "Is any model short of room?",
            "How is the worst engine off?",
            "When is the first engine full?",
            "How is each model off? [B]",
            "How is each model off? [C]",
            "How is each model off? [D]",
            "How is each model off? [F]",
            "How is each model off? [G]",
            "How is each model off? [H]",
            "How is each model off? [I]",
            "How many more requests fit, of each model?",
            "How much room has each model?",
            "How much room has the worst engine of each model?",
            "How long until the first engine of each model is full?",
            "How many engines are busy, and how many are there? [A]",
            "Who waits, and what room is idle for batch work? [A]",
            "Which 20 engines have least room?",
        ),
        ("0.8.5",),
    ),
)
# Variables without a value to choose, and why.
EMPTY_VARIABLES: Mapping[str, str] = {"cluster": "this Prometheus adds no label for a cluster"}


@pytest.fixture(scope="module")
def prometheus_url(prometheus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scraped(tmp_path_factory.mktemp("dashboards"), prometheus) as url:
        time.sleep(SEEN_SECONDS)
        yield url


@pytest.mark.parametrize("version", [DEMO, *PAGES])
@pytest.mark.parametrize("board", BOARDS)
def test_every_query_finds_something_but_for_known_gaps(prometheus_url: str, board: str, version: str) -> None:
    known = {query for gap in GAPS if gap.board == board and version in gap.versions for query in gap.queries}
    assert unanswered(view_of(board, prometheus_url, version)) == known


@pytest.mark.parametrize("board", BOARDS)
def test_every_variable_has_values(prometheus_url: str, board: str) -> None:
    view = view_of(board, prometheus_url, DEMO)
    assert {name for name, options in view.options.items() if not options} == EMPTY_VARIABLES.keys()
    assert DEMO in view.options["target"]
    assert {DEMO, *PAGES} == set(view.options["model"])
