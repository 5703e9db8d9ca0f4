"""How much of the pool is free, and how many more requests of a given length fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache_exporter.capacity import Capacity, blocks_per_max_len_request
from kvcache_exporter.kv_cache_spec import KVCacheLayout
from kvcache_exporter.readings import EngineReading

MAX_LENGTH = "max"


@dataclass(frozen=True)
class BlockUse:
    """A number of blocks of one pool, and the same as bytes over all ranks and as tokens of block space."""

    blocks: int
    size_bytes: int | None
    tokens: int | None


@dataclass(frozen=True)
class RequestSlots:
    """Requests of one length: `slots` fit into the empty engine, `remaining` more fit now.

    `length` is `max` or the number of tokens as text. `tokens` is None when max_model_len is not known, `remaining` when usage
    is not.
    """

    length: str
    tokens: int | None
    slots: int
    remaining: int | None


@dataclass(frozen=True)
class Headroom:
    """Use and free space of one engine's pool; `used` and `free` are None when the engine does not report usage, or sleeps."""

    used: BlockUse | None
    free: BlockUse | None
    slots: tuple[RequestSlots, ...]


def headroom_of(
    reading: EngineReading,
    capacity: Capacity,
    layout: KVCacheLayout | None,
    *,
    max_model_len: int | None,
    max_num_seqs: int | None,
    request_lengths: Sequence[int],
) -> Headroom:
    """Headroom of one engine now. A sleeping engine has given its cache back, so nothing of it is free."""
    used = free = None
    if reading.used_blocks is not None and reading.awake is not False:
        used = _block_use(reading.used_blocks, capacity, layout)
        free = _block_use(capacity.usable_blocks - reading.used_blocks, capacity, layout)
    seats = _free_seats(reading, max_num_seqs)
    free_blocks = None if free is None else free.blocks
    return Headroom(
        used=used,
        free=free,
        slots=tuple(
            RequestSlots(
                length=name,
                tokens=tokens,
                slots=_at_most(capacity.usable_blocks // blocks, max_num_seqs),
                remaining=_remaining(reading, free_blocks, blocks, seats),
            )
            for name, tokens, blocks in _lengths(reading, layout, max_model_len, request_lengths)
        ),
    )


def _block_use(blocks: int, capacity: Capacity, layout: KVCacheLayout | None) -> BlockUse:
    if layout is not None and layout.tokens_per_block is not None:
        tokens: int | None = blocks * layout.tokens_per_block
    elif capacity.tokens is not None:
        tokens = capacity.tokens * blocks // capacity.usable_blocks if capacity.usable_blocks else 0
    else:
        tokens = None
    return BlockUse(blocks, None if layout is None else blocks * layout.bytes_per_block, tokens)


def _lengths(
    reading: EngineReading, layout: KVCacheLayout | None, max_model_len: int | None, request_lengths: Sequence[int]
) -> list[tuple[str, int | None, int]]:
    """(name, tokens, blocks a request) of each length whose cost is known; the engine refuses longer ones than max_model_len."""
    lengths: list[tuple[str, int | None, int]] = []
    blocks_at_max = blocks_per_max_len_request(reading, layout, max_model_len)
    if blocks_at_max is not None:
        lengths.append((MAX_LENGTH, max_model_len, blocks_at_max))
    if layout is not None:
        lengths += [
            (str(tokens), tokens, layout.blocks_for_request(tokens))
            for tokens in request_lengths
            if max_model_len is None or tokens <= max_model_len
        ]
    return lengths


def _free_seats(reading: EngineReading, max_num_seqs: int | None) -> int | None:
    if max_num_seqs is None or reading.num_requests_running is None:
        return None
    return max(0, max_num_seqs - reading.num_requests_running)


def _remaining(reading: EngineReading, free_blocks: int | None, blocks_per_request: int, seats: int | None) -> int | None:
    if free_blocks is None:
        return None
    # vLLM serves its queue first come, first served: while one waits, a new request waits behind it.
    if _is_anyone_waiting(reading):
        return 0
    return _at_most(free_blocks // blocks_per_request, seats)


def _is_anyone_waiting(reading: EngineReading) -> bool:
    """Whether a request waits for blocks or a seat; `deferred` ones wait for something else (a LoRA slot, a KV transfer)."""
    waiting = reading.num_requests_waiting_by_reason.get("capacity", reading.num_requests_waiting)
    return waiting is not None and waiting > 0


def _at_most(slots: int, limit: int | None) -> int:
    return slots if limit is None else min(slots, limit)
