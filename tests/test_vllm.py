"""What single families of a vLLM page mean; whole pages are in test_captures.py."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from kvcache_exporter.readings import EngineReading, Histogram, ServedModel
from kvcache_exporter.sources.vllm import parse_models
from kvcache_exporter.sources.vllm_page import parse_metrics
from lab import capture


def only(body: str) -> EngineReading:
    (engine,) = parse_metrics(body.encode()).engines
    return engine


def with_config(labels: str, usage: float = 0.5, engine: str = 'engine="0",') -> EngineReading:
    return only(f'vllm:kv_cache_usage_perc{{{engine}model_name="m"}} {usage}\nvllm:cache_config_info{{{engine}{labels}}} 1.0\n')


def histogram_page(counts: str, total: float = 9.5, labels: str = 'engine="0",model_name="m"', prefix: str = "vllm:") -> str:
    """`request_prompt_tokens` with these counts up to 1, 2 and any number of tokens, as prometheus_client writes them."""
    name = f"{prefix}request_prompt_tokens"
    buckets = "".join(
        f'{name}_bucket{{{labels},le="{bound}"}} {count}\n'
        for bound, count in zip(("1.0", "2.0", "+Inf"), counts.split(), strict=True)
    )
    return f"{buckets}{name}_count{{{labels}}} {counts.split()[-1]}\n{name}_sum{{{labels}}} {total}\n"


def lora_line(running: str, time: float, waiting: str = "") -> str:
    labels = f'max_lora="4",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
    return f"vllm:lora_requests_info{{{labels}}} {time!r}\n"


RUNNING = 'vllm:num_requests_running{engine="0",model_name="base"} 5.0\n'


def test_null_block_is_not_usable() -> None:
    engine = with_config('num_gpu_blocks="512",kv_cache_memory_bytes="None"', usage=7 / 511)
    assert (engine.num_gpu_blocks, engine.usable_blocks, engine.used_blocks) == (512, 511, 7)


def test_first_v1_releases_count_the_null_block_as_used() -> None:
    """VLLM 0.9: an idle engine reads 1/num_gpu_blocks, which is nothing held."""
    labels = 'num_gpu_blocks="1000",swap_space="4"'
    idle, half = with_config(labels, usage=1 / 1000), with_config(labels, usage=0.5)
    assert (idle.usable_blocks, idle.used_blocks, half.used_blocks) == (999, 0, 499)


def test_v0_has_no_null_block() -> None:
    engine = with_config('num_gpu_blocks="1000"', usage=0.5, engine="")
    assert (engine.engine, engine.usable_blocks, engine.used_blocks) == ("0", 1000, 500)


def test_data_parallel_sum_is_split_by_each_ranks_concurrency() -> None:
    """The label is the sum over ranks; a rank's concurrency is its blocks over a cost that all share, so shares are exact."""
    page = "".join(
        f'vllm:cache_config_info{{engine="{rank}",num_gpu_blocks="1000",kv_cache_max_concurrency="{blocks / 128}"}} 1.0\n'
        for rank, blocks in enumerate((490, 510))
    )
    assert [engine.num_gpu_blocks for engine in parse_metrics(page.encode()).engines] == [490, 510]


def test_data_parallel_sum_that_does_not_divide_is_left_unknown() -> None:
    page = "".join(f'vllm:cache_config_info{{engine="{rank}",num_gpu_blocks="1001"}} 1.0\n' for rank in range(2))
    assert [engine.num_gpu_blocks for engine in parse_metrics(page.encode()).engines] == [None, None]


def test_one_rank_behind_its_own_server_has_the_whole_label() -> None:
    engine = only('vllm:cache_config_info{engine="3",num_gpu_blocks="1000"} 1.0\n')
    assert (engine.engine, engine.num_gpu_blocks) == ("3", 1000)


def test_config_without_engine_label_holds_for_the_engines_there_are() -> None:
    body = 'vllm:kv_cache_usage_perc{engine="1"} 0.5\nvllm:cache_config_info{num_gpu_blocks="1000"} 1.0\n'
    engine = only(body)
    assert (engine.engine, engine.num_gpu_blocks) == ("1", 1000)


def test_engines_are_in_the_order_of_their_number() -> None:
    page = "".join(f'vllm:kv_cache_usage_perc{{engine="{rank}"}} 0.5\n' for rank in (10, 9, 0))
    assert [engine.engine for engine in parse_metrics(page.encode()).engines] == ["0", "9", "10"]


@pytest.mark.parametrize("prefix", ["vllm:", "vllm_", "ray_vllm:", "ray_vllm_"])
def test_spellings_of_the_prefix(prefix: str) -> None:
    assert only(f'{prefix}kv_cache_usage_perc{{engine="0",model_name="m"}} 0.27\n').usage_ratio == 0.27


def test_replicas_behind_one_page_do_not_overwrite_each_other() -> None:
    page = "".join(
        f'ray_vllm_kv_cache_usage_perc{{ReplicaId="{r}",engine="0"}} {u}\n' for r, u in (("a", 0.2), ("b", 0.9), ("c", 0.1))
    )
    engine = only(page)
    assert (engine.usage_ratio, engine.ambiguous) == (0.9, True)


def test_counter_without_total_is_accepted() -> None:
    assert only("vllm:num_preemptions 3.0\n").num_preemptions == 3


def test_prefix_cache_counts_of_blocks_are_not_tokens() -> None:
    """VLLM 0.8 counts blocks under the names with gpu_."""
    (engine,) = parse_metrics(capture("0.8.5_v1.driven")).engines
    assert engine.prefix_cache_queries_tokens is None


def test_sleeping_engine() -> None:
    state = 'vllm:engine_sleep_state{{engine="0",sleep_state="{}"}} {}\n'

    def awake(value: float) -> bool | None:
        return only(state.format("awake", value) + state.format("discard_all", 1 - value)).awake

    assert awake(1.0) is True
    assert awake(0.0) is False
    assert only("vllm:num_requests_running 1.0\n").awake is None


@pytest.mark.parametrize("label", ["None", "", "nan", "inf", "-5", "abc"])
def test_labels_that_are_no_numbers(label: str) -> None:
    engine = with_config(f'num_gpu_blocks="{label}",block_size="16",kv_cache_size_tokens="{label}"')
    assert (engine.num_gpu_blocks, engine.usable_blocks, engine.used_blocks, engine.block_size) == (None, None, None, None)
    assert engine.kv_cache_size_tokens is None


def test_float_labels_are_read() -> None:
    engine = with_config('num_gpu_blocks="512.0",kv_cache_max_concurrency="12.5"')
    assert (engine.num_gpu_blocks, engine.kv_cache_max_concurrency) == (512, 12.5)


def test_base_model_is_the_first_entry_without_a_parent() -> None:
    answer = {
        "data": [
            {"id": "lora", "root": "/adapters/a", "parent": "base", "max_model_len": None},
            {"id": "base", "root": "/models/base", "parent": None, "max_model_len": 8192},
        ]
    }
    assert parse_models(answer) == ServedModel("base", 8192, "/models/base")


def test_finished_requests_by_length() -> None:
    (engine,) = parse_metrics(capture("0.32.0_nearfull_waiting")).engines
    assert engine.request_prompt_tokens == Histogram(
        bounds=(1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000),
        counts=(0, 0, 0, 0, 0, 0, 4, 18, 46, 77, 77, 77),
        sum=31833,
    )
    assert engine.request_generation_tokens is not None
    assert (engine.request_generation_tokens.count, engine.request_generation_tokens.sum) == (77, 28276)
    assert engine.request_success == 77


def test_time_histograms_are_in_seconds() -> None:
    (engine,) = parse_metrics(capture("0.32.0_nearfull_waiting")).engines
    first, between = engine.time_to_first_token_seconds, engine.inter_token_latency_seconds
    assert first is not None
    assert between is not None
    assert (first.bounds[0], first.bounds[-1], first.count) == (0.001, 2560, 100)
    assert (between.bounds[0], between.bounds[-1]) == (0.01, 80)
    assert (between.count, round(between.sum)) == (36216, 1139)


def test_histograms_of_two_engines_are_apart() -> None:
    """Of several API servers too, which write the sum before the buckets."""
    engines = parse_metrics(capture("0.32.0_run3_dp2_loaded")).engines
    prompts = [engine.request_prompt_tokens for engine in engines]
    assert [(prompt.count, prompt.sum) for prompt in prompts if prompt] == [(12, 4264), (20, 6941)]
    assert [engine.request_success for engine in engines] == [12, 20]


@pytest.mark.parametrize(
    ("name", "version_has"),
    [("0.6.6.post1_v0.driven", "old"), ("0.8.5_v1.driven", "old"), ("0.11.2_v1.driven", "both"), ("0.20.0_v1.driven", "new")],
)
def test_inter_token_latency_under_both_of_its_names(name: str, version_has: str) -> None:
    page = capture(name)
    assert (b"vllm:time_per_output_token_seconds_sum" in page) == (version_has != "new")
    assert (b"vllm:inter_token_latency_seconds_sum" in page) == (version_has != "old")
    (engine,) = parse_metrics(page).engines
    assert engine.inter_token_latency_seconds is not None
    assert engine.inter_token_latency_seconds.count == 1


def test_newer_name_of_the_latency_is_preferred() -> None:
    page = "".join(
        f'vllm:{name}_seconds_bucket{{le="+Inf"}} {count}\nvllm:{name}_seconds_sum {count}\n'
        for name, count in (("time_per_output_token", 9), ("inter_token_latency", 1), ("request_time_per_output_token", 5))
    )
    assert only(page).inter_token_latency_seconds == Histogram((), (1,), 1.0)


@pytest.mark.parametrize("prefix", ["vllm:", "vllm_", "ray_vllm:", "ray_vllm_"])
def test_spellings_of_a_histogram(prefix: str) -> None:
    engine = only(histogram_page("0 3 4", labels='ReplicaId="a",engine="0",model_name="m"', prefix=prefix))
    assert engine.request_prompt_tokens == Histogram((1, 2), (0, 3, 4), 9.5)


def test_two_spellings_on_one_page_are_one_histogram() -> None:
    page = histogram_page("0 3 4", prefix="ray_vllm:") + histogram_page("0 3 4", prefix="ray_vllm_")
    reading = parse_metrics(page.encode())
    assert reading.engines[0].request_prompt_tokens == Histogram((1, 2), (0, 3, 4), 9.5)
    assert reading.invalid_samples == 0


def test_of_several_series_the_one_that_counted_most_is_taken_whole() -> None:
    """The largest of each bucket, (6, 6, 9), is a histogram that no process has."""
    pages = [
        histogram_page(counts, total, f'engine="0",model_name="m",pid="{pid}"')
        for pid, (counts, total) in enumerate((("6 6 7", 20.0), ("0 3 9", 30.0), ("1 1 1", 1.0)))
    ]
    lines = "".join(pages).splitlines()
    for page in ("\n".join(lines), "\n".join(reversed(lines))):
        assert only(page).request_prompt_tokens == Histogram((1, 2), (0, 3, 9), 30.0)


@pytest.mark.parametrize(
    "page",
    [
        histogram_page("0 3 2"),
        histogram_page("-1 3 4"),
        histogram_page("0 NaN 4"),
        histogram_page("0 3 +Inf"),
        histogram_page("0 3 4", total=math.nan),
        histogram_page("0 3 4", total=-1.0),
        histogram_page("0 3 4").replace('le="+Inf"', 'le="4.0"'),
        histogram_page("0 3 4").replace('le="2.0"', 'le="1"'),
        histogram_page("0 3 4").replace('le="2.0"', 'le="nan"'),
        histogram_page("0 3 4").replace('le="2.0"', 'le="two"'),
        histogram_page("0 3 4").replace('le="1.0"', 'le="-Inf"'),
        histogram_page("0 3 4").replace(',le="2.0"', ""),
        histogram_page("0 3 4").replace("_sum", "_created"),
        histogram_page("0 3 4").replace("_bucket", "_created"),
    ],
)
def test_histogram_that_cannot_be_true_counts_once(page: str) -> None:
    reading = parse_metrics(page.encode())
    assert [engine.request_prompt_tokens for engine in reading.engines] == [None]
    assert reading.invalid_samples == 1


def test_broken_series_beside_a_sound_one() -> None:
    page = histogram_page("9 3 9", labels='engine="0",pid="1"') + histogram_page("0 3 4", labels='engine="0",pid="2"')
    reading = parse_metrics(page.encode())
    assert reading.engines[0].request_prompt_tokens == Histogram((1, 2), (0, 3, 4), 9.5)
    assert reading.invalid_samples == 1


def test_no_request_has_finished_yet() -> None:
    assert only(histogram_page("0 0 0", total=0.0)).request_prompt_tokens == Histogram((1, 2), (0, 0, 0), 0.0)
    assert only(RUNNING).request_prompt_tokens is None


@given(
    bounds=st.lists(st.floats(0, 1e12), min_size=1, max_size=30, unique=True).map(sorted),
    observations=st.lists(st.floats(0, 1e12), max_size=30),
    model_name=st.text(st.characters(exclude_categories=["Cs"])),
)
def test_any_histogram_comes_back(bounds: list[float], observations: list[float], model_name: str) -> None:
    registry = CollectorRegistry()
    # The library's text formats give the name of the family as it is.
    histogram = prometheus_client.Histogram(
        "vllm:request_prompt_tokens", "documentation", ["engine", "model_name"], buckets=bounds, registry=registry
    ).labels("0", model_name)
    counts = [0] * (len(bounds) + 1)
    total = 0.0
    for observation in observations:
        histogram.observe(observation)
        counts[bisect_left(bounds, observation)] += 1
        total += observation
    expected = Histogram(tuple(bounds), tuple(accumulate(counts)), total)
    for page in (generate_latest(registry), openmetrics.generate_latest(registry)):  # type: ignore[no-untyped-call]
        (engine,) = parse_metrics(page).engines
        assert engine.request_prompt_tokens == expected


def test_finished_requests_are_added_up_over_reasons_and_not_over_processes() -> None:
    line = 'vllm:request_success_total{{engine="0",finished_reason="{}",pid="{}"}} {}\n'
    page = line.format("stop", 1, 5) + line.format("length", 1, 2) + line.format("stop", 2, 7) + line.format("length", 2, 1)
    assert only(page).request_success == 9
    assert only(page + line.format("abort", 1, "NaN")).request_success is None


@pytest.mark.parametrize("name", ["vllm:request_success", "vllm:request_success_total"])
def test_finished_requests_under_both_spellings(name: str) -> None:
    page = f'{name}{{finished_reason="stop",model_name="m"}} 3.0\n{name}_created{{finished_reason="stop"}} 1.79e9\n'
    assert only(page).request_success == 3


def test_external_prefix_cache_of_a_connector() -> None:
    page = "".join(
        f'vllm:external_prefix_cache_{name}_total{{engine="0"}} {n}\n' for name, n in (("queries", 640), ("hits", 128))
    )
    engine = only(page)
    assert (engine.external_prefix_cache_queries_tokens, engine.external_prefix_cache_hits_tokens) == (640, 128)
    assert engine.prefix_cache_queries_tokens is None


def test_start_of_the_api_server_is_of_all_its_engines() -> None:
    (engine,) = parse_metrics(capture("0.32.0_idle")).engines
    assert engine.process_start_time_seconds == pytest.approx(1.796e9, rel=1e-3)
    page = "process_start_time_seconds 1.5e9\n" + RUNNING + RUNNING.replace('engine="0"', 'engine="1"')
    assert [engine.process_start_time_seconds for engine in parse_metrics(page.encode()).engines] == [1.5e9, 1.5e9]
    # Several API servers write no process_* lines.
    assert {e.process_start_time_seconds for e in parse_metrics(capture("0.32.0_run3_dp2_loaded")).engines} == {None}


def test_page_of_a_process_without_engines_has_none() -> None:
    assert parse_metrics(b"process_start_time_seconds 1.5e9\n" + lora_line("sql", 1.757e9).encode()).engines == ()


def test_newest_lora_line_is_current() -> None:
    """Case 13: the value is the time when that set of adapters was last seen, and lines never go away."""
    lines = [lora_line("sql,chat", 1.75700002e9, "code"), lora_line("", 1.757e9), lora_line("sql", 1.75700001e9)]
    engine = only("".join(lines) + RUNNING)
    assert (engine.max_lora, engine.running_lora_adapters, engine.num_requests_running) == (4, 2, 5)
    idle = only(lora_line("", 1.75700003e9) + "".join(lines) + RUNNING)
    assert (idle.max_lora, idle.running_lora_adapters) == (4, 0)


def test_lora_on_real_pages() -> None:
    (engine,) = parse_metrics(capture("0.32.0_lora_loaded")).engines
    assert (engine.max_lora, engine.running_lora_adapters) == (1, 1)
    (engine,) = parse_metrics(capture("0.32.0_idle")).engines
    assert (engine.max_lora, engine.running_lora_adapters) == (None, None)


def test_lora_times_that_api_servers_added_up_do_not_tell_the_newest() -> None:
    """Multiprocess mode adds the values of one label set: a set that two servers saw long ago reads as twice a time."""
    engine = only(lora_line("old", 2 * 1.757e9) + lora_line("sql,chat", 1.757e9) + RUNNING)
    assert (engine.max_lora, engine.running_lora_adapters) == (4, None)


def test_lora_lines_of_two_engines_are_nobodys() -> None:
    page = lora_line("sql", 1.757e9) + RUNNING + RUNNING.replace('engine="0"', 'engine="1"')
    assert [(e.max_lora, e.running_lora_adapters) for e in parse_metrics(page.encode()).engines] == [(None, None)] * 2
