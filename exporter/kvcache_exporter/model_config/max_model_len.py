"""The length that vLLM serves a model with without --max-model-len, and the longest that it takes (`vllm/config/model.py`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvcache_exporter.model_config.fields import Fields

_LENGTH_FIELDS = (
    "max_position_embeddings",
    "n_positions",
    "max_seq_len",
    "seq_length",
    "model_max_length",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_length",
    "seq_len",
)
# Kinds of rope scaling that leave the length as the file states it: it is already scaled, or must not be.
_LENGTH_IS_SCALED = frozenset({"default", "su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling", "mrope"})


@dataclass(frozen=True)
class MaxModelLen:
    """Tokens: `derived` is what vLLM serves when no flag says otherwise, `longest` what it takes as a flag."""

    derived: int
    longest: int


def read_max_model_len(fields: Fields) -> MaxModelLen | None:
    """Both lengths, or None when the file states none."""
    lengths = [fields.whole(name) for name in _LENGTH_FIELDS if isinstance(fields.get(name), int)]
    # Command R states the length of its first training stage beside the one that it is served with.
    if fields.architecture.startswith("Cohere") and fields.get("model_max_length"):
        lengths = [fields.whole("model_max_length")]
    if not lengths:
        return None
    length = derived = longest = min(lengths)
    for scaling in _rope_scalings(fields):
        rope_type = str(scaling.get("rope_type", scaling.get("type", "default")))
        factor = scaling.get("factor", 1.0)
        if rope_type == "longrope":
            derived = fields.whole("original_max_position_embeddings", default=length)
        elif "gemma3" in str(fields.get("model_type", "")) or not _is_finite(factor):
            continue
        elif rope_type not in _LENGTH_IS_SCALED:
            derived = longest = int(length * factor)
        elif "yarn" in rope_type:
            # 0.32 leaves the length, older versions multiplied it: what only they took is not refused.
            longest = max(longest, int(length * factor))
    stated = fields.get("model_max_length")
    return MaxModelLen(derived, max(longest, stated) if isinstance(stated, int) else longest)


def _rope_scalings(fields: Fields) -> Sequence[Fields]:
    """The rope settings: one object, or one for each kind of layer, which all scale alike."""
    scaling = fields.mapping("rope_scaling" if isinstance(fields.get("rope_scaling"), Mapping) else "rope_parameters")
    nested = [scaling.mapping(name) for name in scaling.names() if isinstance(scaling.get(name), Mapping)]
    return nested or [scaling]


def _is_finite(factor: object) -> bool:
    return isinstance(factor, (int, float)) and math.isfinite(factor) and factor > 0
