"""Groups for pools in which pages of different sizes lie side by side in one block (DeepSeek-V4's layout).

The rules are those of `vllm/v1/core/kv_cache_utils.py`, `_get_packed_kv_cache_groups`: layers that need the same slots make a
bucket; one with as many layers of each page size repeats a pattern, and is cut so that all groups hold about as many repeats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from kvcache_exporter.kv_cache_spec.layers import PlacedLayer
from kvcache_exporter.kv_cache_spec.spec import cdiv


def pack_layers(layers: Sequence[PlacedLayer]) -> list[tuple[PlacedLayer, ...]]:
    """The layers of each group."""
    buckets: dict[Hashable, list[PlacedLayer]] = {}
    for layer in layers:
        buckets.setdefault(layer.spec.same_slots_as, []).append(layer)
    balanced = [bucket for bucket in buckets.values() if _is_balanced(bucket)]
    patterns = [_repeats(bucket) for bucket in balanced if _page_sizes(bucket) > 1]
    if not patterns:
        return [tuple(bucket) for bucket in buckets.values()]
    repeats_per_group = _least_padding([_repeats(bucket) for bucket in balanced], at_least=max(patterns))
    groups: list[tuple[PlacedLayer, ...]] = []
    for bucket in buckets.values():
        count = cdiv(_repeats(bucket), repeats_per_group) if _is_balanced(bucket) else 1
        groups += _split(bucket, count)
    return groups


def _split(bucket: Sequence[PlacedLayer], count: int) -> list[tuple[PlacedLayer, ...]]:
    """Every `count`-th repeat of the pattern goes to the same group."""
    if count == 1:
        return [tuple(bucket)]
    by_page: dict[int, list[PlacedLayer]] = {}
    for layer in bucket:
        by_page.setdefault(layer.spec.page_size_bytes, []).append(layer)
    repeats = list(zip(*by_page.values(), strict=True))
    return [tuple(layer for repeat in repeats[start::count] for layer in repeat) for start in range(count)]


def _counts(bucket: Sequence[PlacedLayer]) -> Counter[int]:
    return Counter(layer.spec.page_size_bytes for layer in bucket)


def _is_balanced(bucket: Sequence[PlacedLayer]) -> bool:
    return len(set(_counts(bucket).values())) == 1


def _page_sizes(bucket: Sequence[PlacedLayer]) -> int:
    return len(_counts(bucket))


def _repeats(bucket: Sequence[PlacedLayer]) -> int:
    return max(_counts(bucket).values())


def _least_padding(counts: Sequence[int], *, at_least: int) -> int:
    """The group size that rounds all counts up by the least in all; the larger of equals."""
    sizes = range(at_least, max(*counts, at_least) + 1)
    return min(sizes, key=lambda size: (sum(-count % size for count in counts), -size))
