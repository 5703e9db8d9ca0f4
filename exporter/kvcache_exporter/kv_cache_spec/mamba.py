"""Layers that keep a state of constant size: Mamba, linear attention, short convolutions (`layers/mamba/mamba_utils.py`)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import singledispatch
from math import prod
from typing import ClassVar

from kvcache_exporter.errors import UnsupportedModelError
from kvcache_exporter.kv_cache_spec.spec import KVCacheSpec, Reserve
from kvcache_exporter.model_config.layers import (
    GatedDeltaNetLayer,
    KimiDeltaAttentionLayer,
    LinearAttentionLayer,
    Mamba1Layer,
    Mamba2Layer,
    ShortConvLayer,
)


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    """A request holds `num_blocks` states of `state_bytes`, of whatever length it is.

    One is in use; with prefix caching a second one is kept at the last block boundary, and some mixers keep a third for prefill.
    Each speculative token takes one more.
    """

    kind: ClassVar[str] = "mamba"

    state_bytes: int = 0
    num_blocks: int = 1

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one state."""
        return self.state_bytes

    @property
    def same_slots_as(self) -> Hashable:
        """States of one size and number."""
        return ("mamba", self.page_size_bytes, self.num_blocks)

    def reserved_blocks(self, reserve: Reserve) -> int:
        """The same for any length."""
        return self.num_blocks

    def blocks_for_request(self, num_tokens: int) -> int:
        """The same for any length."""
        return self.num_blocks


@dataclass(frozen=True)
class StateDtypes:
    """Bytes of an element of convolution states and of recurrent states; None for the design's own default."""

    conv_bytes: int
    recurrent_bytes: int | None


@singledispatch
def state_bytes(layer: object, tensor_parallel_size: int, num_speculative_tokens: int, dtypes: StateDtypes) -> int:
    """Bytes of the state of one layer on one rank. Raises UnsupportedModelError when it cannot be divided over the ranks."""
    raise NotImplementedError(type(layer).__name__)


@state_bytes.register
def _(layer: Mamba1Layer, tensor_parallel_size: int, num_speculative_tokens: int, dtypes: StateDtypes) -> int:
    width = _share(layer.d_inner, tensor_parallel_size)
    return (layer.d_conv - 1) * width * dtypes.conv_bytes + width * layer.d_state * _recurrent_bytes(dtypes)


@state_bytes.register
def _(layer: Mamba2Layer, tensor_parallel_size: int, num_speculative_tokens: int, dtypes: StateDtypes) -> int:
    # Groups that do not divide are replicated so that each rank has those of its heads.
    extra_groups = 0 if layer.n_groups % tensor_parallel_size == 0 else tensor_parallel_size - layer.n_groups
    conv_dim = layer.d_inner + 2 * (layer.n_groups + extra_groups) * layer.d_state
    conv = (layer.d_conv - 1 + num_speculative_tokens) * _share(conv_dim, tensor_parallel_size)
    ssm = prod((_share(layer.num_heads, tensor_parallel_size), layer.head_dim, layer.d_state))
    return conv * dtypes.conv_bytes + ssm * _recurrent_bytes(dtypes)


@state_bytes.register
def _(layer: GatedDeltaNetLayer, tensor_parallel_size: int, num_speculative_tokens: int, dtypes: StateDtypes) -> int:
    conv_dim = 2 * layer.num_k_heads * layer.head_k_dim + layer.num_v_heads * layer.head_v_dim
    conv = (layer.conv_kernel_size - 1 + num_speculative_tokens) * _share(conv_dim, tensor_parallel_size)
    recurrent = prod((_share(layer.num_v_heads, tensor_parallel_size), layer.head_v_dim, layer.head_k_dim))
    return conv * dtypes.conv_bytes + recurrent * _recurrent_bytes(dtypes)


@state_bytes.register
def _(layer: KimiDeltaAttentionLayer, tensor_parallel_size: int, num_speculative_tokens: int, dtypes: StateDtypes) -> int:
    conv_dim = 3 * layer.num_heads * layer.head_dim
    conv = (layer.conv_kernel_size - 1 + num_speculative_tokens) * _share(conv_dim, tensor_parallel_size)
    recurrent = prod((_share(layer.num_heads, tensor_parallel_size), layer.head_dim, layer.head_dim))
    # Kept in float32 unless a flag says otherwise, whatever the model's dtype.
    return conv * dtypes.conv_bytes + recurrent * (dtypes.recurrent_bytes or 4)


@state_bytes.register
def _(layer: ShortConvLayer, tensor_parallel_size: int, num_speculative_tokens: int, dtypes: StateDtypes) -> int:
    return (layer.l_cache - 1) * _share(layer.conv_dim, tensor_parallel_size) * dtypes.conv_bytes


@state_bytes.register
def _(layer: LinearAttentionLayer, tensor_parallel_size: int, num_speculative_tokens: int, dtypes: StateDtypes) -> int:
    return prod((_share(layer.num_heads, tensor_parallel_size), layer.head_dim, layer.head_dim)) * dtypes.conv_bytes


def _recurrent_bytes(dtypes: StateDtypes) -> int:
    return dtypes.conv_bytes if dtypes.recurrent_bytes is None else dtypes.recurrent_bytes


def _share(size: int, tensor_parallel_size: int) -> int:
    if size % tensor_parallel_size:
        raise UnsupportedModelError(
            f"vLLM refuses tensor_parallel_size {tensor_parallel_size}, since a state of width {size} cannot be divided evenly",
            field="tensor_parallel_size",
            value=tensor_parallel_size,
        )
    return size // tensor_parallel_size
