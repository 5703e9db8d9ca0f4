"""Engines that look alike in one page are told apart over several; numbers of cases are those of folders in ../shared/cases."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_exporter.engine_state import (
    ASLEEP,
    FROZEN,
    IDLE,
    SERVING,
    STARTING,
    STATES,
    EngineCondition,
    ProgressWatch,
    has_restarted,
)
from kvcache_exporter.readings import EngineReading, Histogram
from kvcache_exporter.sources.vllm_page import parse_metrics
from lab import capture

SHARED = Path(__file__).parents[2] / "shared"

Pages = Sequence[tuple[float, EngineReading]]
Seen = list[tuple[str, bool]]


def only(body: str) -> EngineReading:
    (engine,) = parse_metrics(body.encode()).engines
    return engine


def page(*lines: str, blocks: str = "", **values: float) -> EngineReading:
    """The reading of a page with `values` by family, `blocks` as further labels of cache_config_info, and other lines."""
    labels = 'engine="0",model_name="m"'
    config = [f'vllm:cache_config_info{{block_size="16",engine="0",{blocks}}} 1.0'] if blocks else []
    return only("\n".join([f"vllm:{name}{{{labels}}} {value}" for name, value in values.items()] + [*config, *lines]))


def waiting_line(reason: str, count: int) -> str:
    return f'vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="{reason}"}} {count}.0'


def sleep_line(state: str, value: int) -> str:
    return f'vllm:engine_sleep_state{{engine="0",model_name="m",sleep_state="{state}"}} {value}.0'


def stale_page(running: int, waiting: int, usage: float) -> EngineReading:
    return page(
        'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 377.0',
        num_requests_running=running,
        num_requests_waiting=waiting,
        kv_cache_usage_perc=usage,
        generation_tokens_total=81234,
        prompt_tokens_total=402111,
    )


DEAD_PAGE = page(
    waiting_line("capacity", 6),
    waiting_line("deferred", 0),
    num_requests_running=0,
    num_requests_waiting=6,
    kv_cache_usage_perc=0.0,
    generation_tokens_total=5120,
    blocks='kv_cache_max_concurrency="1.0",kv_cache_size_tokens="90000",num_gpu_blocks="5626"',
)
ASLEEP_PAGE = page(
    sleep_line("awake", 0),
    sleep_line("weights_offloaded", 1),
    sleep_line("discard_all", 0),
    kv_cache_usage_perc=0.0,
    num_requests_running=0,
    blocks='num_gpu_blocks="20001"',
)


def no_usage_page(generation_tokens: int) -> EngineReading:
    return page(
        kv_cache_usage_perc=0.0,
        num_requests_running=12,
        generation_tokens_total=generation_tokens,
        blocks='num_gpu_blocks="10001"',
    )


def reset_page(generation_tokens: int, preemptions: int, start_time: float) -> EngineReading:
    start = f"process_start_time_seconds {start_time}"
    return page(start, generation_tokens_total=generation_tokens, num_preemptions_total=preemptions)


CASES: Mapping[str, Mapping[str, EngineReading]] = {
    "05-stale-after-abort": {
        **{name: stale_page(106, 15, 0.904) for name in ("t000", "t015", "t030", "t045")},
        "t060": stale_page(0, 0, 0.0),
    },
    "06-dead-engine-looks-idle": dict.fromkeys(("t000", "t015", "t030", "t045"), DEAD_PAGE),
    "14-sleep-mode": {"metrics": ASLEEP_PAGE},
    "15-usage-zero-under-load": {"t000": no_usage_page(5000), "t015": no_usage_page(9000), "t030": no_usage_page(13100)},
    "17-counter-reset": {"t000": reset_page(1_000_000, 40, 1.757e9), "t015": reset_page(500, 0, 1.757000007e9)},
}


def case(name: str) -> Pages:
    return [(float(moment[1:]) if moment[0] == "t" else 0.0, reading) for moment, reading in CASES[name].items()]


def watch(pages: Pages) -> Seen:
    watched = ProgressWatch()
    return [(seen.state, seen.usage_suspect) for seen in (watched.observe(at, reading) for at, reading in pages)]


def states(pages: Pages) -> list[str]:
    return [state for state, _ in watch(pages)]


def every(seconds: float, *readings: EngineReading) -> Pages:
    return [(1_757_000_000 + index * seconds, reading) for index, reading in enumerate(readings)]


def engine(**fields: Any) -> EngineReading:
    """A busy engine with a pool of 1000 blocks."""
    busy: dict[str, Any] = {
        "usage_ratio": 0.5,
        "num_gpu_blocks": 1001,
        "usable_blocks": 1000,
        "used_blocks": 500,
        "num_requests_running": 4,
        "num_requests_waiting": 0,
        "generation_tokens": 100,
    }
    return EngineReading("0", **{**busy, **fields})


def first_tokens(count: int) -> Histogram:
    return Histogram(bounds=(1.0,), counts=(0, count), sum=2.0 * count)


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("05-stale-after-abort", [(SERVING, False), (SERVING, False), (FROZEN, False), (FROZEN, False), (IDLE, False)]),
        ("06-dead-engine-looks-idle", [(SERVING, False), (SERVING, False), (FROZEN, False), (FROZEN, False)]),
        ("14-sleep-mode", [(ASLEEP, False)]),
        ("15-usage-zero-under-load", [(SERVING, False), (SERVING, True), (SERVING, True)]),
        ("17-counter-reset", [(SERVING, False), (SERVING, False)]),
    ],
)
def test_cases(name: str, seen: Seen) -> None:
    assert watch(case(name)) == seen


@pytest.mark.skipif(not SHARED.is_dir(), reason="the folder ../shared is not here")
@pytest.mark.parametrize("name", sorted(CASES))
def test_the_pages_here_are_those_of_the_case(name: str) -> None:
    pages = {file.stem: only(file.read_text()) for file in (SHARED / "cases" / name).glob("*.prom")}
    assert pages == CASES[name]


def test_14_an_engine_that_does_not_tell_is_awake() -> None:
    assert states(every(5, replace(ASLEEP_PAGE, awake=None))) == [IDLE]


@pytest.mark.parametrize(
    ("reading", "state"),
    [
        (engine(), SERVING),
        (engine(num_requests_running=0, num_requests_waiting=1), SERVING),
        (engine(num_requests_running=0), IDLE),
        (engine(num_requests_running=0, num_requests_waiting=None), IDLE),
        (engine(usage_ratio=None, used_blocks=None), SERVING),
        (engine(awake=False), ASLEEP),
        (engine(awake=True), SERVING),
        (EngineReading("0", num_requests_running=0, num_requests_waiting=0), IDLE),
        (EngineReading("0"), STARTING),
        (EngineReading("0", num_gpu_blocks=512, generation_tokens=0, prompt_tokens=0), STARTING),
        (EngineReading("0", usage_ratio=0.0, num_requests_running=0, num_requests_waiting=0), IDLE),
    ],
)
def test_state_of_one_page(reading: EngineReading, state: str) -> None:
    assert states(every(5, reading)) == [state]
    assert state in STATES


def test_engines_behind_several_api_servers_start_one_by_one() -> None:
    """A real page on which only the second engine has ended a step: the first has counters, and no gauges."""
    engines = parse_metrics(capture("0.32.0_dp2_only_engine1_seen")).engines
    assert [ProgressWatch().observe(0.0, reading).state for reading in engines] == [STARTING, SERVING]


@pytest.mark.parametrize(
    ("seconds", "pages_until_frozen"),
    [(1, 11), (4, 4), (5, 3), (10, 3), (60, 3)],
)
def test_frozen_takes_two_intervals_and_ten_seconds(seconds: float, pages_until_frozen: int) -> None:
    assert states(every(seconds, *[engine()] * 15)).index(FROZEN) == pages_until_frozen - 1


STILL = [engine()] * 3


@pytest.mark.parametrize(
    ("readings", "state"),
    [
        (STILL, FROZEN),
        ([engine(num_requests_running=0, num_requests_waiting=3)] * 3, FROZEN),
        ([engine(num_requests_running=0, num_requests_waiting=None, num_requests_waiting_by_reason={"capacity": 3})] * 3, FROZEN),
        ([engine(num_requests_running=0)] * 3, IDLE),
        (
            [
                engine(
                    num_requests_running=0, num_requests_waiting=3, num_requests_waiting_by_reason={"capacity": 0, "deferred": 3}
                )
            ]
            * 3,
            SERVING,
        ),
        ([engine(generation_tokens=None)] * 3, SERVING),
        ([engine(generation_tokens=None, prompt_tokens=7)] * 3, FROZEN),
        ([*STILL, engine(generation_tokens=101)], SERVING),
        ([*STILL, engine(used_blocks=501, usage_ratio=0.501)], SERVING),
        ([*STILL, engine(num_requests_running=5)], SERVING),
        ([*STILL, engine(num_requests_waiting=1)], SERVING),
        ([*STILL, engine(num_requests_waiting_by_reason={"capacity": 0})], SERVING),
        ([*STILL, engine(request_success=1)], SERVING),
        ([*STILL, engine(generation_tokens=99)], SERVING),
        ([*STILL, engine(awake=False)], ASLEEP),
        ([*STILL, engine(awake=False), *STILL[1:]], SERVING),
        ([*STILL, engine(awake=False), *STILL], FROZEN),
        ([*STILL, engine(generation_tokens=99), engine(generation_tokens=99)], SERVING),
        ([*STILL, engine(process_start_time_seconds=1.7e9)], FROZEN),
        ([engine(process_start_time_seconds=1.7e9)] * 3 + [engine(process_start_time_seconds=1.7e9 + 7)], SERVING),
    ],
)
def test_state_after_several_pages(readings: Sequence[EngineReading], state: str) -> None:
    assert states(every(5, *readings))[-1] == state


def test_clock_set_back_does_not_hide_a_frozen_engine() -> None:
    """The count of seconds begins again; that of an hour does not have to pass first."""
    pages = [(7200.0 if index < 2 else 3600.0 + 5 * index, engine()) for index in range(5)]
    assert states(pages) == [SERVING, SERVING, SERVING, SERVING, FROZEN]


@pytest.mark.parametrize(
    ("readings", "suspect"),
    [
        ([engine(used_blocks=0, usage_ratio=0.0)], False),
        ([engine(used_blocks=0, usage_ratio=0.0)] * 2, True),
        ([engine(used_blocks=0, usage_ratio=0.0), engine(), engine(used_blocks=0, usage_ratio=0.0)], False),
        ([engine(used_blocks=0, usage_ratio=0.0)] * 2 + [engine()], False),
        ([engine(used_blocks=0, usage_ratio=0.0, num_requests_running=0)] * 2, False),
        ([engine(used_blocks=0, usage_ratio=0.0, awake=False)] * 2, False),
        ([engine(used_blocks=0, usage_ratio=0.0, generation_tokens=count) for count in (100, 50)], False),
        # vLLM 0.9 counts its null block as used: nothing is held, although the gauge says more than 0.
        ([engine(used_blocks=0, usage_ratio=0.001)] * 2, True),
        ([engine(used_blocks=None, usable_blocks=None, usage_ratio=0.0)] * 2, True),
        # Models that only pool: no block but the null one, or no count at all, and no token ever generated.
        ([engine(used_blocks=0, usable_blocks=0, usage_ratio=0.0, generation_tokens=0)] * 2, False),
        ([engine(used_blocks=None, usable_blocks=None, usage_ratio=0.0, generation_tokens=0)] * 2, False),
        ([engine(used_blocks=None, usage_ratio=None)] * 2, False),
    ],
)
def test_running_requests_that_hold_nothing_are_suspect(readings: Sequence[EngineReading], suspect: bool) -> None:
    assert watch(every(5, *readings))[-1][1] == suspect


def busy(pages: int, **fields: Any) -> list[EngineReading]:
    """An engine that works, with another number of running requests on each page."""
    return [engine(generation_tokens=100 * index, num_requests_running=5 + index % 2, **fields) for index in range(pages)]


@pytest.mark.parametrize(
    ("readings", "suspect"),
    [
        (busy(20), False),
        (busy(21), True),
        (busy(21, used_blocks=None, usable_blocks=None), True),
        (busy(21, used_blocks=1000, usage_ratio=1.0), False),
        (busy(21, used_blocks=None, usage_ratio=None), False),
        ([*busy(30), engine(generation_tokens=9000, used_blocks=501, usage_ratio=0.501)], False),
        ([*busy(30), engine(generation_tokens=9000)], True),
        ([replace(reading, num_requests_running=32) for reading in busy(60)], False),
        ([replace(reading, used_blocks=100 * (reading.num_requests_running or 0)) for reading in busy(60)], False),
    ],
)
def test_usage_that_no_request_moves_is_suspect(readings: Sequence[EngineReading], suspect: bool) -> None:
    """The same usage while 20 times other requests run, unless the pool is full; and it is still no frozen engine."""
    seen = watch(every(5, *readings))
    assert seen[-1] == (SERVING, suspect)


COUNTERS = (
    "generation_tokens",
    "prompt_tokens",
    "num_preemptions",
    "request_success",
    "prefix_cache_queries_tokens",
    "prefix_cache_hits_tokens",
    "external_prefix_cache_queries_tokens",
    "external_prefix_cache_hits_tokens",
    "time_to_first_token_seconds",
)


def counting(counter: str, value: int) -> EngineReading:
    known: Any = first_tokens(value) if counter == "time_to_first_token_seconds" else value
    return EngineReading("0", num_requests_running=1, usage_ratio=0.5, **{counter: known})


@pytest.mark.parametrize("counter", COUNTERS)
def test_each_counter_tells_progress_and_restart(counter: str) -> None:
    readings = [counting(counter, value) for value in (10, 10, 10, 11, 10)]
    assert states(every(5, *readings)) == [SERVING, SERVING, FROZEN, SERVING, SERVING]
    assert [has_restarted(*pair) for pair in pairwise(readings)] == [False, False, False, True]


@pytest.mark.parametrize(
    ("before", "after", "restarted"),
    [
        (engine(), engine(), False),
        (engine(), engine(num_gpu_blocks=2002), True),
        (engine(num_gpu_blocks=None), engine(), False),
        (engine(), engine(num_gpu_blocks=None), False),
        (engine(), engine(generation_tokens=None), False),
        (engine(generation_tokens=None), engine(), False),
        (engine(), engine(num_requests_running=0, used_blocks=0, usage_ratio=0.0), False),
        (engine(process_start_time_seconds=1.757e9), engine(process_start_time_seconds=1.757e9 + 0.5), False),
        (engine(process_start_time_seconds=1.757e9), engine(process_start_time_seconds=1.757e9 + 7), True),
        (engine(process_start_time_seconds=1.757e9), engine(process_start_time_seconds=1.757e9 - 7), True),
        (engine(process_start_time_seconds=None), engine(process_start_time_seconds=1.757e9), False),
    ],
)
def test_restart(before: EngineReading, after: EngineReading, restarted: bool) -> None:
    assert has_restarted(before, after) is restarted


def test_17_counter_reset_is_a_restart() -> None:
    (_, before), (_, after) = case("17-counter-reset")
    assert has_restarted(before, after)
    assert has_restarted(before, replace(after, process_start_time_seconds=before.process_start_time_seconds))


GAUGES = st.fixed_dictionaries(
    {
        "usage_ratio": st.sampled_from((None, 0.0, 0.5, 1.0)),
        "num_requests_running": st.sampled_from((None, 0, 3)),
        "num_requests_waiting": st.sampled_from((None, 0, 3)),
        "awake": st.sampled_from((None, True)),
    }
)
INTERVALS = st.floats(0.1, 3600)


@given(st.lists(st.tuples(INTERVALS, GAUGES, st.sampled_from(COUNTERS)), max_size=12))
def test_an_engine_whose_counters_move_is_never_frozen(steps: Sequence[tuple[float, Mapping[str, Any], str]]) -> None:
    watched, at, counts = ProgressWatch(), 0.0, dict.fromkeys(COUNTERS, 0)
    for seconds, gauges, counter in steps:
        at += seconds
        counts[counter] += 1
        counters: dict[str, Any] = {**counts, "time_to_first_token_seconds": first_tokens(counts["time_to_first_token_seconds"])}
        assert watched.observe(at, EngineReading("0", **gauges, **counters)).state != FROZEN


@given(st.lists(st.tuples(INTERVALS, GAUGES, st.integers(0, 2)), max_size=12))
def test_frozen_engines_have_work_and_two_equal_pages_before(steps: Sequence[tuple[float, Mapping[str, Any], int]]) -> None:
    """Whatever the pages, counters that go down among them."""
    watched, at = ProgressWatch(), 0.0
    pages: list[tuple[float, EngineReading]] = []
    for seconds, gauges, tokens in steps:
        at += seconds
        pages.append((at, EngineReading("0", generation_tokens=tokens, **gauges)))
        seen = watched.observe(*pages[-1])
        assert seen.state in STATES
        if seen.state == FROZEN:
            reading = pages[-1][1]
            assert reading.num_requests_running or reading.num_requests_waiting
            assert len({(r.usage_ratio, r.num_requests_running, r.generation_tokens) for _, r in pages[-3:]}) == 1
            assert len(pages) >= 3


def recorded(file: Path) -> Iterator[Pages]:
    """The pages of each engine of a recording, one a second."""
    engines: dict[str, list[tuple[float, EngineReading]]] = {}
    with gzip.open(file, "rt") as lines:
        for line in lines:
            moment = json.loads(line)
            if moment["status"] == 200:
                for reading in parse_metrics(moment["body"].encode()).engines:
                    engines.setdefault(reading.engine, []).append((moment["t"], reading))
    yield from engines.values()


@pytest.mark.skipif(not SHARED.is_dir(), reason="the folder ../shared is not here")
@pytest.mark.parametrize("file", sorted((SHARED / "captures" / "series").glob("*.metrics.jsonl.gz")), ids=lambda file: file.name)
def test_real_engines_are_neither_frozen_nor_suspect(file: Path) -> None:
    """However often they are polled: they took up to 6 s for a step, and none hung."""
    for pages in recorded(file):
        for step in (1, 2, 5, 15):
            for first in range(step):
                polled = pages[first::step]
                assert {FROZEN, ASLEEP}.isdisjoint(states(polled))
                assert not any(suspect for _, suspect in watch(polled))
        assert not any(has_restarted(before, after) for (_, before), (_, after) in pairwise(pages))


def test_condition_is_a_value() -> None:
    assert ProgressWatch().observe(0.0, engine()) == EngineCondition(SERVING, usage_suspect=False, shows_room=True)
