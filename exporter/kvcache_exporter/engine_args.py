"""What the command line of a vLLM server says about the engine.

A value that cannot be told from outside is named in `EngineArgs.unknown`; nothing is guessed in its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvcache_exporter.human_integer import parse_human_integer
from kvcache_exporter.shell_words import is_unresolved
from kvcache_exporter.vllm_command_line import (
    ANYTHING,
    FLAGS,
    MAYBE_MODEL,
    POSITIONAL,
    server_arguments,
    settings,
    without_command,
)


@dataclass(frozen=True)
class EngineArgs:
    """Flags of one vLLM server; None: not given, or in `unknown`.

    `unknown` has the fields whose value cannot be told, each with the word to blame, such as `{"tensor_parallel_size":
    "$(TP)"}`. A word that may hold any flags makes every field unknown that no later word sets. `num_speculative_tokens` is
    unknown where speculation is asked for without their number; `speculative_method` is as it stands, such as `mtp`, and None
    where vLLM finds it out by the model. `config_file` is what vLLM's `--config` names: a file that may set what no flag
    sets. `is_vllm`: the words start vLLM's server, or are its flags alone, as for an image that starts it. If not, another
    command may give the server more than is in sight.
    """

    model: str | None = None
    port: int | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    decode_context_parallel_size: int | None = None
    data_parallel_size: int | None = None
    max_num_seqs: int | None = None
    max_num_active_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    num_speculative_tokens: int | None = None
    speculative_method: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    block_size: int | None = None
    performance_mode: str | None = None
    uses_tls: bool = False
    config_file: str | None = None
    unknown: Mapping[str, str] = field(default_factory=dict)
    is_vllm: bool = False


_TEXTS = {"model": "[^-].*", "dtype": r"\w+", "kv_cache_dtype": r"\w+", "speculative_method": r"\w+", "performance_mode": r"\w+"}
_NOTHING = ("", "None")  # what vLLM takes for a flag that is not given

# What a word that may hold any flags leaves unknown.
_NAMES = tuple(sorted({*FLAGS.values()} - {"speculation", "num_speculative_tokens"}))

# Other servers have these flags as well: alone they do not show that a server is vLLM's.
_SHOW_NOTHING = frozenset({"port", "dtype", "uses_tls", "config_file", POSITIONAL, MAYBE_MODEL, ANYTHING})


def with_further_args(words: Sequence[str], further: Sequence[str]) -> EngineArgs:
    """Read the words of a process with arguments that are said beside it, and have the last word. Never raises.

    They do not make the process vLLM's: what they leave out may still be where they were not seen.
    """
    return replace(read_engine_args((*words, *further)), is_vllm=read_engine_args(words).is_vllm)


def read_engine_args(words: Sequence[str]) -> EngineArgs:
    """Read the words of a process, or flags alone. Never raises."""
    start, arguments = server_arguments(words) or without_command(words)
    said = tuple(settings(arguments))
    reading = _Reading()
    for name, word in said:
        reading.take(name, word)
    shows_vllm = any(name not in _SHOW_NOTHING for name, _ in said)
    return reading.result(
        # vLLM's module, unlike its command, ignores a word without a flag.
        takes_model=start in ("serve", "flags"),
        is_vllm=start in ("serve", "api_server") or (start == "flags" and shows_vllm),
    )


class _Reading:
    """What the arguments so far come to."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._unknown: dict[str, str] = {}
        self._models: list[str] = []
        self._may_be_models: list[str] = []

    def take(self, name: str, word: str) -> None:
        """Add what the next argument says; the last one wins."""
        if name == ANYTHING:
            self._values.clear()
            self._unknown = {name: word for name in _NAMES if name != "model" or not self._models}
        elif name == MAYBE_MODEL:
            self._may_be_models.append(word)
        elif name == POSITIONAL:
            self._models.append(word)
        else:
            self._set(name, word)

    def _set(self, name: str, word: str) -> None:
        self._values.pop(name, None)
        self._unknown.pop(name, None)
        try:
            value = None if word in _NOTHING else _value(name, word)
        except ValueError:
            self._unknown[name] = word
        else:
            if value is not None:
                self._values[name] = value

    def _settle_speculation(self) -> None:
        """Take the number of tokens from its flag, else from the config; without either, a draft has a number of its own."""
        named = self._values.pop("speculation", self._values.get("speculative_method"))
        unknown = self._unknown.pop("speculative_config", named)
        number, method = self._values.pop("speculative_config", (None, None))
        if method is not None:
            self._values.setdefault("speculative_method", method)
        if "num_speculative_tokens" in self._values or "num_speculative_tokens" in self._unknown:
            return
        if number is not None:
            self._values["num_speculative_tokens"] = number
        elif unknown is not None:
            self._unknown["num_speculative_tokens"] = unknown

    def result(self, *, is_vllm: bool, takes_model: bool) -> EngineArgs:
        if takes_model and "model" not in self._values and "model" not in self._unknown:  # else by flag, which comes first
            if self._models:
                self.take("model", self._models[0])
            elif self._may_be_models:
                self._unknown["model"] = self._may_be_models[0]
        self._settle_speculation()
        return EngineArgs(**self._values, unknown=self._unknown, is_vllm=is_vllm)


def _value(name: str, word: str) -> object:
    """The value of a flag. Raises ValueError."""
    if name == "max_model_len" and word.lower() in ("-1", "auto"):  # vLLM takes what fits, and tells it at /v1/models
        return None
    if name == "uses_tls":
        return True
    if name == "speculative_config":
        return _speculation(word)
    if name in ("config_file", "speculation"):
        return word
    if name not in _TEXTS:
        return parse_human_integer(word)
    if is_unresolved(word) or not re.fullmatch(_TEXTS[name], word, re.DOTALL):
        raise ValueError(f"{word!r} is no {name}")
    return word


def _speculation(config: str) -> tuple[int, str | None]:
    """Number of tokens and method of a speculative config. Raises ValueError without the number: the draft model says it."""
    try:
        parsed = {str(key).replace("-", "_"): value for key, value in json.loads(config).items()}
        method = parsed.get("method")
        return parse_human_integer(str(parsed["num_speculative_tokens"])), None if method is None else str(method)
    except (AttributeError, KeyError, RecursionError) as error:
        raise ValueError(f"{config!r} gives no number of tokens") from error
