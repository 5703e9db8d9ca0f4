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
    """Seats that neither running nor deferred requests hold, and the number of deferred ones.

    Deferred requests (waiting for a KV transfer or a LoRA slot) hold seats: vLLM's scheduler admits none while running and
    deferred ones add up to max_num_seqs.
    """

    free: int
    deferred: int

    def after(self, waiting: int) -> int:
        """Seats that are left once everyone who waits has one, not below 0."""
        return max(0, self.free - waiting)


def free_seats(reading: EngineReading, limits: AdmissionLimits) -> Seats | None:
    """The seats of an engine; None when the number of seats or of running requests is not known."""
    if limits.seats is None or reading.num_requests_running is None:
        return None
    deferred = reading.num_requests_waiting_by_reason.get("deferred", 0)
    return Seats(max(0, limits.seats - reading.num_requests_running - deferred), deferred)


def waiting_for_capacity(reading: EngineReading) -> int:
    """Requests that wait for blocks or a seat, as far as the page tells them from deferred ones."""
    return reading.num_requests_waiting_by_reason.get("capacity", reading.num_requests_waiting or 0)


def binding_limit(*, by_blocks: int, seats: Seats | None, queue_has_room: bool, states_are_most: bool) -> str | None:
    """The limit that a growing load meets first, or that the queue waits for; None when that cannot be told.

    `by_blocks` further requests fit into the blocks beside those that run, the queue not counted. `queue_has_room`: one stays
    although a long request would find blocks. Then it waits for the engine's speed, or for a seat.
    """
    if queue_has_room:
        if seats is None:
            return None
        if seats.free > 0:
            return COMPUTE
    if seats is not None and seats.free < by_blocks:
        is_deferred = seats.deferred > 0 and (seats.free == 0 or seats.free + seats.deferred >= by_blocks)
        return DEFERRED if is_deferred else MAX_NUM_SEQS
    return STATE_SLOTS if states_are_most else KV_BLOCKS


def states_are_most(layout: KVCacheLayout, tokens: int) -> bool:
    """Whether most blocks of a request of that length are states (Mamba, linear attention, short convolution)."""
    states = sum(g.blocks_for_request(tokens) for g in layout.groups if g.spec.kind == MambaSpec.kind)
    return 2 * states > layout.blocks_for_request(tokens)
