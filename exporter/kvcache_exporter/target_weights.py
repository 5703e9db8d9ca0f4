"""The weights of one target: what each of its GPUs holds of them, and where that figure comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvcache_exporter.config import TargetConfig
from kvcache_exporter.kv_cache_spec import EngineConfig
from kvcache_exporter.model_config import ModelConfig
from kvcache_exporter.weights import Weights, checkpoint_share_bytes, computed_weights

CONFIGURED = "configured"
COMPUTED = "computed"
CHECKPOINT = "checkpoint"

# What loading takes besides the parameters (tables of rotary positions, rounding of the allocator) is below this.
_TOLERANCE = 0.05


@dataclass(frozen=True)
class TracedWeights:
    """Weights, with their source: `configured`, `computed` from config.json, or an even share of the `checkpoint`."""

    weights: Weights
    source: str


@dataclass(frozen=True, eq=False)
class ModelOnDisk:
    """A model as its files describe it: config.json, what was read from it, and the size of its weights where they are there."""

    config_json: Mapping[str, Any]
    model: ModelConfig
    checkpoint_bytes: int | None = None


class TargetWeights:
    """Finds the weights once for each model and set of flags, since pages come every few seconds and these stay."""

    def __init__(self, config: TargetConfig) -> None:
        self._config = config
        self._of = lru_cache(maxsize=1)(self._find)

    def of(self, files: ModelOnDisk | None, engine: EngineConfig) -> TracedWeights | None:
        """The weights that the operator states, else those that every parameter is known of, else a share of the checkpoint."""
        return self._of(files, engine)

    def _find(self, files: ModelOnDisk | None, engine: EngineConfig) -> TracedWeights | None:
        computed = None if files is None else computed_weights(files.config_json, files.model, engine)
        stated = self._config.weight_bytes_per_gpu
        if stated is not None:
            streamed = computed.streamed_bytes_per_rank if computed is not None and _agrees(stated, computed) else None
            return TracedWeights(Weights((stated,) * engine.pipeline_parallel_size, streamed), CONFIGURED)
        if computed is not None:
            return TracedWeights(computed, COMPUTED)
        if files is None or files.checkpoint_bytes is None:
            return None
        share = checkpoint_share_bytes(files.checkpoint_bytes, files.config_json, files.model, engine)
        return None if share is None else TracedWeights(Weights((share,), None), CHECKPOINT)


def _agrees(stated: int, computed: Weights) -> bool:
    """Whether these are the same weights: an engine can quantize while it loads, and nothing tells but their size."""
    return all(abs(stated / size - 1) < _TOLERANCE for size in computed.bytes_per_rank)
