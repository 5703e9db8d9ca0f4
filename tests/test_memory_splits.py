"""The split of GPU memory against published vLLM start-up logs, where they are beside the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcache_exporter.gpu_memory import FREE, KV_CACHE, OTHER_PROCESSES, OVERHEAD, UNKNOWN, WEIGHTS
from kvcache_exporter.kv_cache_spec.engine_config import GIB
from memory_splits import MIB, OUTLIERS, PRINTED_BYTES, Figures, load, main, report, row

LOGS = Path(__file__).parents[2] / "shared" / "reality" / "vllm-logs.json"

CONFIG: Figures = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}
# Two tables, two layers with their norms, and the final norm.
WEIGHT_BYTES = 2 * (2 * 32000 * 1024 + 2 * (4 * 1024 * 1024 + 3 * 1024 * 4096 + 2 * 1024) + 1024)
RECORD: Figures = {
    "n": 1,
    "model": "made up",
    "tp": 1,
    "block_size": 16,
    "total_gpu_gib": 8.0,
    "weights_gib": WEIGHT_BYTES / GIB,
    "available_kv_gib": 4.0,
    # 32768 blocks of 128 KiB
    "kv_cache_tokens": 32768 * 16,
    "non_torch_gib": 0.25,
    "cuda_graph_gib": 0.5,
}


@pytest.mark.skipif(not LOGS.exists(), reason="the folder ../shared/reality is not here")
def test_logged_weights_and_cache_are_met(capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(load(LOGS))
    assert len(rows) == 18
    assert sum(one.weights_error is not None for one in rows) == 12
    assert sum(one.has_logged_blocks for one in rows) == 10
    assert {one.number for one in rows if not one.has_weights_within_bar} == OUTLIERS.keys()
    assert [one.number for one in rows if not one.has_kv_cache_within_bar] == []
    # 23 logs the bare parameters, without a rotary table; 25 does not name its model.
    assert {one.number for one in rows if abs(one.unexplained or 0) > PRINTED_BYTES} == {23, 25}
    assert main(LOGS) == 0
    assert "beyond the bar and no outlier: none" in capsys.readouterr().out


def test_a_record_is_split_as_it_was_logged() -> None:
    one = row(RECORD, CONFIG)
    assert one.split is not None
    assert one.split.components == {
        WEIGHTS: WEIGHT_BYTES,
        KV_CACHE: 4 * GIB,
        OTHER_PROCESSES: 0,
        OVERHEAD: 3 * GIB // 4,
        FREE: 8 * GIB - WEIGHT_BYTES - 4 * GIB - 3 * GIB // 4,
    }
    assert (one.weights_error, one.kv_cache_difference, one.is_missed) == (0, 0, False)


def test_causes_are_the_rotary_table_and_the_rounding_of_large_matrices() -> None:
    # 62.5 MiB a table leaves 1.5 MiB of a segment, which PyTorch splits off.
    causes = row(RECORD, CONFIG).causes
    assert causes is not None
    assert (causes.rotary, causes.padding, causes.vision) == (2 * MIB, 0, 0)
    # 63 MiB leaves 1 MiB, which it does not.
    causes = row(RECORD, {**CONFIG, "vocab_size": 32256}).causes
    assert causes is not None
    assert causes.padding == 2 * MIB


def test_quantized_weights_are_unknown_with_the_rest() -> None:
    one = row({**RECORD, "weight_format": "fp8"}, CONFIG)
    assert one.split is not None
    assert one.split.components[UNKNOWN] == WEIGHT_BYTES + 3 * GIB // 4
    assert not {WEIGHTS, OVERHEAD} & one.split.components.keys()
    assert f"unknown {(WEIGHT_BYTES + 3 * GIB // 4) / GIB:.2f}" in report([one])


def test_graphs_below_zero_are_kept_and_said() -> None:
    one = row({**RECORD, "cuda_graph_gib": -0.5}, CONFIG)
    assert one.overhead == -GIB // 4
    assert one.split is not None
    assert one.split.contradiction
    assert "Records 1 log CUDA graphs below 0" in report([one])
    assert "contradiction: in records 1 " in report([one])


def test_what_is_not_logged_is_a_dash() -> None:
    one = row({name: value for name, value in RECORD.items() if name != "non_torch_gib"}, CONFIG)
    assert (one.split, one.used) == (None, None)
    assert report([one]).splitlines()[2].split("|")[3].split() == ["-", "-"]


def test_a_figure_beyond_its_bar_is_missed() -> None:
    assert row({**RECORD, "weights_gib": WEIGHT_BYTES / GIB * 1.02}, CONFIG).is_missed
    assert row({**RECORD, "available_kv_gib": 4.01}, CONFIG).is_missed
    assert not row({**RECORD, "available_kv_gib": 4.005}, CONFIG).is_missed
