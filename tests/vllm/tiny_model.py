"""A Llama small enough for a CPU: its config.json and tokenizer. It has no weights, so serve it with `--load-format dummy`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB_SIZE = 1024
MAX_MODEL_LEN = 4096

_LAYERS = 2
_KV_HEADS = 2
_HEAD_DIM = 32
_BYTES_OF_BFLOAT16 = 2

# A key and a value for each layer and KV head.
BYTES_PER_TOKEN = _LAYERS * 2 * _KV_HEADS * _HEAD_DIM * _BYTES_OF_BFLOAT16

_SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")

# Token ids from here on are plain words.
FIRST_WORD = len(_SPECIAL_TOKENS)

_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_MODEL_LEN,
    "num_hidden_layers": _LAYERS,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_tiny_model(folder: Path) -> None:
    """Write config.json and a tokenizer that has one token for each word."""
    folder.mkdir()
    words = (*_SPECIAL_TOKENS, *(f"word{number}" for number in range(FIRST_WORD, VOCAB_SIZE)))
    _write(folder / "config.json", _CONFIG)
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
