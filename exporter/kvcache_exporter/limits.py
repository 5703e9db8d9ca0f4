"""What keeps a further request out: blocks, seats, states, deferred requests that hold seats, or the engine's speed."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache_exporter.kv_cache_spec import KVCacheLayout
from kvcache_exporter.kv_cache_spec.mamba import MambaSpec
from kvcache_exporter.readings import EngineReading

KV_BLOCKS = "kv_blocks"
MAX_NUM_SEQS = "max_num_seqs"
STATE_SLOTS = "state_slots"
DEFERRED = "deferred"
COMPUTE = "compute"
MEMORY_LIMITS = (KV_BLOCKS, STATE_SLOTS)
LIMITS = (KV_BLOCKS, MAX_NUM_SEQS, STATE_SLOTS, DEFERRED, COMPUTE)


@dataclass(frozen=True)
class AdmissionLimits:
    """Flags of the engine that limit how many requests run; None where they are not known.

    `max_num_active_seqs` caps admission below max_num_seqs (vLLM's SchedulerConfig, 2026-09). `watermark` is the share of
    blocks that vLLM keeps free when it admits a request (0.24 and later; 0 by default; 0.01 in V0).
    """

    max_num_seqs: int | None = None
    max_num_active_seqs: int | None = None
    watermark: float = 0.0

    @property
    def seats(self) -> int | None:
        """Requests that may run at once, as far as flags say."""
        return min((limit for limit in (self.max_num_active_seqs, self.max_num_seqs) if limit is not None), default=None)

    def watermark_blocks(self, usable_blocks: int) -> int:
        """Blocks that admission leaves free, rounded down as vLLM does."""
        return int(self.watermark * usable_blocks)


@dataclass(frozen=True)
class Seats:
    """Seats that are free once everyone who waits has one: `free` as it is, `free_without_deferred` if nobody were deferred.

    Deferred requests (waiting for a KV transfer or a LoRA slot) hold seats: vLLM's scheduler admits none while running and
    deferred ones add up to max_num_seqs.
    """

    free: int
    free_without_deferred: int


def free_seats(reading: EngineReading, limits: AdmissionLimits) -> Seats | None:
    """Seats for further requests, not below 0; None when the number of seats or of running requests is not known."""
    if limits.seats is None or reading.num_requests_running is None:
        return None
    left = limits.seats - reading.num_requests_running - waiting_for_capacity(reading)
    return Seats(max(0, left - deferred(reading)), max(0, left))


def waiting_for_capacity(reading: EngineReading) -> int:
    """Requests that wait for blocks or a seat, as far as the page tells them from deferred ones."""
    return reading.num_requests_waiting_by_reason.get("capacity", reading.num_requests_waiting or 0)


def deferred(reading: EngineReading) -> int:
    """Requests that wait for something else: a KV transfer, a LoRA slot."""
    return reading.num_requests_waiting_by_reason.get("deferred", 0)


def binding_limit(
    *, by_blocks: int, seats: Seats | None, queue_stays: bool, states_are_most: bool, is_blocked: bool
) -> str | None:
    """The limit that a growing load meets first; None when that cannot be told.

    `by_blocks` further requests fit into the blocks. A queue that stays (`queue_stays`) although there are blocks and seats for
    it waits for the engine's speed; without a known number of seats it may as well wait for a seat. `is_blocked`: the blocks do
    not hold those that are here.
    """
    if queue_stays and by_blocks > 0 and not is_blocked:
        if seats is None:
            return None
        if seats.free > 0:
            return COMPUTE
    if seats is not None and seats.free < by_blocks:
        return DEFERRED if seats.free_without_deferred >= by_blocks else MAX_NUM_SEQS
    return STATE_SLOTS if states_are_most else KV_BLOCKS


def states_are_most(layout: KVCacheLayout, tokens: int) -> bool:
    """Whether most blocks of a request of that length are states (Mamba, linear attention, short convolution)."""
    states = sum(g.blocks_for_request(tokens) for g in layout.groups if g.spec.kind == MambaSpec.kind)
    return 2 * states > layout.blocks_for_request(tokens)
