"""The simulated engine obeys vLLM's scheduler, its page reads like vLLM's, and the demo tells its story in two minutes."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from itertools import islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from kvcache_exporter.simulator import (
    LLAMA_3_1_8B_CONFIG,
    EngineParameters,
    EngineStats,
    SimulatedEngine,
    SimulatedEngineServer,
    SimulatedNvml,
    SimulatedTraffic,
    TrafficParameters,
    arrivals,
    render_page,
)

# A pool of 15 usable blocks of 4 tokens, with steps of 0.1 s: small enough that everything that can happen happens soon.
SMALL = EngineParameters(
    block_size=4,
    num_gpu_blocks=16,
    max_num_seqs=5,
    max_model_len=40,
    max_num_batched_tokens=24,
    step_base_seconds=0.1,
    step_seconds_per_prefill_token=0.0,
    step_seconds_per_sequence=0.0,
)

REQUESTS = st.lists(st.tuples(st.integers(1, 25), st.integers(1, 15), st.floats(0, 1)), min_size=1, max_size=25)

# Families of a vLLM 0.32 page from which an exporter learns of the KV cache and the requests.
VLLM_FAMILIES = {
    "vllm:cache_config_info": "gauge",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:engine_sleep_state": "gauge",
    "vllm:generation_tokens": "counter",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:num_requests_waiting_by_reason": "gauge",
    "vllm:prefix_cache_hits": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_success": "counter",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
}


def counters(stats: EngineStats) -> list[float]:
    return [
        stats.num_preemptions,
        stats.num_requests_finished,
        stats.prompt_tokens,
        stats.generation_tokens,
        stats.prefix_cache_queries_tokens,
        *(value for reading in stats.histograms.values() for value in (*reading.cumulative_counts, reading.sum)),
    ]


def check_pool(engine: SimulatedEngine) -> None:
    parameters = engine.parameters
    stats = engine.stats()
    for request in engine.running:
        assert request.num_blocks == -(-request.num_computed_tokens // parameters.block_size)
    assert all(request.num_blocks == request.num_computed_tokens == 0 for request in engine.waiting)
    assert engine.used_blocks == sum(request.num_blocks for request in engine.running) <= parameters.usable_blocks
    assert stats.used_blocks <= parameters.usable_blocks
    assert stats.kv_cache_usage == pytest.approx(stats.used_blocks / parameters.usable_blocks)
    assert stats.num_requests_running <= parameters.max_num_seqs


def check_first_come_first_served(engine: SimulatedEngine) -> None:
    ids = [request.request_id for request in (*engine.running, *engine.waiting)]
    assert ids == sorted(ids)


@settings(max_examples=60, deadline=None)
@given(requests=REQUESTS)
def test_whatever_arrives_the_pool_adds_up_and_every_request_finishes_in_turn(requests: list[tuple[int, int, float]]) -> None:
    engine = SimulatedEngine(SMALL)
    before = counters(engine.stats())
    for prompt_tokens, output_tokens, gap in requests:
        engine.submit(prompt_tokens, output_tokens)
        engine.advance(gap)
        check_pool(engine)
        check_first_come_first_served(engine)
    for _ in range(10_000):
        if not engine.running and not engine.waiting:
            break
        engine.advance(0.1)
        check_pool(engine)
        check_first_come_first_served(engine)
        after = counters(engine.stats())
        assert all(old <= new for old, new in zip(before, after, strict=True))
        before = after
    stats = engine.stats()
    assert stats.num_requests_finished == len(requests)
    assert stats.used_blocks == 0
    assert stats.prompt_tokens == stats.prefix_cache_queries_tokens == sum(prompt for prompt, _, _ in requests)
    assert stats.generation_tokens == sum(output for _, output, _ in requests)
    assert stats.histograms["request_num_preemptions"].sum == stats.num_preemptions


@settings(max_examples=30, deadline=None)
@given(requests=REQUESTS, cuts=st.lists(st.integers(1, 40), max_size=8))
def test_cutting_a_stretch_of_time_into_pieces_changes_nothing(requests: list[tuple[int, int, float]], cuts: list[int]) -> None:
    whole, pieces = SimulatedEngine(SMALL), SimulatedEngine(SMALL)
    for prompt_tokens, output_tokens, _ in requests:
        whole.submit(prompt_tokens, output_tokens)
        pieces.submit(prompt_tokens, output_tokens)
    whole.advance_to(4.05)
    for cut in sorted(cuts):
        pieces.advance_to(cut / 10)
    pieces.advance_to(4.05)
    assert pieces.stats() == whole.stats()
    assert pieces.running == whole.running


def test_a_long_prompt_is_prefilled_in_chunks_of_the_token_budget() -> None:
    engine = SimulatedEngine(replace(SMALL, max_num_batched_tokens=8))
    engine.submit(20, 1)
    computed = []
    for middle_of_step in (0.05, 0.15, 0.25):
        engine.advance_to(middle_of_step)
        computed.append([request.num_computed_tokens for request in engine.running])
    engine.advance_to(0.35)
    assert computed == [[8], [16], [20]]
    assert engine.stats().num_requests_finished == 1


def test_a_request_waits_until_its_whole_sequence_fits() -> None:
    """14 of 15 blocks are in use; the head of the queue needs two and holds back the small one behind it."""
    engine = SimulatedEngine(SMALL)
    engine.submit(24, 16)
    engine.submit(24, 16)
    engine.advance(0.25)
    engine.submit(5, 1)
    engine.submit(1, 1)
    engine.advance(0.1)
    assert engine.used_blocks == 14
    assert [request.request_id for request in engine.waiting] == [2, 3]


def test_the_youngest_is_preempted_to_the_head_of_the_queue_and_prefills_all_it_had() -> None:
    engine = SimulatedEngine(SMALL)
    engine.submit(24, 16)
    engine.submit(24, 16)
    engine.advance(0.15)
    engine.submit(20, 1)
    while engine.stats().num_preemptions == 0:
        engine.advance(0.1)
    assert [request.request_id for request in engine.running] == [0]
    assert [request.request_id for request in engine.waiting] == [1, 2]
    had = engine.waiting[0].num_tokens
    assert had > 24
    while len(engine.running) == 1 and engine.running[0].request_id == 0:
        engine.advance(0.1)
    assert engine.running[0].request_id == 1
    assert engine.running[0].num_computed_tokens == min(had, SMALL.max_num_batched_tokens)


def test_gauges_are_those_of_the_last_step_that_ended() -> None:
    """A request that has arrived since is not in the queue yet, and one that left within the step holds nothing any more."""
    engine = SimulatedEngine(SMALL)
    engine.submit(24, 16)
    stats = engine.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting, stats.used_blocks) == (0, 0, 0)
    while engine.stats().num_requests_running == 0:
        engine.advance(0.001)
    engine.submit(24, 16)
    assert engine.stats().num_requests_waiting == 0
    assert len(engine.waiting) == 1


def test_seats_bind_when_the_pool_does_not() -> None:
    engine = SimulatedEngine(replace(SMALL, max_num_seqs=2))
    for _ in range(3):
        engine.submit(1, 5)
    engine.advance(0.2)
    stats = engine.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (2, 1)
    assert stats.kv_cache_usage < 0.2


def test_times_of_a_request_follow_the_steps() -> None:
    """Arrives at 0.05 during the first request's step, is scheduled at 0.1, and has a token at 0.2, 0.3 and 0.4."""
    engine = SimulatedEngine(SMALL)
    engine.submit(1, 1)
    engine.advance(0.05)
    engine.submit(5, 3)
    engine.advance(0.4)
    histograms = engine.stats().histograms
    assert histograms["request_queue_time_seconds"].sum == pytest.approx(0.05)
    assert histograms["time_to_first_token_seconds"].sum == pytest.approx(0.1 + 0.15)
    assert histograms["inter_token_latency_seconds"].sum == pytest.approx(0.2)
    assert histograms["request_time_per_output_token_seconds"].sum == pytest.approx(0.1)
    assert histograms["e2e_request_latency_seconds"].sum == pytest.approx(0.1 + 0.35)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"max_model_len": 64}, "one request of max_model_len takes 16 blocks; the pool has 15"),
        ({"max_num_seqs": 0}, "at least 1"),
        ({"step_base_seconds": 0.0}, "above 0"),
    ],
)
def test_parameters_that_cannot_work_are_refused(change: dict[str, float], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        replace(SMALL, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(("prompt_tokens", "output_tokens"), [(0, 1), (1, 0), (30, 11)])
def test_requests_that_can_never_be_served_are_refused(prompt_tokens: int, output_tokens: int) -> None:
    with pytest.raises(ValueError, match="token"):
        SimulatedEngine(SMALL).submit(prompt_tokens, output_tokens)


def test_time_does_not_run_backwards() -> None:
    with pytest.raises(ValueError, match="backwards"):
        SimulatedEngine(SMALL).advance(-1)


def test_arrivals_depend_on_the_seed_only_and_fit_the_model() -> None:
    traffic = TrafficParameters(output_tokens_median=4000.0)
    first, again = (list(islice(arrivals(traffic, 8192), 500)) for _ in range(2))
    other = list(islice(arrivals(replace(traffic, seed=traffic.seed + 1), 8192), 500))
    assert first == again != other
    assert all(early.seconds < late.seconds for early, late in pairwise(first))
    assert all(arrival.prompt_tokens >= 1 and arrival.output_tokens >= 1 for arrival in first)
    assert max(arrival.prompt_tokens + arrival.output_tokens for arrival in first) == 8192


def test_a_wave_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="trough_rate"):
        TrafficParameters(trough_rate=5.0, crest_rate=1.0)


def demo_story() -> list[EngineStats]:
    """Run the demo's defaults and return its state at each of the first 120 seconds."""
    engine = SimulatedEngine()
    traffic = SimulatedTraffic(engine, arrivals(TrafficParameters(), engine.parameters.max_model_len))
    story = []
    for second in range(121):
        traffic.advance_to(second)
        check_pool(engine)
        story.append(engine.stats())
    return story


def test_the_demo_fills_queues_preempts_and_drains_within_two_minutes_and_always_the_same_way() -> None:
    story = demo_story()
    usage = [stats.kv_cache_usage for stats in story]
    full = next(second for second, ratio in enumerate(usage) if ratio > 0.99)
    assert max(usage[:20]) < 0.2
    assert 40 <= full <= 60
    assert sum(stats.num_requests_waiting >= 10 for stats in story) >= 15
    assert story[full + 30].num_preemptions >= 10
    assert min(usage[full:]) < 0.1
    assert usage[120] < 0.4
    assert demo_story()[120] == story[120]


def loaded_page() -> str:
    engine = SimulatedEngine()
    SimulatedTraffic(engine, arrivals(TrafficParameters(), engine.parameters.max_model_len)).advance_to(60)
    return render_page(engine.stats(), engine.parameters, model_name='simulated-"x"', created=1795973338.1)


def test_the_page_carries_the_families_and_labels_of_vllm() -> None:
    families = {family.name: family for family in text_string_to_metric_families(loaded_page())}
    assert {name: families[name].type for name in VLLM_FAMILIES} == VLLM_FAMILIES
    for name in VLLM_FAMILIES.keys() - {"vllm:cache_config_info"}:
        for sample in families[name].samples:
            assert sample.labels["engine"] == "0"
            assert sample.labels["model_name"] == 'simulated-"x"'
    (config,) = families["vllm:cache_config_info"].samples
    wanted = {
        "block_size": "16",
        "cache_dtype": "auto",
        "enable_prefix_caching": "True",
        "engine": "0",
        "gpu_memory_utilization": "0.92",
        "kv_cache_max_concurrency": "53.0",
        "kv_cache_size_tokens": "434176",
        "num_gpu_blocks": "27136",
        "sliding_window": "None",
    }
    assert config.labels.items() >= wanted.items()
    assert config.value == 1


def test_the_page_says_first_that_it_is_simulated() -> None:
    assert loaded_page().startswith("# SIMULATED")


def test_numbers_and_lines_look_like_those_of_the_prometheus_client() -> None:
    stats = replace(SimulatedEngine().stats(), num_preemptions=21, prompt_tokens=1_250_000, generation_tokens=2_000_000)
    lines = render_page(stats, EngineParameters(), model_name="simulated", created=1795973338.1024728).splitlines()
    labels = 'engine="0",model_name="simulated"'
    assert f"vllm:num_requests_running{{{labels}}} 0.0" in lines
    assert f"vllm:kv_cache_usage_perc{{{labels}}} 0.0" in lines
    assert f"vllm:num_preemptions_total{{{labels}}} 21.0" in lines
    assert f"vllm:num_preemptions_created{{{labels}}} 1.7959733381024728e+09" in lines
    assert f"vllm:prompt_tokens_total{{{labels}}} 1.25e+06" in lines
    assert f"vllm:generation_tokens_total{{{labels}}} 2e+06" in lines
    assert f'vllm:num_requests_waiting_by_reason{{{labels},reason="deferred"}} 0.0' in lines
    assert 'vllm:request_prompt_tokens_bucket{engine="0",le="5000.0",model_name="simulated"} 0.0' in lines
    assert 'vllm:request_prompt_tokens_bucket{engine="0",le="+Inf",model_name="simulated"} 0.0' in lines
    assert 'vllm:request_success_total{engine="0",finished_reason="stop",model_name="simulated"} 0.0' in lines


def test_histogram_buckets_are_cumulative_and_end_at_the_count() -> None:
    for family in text_string_to_metric_families(loaded_page()):
        if family.type == "histogram":
            buckets = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
            (count,) = [sample.value for sample in family.samples if sample.name.endswith("_count")]
            assert buckets == sorted(buckets)
            assert buckets[-1] == count > 0


def get(url: str) -> tuple[str, str]:
    with urllib.request.urlopen(url, timeout=5) as response:
        return response.headers["Content-Type"], response.read().decode()


def sample(page: str, name: str) -> float:
    return next(s.value for family in text_string_to_metric_families(page) for s in family.samples if s.name == name)


def test_the_server_answers_what_an_exporter_asks() -> None:
    seconds = 0.0
    with SimulatedEngineServer(clock=lambda: seconds, now=lambda: 1795973338.0, speed=10.0, root="some/model") as server:
        content_type, page = get(f"{server.url}/metrics")
        assert content_type.startswith("text/plain; version=")
        assert sample(page, "vllm:prompt_tokens_total") == 0
        seconds = 6.0
        _, page = get(f"{server.url}/metrics?x=1")
        assert sample(page, "vllm:kv_cache_usage_perc") > 0.9
        (model,) = json.loads(get(f"{server.url}/v1/models")[1])["data"]
        assert (model["id"], model["root"], model["max_model_len"]) == ("simulated-llama-3.1-8b", "some/model", 8192)
        assert json.loads(get(f"{server.url}/version")[1]) == {"version": "0.32.0+simulated"}
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            get(f"{server.url}/health/")
        refused.value.close()


def test_the_engine_runs_on_while_nobody_asks() -> None:
    looked = threading.Semaphore(0)

    def clock() -> float:
        looked.release()
        return 0.0

    server = SimulatedEngineServer(clock=clock)
    try:
        assert all(looked.acquire(timeout=5) for _ in range(3))
    finally:
        server.close()
        server.close()


def test_a_speed_that_stands_still_is_refused() -> None:
    with pytest.raises(ValueError, match="speed"):
        SimulatedEngineServer(speed=0)


def test_the_gpu_holds_weights_and_pool_and_says_that_it_is_simulated() -> None:
    nvml = SimulatedNvml()
    (gpu,) = nvml.read().gpus
    nvml.close()
    assert (gpu.uuid, gpu.name) == ("GPU-simulated-0", "NVIDIA H100 80GB HBM3 (simulated)")
    assert (gpu.memory_total_bytes, gpu.memory_reserved_bytes) == (85_520_809_984, 577_765_376)
    assert gpu.memory_used_bytes is not None
    config = LLAMA_3_1_8B_CONFIG
    bytes_per_token = config["num_hidden_layers"] * config["num_key_value_heads"] * 2 * 2 * 128
    pool = EngineParameters().num_gpu_blocks * EngineParameters().block_size * bytes_per_token
    assert pool + 16e9 < gpu.memory_used_bytes < 0.92 * 85_520_809_984
