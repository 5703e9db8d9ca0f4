"""Compares the layouts of this package with what vLLM's own code computed, a row for each model and set of flags.

Run it as `python tests/oracle.py PATH_TO_oracle.jsonl`, with the folder `configs` beside that file. It prints how many rows of
each model are right, wrong and refused, and exits with 1 if any is wrong. A refusal states no figure, so it is not wrong.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache_exporter.capacity import kv_cache_size_tokens, max_concurrency, num_gpu_blocks_for
from kvcache_exporter.errors import UnsupportedModelError
from kvcache_exporter.kv_cache_spec import EngineConfig, KVCacheLayout, kv_cache_layout
from kvcache_exporter.kv_cache_spec.engine_config import GIB
from kvcache_exporter.model_config import parse_model_config

RIGHT, WRONG, REFUSED = "right", "wrong", "refused"

# The oracle's short names of flags; the others have vLLM's own.
_FLAGS = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dcp": "decode_context_parallel_size",
    "kv_dtype": "kv_cache_dtype",
}
_GPU_MEMORY_GIB = {"NVIDIA H100 80GB HBM3": 80, "NVIDIA B200": 180, "NVIDIA L40S": 48}

Figures = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """One row: its model, RIGHT, WRONG or REFUSED, and why it is not right."""

    model: str
    word: str
    reason: str = ""


def verdicts(path: Path) -> Iterator[Verdict]:
    """The verdict on every row of oracle.jsonl."""
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            config = json.loads((path.parent / "configs" / f"{row['model']}.json").read_text())
            yield verdict(row, config)


def verdict(row: Mapping[str, Any], config: Mapping[str, Any]) -> Verdict:
    """Compare one row with what this package makes of the model's config.json and the row's flags."""
    try:
        model = parse_model_config(config)
        layout = kv_cache_layout(model, _engine(row))
    except UnsupportedModelError as refusal:
        return Verdict(row["model"], RIGHT) if "refused" in row else Verdict(row["model"], REFUSED, str(refusal))
    if "refused" in row:
        return Verdict(row["model"], WRONG, f"{row['flags']}: vLLM refuses this: {row['refused']}")
    max_model_len = row["flags"].get("max_model_len") or model.max_model_len or 0
    for ours, theirs in _comparisons(row, layout, max_model_len):
        different = {name: (ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]}
        if different:
            return Verdict(row["model"], WRONG, f"{row['flags']}: (ours, vLLM's) {different}")
    return Verdict(row["model"], RIGHT)


def _engine(row: Mapping[str, Any]) -> EngineConfig:
    # Rows that were built by hand, or that vLLM refused at once, name no GPU.
    gpu = row.get("gpu", "NVIDIA H100 80GB HBM3")
    flags = {_FLAGS.get(name, name): value for name, value in row["flags"].items() if name not in ("gpu", "speculative_config")}
    flags["kv_cache_dtype_skip_layers"] = tuple(flags.get("kv_cache_dtype_skip_layers", ()))
    speculation = row["flags"].get("speculative_config")
    if speculation is not None:
        flags |= {"num_speculative_tokens": speculation["num_speculative_tokens"], "num_draft_layers": 1}
    return EngineConfig(**flags, gpu_name=gpu, gpu_memory_bytes=_GPU_MEMORY_GIB[gpu] * GIB)


def _comparisons(row: Mapping[str, Any], layout: KVCacheLayout, max_model_len: int) -> Iterator[tuple[Figures, Figures]]:
    """Pairs of (our figures, vLLM's) that have to be equal: what the flags came to, then each memory and length tried."""
    if "derived" in row:
        yield _resolved(layout, max_model_len), _resolved_by_vllm(row["derived"])
    if "results" not in row:
        # A packed dtype, built by hand: one result, written in the row itself.
        yield _packed(layout, row), dict(row)
    for result in row.get("results", ()):
        memory = result.get("avail_bytes", row.get("avail_bytes"))
        if "max_model_len" in result:
            yield _figures(layout, memory, result["max_model_len"], result["need_blocks_at"]), _figures_of_vllm(result)
        else:
            # No request of the default length fits beside the null block.
            fits = num_gpu_blocks_for(layout, memory) - 1 >= layout.reserved_blocks(max_model_len)
            yield {"one request fits": fits}, {"one request fits": False}


def _resolved(layout: KVCacheLayout, max_model_len: int) -> Figures:
    return {
        "max_model_len": max_model_len,
        "block_size": layout.block_size,
        "max_num_batched_tokens": layout.engine.batched_tokens,
        "max_in_flight_tokens": layout.engine.max_in_flight_tokens,
    }


def _resolved_by_vllm(derived: Mapping[str, Any]) -> Figures:
    names = ("max_model_len", "max_num_batched_tokens", "max_in_flight_tokens")
    return {name: derived[name] for name in names} | {"block_size": derived["block_size_after"]}


def _packed(layout: KVCacheLayout, row: Mapping[str, Any]) -> Figures:
    blocks = num_gpu_blocks_for(layout, row["avail_bytes"])
    return {
        "bytes_per_block": layout.bytes_per_block,
        "bytes_per_token": layout.bytes_per_token,
        "page_bytes": layout.groups[0].page_bytes,
        "num_blocks": blocks,
        "max_concurrency": max_concurrency(layout, blocks, row["max_model_len"]),
        "gpu_kv_cache_size_tokens": kv_cache_size_tokens(layout, blocks, row["max_model_len"]),
    }


def _figures(layout: KVCacheLayout, memory: int, max_model_len: int, lengths: Iterable[str]) -> Figures:
    blocks = num_gpu_blocks_for(layout, memory)
    reserve = layout.reserve(max_model_len)
    stages = [(group, group.on_stage(0)) for group in layout.groups]
    return {
        "bytes per block and rank": list(layout.bytes_per_block_per_rank),
        "blocks": blocks,
        "blocks needed": {length: layout.reserved_blocks(int(length)) for length in lengths},
        "concurrency": round(max_concurrency(layout, blocks, max_model_len), 9),
        "tokens": kv_cache_size_tokens(layout, blocks, max_model_len),
        "fixed blocks": layout.fixed_blocks_per_request,
        "fixed bytes": layout.fixed_blocks_per_request * layout.bytes_per_block_per_rank[0],
        "marginal bytes": round(layout.marginal_bytes_per_token_per_rank[0], 6),
        "groups": sorted(
            (group.spec.kind, len(part.layers), group.spec.block_size, part.page_bytes, group.reserved_blocks(reserve))
            for group, part in stages
        ),
    }


def _figures_of_vllm(result: Mapping[str, Any]) -> Figures:
    group_fields = ("kind", "layers", "block_size", "page_bytes", "blocks_per_max_len_request")
    return {
        "bytes per block and rank": result["bytes_per_block_per_rank"],
        "blocks": result["num_blocks"],
        "blocks needed": result["need_blocks_at"],
        "concurrency": round(result["max_concurrency"], 9),
        "tokens": result["gpu_kv_cache_size_tokens"],
        "fixed blocks": result["fixed_blocks_per_request"],
        "fixed bytes": _on_first_stage(result["fixed_bytes_per_request_per_rank"]),
        "marginal bytes": round(_on_first_stage(result["marginal_bytes_per_token_per_rank"]), 6),
        "groups": sorted(tuple(group[field] for field in group_fields) for group in result["groups"]),
    }


def _on_first_stage(value: list[float] | float) -> float:
    """Rows that were built by hand have one number in place of a list."""
    return value[0] if isinstance(value, list) else value


def report(found: Iterable[Verdict]) -> str:
    """A line for each model, with the reasons under it, and a total."""
    by_model: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, dict[str, None]] = defaultdict(dict)
    for one in found:
        by_model[one.model][one.word] += 1
        if one.reason:
            reasons[one.model][f"{one.word}: {one.reason}"] = None
    lines = []
    for model, words in sorted(by_model.items()):
        lines.append(_line(model, words))
        lines += [f"    {reason}" for reason in reasons[model]]
    return "\n".join([*lines, _line("total", sum(by_model.values(), Counter()))])


def _line(name: str, words: Mapping[str, int]) -> str:
    return f"{name:<40}" + "".join(f"{words.get(word, 0):>6} {word}" for word in (RIGHT, WRONG, REFUSED))


def main() -> int:
    """Print the report on the file that the command line names."""
    if len(sys.argv) != 2:
        print("usage: python tests/oracle.py PATH_TO_oracle.jsonl", file=sys.stderr)
        return 2
    found = list(verdicts(Path(sys.argv[1])))
    print(report(found))
    return 1 if any(one.word == WRONG for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
