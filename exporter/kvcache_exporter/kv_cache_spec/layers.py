"""Decoder layers of a model -> what each keeps on one rank of an engine, and on which pipeline stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvcache_exporter.errors import UnsupportedModelError
from kvcache_exporter.kv_cache_spec import cache_dtype as dtypes
from kvcache_exporter.kv_cache_spec.cross_attention import CrossAttentionSpec
from kvcache_exporter.kv_cache_spec.engine_config import EngineConfig
from kvcache_exporter.kv_cache_spec.full_attention import FullAttentionSpec
from kvcache_exporter.kv_cache_spec.latent import MLAAttentionSpec, SlidingWindowMLASpec
from kvcache_exporter.kv_cache_spec.mamba import MambaSpec
from kvcache_exporter.kv_cache_spec.pipeline import stage_of_layers
from kvcache_exporter.kv_cache_spec.rank import (
    context_shards,
    heads_of_rank,
    latent_bytes,
    latent_shards,
    served_dtype,
    state_bytes_of_rank,
)
from kvcache_exporter.kv_cache_spec.resolved_cache import KERNEL_BLOCK_SIZE, ResolvedCache, resolve_cache
from kvcache_exporter.kv_cache_spec.sliding_window import ChunkedLocalAttentionSpec, SlidingWindowSpec
from kvcache_exporter.kv_cache_spec.spec import KVCacheSpec, cdiv
from kvcache_exporter.model_config import ModelConfig
from kvcache_exporter.model_config.layers import (
    AttentionLayer,
    CacheLayer,
    CompressedLatentLayer,
    CrossAttentionLayer,
    DecoderLayer,
    MLALayer,
    SlidingLatentLayer,
    SparseIndexerLayer,
)

# DeepSeek-V4 keeps pages of several sizes in one block: each is rounded up to a whole row.
_PACKED_ALIGNMENT = 576
# An index key is fp8 with one fp32 scale for each 128 elements, whatever the cache dtype.
_INDEX_SCALE_ELEMENTS = 128


@dataclass(frozen=True)
class PlacedLayer:
    """What one layer keeps, and the pipeline stage that it is on."""

    spec: KVCacheSpec
    stage: int


def place_layers(
    model: ModelConfig, engine: EngineConfig, draft: ModelConfig | None = None
) -> tuple[tuple[PlacedLayer, ...], ResolvedCache]:
    """The layers that keep something, in the order of the model, and what the flags came to; those of a draft model come last.

    Raises UnsupportedModelError for a dtype that is not known and for what vLLM refuses.
    """
    if model.num_attention_heads % engine.tensor_parallel_size:
        raise UnsupportedModelError(
            f"vLLM refuses tensor_parallel_size {engine.tensor_parallel_size}, "
            f"since it does not divide the {model.num_attention_heads} attention heads",
            field="tensor_parallel_size",
            value=engine.tensor_parallel_size,
        )
    builder = _Builder(model, engine, resolve_cache(model, engine))
    stages = stage_of_layers(len(model.decoder_layers), engine.pipeline_parallel_size)
    placed = [
        PlacedLayer(builder.spec(layer, index), stage)
        for index, (decoder_layer, stage) in enumerate(zip(model.decoder_layers, stages, strict=True))
        for layer in decoder_layer
    ]
    placed += [
        PlacedLayer(builder.spec(layer, len(stages) + index), stages[-1])
        for index, decoder_layer in enumerate(_draft_layers(model, engine, draft))
        for layer in decoder_layer
    ]
    if not placed:
        raise UnsupportedModelError("no layer keeps a cache", field="num_hidden_layers", value=len(stages))
    return tuple(placed), builder.cache


def _draft_layers(model: ModelConfig, engine: EngineConfig, draft: ModelConfig | None) -> Iterator[DecoderLayer]:
    if draft is not None:
        yield from draft.decoder_layers
    for _ in range(engine.num_draft_layers):
        if model.draft_layer is None:
            raise UnsupportedModelError(
                "the layers that its drafts would add are not known",
                field="speculative_config",
                value="mtp",
            )
        yield model.draft_layer


@dataclass(frozen=True)
class _Builder:
    """Builds the specs of one model on one engine from what all its layers share."""

    model: ModelConfig
    engine: EngineConfig
    cache: ResolvedCache

    def spec(self, layer: CacheLayer, index: int) -> KVCacheSpec:
        """What decoder layer `index` keeps for one of its cache layers."""
        if isinstance(layer, AttentionLayer):
            return self._attention(layer, index)
        if isinstance(layer, CrossAttentionLayer):
            return CrossAttentionSpec(
                block_size=self.cache.block_size,
                num_kv_heads=heads_of_rank(layer.num_kv_heads, self.engine),
                head_bytes=dtypes.head_bytes(self.cache.cache_dtype, layer.head_size, layer.head_size),
                encoder_tokens=layer.encoder_tokens or self.engine.batched_tokens,
            )
        if isinstance(layer, MLALayer):
            return self._latent(latent_bytes(layer, self.cache.cache_dtype))
        if isinstance(layer, CompressedLatentLayer):
            latent = MLAAttentionSpec(
                self.cache.block_size, head_bytes=layer.state_bytes, tokens_per_state=layer.tokens_per_state
            )
            return latent.padded(_rounded_up(latent.page_size_bytes, _PACKED_ALIGNMENT))
        if isinstance(layer, SlidingLatentLayer):
            window = SlidingWindowMLASpec(layer.block_size, head_bytes=layer.state_bytes, sliding_window=layer.sliding_window)
            return window.padded(_rounded_up(window.page_size_bytes, _PACKED_ALIGNMENT))
        if isinstance(layer, SparseIndexerLayer):
            scales = layer.index_head_dim // _INDEX_SCALE_ELEMENTS * 4
            return self._latent(layer.index_head_dim + scales)
        return MambaSpec(
            block_size=self._block_size_of_state(),
            page_size_padded=self.cache.state_page_bytes,
            state_bytes=state_bytes_of_rank(layer, self.model, self.engine),
            num_blocks=self._blocks_of_state(),
        )

    def _latent(self, token_bytes: int) -> MLAAttentionSpec:
        return MLAAttentionSpec(
            block_size=self.cache.block_size,
            head_bytes=token_bytes,
            decode_context_parallel_size=latent_shards(self.engine),
        )

    def _attention(self, layer: AttentionLayer, index: int) -> KVCacheSpec:
        dtype = served_dtype(self.engine) if self._is_skipped(layer, index) else self.cache.cache_dtype
        heads = heads_of_rank(layer.num_kv_heads, self.engine)
        # vLLM before 0.20 stored values at the size of keys.
        size_v = layer.head_size if self.engine.vllm_version < (0, 20) else layer.head_size_v
        head_bytes = dtypes.head_bytes(dtype, layer.head_size, size_v)
        block_size, shared_page = self.cache.block_size, self.cache.shared_page_bytes
        if layer.sliding_window is not None:
            if shared_page is not None:
                block_size = max(1, shared_page // (heads * head_bytes) // KERNEL_BLOCK_SIZE) * KERNEL_BLOCK_SIZE
            return SlidingWindowSpec(block_size, shared_page, heads, head_bytes, layer.sliding_window)
        if layer.attention_chunk_size is not None:
            return ChunkedLocalAttentionSpec(block_size, None, heads, head_bytes, layer.attention_chunk_size)
        return FullAttentionSpec(block_size, None, heads, head_bytes, context_shards(layer, self.model, self.engine))

    def _is_skipped(self, layer: AttentionLayer, index: int) -> bool:
        skip = self.engine.kv_cache_dtype_skip_layers
        return str(index) in skip or ("sliding_window" in skip and layer.sliding_window is not None)

    def _block_size_of_state(self) -> int:
        """A state stands for all tokens of a request; with prefix caching one is kept at each block boundary."""
        length = self.engine.max_model_len or self.model.max_model_len
        return self.cache.block_size if self.engine.enable_prefix_caching or length is None else length

    def _blocks_of_state(self) -> int:
        engine = self.engine
        blocks = 1 + engine.num_speculative_tokens
        if engine.enable_prefix_caching:
            blocks += 1
            if self.model.has_prefill_checkpoint and engine.vllm_version >= (0, 29):
                blocks += 1
        return blocks


def _rounded_up(size: int, multiple: int) -> int:
    return cdiv(size, multiple) * multiple
