"""What single families of a vLLM page mean; whole pages are in test_captures.py."""

from __future__ import annotations

import pytest

from kvcache_exporter.readings import EngineReading, ServedModel
from kvcache_exporter.sources.vllm import parse_metrics, parse_models
from lab import capture


def only(body: str) -> EngineReading:
    (engine,) = parse_metrics(body.encode()).engines
    return engine


def with_config(labels: str, usage: float = 0.5, engine: str = 'engine="0",') -> EngineReading:
    return only(f'vllm:kv_cache_usage_perc{{{engine}model_name="m"}} {usage}\nvllm:cache_config_info{{{engine}{labels}}} 1.0\n')


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
