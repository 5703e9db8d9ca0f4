"""All figures against what vLLM's own code computed, where that file is at hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from oracle import REFUSED, RIGHT, WRONG, report, verdict, verdicts

ORACLE = Path(__file__).parents[1].parent / "shared" / "oracle"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
PACKED = {
    "model": "llama",
    "flags": {"kv_dtype": "nvfp4", "block_size": 16},
    "page_bytes": 18_432,
    "bytes_per_block": 589_824,
    "bytes_per_token": 36_864.0,
    "avail_bytes": 10_737_418_240,
    "num_blocks": 18_204,
    "max_model_len": 131_072,
    "max_concurrency": 2.22216796875,
    "gpu_kv_cache_size_tokens": 291_264,
}


@pytest.mark.skipif(not ORACLE.is_dir(), reason="the folder ../shared/oracle, with the figures of vLLM's own code, is not here")
def test_no_figure_differs_from_vllms_own() -> None:
    """Every row is right or refused; refused are only the formats that leave outer layers unquantized."""
    found = list(verdicts(ORACLE / "oracle.jsonl"))
    words = Counter(one.word for one in found)
    assert words[WRONG] == 0, report(one for one in found if one.word == WRONG)
    assert words[RIGHT] >= 601
    assert all("turboquant" in one.reason for one in found if one.word == REFUSED)


def test_a_row_that_agrees_is_right() -> None:
    assert verdict(PACKED, LLAMA).word == RIGHT


@pytest.mark.parametrize("field", ["page_bytes", "bytes_per_block", "num_blocks", "max_concurrency", "gpu_kv_cache_size_tokens"])
def test_one_figure_that_differs_makes_a_row_wrong(field: str) -> None:
    found = verdict({**PACKED, field: 1}, LLAMA)
    assert found.word == WRONG
    assert field in found.reason


def test_what_vllm_refuses_must_be_refused() -> None:
    row = {"model": "llama", "flags": {"tp": 3}, "refused": "tensor parallel size does not divide the attention heads"}
    assert verdict(row, LLAMA).word == RIGHT
    assert verdict({**row, "flags": {"tp": 2}}, LLAMA).word == WRONG


def test_a_refusal_of_what_vllm_serves_is_told_with_its_reason() -> None:
    found = verdict(PACKED, {**LLAMA, "architectures": ["NewDesignForCausalLM"], "kv_lora_rank": 512})
    assert found.word == REFUSED
    assert "NewDesignForCausalLM" in report([found])
    assert report([found]).splitlines()[-1].split() == ["total", "0", "right", "0", "wrong", "1", "refused"]


def test_memory_for_which_vllm_refuses_to_start_must_not_hold_a_request() -> None:
    """131,072 tokens take 8,192 blocks of 2 MiB, and vLLM wants them beside the null block."""
    row = {"model": "llama", "flags": {}, "results": [{"avail_bytes": 8192 * 2_097_152, "refused": "does not fit"}]}
    assert verdict(row, LLAMA).word == RIGHT
    row["results"] = [{"avail_bytes": 8193 * 2_097_152, "refused": "does not fit"}]
    assert verdict(row, LLAMA).word == WRONG
