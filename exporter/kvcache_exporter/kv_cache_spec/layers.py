"""Decoder layers of a model -> what each keeps on one rank of an engine: dtype, block size, heads of a rank, state sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from kvcache_exporter.errors import UnsupportedModelError
from kvcache_exporter.kv_cache_spec import cache_dtype as dtypes
from kvcache_exporter.kv_cache_spec.cross_attention import CrossAttentionSpec
from kvcache_exporter.kv_cache_spec.engine_config import EngineConfig
from kvcache_exporter.kv_cache_spec.full_attention import FullAttentionSpec
from kvcache_exporter.kv_cache_spec.latent import MLAAttentionSpec, SlidingWindowMLASpec
from kvcache_exporter.kv_cache_spec.mamba import MambaSpec, StateDtypes, state_bytes
from kvcache_exporter.kv_cache_spec.pipeline import stage_of_layers
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

LayerT = TypeVar("LayerT")

# The smallest block that the attention kernels take, and vLLM's default.
_KERNEL_BLOCK_SIZE = 16
# FlashAttention 3 has no larger heads than this; with fp8 on Hopper vLLM takes another kernel for them, with larger blocks.
_LARGEST_COMMON_HEAD = 256
# DeepSeek's own packed format for sparse attention: 512 fp8 elements, 4 fp32 scales, 64 bf16 rotary elements.
_FP8_DS_MLA_BYTES = 656
# Hybrids with latents: their decode kernels want the number of kernel blocks aligned to this many tokens.
_LATENT_HYBRID_BLOCK_SIZE = 128
# DeepSeek-V4 keeps pages of several sizes in one block: each is rounded up to a whole row, and its block of tokens is fixed.
_PACKED_ALIGNMENT = 576
_PACKED_BLOCK_SIZE = 256
# An index key is fp8 with one fp32 scale for each 128 elements, whatever the cache dtype.
_INDEX_SCALE_ELEMENTS = 128


_NOT_STATES = (
    AttentionLayer,
    CrossAttentionLayer,
    MLALayer,
    SparseIndexerLayer,
    CompressedLatentLayer,
    SlidingLatentLayer,
)


@dataclass(frozen=True)
class PlacedLayer:
    """What one layer keeps, and the pipeline stage that it is on."""

    spec: KVCacheSpec
    stage: int


@dataclass(frozen=True)
class ResolvedCache:
    """What the flags come to for a model: `block_size` tokens after all alignment, and the dtype of cached elements.

    `is_dtype_assumed` tells that neither flag nor file states a dtype; vLLM then takes one of 16 bits.
    """

    block_size: int
    cache_dtype: str
    is_dtype_assumed: bool


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
    builder = _Builder(model, engine)
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
    return tuple(placed), ResolvedCache(builder.block_size, builder.cache_dtype, builder.is_dtype_assumed)


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


class _Builder:
    """Builds the specs of one model on one engine: everything that all layers share is settled once."""

    def __init__(self, model: ModelConfig, engine: EngineConfig) -> None:
        self._model = model
        self._engine = engine
        kinds = {type(layer) for layers in model.decoder_layers for layer in layers}
        self._is_sparse = SparseIndexerLayer in kinds
        self._has_latents = MLALayer in kinds
        self._is_packed = CompressedLatentLayer in kinds
        self._model_dtype = _served_dtype(engine)
        self.cache_dtype = self._resolve_cache_dtype()
        self.is_dtype_assumed = model.dtype is None and engine.dtype == "auto" and self.cache_dtype == self._model_dtype
        if dtypes.is_turboquant(self.cache_dtype) and not engine.kv_cache_dtype_skip_layers:
            raise UnsupportedModelError(
                f"with {self.cache_dtype} vLLM leaves outer layers unquantized by a rule of its own; "
                "name them with kv_cache_dtype_skip_layers",
                field="kv_cache_dtype",
                value=self.cache_dtype,
            )
        self.block_size = self._base_block_size()
        self._state_page: int | None = None
        self._shared_page: int | None = None
        self._align_to_states()
        self._align_to_skipped_layers()

    def spec(self, layer: CacheLayer, index: int) -> KVCacheSpec:
        """What decoder layer `index` keeps for one of its cache layers."""
        if isinstance(layer, AttentionLayer):
            return self._attention(layer, index)
        if isinstance(layer, CrossAttentionLayer):
            return CrossAttentionSpec(
                block_size=self.block_size,
                num_kv_heads=self._heads_of_rank(layer.num_kv_heads),
                head_bytes=dtypes.head_bytes(self.cache_dtype, layer.head_size, layer.head_size),
                encoder_tokens=layer.encoder_tokens or self._engine.batched_tokens,
            )
        if isinstance(layer, MLALayer):
            return self._latent(self._latent_bytes(layer))
        if isinstance(layer, CompressedLatentLayer):
            spec = MLAAttentionSpec(self.block_size, head_bytes=layer.state_bytes, tokens_per_state=layer.tokens_per_state)
            return spec.padded(_rounded_up(spec.page_size_bytes, _PACKED_ALIGNMENT))
        if isinstance(layer, SlidingLatentLayer):
            window = SlidingWindowMLASpec(layer.block_size, head_bytes=layer.state_bytes, sliding_window=layer.sliding_window)
            return window.padded(_rounded_up(window.page_size_bytes, _PACKED_ALIGNMENT))
        if isinstance(layer, SparseIndexerLayer):
            scales = layer.index_head_dim // _INDEX_SCALE_ELEMENTS * 4
            return self._latent(layer.index_head_dim + scales)
        return MambaSpec(
            block_size=self._block_size_of_state(),
            page_size_padded=self._state_page,
            state_bytes=self._state_bytes(layer),
            num_blocks=self._blocks_of_state(),
        )

    def _latent(self, token_bytes: int) -> MLAAttentionSpec:
        shards, ranks = self._engine.decode_context_parallel_size, self._engine.tensor_parallel_size
        if shards > ranks:
            raise UnsupportedModelError(
                f"vLLM refuses decode_context_parallel_size {shards} on {ranks} ranks",
                field="decode_context_parallel_size",
                value=shards,
            )
        return MLAAttentionSpec(
            block_size=self.block_size,
            head_bytes=token_bytes,
            decode_context_parallel_size=self._engine.decode_context_parallel_size,
        )

    def _attention(self, layer: AttentionLayer, index: int) -> KVCacheSpec:
        dtype = self._model_dtype if self._is_skipped(layer, index) else self.cache_dtype
        heads = self._heads_of_rank(layer.num_kv_heads)
        # vLLM before 0.20 stored values at the size of keys.
        size_v = layer.head_size if self._engine.vllm_version < (0, 20) else layer.head_size_v
        head_bytes = dtypes.head_bytes(dtype, layer.head_size, size_v)
        if layer.sliding_window is not None:
            block_size = self.block_size
            if self._shared_page is not None:
                block_size = max(1, self._shared_page // (heads * head_bytes) // _KERNEL_BLOCK_SIZE) * _KERNEL_BLOCK_SIZE
            return SlidingWindowSpec(block_size, self._shared_page, heads, head_bytes, layer.sliding_window)
        if layer.attention_chunk_size is not None:
            return ChunkedLocalAttentionSpec(self.block_size, None, heads, head_bytes, layer.attention_chunk_size)
        return FullAttentionSpec(self.block_size, None, heads, head_bytes, self._context_shards(layer))

    def _is_skipped(self, layer: AttentionLayer, index: int) -> bool:
        skip = self._engine.kv_cache_dtype_skip_layers
        return str(index) in skip or ("sliding_window" in skip and layer.sliding_window is not None)

    def _context_shards(self, layer: AttentionLayer) -> int:
        """Ranks over which decode-context parallelism spreads the tokens of this layer."""
        engine = self._engine
        shards = engine.decode_context_parallel_size
        if shards == 1:
            return 1
        queries_per_kv_head = self._model.num_attention_heads // layer.num_kv_heads
        if (
            engine.tensor_parallel_size <= layer.num_kv_heads
            or shards > engine.tensor_parallel_size // layer.num_kv_heads
            or queries_per_kv_head % shards
        ):
            raise UnsupportedModelError(
                f"vLLM refuses decode_context_parallel_size {shards} with "
                f"{layer.num_kv_heads} KV heads on {engine.tensor_parallel_size} ranks",
                field="decode_context_parallel_size",
                value=shards,
            )
        return shards

    def _heads_of_rank(self, kv_heads: int) -> int:
        """KV heads on one rank: divided over the ranks, or replicated when there are more ranks than heads, never a fraction."""
        ranks = self._engine.tensor_parallel_size
        if kv_heads % ranks and ranks % kv_heads:
            raise UnsupportedModelError(
                f"vLLM refuses tensor_parallel_size {ranks}, "
                f"since the {kv_heads} KV heads can be neither divided nor replicated evenly",
                field="tensor_parallel_size",
                value=ranks,
            )
        return max(1, kv_heads // ranks)

    def _resolve_cache_dtype(self) -> str:
        """What `auto` stands for: the checkpoint's own cache format, else the dtype that the engine computes in."""
        model, engine = self._model, self._engine
        name = engine.kv_cache_dtype if model.honours_kv_cache_dtype else "auto"
        if self._is_packed:
            if name not in ("auto", "fp8", "fp8_e4m3", "fp8_ds_mla"):
                raise UnsupportedModelError(
                    f"its cache format is fixed, and kv_cache_dtype {name} is another",
                    field="kv_cache_dtype",
                    value=name,
                )
            return "fp8_ds_mla"
        if name == "auto":
            name = model.kv_cache_dtype or ("fp8" if self._is_sparse_on_blackwell_by_default() else self._model_dtype)
        if name == "fp8_ds_mla" and not self._is_sparse:
            raise UnsupportedModelError(
                "kv_cache_dtype fp8_ds_mla is for sparse latent attention only",
                field="kv_cache_dtype",
                value=name,
            )
        if self._is_sparse and name in ("fp8", "fp8_e4m3") and not engine.is_blackwell:
            return "fp8_ds_mla"
        return name

    def _is_sparse_on_blackwell_by_default(self) -> bool:
        return self._is_sparse and self._engine.is_blackwell and self._model.architecture.startswith("Glm")

    def _latent_bytes(self, layer: MLALayer) -> int:
        if self.cache_dtype == "fp8_ds_mla":
            return _FP8_DS_MLA_BYTES
        size = dtypes.element_bytes(self.cache_dtype)
        if size is None:
            raise UnsupportedModelError(
                f"kv_cache_dtype {self.cache_dtype} is not a format of latent attention",
                field="kv_cache_dtype",
                value=self.cache_dtype,
            )
        return (layer.kv_lora_rank + layer.qk_rope_head_dim) * size

    def _base_block_size(self) -> int:
        """The flag, else the smallest size that the attention backend of this GPU accepts."""
        if self._is_packed:
            # The label of an engine shows the smallest block of its groups instead.
            return _PACKED_BLOCK_SIZE
        if self._engine.block_size is not None:
            return self._engine.block_size
        if self._is_sparse:
            return 64
        if self._has_latents:
            if self._engine.is_blackwell:
                return 32
            return 64 if dtypes.is_quantized(self.cache_dtype) else _KERNEL_BLOCK_SIZE
        if self.cache_dtype.startswith("fp8") and not self._engine.is_blackwell and self._largest_head() > _LARGEST_COMMON_HEAD:
            return 64
        return _KERNEL_BLOCK_SIZE

    def _largest_head(self) -> int:
        sizes = (
            layer.head_size for layers in self._model.decoder_layers for layer in layers if isinstance(layer, AttentionLayer)
        )
        return max(sizes, default=0)

    def _align_to_states(self) -> None:
        """Hybrids: raise the block size until a page of attention is no smaller than a state, and pad the state to that page."""
        states = [
            self._state_bytes(layer)
            for layers in self._model.decoder_layers
            for layer in layers
            if not isinstance(layer, _NOT_STATES)
        ]
        token_bytes = self._attention_token_bytes()
        if not states or token_bytes is None:
            return
        state = max(states)
        granularity = max(self.block_size, _LATENT_HYBRID_BLOCK_SIZE if self._has_latents else 0)
        self.block_size = max(self.block_size, granularity * cdiv(state, granularity * token_bytes))
        self._state_page = self.block_size * token_bytes

    def _align_to_skipped_layers(self) -> None:
        """Layers left at the model's dtype: raise the block size until a quantized page is no smaller than one of theirs."""
        if not self._engine.kv_cache_dtype_skip_layers:
            return
        layer = next(self._of(AttentionLayer), None)
        if layer is None:
            return
        heads = self._heads_of_rank(layer.num_kv_heads)
        quantized = heads * dtypes.head_bytes(self.cache_dtype, layer.head_size, layer.head_size)
        skipped = heads * dtypes.head_bytes(self._model_dtype, layer.head_size, layer.head_size)
        if skipped == quantized:
            return
        required = max(skipped * _KERNEL_BLOCK_SIZE, self._state_page or 0)
        self.block_size = max(self.block_size, self.block_size * cdiv(required, self.block_size * quantized))
        self._shared_page = self.block_size * quantized
        if self._state_page is not None:
            self._state_page = self._shared_page

    def _attention_token_bytes(self) -> int | None:
        """Bytes of one token in one attention layer of this rank; None for a model without attention."""
        latent = next(self._of(MLALayer), None)
        if latent is not None:
            return self._latent_bytes(latent)
        layer = next(self._of(AttentionLayer), None)
        if layer is None:
            return None
        head_bytes = dtypes.head_bytes(self.cache_dtype, layer.head_size, layer.head_size)
        return self._heads_of_rank(layer.num_kv_heads) * head_bytes

    def _of(self, kind: type[LayerT]) -> Iterator[LayerT]:
        """The model's layers of one kind, in order."""
        return (layer for layers in self._model.decoder_layers for layer in layers if isinstance(layer, kind))

    def _state_bytes(self, layer: CacheLayer) -> int:
        engine = self._engine
        conv = engine.mamba_cache_dtype if engine.mamba_cache_dtype != "auto" else self._model_dtype
        recurrent = engine.mamba_ssm_cache_dtype
        if recurrent == "auto":
            recurrent = self._model.ssm_dtype or "auto"
        return state_bytes(
            layer,
            engine.tensor_parallel_size,
            engine.num_speculative_tokens,
            StateDtypes(_element_bytes(conv), None if recurrent == "auto" else _element_bytes(recurrent)),
        )

    def _block_size_of_state(self) -> int:
        """A state stands for all tokens of a request; with prefix caching one is kept at each block boundary."""
        length = self._engine.max_model_len or self._model.max_model_len
        return self.block_size if self._engine.enable_prefix_caching or length is None else length

    def _blocks_of_state(self) -> int:
        engine = self._engine
        blocks = 1 + engine.num_speculative_tokens
        if engine.enable_prefix_caching:
            blocks += 1
            if self._model.has_prefill_checkpoint and engine.vllm_version >= (0, 29):
                blocks += 1
        return blocks


def _served_dtype(engine: EngineConfig) -> str:
    """The dtype that the engine computes in: vLLM serves a float32 checkpoint, and one that names no dtype, in 16 bits."""
    return "bfloat16" if engine.dtype == "auto" else engine.dtype


def _rounded_up(size: int, multiple: int) -> int:
    return cdiv(size, multiple) * multiple


def _element_bytes(name: str) -> int:
    size = dtypes.element_bytes(name)
    if size is None:
        raise dtypes.unknown_cache_dtype(name)
    return size
