"""Single values of the exporter's file. Each function takes what YAML made of one; a ValueError has the sentence for the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = "{root}"
"""Stands for the engine's hub name in the address of a model's config.json."""

_DTYPES = ("auto", "bfloat16", "float16", "half", "float", "float32")


def http_url(value: object) -> str:
    """An http or https address without credentials, query or fragment."""
    text = str(value)
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{text!r} is not an http or https address, such as http://127.0.0.1:8000")
    if parts.username is not None:
        raise ValueError("a user or password in the address would show in labels and logs; use bearer_token_file")
    if parts.query or parts.fragment:
        raise ValueError(f"{text!r} has a query or fragment; give the address without it")
    return text


def some_text(value: object) -> str:
    """A text that is not blank, without the blanks around it."""
    text = str(value).strip()
    if not text:
        raise ValueError("is empty; give a name, or leave it out")
    return text


def model_source(value: object, folder: Path) -> Path | str | Mapping[str, Any]:
    """A path, relative to `folder`, an address, or the content of a config.json itself."""
    if isinstance(value, dict):
        return value
    return http_url(value) if _is_url(value) else path_in(value, folder)


def gpu_list(value: object) -> tuple[str, ...]:
    """GPUs by index or uuid, as a list or separated by commas."""
    entries = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    gpus = tuple(str(entry).strip() for entry in entries)
    for gpu in gpus:
        if not gpu.isdecimal() and not gpu.startswith(("GPU-", "MIG-")):
            raise ValueError(f"{gpu!r} names no GPU; give indexes, or uuids as nvidia-smi -L shows them, such as [0, 1]")
    if len(set(gpus)) < len(gpus):
        raise ValueError("names a GPU twice")
    return gpus


def pod_name(value: object) -> str:
    """A pod as `namespace/pod` or `namespace/pod/container`."""
    text = str(value)
    if text.count("/") not in (1, 2) or not all(text.split("/")):
        raise ValueError(f"{text!r} is not a pod; write it as namespace/pod or namespace/pod/container")
    return text


def path_in(value: object, folder: Path) -> Path:
    """A path, relative to `folder`; nothing has to be there yet."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a path")
    return folder / value


def file_in(value: object, folder: Path) -> Path:
    """A path, relative to `folder`, of a file that is there."""
    path = path_in(value, folder)
    if not path.is_file():
        raise ValueError(f"{path} is not a file here")
    return path


def strings(value: object) -> tuple[str, ...]:
    """A list of strings that are not empty."""
    entries = value if isinstance(value, list) else [value]
    if not all(isinstance(entry, str) and entry for entry in entries):
        raise ValueError(f"{value!r} is not a list of names")
    return tuple(entries)


def models_source(value: object, folder: Path) -> Path | str:
    """A path, relative to `folder`, of a directory of models, or an address with `{root}` for the name of one."""
    if _is_url(value):
        if ROOT not in str(value):
            raise ValueError(f"{value!r} is of one model, and engines that are found may run others: put {ROOT} for the name")
        return http_url(value)
    path = path_in(value, folder)
    if (path / "config.json").is_file():
        raise ValueError(
            f"{path} is the directory of one model, and engines that are found may run others: give the one above it"
        )
    return path


def _is_url(value: object) -> bool:
    return isinstance(value, str) and value.startswith(("http://", "https://"))


def dtype(value: object) -> str:
    """One of the dtypes that vLLM's --dtype takes."""
    if value not in _DTYPES:
        raise ValueError(f"{value!r} is not one of {', '.join(_DTYPES)}")
    return str(value)


def positive_int(value: object) -> int:
    """A whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{value!r} is not a positive whole number")
    return value


def share(value: object) -> float:
    """A ratio of at least 0 and below 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ValueError(f"{value!r} is not a share of at least 0 and below 1, such as 0.01")
    return float(value)


def token_counts(value: object) -> tuple[int, ...]:
    """A list of token counts; sorted, each once."""
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list of token counts, such as [8192, 32768]")
    return tuple(sorted({positive_int(length) for length in value}))


def boolean(value: object) -> bool:
    """A truth value; words such as `on` stand for none."""
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def seconds(*, at_least: float) -> Callable[[object], float]:
    """What reads a number of seconds of at least `at_least`."""

    def convert(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not at_least <= value < float("inf"):
            raise ValueError(f"{value!r} is not a number of seconds of at least {at_least:g}")
        return float(value)

    return convert
