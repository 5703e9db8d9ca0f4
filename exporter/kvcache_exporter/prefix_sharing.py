"""What prefix caching saves: prompt tokens that are not computed, and those among them whose blocks a running request holds.

Only the second kind saves blocks. A hit on a block that nobody holds takes it off the free ones, as a new block would be: vLLM
counts cached blocks without a holder as free (`v1/core/block_pool.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcache_exporter.readings import EngineReading
from kvcache_exporter.running_requests import AgeGroup


@dataclass(frozen=True)
class PrefixSavings:
    """Shares of the prompt tokens of late, 0-1: `hit_ratio` was in the cache, `shared_ratio` in blocks that others held."""

    hit_ratio: float
    shared_ratio: float


class PrefixSharing:
    """Learns from one run of one engine how much of the prompts is shared. `half_life_seconds` is how fast it forgets.

    No page tells which hits are on held blocks. But running requests that share hold less than their tokens need: what is
    missing, over what would be if every hit were shared with another running request, is the share that is.
    """

    def __init__(self, half_life_seconds: float) -> None:
        self._half_life_seconds = half_life_seconds
        self._queries = self._hits = 0.0
        self._missing = self._possible = 0.0

    def observe(self, seconds: float, before: EngineReading, after: EngineReading) -> None:
        """Take the queries and hits between two readings of one run."""
        counters = (
            before.prefix_cache_queries_tokens,
            after.prefix_cache_queries_tokens,
            before.prefix_cache_hits_tokens,
            after.prefix_cache_hits_tokens,
        )
        if None in counters:
            return
        queries_before, queries, hits_before, hits = (float(counter or 0) for counter in counters)
        if queries <= queries_before:
            return
        kept = 0.5 ** (seconds / self._half_life_seconds)
        self._queries = self._queries * kept + queries - queries_before
        self._hits = self._hits * kept + max(0.0, hits - hits_before)

    def compare(self, seconds: float, prompt_mean: float, ages: Sequence[AgeGroup], held_tokens: float) -> None:
        """Compare what running requests hold, in tokens, with what they would hold if nothing were shared."""
        number = sum(group.number for group in ages)
        if number < 2 or not self._hits:
            return
        needed = sum(group.number * (prompt_mean + group.age_tokens) for group in ages)
        kept = 0.5 ** (seconds / self._half_life_seconds)
        self._missing = self._missing * kept + needed - held_tokens
        self._possible = self._possible * kept + (number - 1) * prompt_mean * self._hits / self._queries

    def savings(self) -> PrefixSavings | None:
        """What is saved lately; None before the first prompt was looked up."""
        if self._queries <= 0:
            return None
        hit_ratio = min(1.0, self._hits / self._queries)
        shared = 0.0 if self._possible <= 0 else min(1.0, max(0.0, self._missing / self._possible))
        return PrefixSavings(hit_ratio, hit_ratio * shared)
