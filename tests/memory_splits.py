"""Published vLLM start-up logs against the split of GPU memory that the exporter would show for the same engine.

Run it as `python tests/memory_splits.py FILE`, with the folder `../oracle/configs` beside FILE's own. The table has every record
that states weights and KV memory and whose model is in MODELS. From the log come only what NVML would show and the number of
blocks; weights and bytes of a block are computed. The exit status is 1 if a figure is off by more than its bar.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from kvcache_exporter.capacity import num_gpu_blocks_for
from kvcache_exporter.errors import UnsupportedModelError
from kvcache_exporter.gpu_memory import FREE, OVERHEAD, UNKNOWN, MemorySplit, Tenant, split_memory
from kvcache_exporter.gpu_reading import GpuProcess, GpuReading
from kvcache_exporter.kv_cache_spec import EngineConfig, KVCacheLayout, kv_cache_layout
from kvcache_exporter.kv_cache_spec.engine_config import GIB, NEWEST_VLLM_VERSION, parse_vllm_version
from kvcache_exporter.model_config import parse_model_config
from kvcache_exporter.weights import computed_weights

MIB = 1024**2
WEIGHTS_BAR = 0.01
# Half of the last digit that vLLM prints. The cache may differ by that and by what is left over when memory is cut into blocks.
PRINTED_BYTES = GIB // 200
ENGINE_PID = 1

OUTLIERS: Mapping[int, str] = {
    8: "only the text part is computed here; of the whole model's config the exporter computes no weights",
    13: "only the text part is computed here; of the whole model's config the exporter computes no weights",
    25: "the log names no model, Qwen2.5-7B is a guess from layers and heads; 0.12 GiB are not explained",
}
"""Records whose weights are off by more than the bar, and what is known about it."""

Figures: TypeAlias = Mapping[str, Any]

# https://huggingface.co/Qwen/Qwen3-14B
_QWEN3_14B: Figures = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 40,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
# `text_config` of https://huggingface.co/llava-hf/llava-v1.6-mistral-7b-hf: Mistral-7B-Instruct-v0.2 with 64 more tokens.
_LLAVA_MISTRAL_TEXT: Figures = {
    "architectures": ["MistralForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32064,
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "tie_word_embeddings": False,
}

MODELS: Mapping[str, str | Figures] = {
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic": "Meta-Llama-3.1-70B",
    "nvidia/Llama-3.3-70B-Instruct-FP8": "Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B": "Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-8B-Instruct": "Meta-Llama-3.1-8B",
    "Llama-class 8B (32 layers/8 KV heads)": "Meta-Llama-3.1-8B",
    "meta-llama/Meta-Llama-3-8B": "Meta-Llama-3.1-8B",
    "Qwen/Qwen3-0.6B": "Qwen3-0.6B",
    "Qwen/Qwen3-0.6B-FP8": "Qwen3-0.6B",
    "Qwen/Qwen3-14B": _QWEN3_14B,
    "Qwen/Qwen3-32B": "Qwen3-32B",
    "7B-class, 28 layers/4 KV heads (path hidden; fits Qwen2.5-7B)": "blis-qwen2.5-7b-instruct",
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": "Mistral-Small-3.1-24B-text",
    "llava-hf/llava-v1.6-mistral-7b-hf": _LLAVA_MISTRAL_TEXT,
    "google/gemma-4-26B-A4B": "gemma-4-26B-A4B",
}
"""The model of a record: a file in `configs`, or its sizes."""

# Llama 3 has the sizes of 3.1, but for the length.
_POSITIONS = {"meta-llama/Meta-Llama-3-8B": 8192}


def _pixtral_parameters() -> int:
    """The vision part of Mistral-Small-3.1 and 3.2: 24 layers of width 1024 without biases, patches of 14x14, merged 2x2."""
    width, inner, text = 1024, 4096, 5120
    layer = 4 * width * width + 3 * width * inner + 2 * width
    merger = 4 * width * width
    projector = width * text + text * text + width
    return 3 * 14 * 14 * width + width + 24 * layer + merger + projector


def _clip_parameters() -> int:
    """The vision part of LLaVA-1.6: CLIP ViT-L/14 for 336 pixels, of whose 24 layers vLLM builds the 23 that are used."""
    width, inner, text = 1024, 4096, 4096
    layer = 4 * (width * width + width) + 2 * width * inner + inner + width + 4 * width
    embeddings = 3 * 14 * 14 * width + width + ((336 // 14) ** 2 + 1) * width + 2 * width
    projector = width * text + text + text * text + text
    return embeddings + 23 * layer + projector + text


_VISION_PARAMETERS = {
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": _pixtral_parameters(),
    "llava-hf/llava-v1.6-mistral-7b-hf": _clip_parameters(),
}


@dataclass(frozen=True)
class Causes:
    """Bytes that the log counts as weights and that are none of the parameters of the config at hand."""

    rotary: int
    padding: int
    vision: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.rotary + self.padding + self.vision


@dataclass(frozen=True)
class Row:
    """One record: what was logged, in bytes, and what the exporter would make of it. None: not logged, or not known.

    `overhead` is the logged non-torch memory and CUDA graphs. `split` is None where the log lacks what NVML would show.
    `has_logged_blocks` is not set where the blocks were cut from the logged memory, which therefore agrees. `refusal` says why
    there is no layout.
    """

    number: int
    model: str
    tp: int
    weights: int
    kv_cache: int
    overhead: int | None
    total: int | None
    activation_peak: int | None
    graphs: int | None
    block_bytes: int | None
    has_logged_blocks: bool
    refusal: str | None
    tenant: Tenant
    split: MemorySplit | None
    causes: Causes | None

    @property
    def used(self) -> int | None:
        """All that is resident; None where a part was not logged."""
        return None if self.overhead is None else self.weights + self.kv_cache + self.overhead

    @property
    def weights_error(self) -> float | None:
        """Computed over logged, minus 1."""
        return None if self.tenant.weight_bytes is None else self.tenant.weight_bytes / self.weights - 1

    @property
    def has_weights_within_bar(self) -> bool:
        """Whether the computed weights are near the logged ones."""
        return abs(self.weights_error or 0) <= WEIGHTS_BAR

    @property
    def kv_cache_difference(self) -> int | None:
        """Computed minus logged."""
        return None if self.tenant.kv_cache_bytes is None else self.tenant.kv_cache_bytes - self.kv_cache

    @property
    def has_kv_cache_within_bar(self) -> bool:
        """Whether the cache differs by no more than two decimals and the rest of a block can account for."""
        return self.kv_cache_difference is None or abs(self.kv_cache_difference) <= PRINTED_BYTES + (self.block_bytes or 0)

    @property
    def unexplained(self) -> int | None:
        """What of the logged weights is neither a parameter nor in `causes`."""
        if self.tenant.weight_bytes is None or self.causes is None:
            return None
        return self.weights - self.tenant.weight_bytes - self.causes.total

    @property
    def is_missed(self) -> bool:
        """Whether a figure is off by more than its bar, and is no outlier that is known."""
        return not self.has_kv_cache_within_bar or (not self.has_weights_within_bar and self.number not in OUTLIERS)


def load(path: Path) -> Iterator[Row]:
    """The rows of the file's records that can be compared."""
    folder = path.parent.parent / "oracle" / "configs"
    for record in json.loads(path.read_text())["records"]:
        config = MODELS.get(record["model"])
        if config is None or not record.get("weights_gib") or not record.get("available_kv_gib"):
            continue
        if isinstance(config, str):
            config = json.loads((folder / f"{config}.json").read_text())
        if record["model"] in _POSITIONS:
            config = {**config, "max_position_embeddings": _POSITIONS[record["model"]]}
        yield row(record, config)


def row(record: Figures, config: Figures) -> Row:
    """What the exporter makes of one record, whose model has this config.json."""
    engine = EngineConfig(
        block_size=record.get("block_size"),
        kv_cache_dtype="fp8" if str(record.get("kv_cache_dtype")).startswith("fp8") else "auto",
        tensor_parallel_size=record["tp"],
        vllm_version=parse_vllm_version(record.get("vllm_version")) or NEWEST_VLLM_VERSION,
    )
    model = parse_model_config(config)
    layout, refusal = None, None
    try:
        layout = kv_cache_layout(model, engine)
    except UnsupportedModelError as error:
        refusal = str(error)
    if not str(record.get("weight_format") or "bf16").startswith(("bf16", "fp16")):
        # The config at hand is that of the checkpoint in 16 bits.
        config = {**config, "quantization_config": {"quant_method": record["weight_format"]}}
    weights = computed_weights(config, model, engine)
    logged_blocks = None if layout is None else _logged_blocks(record, layout)
    tenant = Tenant(
        kv_cache_bytes=None if layout is None else _kv_cache_bytes(record, layout, logged_blocks),
        weight_bytes=None if weights is None else weights.bytes_per_rank[0],
        pids=frozenset({ENGINE_PID}),
    )
    non_torch, graphs = _optional_bytes(record, "non_torch_gib"), _optional_bytes(record, "cuda_graph_gib")
    overhead = None if non_torch is None or graphs is None else non_torch + graphs
    total = _optional_bytes(record, "total_gpu_gib")
    logged_weights, kv_cache = _bytes(record["weights_gib"]), _bytes(record["available_kv_gib"])
    used = None if overhead is None else logged_weights + kv_cache + overhead
    gpu = GpuReading("", memory_total_bytes=total, memory_used_bytes=used, processes=(GpuProcess(ENGINE_PID, used),))
    return Row(
        number=record["n"],
        model=record["model"],
        tp=record["tp"],
        weights=logged_weights,
        kv_cache=kv_cache,
        overhead=overhead,
        total=total,
        activation_peak=_optional_bytes(record, "activation_peak_gib"),
        graphs=graphs,
        block_bytes=None if layout is None else layout.bytes_per_block_per_rank[0],
        has_logged_blocks=logged_blocks is not None,
        refusal=refusal,
        tenant=tenant,
        split=split_memory(gpu, [tenant], tenants_known=True),
        causes=None if weights is None else _causes(record, config),
    )


def _logged_blocks(record: Figures, layout: KVCacheLayout) -> int | None:
    tokens = record.get("kv_cache_tokens")
    return None if tokens is None or layout.tokens_per_block is None else tokens // layout.tokens_per_block


def _kv_cache_bytes(record: Figures, layout: KVCacheLayout, logged_blocks: int | None) -> int:
    blocks = num_gpu_blocks_for(layout, _bytes(record["available_kv_gib"])) if logged_blocks is None else logged_blocks
    return blocks * layout.bytes_per_block_per_rank[0]


def _bytes(gib: float) -> int:
    return round(gib * GIB)


def _optional_bytes(record: Figures, name: str) -> int | None:
    return None if record.get(name) is None else _bytes(record[name])


def _causes(record: Figures, config: Figures) -> Causes:
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    # Every rank holds the table whole, and all layers share it.
    rotary = config["max_position_embeddings"] * head * 2
    padding = sum(_padding(size) for size in _matrices(config, heads, head, record["tp"]))
    return Causes(rotary, padding, 2 * _VISION_PARAMETERS.get(record["model"], 0))


def _matrices(config: Figures, heads: int, head: int, ranks: int) -> Iterator[int]:
    """Bytes of each matrix of a gated decoder on one rank, as vLLM fuses them."""
    hidden, width, kv_heads = config["hidden_size"], config["intermediate_size"] // ranks, config["num_key_value_heads"]
    tables = 1 if config.get("tie_word_embeddings") else 2
    yield from [config["vocab_size"] // ranks * hidden * 2] * tables
    for _ in range(config["num_hidden_layers"]):
        yield hidden * (heads + 2 * kv_heads) // ranks * head * 2
        yield hidden * heads // ranks * head * 2
        yield hidden * 2 * width * 2
        yield hidden * width * 2


def _padding(size: int) -> int:
    """What PyTorch counts as allocated beyond a tensor of 10 MiB or more.

    It asks CUDA for a multiple of 2 MiB, and splits off what is left only if that is more than 1 MiB
    (`c10/cuda/CUDACachingAllocator.cpp`, `get_allocation_size` and `should_split`).
    """
    spare = -size % (2 * MIB)
    return spare if size >= 10 * MIB and spare <= MIB else 0


def report(rows: Sequence[Row]) -> str:
    """The table, its footnotes, the medians, and the causes of what differs."""
    parts = (_table(rows), _footnotes(rows), _summary(rows), _explained(rows), _reasons(rows))
    return "\n\n".join("\n".join(part) for part in parts)


_LINE = "{:>6} {:<36} {:>2} |{:>7}{:>9}{:>7} |{:>7}{:>8}{:>7} |{:>7}{:>15} |{:>7}{:>7}{:>7}"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield f"{'':<47}|{'weights':^24}|{'KV cache':^23}|{'overhead':^23}|{'free':^14}{'peak':>7}"
    yield _LINE.format("record", "model", "tp", "log", "ours", "diff", "log", "ours", "diff", "log", "ours", "log", "ours", "log")
    for one in rows:
        weights, kv_cache = one.tenant.weight_bytes, one.tenant.kv_cache_bytes
        yield _LINE.format(
            one.number,
            one.model[:36],
            one.tp,
            _gib(one.weights),
            "unknown" if weights is None else _gib(weights),
            _difference(None if weights is None else weights - one.weights),
            _gib(one.kv_cache),
            "unknown" if kv_cache is None else _gib(kv_cache) + (" " if one.has_logged_blocks else "*"),
            _difference(one.kv_cache_difference),
            _gib(one.overhead),
            _rest(one.split),
            _gib(None if one.total is None or one.used is None else one.total - one.used),
            _gib(None if one.split is None else one.split.components[FREE]),
            _gib(one.activation_peak),
        )


def _rest(split: MemorySplit | None) -> str:
    if split is None:
        return "-"
    if split.contradiction:
        return "contradiction"
    overhead = split.components.get(OVERHEAD)
    return f"unknown {_gib(split.components[UNKNOWN])}" if overhead is None else _gib(overhead)


def _footnotes(rows: Sequence[Row]) -> Iterator[str]:
    yield "GiB of one GPU. overhead: non-torch memory and CUDA graphs. -: not logged. peak: activations, which are reserved and"
    yield "not resident: they are within free until a large batch has run. Total and used are taken from the log, so free agrees"
    yield "by construction, and our overhead is the log's less the differences of weights and cache."
    yield "*: no tokens logged; the blocks are cut from the logged KV memory, so it agrees but for less than a block."
    yield "unknown: weights that are quantized or not known to the byte; then what is used and is no cache is one component."
    for one in rows:
        if one.refusal is not None:
            yield f"Record {one.number}: no cache layout: {one.refusal}."
    negative = [one.number for one in rows if (one.graphs or 0) < 0]
    if negative:
        yield f"Records {_listed(negative)} log CUDA graphs below 0, kept as they are: vLLM prints free memory before the capture"
        yield "minus free memory after it, a measuring artefact where memory was given back meanwhile."
    contradicted = [one.number for one in rows if one.split is not None and one.split.contradiction]
    if contradicted:
        yield f"contradiction: in records {_listed(contradicted)} the parts of `used` add up to less than our weights and cache"
        yield "together; for such a reading the exporter shows all of it as unknown."


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    yield f"{len(rows)} records"
    weights = [(error, one) for one in rows if (error := one.weights_error) is not None]
    yield f"weights: {_median_and_worst(weights)}; bar {WEIGHTS_BAR:.0%}"
    ours = [(error, one) for error, one in weights if one.number not in OUTLIERS]
    yield f"weights without outliers: {_median_and_worst(ours)}"
    caches = [
        (one.kv_cache_difference / one.kv_cache, one)
        for one in rows
        if one.has_logged_blocks and one.kv_cache_difference is not None
    ]
    yield f"KV cache where tokens are logged: {_median_and_worst(caches)}; bar 0.005 GiB and one block"
    yield f"beyond the bar and no outlier: {_listed([one.number for one in rows if one.is_missed]) or 'none'}"


def _median_and_worst(errors: Sequence[tuple[float, Row]]) -> str:
    if not errors:
        return "no records"
    middle = median(error for error, _ in errors)
    worst, one = max(errors, key=lambda pair: abs(pair[0]))
    return f"{len(errors)} records, median {middle:+.3%}, worst {worst:+.3%} (record {one.number})"


_CAUSE_LINE = "{:>6} {:>13} {:>8} {:>8} {:>8} {:>8}"


def _explained(rows: Sequence[Row]) -> Iterator[str]:
    yield "Weights that are logged and are no parameters of the config at hand, in GiB:"
    yield _CAUSE_LINE.format("record", "logged - ours", "rotary", "padding", "vision", "left")
    for one in rows:
        if one.causes is not None and one.unexplained is not None:
            causes, left = one.causes, one.unexplained
            parts = (left + causes.total, causes.rotary, causes.padding, causes.vision, left)
            yield _CAUSE_LINE.format(one.number, *(f"{part / GIB:.4f}" for part in parts))


def _reasons(rows: Sequence[Row]) -> Iterator[str]:
    yield "rotary: the table of max_position_embeddings x head_dim x 2 bytes is a buffer, no parameter."
    yield "padding: PyTorch rounds a matrix up to a multiple of 2 MiB where that takes up to 1 MiB, and counts it as allocated."
    yield "vision: tower and projector, which the text config does not have; from their published sizes."
    if all(one.has_kv_cache_within_bar for one in rows):
        yield "KV cache: every difference is within the two decimals of the log and the part of a block that is left over."
    left = [one.number for one in rows if abs(one.unexplained or 0) > PRINTED_BYTES]
    if left:
        yield f"left: within the two decimals of the log, but for records {_listed(left)}, where no cause is established."
    yield from (f"Outlier {one.number}: {OUTLIERS[one.number]}." for one in rows if one.number in OUTLIERS)


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.2f}"


def _difference(size: int | None) -> str:
    return "" if size is None else f"{size / GIB:+.2f}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers)


def main(path: Path) -> int:
    """Print the report; returns the exit status."""
    rows = list(load(path))
    print(report(rows))
    return 1 if any(one.is_missed for one in rows) else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
