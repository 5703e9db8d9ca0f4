"""What one layer keeps, on one rank: the base that every attention design extends (`vllm/v1/kv_cache_interface.py`)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

SpecT = TypeVar("SpecT", bound="KVCacheSpec")


@dataclass(frozen=True)
class Reserve:
    """What vLLM counts with when it says how many requests of max_model_len fit. All are tokens but the rank count."""

    max_model_len: int
    max_in_flight_tokens: int
    max_num_encoder_input_tokens: int
    decode_context_parallel_size: int = 1


@dataclass(frozen=True)
class KVCacheSpec:
    """`block_size` is tokens in one block; `page_size_padded` bytes replace the page's own size where pages have to be alike."""

    kind: ClassVar[str]
    grows: ClassVar[bool] = False
    can_pad: ClassVar[bool] = True

    block_size: int
    page_size_padded: int | None = None

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one block in this layer."""
        raise NotImplementedError

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block in this layer, padding included."""
        return self.unpadded_page_size_bytes if self.page_size_padded is None else self.page_size_padded

    @property
    def same_slots_as(self) -> Hashable:
        """Layers with equal values always need the same number of token slots, so they can share a block table."""
        raise NotImplementedError

    def reserved_blocks(self, reserve: Reserve) -> int:
        """Blocks that vLLM sets aside for a request of max_model_len at start-up."""
        raise NotImplementedError

    def blocks_for_request(self, num_tokens: int) -> int:
        """Blocks that a running request of `num_tokens` tokens (prompt and output) holds between two steps."""
        raise NotImplementedError

    def scaled(self: SpecT, factor: int) -> SpecT:
        """The same layer with `factor` times as many tokens in a block."""
        return replace(self, block_size=self.block_size * factor)

    def padded(self: SpecT, page_size_bytes: int) -> SpecT:
        """The same layer with its page padded to `page_size_bytes`."""
        return replace(self, page_size_padded=page_size_bytes)


def cdiv(a: int, b: int) -> int:
    """A / b rounded up."""
    return -(-a // b)
