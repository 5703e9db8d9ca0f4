"""Weights of one rank, against the parameters that vLLM's own classes create.

`data/weights.jsonl` holds one model a line: the fields of its config that matter, and for each tensor and pipeline parallelism
the bytes of the parameters that vLLM 0.32.0 creates on a rank of each stage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvcache_exporter.kv_cache_spec import EngineConfig
from kvcache_exporter.model_config import parse_model_config
from kvcache_exporter.weights import EXACT_ARCHITECTURES, Weights, checkpoint_share_bytes, computed_weights
from lab import DATA

ORACLE = Path(__file__).parents[1].parent / "shared" / "oracle"
needs_oracle = pytest.mark.skipif(
    not ORACLE.is_dir(), reason="the folder ../shared/oracle, with the figures of vLLM's own code, is not here"
)


@dataclass(frozen=True)
class Row:
    """One model under one parallelism, and what vLLM's class holds on a rank of each stage."""

    model: str
    config: Mapping[str, Any]
    engine: EngineConfig
    bytes_per_rank: tuple[int, ...]

    @property
    def architecture(self) -> str:
        return str(self.config["architectures"][0])

    def __str__(self) -> str:
        return f"{self.model}-tp{self.engine.tensor_parallel_size}-pp{self.engine.pipeline_parallel_size}"


def row(model: str, config: Mapping[str, Any], ranks: Mapping[str, Any], bytes_per_rank: list[int]) -> Row:
    engine = EngineConfig(tensor_parallel_size=ranks.get("tp", 1), pipeline_parallel_size=ranks.get("pp", 1))
    return Row(model, config, engine, tuple(bytes_per_rank))


def sampled_rows() -> Iterator[Row]:
    for line in (DATA / "weights.jsonl").read_text().splitlines():
        sample = json.loads(line)
        for ranks in sample["ranks"]:
            yield row(sample["model"], sample["config"], ranks, ranks["weight_bytes_per_rank"])


def oracle_rows() -> Iterator[Row]:
    for line in (ORACLE / "oracle.jsonl").read_text().splitlines():
        found = json.loads(line)
        if found.get("weight_bytes_per_rank"):
            config = json.loads((ORACLE / "configs" / f"{found['model']}.json").read_text())
            yield row(found["model"], config, found["flags"], found["weight_bytes_per_rank"])


SAMPLED = list(sampled_rows())
LLAMA: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
LLAMA_BYTES = 16_060_522_496


def computed(config: Mapping[str, Any], engine: EngineConfig | None = None) -> Weights | None:
    return computed_weights(config, parse_model_config(config), engine or EngineConfig())


def share(checkpoint_bytes: int, config: Mapping[str, Any], engine: EngineConfig | None = None) -> int | None:
    return checkpoint_share_bytes(checkpoint_bytes, config, parse_model_config(config), engine or EngineConfig())


def ranks(tensor: int = 1, pipeline: int = 1) -> EngineConfig:
    return EngineConfig(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)


@pytest.mark.parametrize("found", SAMPLED, ids=str)
def test_every_rank_holds_what_vllms_class_creates(found: Row) -> None:
    weights = computed(found.config, found.engine)
    assert weights is not None
    assert weights.bytes_per_rank == found.bytes_per_rank


def test_every_exact_architecture_is_among_the_samples() -> None:
    assert {found.architecture for found in SAMPLED} == EXACT_ARCHITECTURES


@needs_oracle
def test_every_row_of_vllm_is_exact_or_not_stated() -> None:
    """Not stated are other architectures and quantized checkpoints, and nothing else."""
    for found in oracle_rows():
        weights = computed(found.config, found.engine)
        if found.architecture in EXACT_ARCHITECTURES and "quantization_config" not in found.config:
            assert weights is not None, str(found)
            assert weights.bytes_per_rank == found.bytes_per_rank, str(found)
        else:
            assert weights is None, str(found)


@needs_oracle
def test_the_share_errs_by_what_its_docstring_says() -> None:
    """The checkpoint is taken to be what one rank alone holds, in the dtype that is served."""
    rows = {str(found): found for found in oracle_rows() if found.engine.pipeline_parallel_size == 1}
    alone = {found.model: found.bytes_per_rank[0] for found in rows.values() if found.engine.tensor_parallel_size == 1}
    errors = []
    for found in rows.values():
        if found.engine.tensor_parallel_size > 1 and found.model in alone:
            model = replace(parse_model_config(found.config), dtype="bfloat16")
            estimate = checkpoint_share_bytes(alone[found.model], found.config, model, found.engine)
            if estimate is not None:
                errors.append(1 - estimate / found.bytes_per_rank[0])
    assert len(errors) >= 178
    assert min(errors) >= 0
    assert median(errors) < 0.0004
    assert max(errors) < 0.056
    assert sum(error > 0.01 for error in errors) < len(errors) / 10


@pytest.mark.parametrize("file", sorted((DATA / "models").glob("*.json")), ids=lambda file: str(file.stem))
def test_models_of_other_designs_state_no_weights(file: Path) -> None:
    """Latents, states, experts beside shared ones, vision towers, quantized checkpoints."""
    config = json.loads(file.read_text())
    weights = computed(config)
    assert (weights is not None) == (config["architectures"][0] in EXACT_ARCHITECTURES)


@pytest.mark.parametrize(
    "changed",
    [
        {"quantization_config": {"quant_method": "fp8"}},
        {"compression_config": {"quant_method": "compressed-tensors"}},
        {"vision_config": {"hidden_size": 1024}},
        {"qkv_bias": False},
        {"ada_rms_norm_t_cond": True},
        {"architectures": ["Qwen2ForCausalLM"], "qk_norm": True},
        {"architectures": ["CohereForCausalLM"], "use_qk_norm": True, "tie_word_embeddings": True},
        {"architectures": ["CohereForCausalLM"], "tie_word_embeddings": False},
        {"architectures": ["NewDesignForCausalLM"]},
    ],
    ids=str,
)
def test_what_adds_unknown_weights_states_none(changed: Mapping[str, Any]) -> None:
    assert computed({**LLAMA, **changed}) is None


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "vocab_size"])
@pytest.mark.parametrize("value", [None, 0, "4096", True])
def test_a_size_that_is_missing_or_impossible_states_no_weights(field: str, value: object) -> None:
    model = parse_model_config(LLAMA)
    assert computed_weights({**LLAMA, field: value}, model, EngineConfig()) is None
    assert computed_weights({name: size for name, size in LLAMA.items() if name != field}, model, EngineConfig()) is None


@pytest.mark.parametrize("tensor", [3, 5, 64])
def test_a_parallelism_that_vllm_refuses_states_no_weights(tensor: int) -> None:
    assert computed(LLAMA, ranks(tensor)) is None
    assert share(LLAMA_BYTES, LLAMA, ranks(tensor)) is None


def test_a_norm_over_all_heads_is_not_known_where_ranks_hold_copies() -> None:
    olmo = {**LLAMA, "architectures": ["Olmo2ForCausalLM"]}
    assert computed(olmo, ranks(8)) is not None
    assert computed(olmo, ranks(16)) is None


def test_layers_without_keys_and_values_of_their_own_state_no_weights() -> None:
    model = parse_model_config(LLAMA)
    without = replace(model, decoder_layers=(*model.decoder_layers[:-1], ()))
    assert computed_weights(LLAMA, without, EngineConfig()) is None


def test_biases_count_where_the_file_turns_them_on() -> None:
    """Queries, keys and values take 6,144 together, the output 4,096, gate and up 14,336 each, down 4,096; two bytes each."""
    weights = computed({**LLAMA, "attention_bias": True, "mlp_bias": True})
    assert weights is not None
    assert weights.bytes_per_rank == (LLAMA_BYTES + 32 * 2 * (6144 + 4096 + 2 * 14336 + 4096),)


def test_weights_are_as_wide_as_the_dtype_that_is_served() -> None:
    wide, half = computed(LLAMA, EngineConfig(dtype="float32")), computed({**LLAMA, "dtype": "float32"})
    assert wide is not None
    assert half is not None
    assert (wide.bytes_per_rank, half.bytes_per_rank) == ((2 * LLAMA_BYTES,), (LLAMA_BYTES,))
    assert computed(LLAMA, EngineConfig(dtype="fp8")) is None


def test_a_step_streams_all_but_the_embedding_table() -> None:
    table = 128256 * 4096 * 2
    weights = computed(LLAMA)
    assert weights is not None
    assert weights.streamed_bytes_per_rank == (LLAMA_BYTES - table,)
    split = computed(LLAMA, ranks(pipeline=2))
    assert split is not None
    assert split.streamed_bytes_per_rank == (split.bytes_per_rank[0] - table, split.bytes_per_rank[1])


def test_a_table_that_is_tied_to_the_head_is_streamed_as_the_head() -> None:
    tied = {**LLAMA, "tie_word_embeddings": True}
    weights, split = computed(tied), computed(tied, ranks(pipeline=2))
    assert weights is not None
    assert split is not None
    assert weights.streamed_bytes_per_rank == weights.bytes_per_rank
    assert split.streamed_bytes_per_rank == (split.bytes_per_rank[0] - 128256 * 4096 * 2, split.bytes_per_rank[1])


def test_what_experts_a_step_streams_is_not_stated() -> None:
    weights = computed({**LLAMA, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8})
    assert weights is not None
    assert weights.streamed_bytes_per_rank is None


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    return {
        "architectures": [draw(st.sampled_from(sorted(EXACT_ARCHITECTURES)))],
        "hidden_size": 64 * draw(st.integers(1, 64)),
        "intermediate_size": 64 * draw(st.integers(1, 64)),
        "num_hidden_layers": draw(st.integers(8, 40)),
        "num_attention_heads": 8 * draw(st.sampled_from([1, 2, 3, 8])),
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([64, 96, 128])),
        "num_local_experts": draw(st.integers(1, 8)),
        "vocab_size": draw(st.integers(1, 100_000)),
        "attention_bias": draw(st.booleans()),
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
    }


SPLITS = st.builds(ranks, st.sampled_from([1, 2, 4, 8]), st.integers(1, 4))


@given(models(), SPLITS)
def test_all_ranks_together_hold_at_least_the_whole_model(config: dict[str, Any], engine: EngineConfig) -> None:
    assume(config["hidden_size"] % config["num_attention_heads"] == 0)
    whole, split = computed(config), computed(config, engine)
    assert whole is not None
    assume(split is not None)
    assert split is not None
    assert len(split.bytes_per_rank) == engine.pipeline_parallel_size
    assert engine.tensor_parallel_size * sum(split.bytes_per_rank) >= whole.bytes_per_rank[0]
    streamed = split.streamed_bytes_per_rank or split.bytes_per_rank
    assert all(read <= held for read, held in zip(streamed, split.bytes_per_rank, strict=True))


@given(models(), SPLITS)
def test_one_more_layer_makes_no_rank_lighter_in_total(config: dict[str, Any], engine: EngineConfig) -> None:
    assume(config["hidden_size"] % config["num_attention_heads"] == 0)
    fewer, more = computed(config, engine), computed({**config, "num_hidden_layers": config["num_hidden_layers"] + 1}, engine)
    assume(fewer is not None)
    assert fewer is not None
    assert more is not None
    assert sum(more.bytes_per_rank) > sum(fewer.bytes_per_rank)


def test_the_share_of_a_checkpoint_is_even_while_kv_heads_divide() -> None:
    assert share(LLAMA_BYTES, LLAMA) == LLAMA_BYTES
    assert share(LLAMA_BYTES, LLAMA, ranks(8)) == LLAMA_BYTES // 8


def test_the_share_adds_the_kv_heads_that_ranks_hold_in_copies() -> None:
    """Sixteen ranks hold one head each of eight, where an even share has half of one."""
    half_heads = 32 * 4096 * 128 * 2
    assert share(LLAMA_BYTES, LLAMA, ranks(16)) == LLAMA_BYTES // 16 + half_heads
    assert share(LLAMA_BYTES // 2, {**LLAMA, "quantization_config": {}}, ranks(16)) == LLAMA_BYTES // 32 + half_heads
    quantized = {**LLAMA, "quantization_config": {"quant_method": "fp8"}}
    assert share(LLAMA_BYTES // 2, quantized, ranks(16)) == LLAMA_BYTES // 32 + half_heads // 2


def test_a_checkpoint_counts_in_the_dtype_that_is_served_unless_it_is_quantized() -> None:
    wide = {**LLAMA, "dtype": "float32"}
    assert share(2 * LLAMA_BYTES, wide) == LLAMA_BYTES
    assert share(LLAMA_BYTES, LLAMA, EngineConfig(dtype="float32")) == 2 * LLAMA_BYTES
    assert share(LLAMA_BYTES, {**wide, "quantization_config": {"quant_method": "awq"}}) == LLAMA_BYTES
    assert share(LLAMA_BYTES, {name: value for name, value in LLAMA.items() if name != "dtype"}) == LLAMA_BYTES
    assert share(LLAMA_BYTES, LLAMA, EngineConfig(dtype="no such dtype")) is None


def test_no_share_is_stated_where_ranks_differ_by_more_than_can_be_said() -> None:
    assert share(LLAMA_BYTES, LLAMA, ranks(pipeline=2)) is None
    assert share(LLAMA_BYTES, {**LLAMA, "architectures": ["GPTBigCodeForCausalLM"]}) is None


def test_copies_of_an_unknown_size_state_no_share() -> None:
    nested = {"architectures": ["LlavaForConditionalGeneration"], "text_config": dict(LLAMA)}
    assert share(LLAMA_BYTES, nested, ranks(8)) == LLAMA_BYTES // 8
    assert share(LLAMA_BYTES, nested, ranks(16)) is None
