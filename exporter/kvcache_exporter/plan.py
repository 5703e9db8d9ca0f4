"""What an engine will hold before it is started: layout and capacity from a model and the flags of `vllm serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcache_exporter.capacity import kv_cache_size_tokens, max_concurrency, num_gpu_blocks_for, requests_that_fit
from kvcache_exporter.errors import KVCacheExporterError, UnsupportedModelError
from kvcache_exporter.kv_cache_spec import KERNEL_BLOCK_SIZE, EngineConfig, KVCacheLayout, kv_cache_layout
from kvcache_exporter.model_config import ModelConfig


class RefusedPlanError(KVCacheExporterError):
    """What vLLM would refuse, or what is not known; `str()` is the reason."""


@dataclass(frozen=True)
class Plan:
    """A layout, the length that it is planned for, and the pool that a given memory makes. None: not known.

    `weight_bytes` are those of the whole checkpoint. `num_blocks` counts the null block, as vLLM does.
    """

    model: ModelConfig
    layout: KVCacheLayout
    max_model_len: int | None
    weight_bytes: int | None
    num_blocks: int | None
    lengths: tuple[int, ...]


def make_plan(
    model: ModelConfig,
    engine: EngineConfig,
    *,
    kv_bytes_per_rank: int | None,
    draft: ModelConfig | None = None,
    weight_bytes: int | None = None,
    lengths: Sequence[int] = (),
    allow_long_max_model_len: bool = False,
) -> Plan:
    """Plan one engine. `kv_bytes_per_rank` is the memory that each rank has for its cache, `draft` the model that drafts for it.

    `allow_long_max_model_len` takes a longer max_model_len than the model's own, as VLLM_ALLOW_LONG_MAX_MODEL_LEN does.

    Raises RefusedPlanError when the layout is not known, when vLLM would refuse a flag, or when one request of max_model_len does
    not fit.
    """
    _check_flags(model, engine, allow_long_max_model_len=allow_long_max_model_len)
    try:
        layout = kv_cache_layout(model, engine, draft)
    except UnsupportedModelError as error:
        raise RefusedPlanError(str(error)) from error
    max_model_len = engine.max_model_len or model.max_model_len
    num_blocks = None if kv_bytes_per_rank is None else num_gpu_blocks_for(layout, kv_bytes_per_rank)
    if num_blocks is not None and max_model_len is not None:
        needed = layout.reserved_blocks(max_model_len)
        # The null block holds nothing, so one more than the request takes has to be there.
        if num_blocks - 1 < needed:
            raise RefusedPlanError(
                f"vLLM refuses to start: one request of {max_model_len} tokens takes {needed} blocks, "
                f"and {kv_bytes_per_rank} bytes make {max(0, num_blocks - 1)} usable ones"
            )
    return Plan(model, layout, max_model_len, weight_bytes, num_blocks, tuple(lengths))


def _check_flags(model: ModelConfig, engine: EngineConfig, *, allow_long_max_model_len: bool) -> None:
    """Refuse what vLLM's own checks refuse (`vllm/config/model.py`, and the block sizes in `vllm/v1/attention/backends/`)."""
    longest = model.longest_max_model_len
    asked = engine.max_model_len
    if asked is not None and longest is not None and asked > longest and not allow_long_max_model_len:
        raise RefusedPlanError(
            f"vLLM refuses max_model_len {asked}: config.json of {model.architecture} allows at most {longest}; "
            "where the engine runs with VLLM_ALLOW_LONG_MAX_MODEL_LEN=1, set that here too"
        )
    if engine.block_size is not None and engine.block_size % KERNEL_BLOCK_SIZE:
        raise RefusedPlanError(
            f"vLLM refuses block_size {engine.block_size}: its attention kernels take multiples of {KERNEL_BLOCK_SIZE}"
        )


def plan_as_json(plan: Plan) -> Mapping[str, Any]:
    """The plan as an object of plain values; keys that are not known are left out."""
    layout, engine = plan.layout, plan.layout.engine
    stages = range(engine.pipeline_parallel_size)
    bytes_per_block = layout.bytes_per_block_per_rank
    values = {
        "architecture": plan.model.architecture,
        "assumed": layout.is_assumed or None,
        "vllm_version": ".".join(map(str, engine.vllm_version)),
        "max_model_len": plan.max_model_len,
        "max_num_batched_tokens": engine.batched_tokens,
        "block_size": layout.block_size,
        "cache_dtype": layout.cache_dtype,
        "groups": [
            {
                "kind": group.spec.kind,
                "layers": len(group.on_stage(0).layers),
                "block_size": group.spec.block_size,
                "page_bytes": group.on_stage(0).page_bytes,
            }
            for group in layout.groups
        ],
        "bytes_per_block_per_rank": list(bytes_per_block),
        "num_blocks": plan.num_blocks,
        "kv_cache_size_tokens": _tokens(plan),
        "max_concurrency": _concurrency(plan),
        "marginal_bytes_per_token_per_rank": list(layout.marginal_bytes_per_token_per_rank),
        "fixed_blocks_per_request": layout.fixed_blocks_per_request,
        "fixed_bytes_per_request_per_rank": [layout.fixed_blocks_per_request * bytes_per_block[stage] for stage in stages],
        "blocks_for_request": {str(length): layout.reserved_blocks(length) for length in plan.lengths},
        "blocks_held_by_request": {str(length): layout.blocks_for_request(length) for length in plan.lengths},
        "weight_bytes": plan.weight_bytes,
        "weight_bytes_per_rank": _weight_bytes_per_rank(plan),
    }
    return {key: value for key, value in values.items() if value is not None}


def _tokens(plan: Plan) -> int | None:
    return None if plan.num_blocks is None else kv_cache_size_tokens(plan.layout, plan.num_blocks, plan.max_model_len)


def _concurrency(plan: Plan) -> float | None:
    if plan.num_blocks is None or plan.max_model_len is None:
        return None
    return max_concurrency(plan.layout, plan.num_blocks, plan.max_model_len)


def _weight_bytes_per_rank(plan: Plan) -> int | None:
    """An even share of the checkpoint; what ranks replicate (norms, small projections) is not known from it."""
    engine = plan.layout.engine
    ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size
    return None if plan.weight_bytes is None else -(-plan.weight_bytes // ranks)


def plan_as_text(plan: Plan) -> str:
    """The plan as a table for a person."""
    layout, engine = plan.layout, plan.layout.engine
    ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size
    lines = [
        f"{plan.model.architecture} in vLLM {'.'.join(map(str, engine.vllm_version))} on {ranks} x {engine.gpu_name}, "
        f"cache {layout.cache_dtype}, {engine.batched_tokens} batched tokens, {engine.max_in_flight_tokens} in flight",
        "",
        "group                     layers  tokens a block  bytes a page",
    ]
    lines += [
        f"{group.spec.kind:<24}  {len(group.layers):>6}  {group.spec.block_size:>14}  {group.page_bytes:>12,}"
        for group in layout.groups
    ]
    if plan.model.is_assumed:
        lines.insert(1, "ASSUMED: this architecture is not known; its file reads like a plain decoder of full attention")
    elif layout.is_assumed:
        lines.insert(1, "ASSUMED: config.json names no dtype; vLLM then takes one of 16 bits")
    lines += ["", f"bytes a block and rank    {', '.join(f'{size:,}' for size in layout.bytes_per_block_per_rank)}"]
    lines.append(f"bytes a token, all ranks  {layout.bytes_per_token:,.0f}")
    if layout.fixed_blocks_per_request:
        lines.append(f"fixed part of a request   {layout.fixed_blocks_per_request:,} blocks reserved")
    if plan.weight_bytes is not None:
        lines.append(f"weights                   {plan.weight_bytes:,} bytes in the checkpoint")
    if plan.num_blocks is None:
        lines.append("pool                      give --kv-bytes (per rank), as in vLLM's log: Available KV cache memory")
    else:
        lines.append(f"blocks                    {plan.num_blocks:,}, of which 1 is never usable")
        tokens, concurrency = _tokens(plan), _concurrency(plan)
        if tokens is not None:
            lines.append(f"KV cache size             {tokens:,} tokens")
        if concurrency is not None:
            lines.append(f"maximum concurrency       {concurrency:.2f}x at {plan.max_model_len:,} tokens a request")
    lines += [_length_line(plan, length) for length in plan.lengths]
    return "\n".join(lines)


def _length_line(plan: Plan, length: int) -> str:
    reserved, held = plan.layout.reserved_blocks(length), plan.layout.blocks_for_request(length)
    line = f"request of {length:>12,}   {held:,} blocks held, {reserved:,} reserved at start-up"
    if plan.num_blocks is None:
        return line
    return f"{line}; {requests_that_fit(plan.num_blocks - 1, admitted=reserved, held=held):,} such requests fit"
