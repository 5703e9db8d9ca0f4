"""How much of the pool is free, how many more requests fit, and what keeps the next one out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcache_exporter.capacity import Capacity, blocks_per_max_len_request, requests_that_fit
from kvcache_exporter.expected_blocks import ExpectedBlocks, RequestBlocks, expected_blocks, fullest
from kvcache_exporter.expected_blocks import requests_that_fit as expected_requests_that_fit
from kvcache_exporter.history import Traffic
from kvcache_exporter.kv_cache_spec import KVCacheLayout
from kvcache_exporter.limits import AdmissionLimits, Seats, binding_limit, free_seats, states_are_most, waiting_for_capacity
from kvcache_exporter.readings import EngineReading
from kvcache_exporter.request_mix import RequestMix

MAX_LENGTH = "max"
TYPICAL_LENGTH = "typical"
P95_LENGTH = "p95"
# How slots are listed; lengths of the operator's choice come behind.
_ORDER = {TYPICAL_LENGTH: 0, P95_LENGTH: 1, MAX_LENGTH: 2}

# A typical request counts this much more than its mean, so that a promise is kept more often than broken: the requests of the
# next minutes are not those of the last.
_MARGIN = 0.05
# What waits is longer than the mean request by so many standard deviations: of a queue nothing is known but its number, and a
# long request at its head is what most often holds it up.
_QUEUE_SPREAD = 1.0


@dataclass(frozen=True)
class BlockUse:
    """A number of blocks of one pool, and the same as bytes over all ranks and as tokens of block space."""

    blocks: int
    size_bytes: int | None
    tokens: int | None


@dataclass(frozen=True)
class RequestSlots:
    """Requests of one length: `slots` fit into the empty engine, `remaining` more fit now.

    `length` is `max`, `typical`, `p95` or the number of tokens as text. `tokens` is None when max_model_len is not known,
    `remaining` when usage is not. `blocks` is what one such request takes at its most.
    """

    length: str
    tokens: int | None
    slots: int
    remaining: int | None
    blocks: float = 0.0


@dataclass(frozen=True)
class Headroom:
    """Use and free space of one engine's pool; `used` and `free` are None when the engine does not report usage, or sleeps.

    `binding_limit` is one of limits.LIMITS for typical requests (of max_model_len before any is known), None when not known.
    """

    used: BlockUse | None
    free: BlockUse | None
    slots: tuple[RequestSlots, ...]
    binding_limit: str | None = None

    def of(self, length: str) -> RequestSlots | None:
        """Slots of the length of that name."""
        return next((slots for slots in self.slots if slots.length == length), None)

    @property
    def ratio(self) -> float | None:
        """Remaining over all slots for typical requests, 0-1; None when either is not known or the engine holds none."""
        typical = self.of(TYPICAL_LENGTH)
        if typical is None or typical.remaining is None or not typical.slots:
            return None
        return typical.remaining / typical.slots


def headroom_of(
    reading: EngineReading,
    capacity: Capacity,
    layout: KVCacheLayout | None,
    *,
    max_model_len: int | None,
    limits: AdmissionLimits,
    request_lengths: Sequence[int],
    traffic: Traffic | None = None,
    is_serving: bool = True,
) -> Headroom:
    """Headroom of one engine now. Of an engine that does not serve (asleep, frozen), nothing is free.

    `traffic` is what its past says of its requests, None when nothing is known of it.
    """
    used = free = None
    if reading.used_blocks is not None and reading.awake is not False:
        used = _block_use(reading.used_blocks, capacity, layout)
        free = _block_use(capacity.usable_blocks - reading.used_blocks, capacity, layout) if is_serving else None
    lengths = _lengths(reading, layout, max_model_len, request_lengths)
    typical = None
    if traffic is not None and traffic.mix is not None and layout is not None and max_model_len is not None:
        typical = _Typical.of(reading, traffic, traffic.mix, layout, max_model_len)
        lengths.append(typical.long_request)
    seats = free_seats(reading, limits)
    left = None if free is None else _left_for_others(reading, capacity, free.blocks, lengths, typical, limits, seats)
    slots = [_slots(length, capacity, limits, left) for length in lengths]
    binding = None
    if typical is not None:
        slots.append(typical.slots(capacity, limits, left))
        binding = None if left is None else typical.binding_limit(capacity, limits, seats)
    elif lengths and lengths[0].name == MAX_LENGTH:
        if traffic is not None and traffic.has_requests:
            # The first ones run: until one has ended, it may be as long as any.
            slots.append(replace(slots[0], length=TYPICAL_LENGTH))
        binding = None if left is None else _limit_at_max(lengths[0], left, seats)
    if traffic is not None and traffic.queue_is_stuck:
        # First come, first served: whoever comes waits behind those who wait, however short it is.
        slots = [entry if entry.remaining is None else replace(entry, remaining=0) for entry in slots]
    slots.sort(key=lambda entry: _ORDER.get(entry.length, len(_ORDER)))
    return Headroom(used=used, free=free, slots=tuple(slots), binding_limit=binding)


def _slots(length: _Length, capacity: Capacity, limits: AdmissionLimits, left: _Left | None) -> RequestSlots:
    return RequestSlots(
        length=length.name,
        tokens=length.tokens,
        slots=_at_most(length.requests_in(capacity.usable_blocks), limits.seats),
        remaining=None if left is None else _at_most(length.requests_in(left.blocks), left.seats),
        blocks=length.held,
    )


@dataclass(frozen=True)
class _Typical:
    """A typical request, and what it meets: the blocks of those that run, now and later, and its own."""

    tokens: int
    long_request: _Length
    beside_running: ExpectedBlocks
    in_empty_engine: ExpectedBlocks
    admission_extra: float
    waiting: int
    queue_stays: bool
    least_free_blocks: int | None
    states_are_most: bool

    @classmethod
    def of(cls, reading: EngineReading, traffic: Traffic, mix: RequestMix, layout: KVCacheLayout, max_model_len: int) -> _Typical:
        blocks = RequestBlocks(layout)
        prompt, tokens = math.ceil(mix.prompt_mean), min(max_model_len, round(mix.mean_tokens))
        now = expected_blocks(blocks, mix, traffic.ages, reading.used_blocks or 0, max_model_len)
        alone = replace(now, running=(0.0,) * len(now.running))
        shared = traffic.prefix.shared_ratio if traffic.prefix is not None and traffic.ages else 0.0
        if shared:
            # Beside others a request does not need the blocks that they hold for it too.
            rest = replace(mix, prompt_mean=mix.prompt_mean * (1 - shared))
            now = replace(expected_blocks(blocks, rest, (), 0, max_model_len), running=now.running)
        return cls(
            tokens=tokens,
            long_request=_p95_length(mix, layout, max_model_len),
            beside_running=now,
            in_empty_engine=alone,
            admission_extra=max(0, layout.reserved_blocks(prompt) - layout.blocks_for_request(prompt)),
            waiting=waiting_for_capacity(reading),
            queue_stays=traffic.queue_stays,
            least_free_blocks=traffic.least_free_blocks,
            states_are_most=states_are_most(layout, tokens),
        )

    def fit(self, expected: ExpectedBlocks, capacity: Capacity, limits: AdmissionLimits, *, waiting: int) -> int:
        """Requests that fit into the blocks beside those here, `waiting` ones served first; at least 0."""
        number = expected_requests_that_fit(
            expected,
            capacity.usable_blocks,
            waiting=waiting,
            queue_spread=_QUEUE_SPREAD,
            cost_factor=1 + _MARGIN,
            admission_extra=self.admission_extra + limits.watermark_blocks(capacity.usable_blocks),
        )
        return max(0, math.floor(number))

    def slots(self, capacity: Capacity, limits: AdmissionLimits, left: _Left | None) -> RequestSlots:
        remaining = None
        if left is not None:
            remaining = _at_most(self.fit(self.beside_running, capacity, limits, waiting=self.waiting), left.seats)
        return RequestSlots(
            length=TYPICAL_LENGTH,
            tokens=self.tokens,
            slots=_at_most(self.fit(self.in_empty_engine, capacity, limits, waiting=0), limits.seats),
            remaining=remaining,
            blocks=max(self.in_empty_engine.request),
        )

    def binding_limit(self, capacity: Capacity, limits: AdmissionLimits, seats: Seats | None) -> str | None:
        """What a growing load meets first, or what the queue that stays waits for."""
        beside_running = capacity.usable_blocks - fullest(self.beside_running) - limits.watermark_blocks(capacity.usable_blocks)
        free = beside_running if self.least_free_blocks is None else min(beside_running, self.least_free_blocks)
        has_room = self.long_request.requests_in(math.floor(max(0.0, free))) > 0
        return binding_limit(
            by_blocks=self.fit(self.beside_running, capacity, limits, waiting=0),
            seats=seats,
            queue_has_room=self.queue_stays and has_room,
            states_are_most=self.states_are_most,
        )

    def most_blocks(self) -> float:
        """Most blocks that those here, the queue served, hold at any moment."""
        request = max(self.in_empty_engine.request)
        spread = math.sqrt(max(self.in_empty_engine.request_variance))
        queue = self.waiting * request + _QUEUE_SPREAD * math.sqrt(self.waiting) * spread
        return fullest(self.beside_running) + queue


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
            _length(str(tokens), tokens, layout) for tokens in request_lengths if max_model_len is None or tokens <= max_model_len
        ]
    return lengths


def _length(name: str, tokens: int, layout: KVCacheLayout) -> _Length:
    return _Length(name, tokens, layout.reserved_blocks(tokens), layout.blocks_for_request(tokens))


def _p95_length(mix: RequestMix, layout: KVCacheLayout, max_model_len: int) -> _Length:
    return _length(P95_LENGTH, min(max_model_len, max(1, math.ceil(mix.quantile_tokens(0.95)))), layout)


@dataclass(frozen=True)
class _Left:
    """Free blocks, and free seats where their limit is known, that running requests and queue leave to a new one."""

    blocks: int
    seats: int | None


def _left_for_others(
    reading: EngineReading,
    capacity: Capacity,
    free_blocks: int,
    lengths: Sequence[_Length],
    typical: _Typical | None,
    limits: AdmissionLimits,
    seats: Seats | None,
) -> _Left:
    """What a request of a fixed length finds: it may come to its full length just when those here hold the most.

    Where the kind of requests is not known, nobody grows and each waiting one counts as one of max_model_len. Then nothing is
    left whenever one waits for blocks, since its need is no more than that; and a queue that is there for a moment (the step's
    token budget is spent) does not hide the free blocks. Where the cost at max_model_len or the number of seats is not known
    either, a queue leaves nothing.
    """
    waiting = waiting_for_capacity(reading)
    free_now = max(0, free_blocks - limits.watermark_blocks(capacity.usable_blocks))
    free = None if seats is None else seats.after(waiting)
    if typical is not None:
        later = math.floor(capacity.usable_blocks - typical.most_blocks())
        return _Left(max(0, min(free_now, later)), free)
    if not waiting:
        return _Left(free_now, free)
    blocks_at_max = next((length.admitted for length in lengths if length.name == MAX_LENGTH), None)
    if blocks_at_max is None or seats is None:
        return _Left(0, 0)
    return _Left(max(0, free_now - waiting * blocks_at_max), free)


def _limit_at_max(longest: _Length, left: _Left, seats: Seats | None) -> str | None:
    """The limit for requests of max_model_len, before anything is known of those that come."""
    return binding_limit(by_blocks=longest.requests_in(left.blocks), seats=seats, queue_has_room=False, states_are_most=False)


def _at_most(slots: int, limit: int | None) -> int:
    return slots if limit is None else min(slots, limit)
