"""The command line of a vLLM server, paired to flags and values as vLLM's `FlexibleArgumentParser`, an argparse, does it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from kvcache_exporter.shell_words import is_unresolved

# The flags that are read, with what they set.
FLAGS = {
    "--model": "model",
    "--port": "port",
    "--tensor-parallel-size": "tensor_parallel_size",
    "-tp": "tensor_parallel_size",
    "--pipeline-parallel-size": "pipeline_parallel_size",
    "-pp": "pipeline_parallel_size",
    "--decode-context-parallel-size": "decode_context_parallel_size",
    "-dcp": "decode_context_parallel_size",
    "--data-parallel-size": "data_parallel_size",
    "-dp": "data_parallel_size",
    "--max-num-seqs": "max_num_seqs",
    "--max-num-active-seqs": "max_num_active_seqs",
    "--max-num-batched-tokens": "max_num_batched_tokens",
    "--max-model-len": "max_model_len",
    "--speculative-config": "speculative_config",
    "-sc": "speculative_config",
    "--spec-method": "speculative_method",
    "--spec-model": "speculation",
    "--speculative-model": "speculation",  # up to 0.8
    "--spec-tokens": "num_speculative_tokens",
    "--num-speculative-tokens": "num_speculative_tokens",  # up to 0.8
    "--dtype": "dtype",
    "--kv-cache-dtype": "kv_cache_dtype",
    "--block-size": "block_size",
    "--ssl-keyfile": "uses_tls",
    "--ssl-certfile": "uses_tls",
    "--config": "config_file",
    "--performance-mode": "performance_mode",
}

# In every version of vLLM another flag starts with these, so that argparse refuses what is short for them.
_NEVER_SHORT = frozenset({"--model", "--config"})

# What words say that are no flag with a value.
POSITIONAL = "a word without a flag"
MAYBE_MODEL = "a word that is the model, or a value of the flag before it"
ANYTHING = "a word that may hold any flags"

# What argparse takes for a flag: no negative number, and no word with a space before its `=`.
_FLAG = re.compile(r"--?(?![\d.-])[^\s=]+(=.*)?", re.DOTALL)

# Flags that take no value, among those that are not read here.
_SWITCH = re.compile(
    r"--(no|allow|disable|enable|enforce|exclude|return|skip|trust|use)-(?!access-log-for).*"
    r"|--(headless|grpc|async-scheduling|language-model-only|data-parallel-(hybrid|external)-lb|fully-sharded-loras)|-ep|-dp[hem]|-O.+"
)

# A variable of such a name holds whole arguments, not the value of the flag before it.
_HOLDS_ARGUMENTS = re.compile(
    r"\$[({]*(\w*_)?(args?|arguments|flags?|opts?|options|extra|params?)(?![a-z])|\$[({]*[@*]", re.IGNORECASE
)

# A model of the Hugging Face Hub, where a command could stand.
_MODEL = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(?<!\.sh)(?<!\.py)")

_API_SERVER = re.compile(r"vllm\.entrypoints\.openai\.api_server|(.*/)?vllm/entrypoints/openai/api_server\.py")


def server_arguments(words: Sequence[str]) -> tuple[str, Sequence[str]] | None:
    """How the words start vLLM's server, `serve` or `api_server`, and the words after that; None if they do not."""
    for index, word in enumerate(words):
        if _API_SERVER.fullmatch(word):
            return "api_server", words[index + 1 :]
        is_command = word.rpartition("/")[2] == "vllm" or word == "vllm.entrypoints.cli.main"
        if is_command and list(words[index + 1 : index + 2]) == ["serve"]:
            return "serve", words[index + 2 :]
    return None


def without_command(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Arguments of an image that starts the server itself (`flags`), or of another command from its first flag on (`other`)."""
    if list(words[:1]) == ["serve"]:
        return "flags", words[1:]
    if words and (_FLAG.fullmatch(words[0]) or (_MODEL.fullmatch(words[0]) and len(words) > 1)):
        return "flags", words
    first_flag = next((index for index, word in enumerate(words) if _FLAG.fullmatch(word)), len(words))
    return "other", words[first_flag:]


def settings(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the fields that the arguments set with the words they set them to, as argparse would pair them."""
    keys: dict[str, dict[str, Any]] = {}  # of --flag.key value, which vLLM appends as --flag '{"key": value}'
    foreign_at: int | None = None  # where the values of a flag start that is not read here, if it has any
    index = 0
    while index < len(arguments):
        word = arguments[index]
        index += 1
        if not _FLAG.fullmatch(word):
            yield from _without_flag(word, index - 1, foreign_at, is_only=len(arguments) == 1)
            foreign_at = index if foreign_at is None and is_unresolved(word) else foreign_at
            continue
        name, has_value, value = word.partition("=")
        flag, *path = re.sub("^--[^.]*", lambda match: match[0].replace("_", "-"), name).split(".")
        names = _fields_of(flag)
        if is_unresolved(name):
            yield ANYTHING, word
        if not path:  # vLLM takes those out first
            foreign_at = None if names or has_value or _SWITCH.fullmatch(flag) else index
        if (names or path) and not has_value:
            value = arguments[index] if index < len(arguments) else ""
            is_missing = not path and (index == len(arguments) or _FLAG.fullmatch(value))
            value, index = (word, index) if is_missing else (value, index + 1)
        if path:
            keys.setdefault(flag, {})[path[0]] = _json_or_text(value)
        else:
            is_certain = len(names) == 1 and (flag in FLAGS or flag.startswith("--"))
            yield from ((each, value if is_certain else word) for each in names)
    for flag, config in keys.items():
        yield from ((each, json.dumps(config)) for each in _fields_of(flag))


def _fields_of(flag: str) -> set[str]:
    """The fields that a flag sets, in full or shortened as argparse allows: several if it is short for several."""
    if flag in FLAGS:
        return {FLAGS[flag]}
    may_be_short = flag.startswith("--") or len(flag) == 2
    return {name for long, name in FLAGS.items() if may_be_short and long.startswith(flag) and long not in _NEVER_SHORT}


def _without_flag(word: str, at: int, foreign_at: int | None, *, is_only: bool) -> Iterator[tuple[str, str]]:
    if is_unresolved(word):
        holds_arguments = _HOLDS_ARGUMENTS.search(word) is not None
        if at == 0 and not is_only and not holds_arguments:
            yield POSITIONAL, word
        elif holds_arguments or at != foreign_at:
            yield ANYTHING, word
    elif foreign_at is not None:
        if at != foreign_at or "/" in word:
            yield MAYBE_MODEL, word
    elif word.lower() not in ("--", "true", "false"):  # up to 0.9 some switches may be followed by true
        yield POSITIONAL, word


def _json_or_text(value: str) -> object:
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
