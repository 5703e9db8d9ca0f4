"""Reading single facts from config.json, with one clear refusal for what is missing, impossible or contradictory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd
from types import MappingProxyType
from typing import Any

from kvcache_exporter.errors import UnsupportedModelError

# KV heads, in the order in which vLLM looks for them (`transformers_utils/model_arch_config_convertor.py`).
_KV_HEAD_FIELDS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
_LAYER_FIELDS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "num_transformer_layers")
_MOST_LAYERS = 10_000
_HEAD_FIELDS = ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads")
HEAD_SIZE_FIELDS = ("head_dim", "hidden_size_per_head", "kv_channels", "attention_head_dim", "d_head", "d_kv")
_HIDDEN_FIELDS = ("hidden_size", "n_embd", "n_embed", "d_model", "model_dim")


class Fields:
    """The language model's part of config.json, and the name that refusals give it. null counts as not given.

    `defaults` are what Hugging Face's config class has for fields that the file leaves out.
    """

    def __init__(self, config: Mapping[str, Any], architecture: str, defaults: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._config = config
        self._defaults = defaults
        self.architecture = architecture

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401  # JSON
        """The value of a field, or the default when it is missing or null."""
        value = self._value(name)
        return default if value is None else value

    def names(self) -> Sequence[str]:
        """The names of all fields."""
        return list(self._config)

    def has(self, name: str) -> bool:
        """Whether the file has the field at all, null or not."""
        return name in self._config

    def whole(self, *names: str, default: int | None = None) -> int:
        """The first of the fields that is given, as a positive whole number. Raises UnsupportedModelError.

        What one of these names says in the file goes before any default of another.
        """
        for name in [name for name in names if name in self._config] or names:
            value = self._value(name)
            if value is not None:
                return self._at_least(1, name, value, "is not a positive whole number")
        if default is not None:
            return default
        raise UnsupportedModelError(f"{self.architecture}: config.json has no {' or '.join(names)}", field=names[0], value=None)

    def count(self, name: str, default: int = 0) -> int:
        """A whole number that may be 0; the default when missing. Raises UnsupportedModelError."""
        return self._at_least(0, name, self.get(name, default), "is not a whole number")

    def text(self, name: str) -> str | None:
        """A word; None when missing. Raises UnsupportedModelError."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            raise self.refuse(name, value, "is not a word")
        return value

    def mapping(self, name: str) -> Fields:
        """A nested object, as fields of its own; empty when missing."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise self.refuse(name, value, "is not an object")
        return Fields(value, self.architecture)

    def entries(self, name: str, *, length: int | None = None) -> Sequence[Any] | None:
        """A list, None when missing. Raises UnsupportedModelError when it has not `length` entries."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, (list, str)) or (length is not None and len(value) != length):
            raise self.refuse(name, value, "is not a list" + ("" if length is None else f" of {length} entries"))
        return value

    def indices(self, name: str) -> frozenset[int] | None:
        """A list of layer numbers, None when missing. Raises UnsupportedModelError for anything else."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(index, int) for index in value):
            raise self.refuse(name, value, "is not a list of layer numbers")
        return frozenset(value)

    def refuse(self, name: str, value: object, why: str) -> UnsupportedModelError:
        """The refusal of a value."""
        return UnsupportedModelError(f"{self.architecture}: {name} = {value!r} {why}", field=name, value=value)

    @property
    def num_hidden_layers(self) -> int:
        """Decoder layers. Raises UnsupportedModelError for more than any model has, which would not fit into memory here."""
        layers = self.whole(*_LAYER_FIELDS)
        if layers > _MOST_LAYERS:
            raise self.refuse("num_hidden_layers", layers, "is more layers than any model has")
        return layers

    @property
    def num_attention_heads(self) -> int:
        """Query heads; where layers differ (OpenELM), what divides them all."""
        per_layer = self.get("num_query_heads")
        if isinstance(per_layer, list) and per_layer:
            return gcd(*per_layer)
        return self.whole(*_HEAD_FIELDS)

    @property
    def hidden_size(self) -> int:
        """Width of the model."""
        return self.whole(*_HIDDEN_FIELDS)

    @property
    def num_key_value_heads(self) -> int:
        """KV heads: as many as query heads unless a field says otherwise."""
        # A switch of Falcon and GPT-BigCode that overrides the count beside it, except in Falcon's newer decoder.
        if self.get("multi_query") and not self.get("new_decoder_architecture"):
            return 1
        heads = self.whole(*_KV_HEAD_FIELDS, default=self.num_attention_heads)
        if self.num_attention_heads % heads:
            raise UnsupportedModelError(
                f"{self.architecture}: {self.num_attention_heads} attention heads cannot share {heads} KV heads evenly",
                field="num_key_value_heads",
                value=heads,
            )
        return heads

    def key_value_heads(self, num_layers: int) -> Sequence[int]:
        """KV heads of each layer. A list in the file gives each its own; 0 means that a layer has no attention."""
        for name in _KV_HEAD_FIELDS:
            value = self.get(name)
            if isinstance(value, list):
                if not all(isinstance(heads, int) and heads >= 0 for heads in value):
                    raise self.refuse(name, value, "is not a list of whole numbers")
                return self.entries(name, length=num_layers) or ()
        return (self.num_key_value_heads,) * num_layers

    @property
    def head_dim(self) -> int:
        """Size of one head: as declared, else the width over the heads."""
        for name in [name for name in HEAD_SIZE_FIELDS if name in self._config] or HEAD_SIZE_FIELDS:
            if self.get(name):
                return self.whole(name)
        if self.hidden_size % self.num_attention_heads:
            raise UnsupportedModelError(
                f"{self.architecture}: hidden_size {self.hidden_size} is not a multiple of {self.num_attention_heads} attention "
                "heads and no head_dim is given",
                field="hidden_size",
                value=self.hidden_size,
            )
        return self.hidden_size // self.num_attention_heads

    def _value(self, name: str) -> Any:  # noqa: ANN401  # JSON
        return self._config[name] if name in self._config else self._defaults.get(name)

    def _at_least(self, least: int, name: str, value: object, why: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refuse(name, value, why)
        return value
