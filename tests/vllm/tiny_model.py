"""Models small enough for a CPU: config.json, tokenizer, and what their caches have to come to.

They have no weights, so serve them with `--load-format dummy`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flags import BLOCK_SIZE, MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS

VOCAB_SIZE = 1024

_KV_HEADS = 2
_HEAD_DIM = 32
_BYTES_OF_BFLOAT16 = 2
_WINDOW = 256

# A key and a value of one KV head.
_BYTES_OF_HEAD = 2 * _HEAD_DIM * _BYTES_OF_BFLOAT16

_SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")

# Token ids from here on are plain words.
FIRST_WORD = len(_SPECIAL_TOKENS)


@dataclass(frozen=True)
class TinyModel:
    """A config.json, and by hand how vLLM 0.32 lays out its cache under the flags of `flags.py`.

    `block_size` is tokens after alignment, `block_bytes` a block of the pool. One group has full attention; beside it are
    `sliding_groups`, and `state_groups` of layers that keep a state of constant size.
    """

    config: Mapping[str, Any]
    block_size: int
    block_bytes: int
    sliding_groups: int = 0
    state_groups: int = 0

    @property
    def group_block_sizes(self) -> tuple[int, ...]:
        """Tokens in a block of each group, as vLLM logs them."""
        return (self.block_size,) * (1 + self.sliding_groups + self.state_groups)

    def admitted_blocks(self, tokens: int) -> int:
        """Blocks that have to be free for a request of so many tokens to start, as vLLM counts.

        A window keeps what it sees and a batch beside it (`vllm/v1/kv_cache_interface.py`, SlidingWindowSpec); a state, with
        prefix caching, itself and one of the last block boundary (MambaSpec).
        """
        in_window = _blocks(min(_WINDOW - 1 + MAX_NUM_BATCHED_TOKENS, tokens), self.block_size) + 1
        return _blocks(tokens, self.block_size) + self.sliding_groups * in_window + self.state_groups * 2

    def held_blocks(self, tokens: int) -> int:
        """Blocks that a request of so many tokens holds at most once its prompt has been read."""
        return _blocks(tokens, self.block_size) + self.held_outside_full_attention(tokens)

    def held_outside_full_attention(self, tokens: int) -> int:
        """Those of windows and states: the share that stops growing."""
        in_window = min(_blocks(tokens, self.block_size), _blocks(_WINDOW - 1, self.block_size) + 1)
        return self.sliding_groups * in_window + self.state_groups * 2

    def requests_in(self, blocks: int, tokens: int) -> int:
        """Requests of so many tokens that fit: each finds the blocks to start, and then holds fewer."""
        admitted = self.admitted_blocks(tokens)
        return 0 if blocks < admitted else (blocks - admitted) // self.held_blocks(tokens) + 1


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


_COMMON: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN,
    "intermediate_size": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Two layers of full attention, in one group: a block of the pool holds one of each.
LLAMA = TinyModel(
    {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    block_size=BLOCK_SIZE,
    block_bytes=2 * BLOCK_SIZE * _KV_HEADS * _BYTES_OF_HEAD,
)

# Five layers with a window for each full one. Groups are as large as the rarest kind is often, so each layer is one.
SLIDING = TinyModel(
    {
        **_COMMON,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"],
        "sliding_window": _WINDOW,
        "sliding_window_pattern": 6,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD_DIM,
        "query_pre_attn_scalar": _HEAD_DIM,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "tie_word_embeddings": True,
    },
    block_size=BLOCK_SIZE,
    block_bytes=BLOCK_SIZE * _KV_HEADS * _BYTES_OF_HEAD,
    sliding_groups=5,
)

# Three short convolutions for each full attention, each layer a group. A state of two columns has 6,144 bytes, and a block of the
# one KV head only 4,096: vLLM doubles the block and pads the state.
_CONV_DIM = 48 * _HEAD_DIM
CONV = TinyModel(
    {
        **_COMMON,
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "conv_L_cache": 3,
        "conv_bias": False,
        "conv_dim": _CONV_DIM,
        "conv_dim_out": _CONV_DIM,
        "hidden_size": _CONV_DIM,
        "block_dim": _CONV_DIM,
        "block_ff_dim": 512,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "num_attention_heads": _CONV_DIM // _HEAD_DIM,
        "num_key_value_heads": 1,
        "norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    block_size=2 * BLOCK_SIZE,
    block_bytes=2 * BLOCK_SIZE * _BYTES_OF_HEAD,
    state_groups=3,
)


def write_tiny_model(folder: Path, model: TinyModel) -> None:
    """Write config.json and a tokenizer that has one token for each word."""
    folder.mkdir(parents=True)
    words = (*_SPECIAL_TOKENS, *(f"word{number}" for number in range(FIRST_WORD, VOCAB_SIZE)))
    _write(folder / "config.json", model.config)
    _write(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [_special_token(number, word) for number, word in enumerate(_SPECIAL_TOKENS)],
            "normalizer": None,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": {word: number for number, word in enumerate(words)}, "unk_token": "<unk>"},
        },
    )
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": MAX_MODEL_LEN,
            "pad_token": "<pad>",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
        },
    )


def _special_token(number: int, word: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": word, "special": True, **flags}


def _write(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=1), encoding="utf-8")
