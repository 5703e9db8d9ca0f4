"""The command `plan`: vLLM's flags in, layout and capacity out."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvcache_exporter.cli import main
from lab import DATA

LLAMA = DATA / "models" / "Meta-Llama-3.1-8B.json"
GEMMA = DATA / "models" / "gemma-3-27b-it.json"


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["plan", *map(str, arguments)])
    return result.exit_code, result.output


def as_json(*arguments: object) -> dict[str, Any]:
    status, output = run(*arguments, "--json")
    assert status == 0, output
    plan: dict[str, Any] = json.loads(output)
    return plan


def test_dense_model_with_a_given_memory() -> None:
    plan = as_json(LLAMA, "--kv-bytes", 61847529062, "--max-model-len", 8192, "--length", 1024, "--length", 8192)
    assert plan["architecture"] == "LlamaForCausalLM"
    assert plan["groups"] == [{"kind": "full_attention", "layers": 32, "block_size": 16, "page_bytes": 65536}]
    assert plan["bytes_per_block_per_rank"] == [2097152]
    assert plan["num_blocks"] == 29491
    assert plan["kv_cache_size_tokens"] == 471856
    assert plan["max_concurrency"] == 57.599609375
    assert plan["marginal_bytes_per_token_per_rank"] == [131072.0]
    assert plan["fixed_bytes_per_request_per_rank"] == [0]
    assert plan["blocks_for_request"] == {"1024": 64, "8192": 512}


def test_keys_that_are_not_known_are_absent() -> None:
    plan = as_json(LLAMA)
    for key in ("num_blocks", "kv_cache_size_tokens", "max_concurrency", "weight_bytes", "refused"):
        assert key not in plan


def test_pipeline_stages_have_their_own_figures() -> None:
    plan = as_json(LLAMA, "-pp", 3)
    assert plan["bytes_per_block_per_rank"] == [11 * 65536, 11 * 65536, 10 * 65536]


@pytest.mark.parametrize(
    ("arguments", "bytes_per_block"),
    [
        (("--tensor-parallel-size", 8), 262144),
        (("--tensor-parallel-size=8",), 262144),
        (("--tensor_parallel_size", 8), 262144),
        (("--kv_cache_dtype=fp8", "--kv_cache_dtype_skip_layers", "0", "31"), 2228224),
        (("--no-disable-hybrid-kv-cache-manager",), 2097152),
        (("-tp", 8), 262144),
        (("-tp=8",), 262144),
        (("--kv-cache-dtype", "fp8"), 1048576),
        (("--block-size", 64), 8388608),
        (("--kv-cache-dtype", "fp8", "--kv-cache-dtype-skip-layers", "0", "31"), 2228224),
        (("--kv-cache-dtype-skip-layers", "0", "31", "--kv-cache-dtype", "fp8"), 2228224),
        (("--dtype", "float32"), 4194304),
        (
            ("--max-num-seqs", 256, "--gpu-memory-utilization", 0.9, "--no-enable-prefix-caching", "--no-async-scheduling"),
            2097152,
        ),
    ],
)
def test_flags_in_vllms_spelling(arguments: tuple[object, ...], bytes_per_block: int) -> None:
    assert as_json(LLAMA, *arguments)["bytes_per_block_per_rank"] == [bytes_per_block]


@pytest.mark.parametrize(("text", "value"), [("8k", 8000), ("8K", 8192), ("1m", 1000000), ("0.5M", 524288), ("4096", 4096)])
def test_numbers_as_vllm_takes_them(text: str, value: int) -> None:
    assert as_json(LLAMA, "--max-num-batched-tokens", text)["max_num_batched_tokens"] == value


def test_longer_than_the_model_where_vllm_is_told_to_allow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_json(LLAMA, "--max-model-len", "132K", "--allow-long-max-model-len")["max_model_len"] == 135168
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert as_json(LLAMA, "--max-model-len", "132K")["max_model_len"] == 135168


def test_windows_reserve_less_without_async_scheduling() -> None:
    reserved = [as_json(GEMMA, *flags)["fixed_blocks_per_request"] for flags in ((), ("--no-async-scheduling",))]
    assert reserved == [6534, 6 * ((1023 + 8192 + 15) // 16 + 1)]


def test_gpu_decides_the_batch() -> None:
    batches = {
        gpu: as_json(LLAMA, "--gpu", gpu)["max_num_batched_tokens"] for gpu in ("H100", "NVIDIA H200", "B200", "L40S", "A100-80")
    }
    assert batches == {"H100": 8192, "NVIDIA H200": 8192, "B200": 16384, "L40S": 2048, "A100-80": 2048}


def test_older_version_switches_the_rules() -> None:
    """Before 0.22 vLLM logged blocks over groups times block size, and it reserved for one batch."""
    new = as_json(GEMMA, "--kv-bytes", "40G", "-tp", 2)
    old = as_json(GEMMA, "--kv-bytes", "40G", "-tp", 2, "--vllm-version", "0.20.0")
    assert (new["kv_cache_size_tokens"], old["kv_cache_size_tokens"]) == (583317, 65536 // 7 * 16)
    assert old["fixed_blocks_per_request"] < new["fixed_blocks_per_request"]


def test_draft_layers_count_with_speculation_only(tmp_path: Path) -> None:
    glm = {
        "architectures": ["Glm4MoeForCausalLM"],
        "num_hidden_layers": 4,
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(glm))
    speculation = '{"method": "mtp", "num_speculative_tokens": 2}'
    layers = [as_json(tmp_path, *flags)["groups"][0]["layers"] for flags in ((), ("--speculative-config", speculation))]
    assert layers == [4, 5]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("-tp", 3), "vLLM refuses tensor_parallel_size 3, since it does not divide the 32 attention heads"),
        (("--kv-bytes", "10G"), "vLLM refuses to start: one request of 131072 tokens takes 8192 blocks, and"),
        (("--kv-cache-dtype", "int3"), "kv_cache_dtype 'int3' is not one of"),
        (
            ("--max-model-len", "132K"),
            "vLLM refuses max_model_len 135168: config.json of LlamaForCausalLM allows at most 131072; ",
        ),
        (("--block-size", 24), "vLLM refuses block_size 24: its attention kernels take multiples of 16"),
        (("-dcp", 2, "-tp", 8), "vLLM refuses decode_context_parallel_size 2 with 8 KV heads on 8 ranks"),
        (("--kv-cache-dtype", "turboquant_4bit_nc"), "name them with kv_cache_dtype_skip_layers"),
        (("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}'), "drafts would add are not known"),
    ],
)
def test_refusal_has_its_reason_and_exit_status_3(arguments: tuple[object, ...], reason: str) -> None:
    status, output = run(LLAMA, *arguments, "--json")
    assert status == 3
    assert reason in json.loads(output)["refused"]
    status, output = run(LLAMA, *arguments)
    assert status == 3
    assert output.startswith("refused: ")


def test_one_block_more_than_a_request_takes_is_needed() -> None:
    """The null block holds nothing: 512 blocks are not enough for a request that takes 512."""
    block = 2097152
    assert run(LLAMA, "--max-model-len", 8192, "--kv-bytes", 512 * block)[0] == 3
    assert run(LLAMA, "--max-model-len", 8192, "--kv-bytes", 513 * block)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--gpu", "Voodoo2"), "'Voodoo2' is not a GPU that is known here: H100, "),
        (("--block-size", "x"), "'x' is not a positive whole number, such as 8192 or 8K"),
        (("--vllm-version", "main"), "'main' is not a version such as 0.32.0"),
        (("--speculative-config", "{}"), "'{}' is not an object with method and num_speculative_tokens"),
        (
            ("--speculative-config", '{"method": "medusa", "num_speculative_tokens": 1}'),
            "what method 'medusa' keeps in the cache is not known here; mtp, ngram, and a draft model by its path are",
        ),
        (("--port", "8000"), "No such option"),
    ],
)
def test_bad_flags_are_refused_with_a_sentence(arguments: tuple[object, ...], sentence: str) -> None:
    status, output = run(LLAMA, *arguments)
    assert status == 2
    assert sentence in output


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_model_that_cannot_be_read(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    status, output = run(tmp_path)
    assert status == 1
    assert output.startswith("Error: ")


def safetensors(file: Path, tensor_bytes: int) -> None:
    header = json.dumps({"w": {"dtype": "U8", "shape": [tensor_bytes], "data_offsets": [0, tensor_bytes]}}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(tensor_bytes))


def test_weights_from_the_headers_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(LLAMA.read_text())
    safetensors(tmp_path / "model-1.safetensors", 1000)
    safetensors(tmp_path / "model-2.safetensors", 3001)
    plan = as_json(tmp_path, "-tp", 4)
    assert (plan["weight_bytes"], plan["weight_bytes_per_rank"]) == (4001, 1001)


def test_weights_from_the_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(LLAMA.read_text())
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 16060522496}, "weight_map": {}})
    )
    assert as_json(tmp_path)["weight_bytes"] == 16060522496


def test_file_that_is_no_safetensors_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(LLAMA.read_text())
    (tmp_path / "model.safetensors").write_bytes(b"version https://git-lfs")
    status, output = run(tmp_path)
    assert status == 1
    assert "model.safetensors is not a safetensors file" in output


def test_table_states_what_it_assumes() -> None:
    status, output = run(GEMMA, "-tp", 2, "--kv-bytes", "40G", "--length", 8192)
    assert status == 0
    assert output.splitlines()[0] == (
        "Gemma3ForConditionalGeneration in vLLM 0.32 on 2 x H100, cache bfloat16, 8192 batched tokens, 16384 in flight"
    )
    assert "maximum concurrency       4.45x at 131,072 tokens a request" in output
    assert "request of        8,192   902 blocks held, 3,590 reserved at start-up; 69 such requests fit" in output
