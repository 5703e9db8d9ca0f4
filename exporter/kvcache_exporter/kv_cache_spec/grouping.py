"""Layers -> KV-cache groups: layers of a group share block tables, and all groups draw from one pool.

The rules are those of `vllm/v1/core/kv_cache_utils.py`: one group if all layers need the same slots, else groups of equal pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcache_exporter.errors import UnsupportedModelError
from kvcache_exporter.kv_cache_spec.full_attention import FullAttentionSpec
from kvcache_exporter.kv_cache_spec.latent import SlidingWindowMLASpec
from kvcache_exporter.kv_cache_spec.layers import PlacedLayer
from kvcache_exporter.kv_cache_spec.mamba import MambaSpec
from kvcache_exporter.kv_cache_spec.packing import pack_layers
from kvcache_exporter.kv_cache_spec.sliding_window import ChunkedLocalAttentionSpec, SlidingWindowSpec
from kvcache_exporter.kv_cache_spec.spec import KVCacheSpec, Reserve, cdiv


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share block tables; `packed` ones lie side by side in a block, whatever the size of their pages."""

    layers: tuple[PlacedLayer, ...]
    packed: bool = False

    @property
    def spec(self) -> KVCacheSpec:
        """What the first layer keeps; the others need as many slots."""
        return self.layers[0].spec

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in one layer if all are alike, else over all layers."""
        sizes = [layer.spec.page_size_bytes for layer in self.layers]
        return sizes[0] if len(set(sizes)) == 1 and not self.packed else sum(sizes)

    def on_stage(self, stage: int) -> KVCacheGroup:
        """The part of the group that one pipeline stage holds."""
        return replace(self, layers=tuple(layer for layer in self.layers if layer.stage == stage))

    def bytes_per_block(self, stage: int) -> int:
        """Bytes of one block over this group's layers on one rank of a stage."""
        return sum(layer.spec.page_size_bytes for layer in self.layers if layer.stage == stage)

    def reserved_blocks(self, reserve: Reserve) -> int:
        """Blocks that vLLM sets aside in this group for a request of max_model_len."""
        return max(layer.spec.reserved_blocks(reserve) for layer in self.layers)

    def blocks_for_request(self, num_tokens: int) -> int:
        """Blocks that a running request of `num_tokens` tokens holds in this group."""
        return max(layer.spec.blocks_for_request(num_tokens) for layer in self.layers)


def group_layers(
    layers: Sequence[PlacedLayer], *, disable_hybrid_kv_cache_manager: bool, vllm_version: tuple[int, int]
) -> tuple[KVCacheGroup, ...]:
    """Group all layers of a model. Raises UnsupportedModelError when vLLM could not lay them out."""
    if disable_hybrid_kv_cache_manager:
        layers = _without_windows(layers)
    if any(isinstance(layer.spec, SlidingWindowMLASpec) for layer in layers):
        return tuple(KVCacheGroup(members, packed=True) for members in pack_layers(layers))
    if len({layer.spec for layer in layers}) == 1 or len({layer.spec.same_slots_as for layer in layers}) == 1:
        return (KVCacheGroup(tuple(layers)),)
    return _equal_groups(_equal_pages(layers, vllm_version), vllm_version)


def _without_windows(layers: Sequence[PlacedLayer]) -> list[PlacedLayer]:
    """Without the hybrid manager, layers with a window or chunk beside full ones keep every token as those do."""
    if not any(isinstance(layer.spec, FullAttentionSpec) for layer in layers):
        return list(layers)
    return [replace(layer, spec=_promoted(layer.spec)) for layer in layers]


def _promoted(spec: KVCacheSpec) -> KVCacheSpec:
    if isinstance(spec, (SlidingWindowSpec, ChunkedLocalAttentionSpec)):
        return FullAttentionSpec(spec.block_size, spec.page_size_padded, spec.num_kv_heads, spec.head_bytes)
    return spec


def _equal_pages(layers: Sequence[PlacedLayer], vllm_version: tuple[int, int]) -> list[PlacedLayer]:
    """Make all pages alike: more tokens in a block where the largest page is a multiple, else padding."""
    largest = max(layer.spec.page_size_bytes for layer in layers)
    return [replace(layer, spec=_with_page(layer.spec, largest, vllm_version)) for layer in layers]


def _with_page(spec: KVCacheSpec, page_size_bytes: int, vllm_version: tuple[int, int]) -> KVCacheSpec:
    own = spec.page_size_bytes
    if own == page_size_bytes:
        return spec
    if not isinstance(spec, MambaSpec) and page_size_bytes % own == 0 and vllm_version >= (0, 20):
        return spec.scaled(page_size_bytes // own)
    if spec.can_pad and vllm_version >= (0, 29):
        return spec.padded(page_size_bytes)
    raise UnsupportedModelError(
        f"a page of {own} bytes ({spec.kind}) cannot share a pool with pages of {page_size_bytes} bytes in vLLM "
        f"{vllm_version[0]}.{vllm_version[1]}",
        field="page_size_bytes",
        value=own,
    )


def _equal_groups(layers: Sequence[PlacedLayer], vllm_version: tuple[int, int]) -> tuple[KVCacheGroup, ...]:
    """Cut each kind of layer into groups of about the size of the rarest kind; every n-th layer, so that stages share evenly."""
    kinds: dict[KVCacheSpec, list[PlacedLayer]] = {}
    for layer in layers:
        kinds.setdefault(layer.spec, []).append(layer)
    sizes = [len(members) for members in kinds.values()]
    size = min(sizes)
    # Not much larger: pad the smaller kind instead of doubling the groups of the larger.
    if max(sizes) < 1.5 * size and vllm_version >= (0, 20):
        size = max(sizes)
    groups = []
    for members in kinds.values():
        count = cdiv(len(members), size)
        groups += [KVCacheGroup(tuple(members[start::count])) for start in range(count)]
    return tuple(groups)
