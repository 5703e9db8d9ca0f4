"""Model files that broke projects like this one, each with the right answer; the number is that of its folder in data/cases.

Bytes a token are those of the whole model, over all ranks, unless a test says otherwise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcache_exporter.errors import SourceError, UnsupportedModelError
from kvcache_exporter.kv_cache_spec import EngineConfig, KVCacheLayout, kv_cache_layout
from kvcache_exporter.model_config import ModelConfig, parse_model_config
from kvcache_exporter.sources.model_files import load_config_json
from lab import CASES, Upstream, lab_for


def config(case: str, name: str = "config") -> dict[str, Any]:
    folder = next(CASES.glob(f"{case}-*"))
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def model(case: str, name: str = "config", **fields: Any) -> ModelConfig:
    return parse_model_config({**config(case, name), **fields})


def layout(case: str, name: str = "config", **flags: Any) -> KVCacheLayout:
    return kv_cache_layout(model(case, name), EngineConfig(**flags))


def bytes_per_token(case: str, name: str = "config", **flags: Any) -> float:
    return layout(case, name, **flags).bytes_per_token


def bytes_of_request(cache: KVCacheLayout, tokens: int) -> int:
    return cache.blocks_for_request(tokens) * cache.bytes_per_block


def refusal(case: str, name: str = "config", **fields: Any) -> str:
    with pytest.raises(UnsupportedModelError) as refused:
        model(case, name, **fields)
    return str(refused.value)


def test_31_explicit_head_dim() -> None:
    """A head_dim that is given wins over the division: 163,840 and 49,152 bytes a token; 204,800 and 34,560 are wrong.

    The first file names no window, so by Hugging Face's default its layers keep 4096 tokens: the figure is that of a block.
    """
    windowed = layout("31", "config-a")
    assert windowed.bytes_per_block / windowed.block_size == 163_840
    assert bytes_per_token("31", "config-b") == 49_152


def test_32_null_head_fields() -> None:
    """A null is not given, so multi-head: 524,288. No heads, and heads that do not divide the width, are refused."""
    assert bytes_per_token("32", "config-a") == 524_288
    assert refusal("32", "config-b") == "LlamaForCausalLM: num_attention_heads = 0 is not a positive whole number"
    assert refusal("32", "config-c") == (
        "LlamaForCausalLM: hidden_size 4097 is not a multiple of 32 attention heads and no head_dim is given"
    )


def test_33_hidden_size_per_head() -> None:
    """The size of a head is hidden_size_per_head: 40,960, marked as assumed for a name that is not known; 32,768 is wrong."""
    assert bytes_per_token("33") == 40_960
    assert model("33").is_assumed


@pytest.mark.parametrize("field", ["kv_channels", "attention_head_dim", "d_head", "d_kv"])
def test_33_other_spellings(field: str) -> None:
    fields = {**config("33"), "model_type": "llama", "hidden_size_per_head": None, field: 160}
    assert kv_cache_layout(parse_model_config(fields), EngineConfig()).bytes_per_token == 40_960


@pytest.mark.parametrize(("name", "expected"), [("deci-blocks", 3072), ("openelm-lists", 3840), ("list-with-zeros", 2048)])
def test_34_per_layer_kv_heads(name: str, expected: int) -> None:
    """The sum of the KV heads of all layers, some of which have none; 65,536 and 4,096 are wrong."""
    assert bytes_per_token("34", name) == expected


def test_34_list_of_wrong_length_is_refused() -> None:
    """Three entries for four layers: no value, with a reason."""
    assert refusal("34", "wrong-length")
    lists = refusal("34", "wrong-length", num_query_heads=[12, 12, 16, 20])
    assert lists == "OpenELMForCausalLM: num_kv_heads = [3, 3, 4] is not a list of 4 entries"
    blocks = config("34", "deci-blocks")["block_configs"]
    assert refusal("34", "deci-blocks", block_configs=blocks[:3]).endswith("is not a list of 4 entries")


def test_35_sliding_window_switch() -> None:
    """A window that is off or null is ignored: 57,344 and 131,072."""
    assert bytes_per_token("35", "off") == 57_344
    assert bytes_per_token("35", "null") == 131_072
    assert layout("35", "off").blocks_for_request(1_000_000) == 62_500


def test_35_window_that_is_on() -> None:
    """Layers 14 to 27 slide: 57,344 for each of the first 4096 tokens, 28,672 for each further one.

    The sliding half stops at 4096 tokens, and one block more where the window starts inside a block.
    """
    cache = layout("35", "on")
    assert bytes_of_request(cache, 4096) == 4096 * 57_344
    assert bytes_of_request(cache, 65_536) - bytes_of_request(cache, 32_768) == 32_768 * 28_672
    sliding = next(group for group in cache.groups if not group.spec.grows)
    assert len(sliding.layers) == 14
    assert sliding.blocks_for_request(65_536) * 16 * 28_672 == 117_440_512 + 16 * 28_672


@pytest.mark.parametrize(
    ("name", "expected"),
    [("vision-dims-on-top", 81_920), ("thinker", 57_344), ("llm-config", 131_072), ("language-config", 491_520)],
)
def test_36_nested_text_config(name: str, expected: int) -> None:
    """The language model's part counts, not the vision or talker numbers beside it: 67,584 is wrong."""
    assert bytes_per_token("36", name) == expected


def test_36_dtype_of_the_outer_level() -> None:
    """It counts where the nested part names none."""
    assert model("36", "llm-config").dtype == "bfloat16"


def test_36_no_part_has_layers_and_heads() -> None:
    """No value, with a reason."""
    empty = {"architectures": ["InternVLChatModel"], "text_config": {"model_type": "qwen2"}}
    with pytest.raises(UnsupportedModelError, match=r"InternVLChatModel: config\.json has no num_"):
        parse_model_config(empty)


def test_37_mla() -> None:
    """One latent a layer, whole on each of 8 GPUs: 70,272 a GPU and 562,176 in all; 8,784 and 3,997,696 are wrong."""
    assert bytes_per_token("37") == 70_272
    cache = layout("37", tensor_parallel_size=8)
    assert cache.marginal_bytes_per_token_per_rank == (70_272,)
    assert cache.bytes_per_token == 562_176


def test_37_packed_latents_without_an_index_are_refused() -> None:
    """The format fp8_ds_mla is for models with a sparse index, which this file does not have; 35,136 in silence is wrong."""
    with pytest.raises(UnsupportedModelError, match="fp8_ds_mla is for sparse latent attention only"):
        layout("37", kv_cache_dtype="fp8_ds_mla")


@pytest.mark.parametrize("name", ["compressed", "producers"])
def test_38_unknown_architecture(name: str) -> None:
    """No bytes, though each file has all that a plain formula needs: 8,192 and 40,960 are wrong."""
    assert config("38", name)["model_type"] in refusal("38", name)


def test_38_operator_may_say_what_a_token_takes(upstream: Upstream) -> None:
    """Then bytes and slots follow from that, and are marked as configured; the refusal stays visible."""
    upstream.page(
        b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5\n'
        b'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="1001",cache_dtype="auto"} 1.0\n'
    )
    lab = lab_for(upstream, model_config=config("38", "compressed"), kv_cache_bytes_per_token=10_000, lengths=(160,)).poll()
    assert lab.value("kvcache_bytes_per_token") == 10_000
    assert lab.value("kvcache_capacity_bytes") == 1000 * 16 * 10_000
    assert lab.value("kvcache_request_slots", length="160") == 100
    assert lab.samples("kvcache_engine_info", layout_source="configured") != {}
    assert lab.value("kvcache_up", source="model_config") == 0


@pytest.mark.parametrize(("name", "field"), [("compressed", "compress_ratios"), ("producers", "kv_source_layer_ids")])
def test_38_the_field_is_named_though_the_architecture_is_not_known(name: str, field: str) -> None:
    assert f"{field} = " in refusal("38", name)


@pytest.mark.parametrize(("name", "field"), [("compressed", "compress_ratios"), ("producers", "kv_source_layer_ids")])
def test_38_field_that_changes_the_storage_is_refused_under_a_known_name_too(name: str, field: str) -> None:
    """The reason names it."""
    assert refusal("38", name, model_type="llama").startswith(f"LlamaForCausalLM: {field} = ")


def test_39_interleaved_sliding_window() -> None:
    """49,152 for each of the first 128 tokens, 24,576 for each further one, 402,653,184 for 8192 without the hybrid manager.

    With it, 8192 tokens take 204,472,320 and one block more, since the window may start inside a block.
    """
    cache = layout("39")
    assert bytes_of_request(cache, 128) == 128 * 49_152
    assert cache.bytes_per_token == 24_576
    assert bytes_of_request(cache, 8192) == 204_472_320 + 16 * 24_576
    assert bytes_of_request(layout("39", disable_hybrid_kv_cache_manager=True), 8192) == 402_653_184


@pytest.mark.parametrize("name", ["dtype-only", "float32", "none", "both-differ", "weird"])
def test_44_dtype_fields(name: str) -> None:
    """131,072 whichever field names the dtype, and 16 bits where it is float32 or missing."""
    assert bytes_per_token("44", name) == 131_072


@pytest.mark.parametrize(("name", "expected"), [("interval", 24_576), ("layer-types", 2048)])
def test_40_linear_attention_interval(name: str, expected: int) -> None:
    """Only attention layers grow, and a list of layers wins over the interval: 98,304 and 4,096 are wrong."""
    assert bytes_per_token("40", name) == expected


def test_44_dtype_that_is_not_named_is_marked_as_assumed() -> None:
    assert layout("44", "none").is_assumed
    assert not layout("44", "dtype-only").is_assumed
    assert not layout("44", "none", dtype="float16").is_assumed


def test_44_float32_by_flag() -> None:
    """262,144 only when the flag asks for it."""
    assert bytes_per_token("44", "float32", dtype="float32") == 262_144


def test_44_missing_dtype_stays_unknown() -> None:
    """What the file does not name is not made up in what is read from it; a prefix is no part of the name."""
    assert model("44", "none").dtype is None
    assert model("44", "weird").dtype == "bfloat16"


def test_45_params_json_only() -> None:
    """147,456, with a dtype and a length that stay unknown: 128,000 as a silent default is wrong."""
    assert bytes_per_token("45", "params") == 147_456
    assert model("45", "params").dtype is None
    assert model("45", "params").max_model_len is None


def test_45_config_json_wins_over_params_json(tmp_path: Path) -> None:
    """Where there are both, config.json counts; where there is neither, there is no value, with a reason."""
    (tmp_path / "model.gguf").touch()
    with pytest.raises(SourceError, match="config"):
        load_config_json(tmp_path)
    (tmp_path / "params.json").write_text(json.dumps(config("45", "params")))
    assert load_config_json(tmp_path) == config("45", "params")
    (tmp_path / "config.json").write_text(json.dumps(config("46", "gpt2")))
    assert load_config_json(tmp_path) == config("46", "gpt2")


@pytest.mark.parametrize(("name", "expected"), [("gpt2", 36_864), ("bigcode", 12_288), ("falcon", 8192), ("falcon-new", 122_880)])
def test_46_old_field_names(name: str, expected: int) -> None:
    """Old spellings of layers, heads and width; multi_query is one KV head except in Falcon's newer decoder."""
    assert bytes_per_token("46", name) == expected


def test_47_draft_layers() -> None:
    """The draft layer of the file counts when speculation uses it, as one layer: 71,424, not twice 70,272."""
    assert bytes_per_token("47") == 70_272
    assert bytes_per_token("47", num_speculative_tokens=1, num_draft_layers=1) == 71_424


def test_47_draft_model() -> None:
    """One layer of 8 heads beside the latents: 74,368."""
    cache = kv_cache_layout(model("47"), EngineConfig(num_speculative_tokens=3), draft=model("47", "draft-config"))
    assert cache.bytes_per_token == 74_368


def test_48_encoder_decoder() -> None:
    """163,840 a generated token; the encoder's layers add nothing, and fields that the file lacks are no error."""
    cache = layout("48")
    assert cache.bytes_per_token == 163_840
    assert [(group.spec.kind, len(group.layers)) for group in cache.groups] == [("full_attention", 32), ("cross_attention", 32)]


def test_48_running_request_holds_the_encoders_output_once() -> None:
    """1,500 positions are 93.75 blocks however many tokens are generated, so 448 tokens take 319,160,320 and a quarter block."""
    cache = layout("48")
    assert [cache.blocks_for_request(tokens) for tokens in (1, 448)] == [1 + 94, 28 + 94]
    assert bytes_of_request(cache, 448) == 319_160_320 + 4 * 163_840
