"""Whether an unknown architecture is plainly a decoder of full attention.

New names for the same old design appear every week. One is taken for such when it calls itself a language model, states layers,
heads and size, and has no field that hints at another design; what follows from it is marked as assumed. All else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_STATED = (
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    ("num_attention_heads", "n_head", "n_heads"),
    ("hidden_size", "n_embd", "d_model", "head_dim"),
)
# Words in field names that stand for windows, latents, states, convolutions, compression, sharing, several kinds of layers,
# layers run twice, and the encoders of BERT's family.
_HINTS = re.compile(
    r"window|sliding|chunk|lora|latent|mamba|ssm|d_state|state_size|conv|linear_|delta|recurren|rwkv|compress|sparse|index_|kv_shar"
    r"|share|source_layer|cross_|layer_types|block_type|pattern|block_configs|attn_type|attention_type|kv_cache|cla_|memory|encoder|loop_|type_vocab"
)
# Fields that match and mean nothing for the cache.
_HARMLESS = re.compile(
    r"expert|hidden_states|chunk_size_feed_forward|no_rope|cross_entropy|sharding|decoder_sparse_step|max_window_layers|mlp_layer_types"
)


def speaks_against(architectures: object, text: Mapping[str, Any]) -> str | None:
    """Why this is not plainly a decoder of full attention; None when nothing speaks against it."""
    if isinstance(architectures, list) and architectures and not str(architectures[0]).endswith(_LANGUAGE_MODELS):
        return "it does not call itself a language model"
    for names in _STATED:
        if all(text.get(name) is None for name in names):
            return f"it states no {names[0]}"
    for name, value in text.items():
        if value and _HINTS.search(name) and not _HARMLESS.search(name) and not _is_all_full(name, value):
            return f"its field {name} = {value!r} hints at another design"
    return None


def _is_all_full(name: str, value: object) -> bool:
    return name == "layer_types" and isinstance(value, list) and set(value) == {"full_attention"}
