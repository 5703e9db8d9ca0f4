"""What kind of requests an engine gets, learned from its counters."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache_exporter.readings import EngineReading, Histogram
from kvcache_exporter.request_mix import RequestMix, RequestMixHistory

BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0)
WINDOW = 300.0


@dataclass
class Counters:
    """An engine's counters, moved by hand."""

    prompts: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    started: int = 0
    prompt_tokens: int = 0

    def run(self, *requests: tuple[int, int]) -> None:
        """Requests of (prompt, output) that start and end."""
        for prompt, output in requests:
            self.started += 1
            self.prompt_tokens += prompt
            self.prompts.append(prompt)
            self.outputs.append(output)

    def reading(self) -> EngineReading:
        return EngineReading(
            "0",
            prompt_tokens=self.prompt_tokens,
            request_prompt_tokens=histogram(self.prompts),
            request_generation_tokens=histogram(self.outputs),
            time_to_first_token_seconds=Histogram((1.0,), (self.started, self.started), 0.0),
        )


def histogram(lengths: list[int]) -> Histogram:
    counts = (*(sum(length <= bound for length in lengths) for bound in BOUNDS), len(lengths))
    return Histogram(BOUNDS, counts, float(sum(lengths)))


def feed(history: RequestMixHistory, counters: Counters, polls: int, *requests: tuple[int, int], seconds: float = 5.0) -> None:
    before = counters.reading()
    for _ in range(polls):
        counters.run(*requests)
        after = counters.reading()
        history.observe(seconds, before, after)
        before = after


def learned(history: RequestMixHistory) -> RequestMix:
    mix = history.mix(8192)
    assert mix is not None
    return mix


def test_nothing_is_known_before_a_request_has_finished() -> None:
    history = RequestMixHistory(WINDOW)
    history.begin(Counters().reading())
    assert history.mix(8192) is None


def test_steady_traffic_is_learned() -> None:
    history, counters = RequestMixHistory(WINDOW), Counters()
    feed(history, counters, 20, (1000, 100), (1000, 300))
    mix = learned(history)
    assert mix.prompt_mean == pytest.approx(1000)
    assert mix.output.mean == pytest.approx(200)
    assert mix.mean_tokens == pytest.approx(1200)
    assert 1200 <= mix.quantile_tokens(0.95) <= 1500


def test_new_kind_of_requests_is_believed_within_a_fraction_of_the_window() -> None:
    """A minute after prompts have become four times as long, most of the change has been taken up."""
    history, counters = RequestMixHistory(WINDOW), Counters()
    feed(history, counters, 120, (400, 100), (600, 100))
    feed(history, counters, 12, (1900, 100), (2100, 100))
    assert learned(history).prompt_mean > 500 + 0.6 * 1500


def test_a_few_odd_requests_are_not_a_new_kind() -> None:
    history, counters = RequestMixHistory(WINDOW), Counters()
    feed(history, counters, 120, (100, 100), (900, 100), (500, 100), (500, 100))
    feed(history, counters, 1, (900, 100))
    assert learned(history).prompt_mean == pytest.approx(500, rel=0.1)


def test_a_quiet_night_does_not_make_it_forget() -> None:
    history, counters = RequestMixHistory(WINDOW), Counters()
    feed(history, counters, 20, (1000, 100))
    feed(history, counters, 5000, seconds=5.0)
    assert learned(history).prompt_mean == pytest.approx(1000)


def test_what_ran_before_the_exporter_is_a_start_and_no_more() -> None:
    """A million requests of another kind, long ago, do not weigh against what comes now."""
    history, counters = RequestMixHistory(WINDOW), Counters()
    counters.run(*[(4000, 400)] * 1000)
    history.begin(counters.reading())
    assert learned(history).prompt_mean == pytest.approx(4000)
    feed(history, counters, 60, *[(500, 100)] * 5)
    assert learned(history).prompt_mean < 1000


def test_counters_of_another_process_are_passed_over() -> None:
    """Several API servers: a page may show the histogram of another one, which counts less."""
    history, counters = RequestMixHistory(WINDOW), Counters()
    feed(history, counters, 20, (1000, 100))
    other = Counters()
    other.run((10, 10))
    history.observe(5.0, counters.reading(), other.reading())
    assert learned(history).prompt_mean == pytest.approx(1000)


def test_without_a_count_of_first_tokens_requests_count_when_they_end() -> None:
    before, after = Counters(), Counters()
    after.run((700, 70))
    history = RequestMixHistory(WINDOW)
    bare = [
        EngineReading(
            "0",
            request_prompt_tokens=c.reading().request_prompt_tokens,
            request_generation_tokens=c.reading().request_generation_tokens,
        )
        for c in (before, after)
    ]
    history.observe(5.0, *bare)
    assert learned(history).prompt_mean == pytest.approx(700)


@given(st.lists(st.tuples(st.integers(1, 8000), st.integers(1, 2000)), min_size=1, max_size=40), st.floats(0.5, 100))
def test_what_is_learned_lies_within_what_was_seen(requests: list[tuple[int, int]], seconds: float) -> None:
    history, counters = RequestMixHistory(WINDOW), Counters()
    for request in requests:
        feed(history, counters, 1, request, seconds=seconds)
    mix = learned(history)
    prompts, outputs = zip(*requests, strict=True)
    assert min(prompts) - 1e-6 <= mix.prompt_mean <= max(prompts) + 1e-6
    assert min(outputs) - 1e-6 <= mix.output.mean <= max(outputs) + 1e-6
