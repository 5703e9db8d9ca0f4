"""How much of the pool is free, and how many more requests of a given length fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache_exporter.capacity import Capacity, blocks_per_max_len_request, requests_that_fit
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
    lengths = _lengths(reading, layout, max_model_len, request_lengths)
    left = None if free is None else _left_after_queue(reading, free.blocks, lengths, max_num_seqs)
    return Headroom(
        used=used,
        free=free,
        slots=tuple(
            RequestSlots(
                length=length.name,
                tokens=length.tokens,
                slots=_at_most(length.requests_in(capacity.usable_blocks), max_num_seqs),
                remaining=None if left is None else _at_most(length.requests_in(left.blocks), left.seats),
            )
            for length in lengths
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


@dataclass(frozen=True)
class _Length:
    """A length by name, its tokens where known, and its blocks: `admitted` to start one, `held` while it runs."""

    name: str
    tokens: int | None
    admitted: int
    held: int

    def requests_in(self, blocks: int) -> int:
        """Requests of this length that fit into so many blocks."""
        return requests_that_fit(blocks, admitted=self.admitted, held=self.held)


def _lengths(
    reading: EngineReading, layout: KVCacheLayout | None, max_model_len: int | None, request_lengths: Sequence[int]
) -> list[_Length]:
    """The lengths whose cost is known; the engine refuses what is longer than max_model_len."""
    lengths = []
    blocks_at_max = blocks_per_max_len_request(reading, layout, max_model_len)
    if blocks_at_max is not None:
        held = blocks_at_max if layout is None or max_model_len is None else layout.blocks_for_request(max_model_len)
        lengths.append(_Length(MAX_LENGTH, max_model_len, blocks_at_max, min(held, blocks_at_max)))
    if layout is not None:
        lengths += [
            _Length(str(tokens), tokens, layout.reserved_blocks(tokens), layout.blocks_for_request(tokens))
            for tokens in request_lengths
            if max_model_len is None or tokens <= max_model_len
        ]
    return lengths


@dataclass(frozen=True)
class _Left:
    """Free blocks, and free seats where their limit is known, that the queue leaves to a new request."""

    blocks: int
    seats: int | None


def _left_after_queue(reading: EngineReading, free_blocks: int, lengths: Sequence[_Length], max_num_seqs: int | None) -> _Left:
    """What is free once everyone who waits has been served, first come, first served.

    The page does not tell how long the waiting ones are, so each counts as one of max_model_len. Then nothing is left whenever
    one waits for blocks, since its need is no more than that; and a queue that is there for a moment (the step's token budget is
    spent) does not hide the free blocks. Where the cost at max_model_len or the number of seats is not known, nothing is left.
    """
    waiting = _waiting_for_capacity(reading)
    running = reading.num_requests_running
    seats = None if max_num_seqs is None or running is None else max_num_seqs - running
    if not waiting:
        return _Left(free_blocks, None if seats is None else max(0, seats))
    blocks_at_max = next((length.admitted for length in lengths if length.name == MAX_LENGTH), None)
    if blocks_at_max is None or seats is None:
        return _Left(0, 0)
    return _Left(max(0, free_blocks - waiting * blocks_at_max), max(0, seats - waiting))


def _waiting_for_capacity(reading: EngineReading) -> int:
    """Requests that wait for blocks or a seat; `deferred` ones wait for something else (a LoRA slot, a KV transfer)."""
    return reading.num_requests_waiting_by_reason.get("capacity", reading.num_requests_waiting or 0)


def _at_most(slots: int, limit: int | None) -> int:
    return slots if limit is None else min(slots, limit)
