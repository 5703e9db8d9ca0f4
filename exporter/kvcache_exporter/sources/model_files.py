"""The files of a model, in a directory or a Hugging Face cache: config.json (or params.json), and the size of its weights."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcache_exporter.errors import SourceError

# config.json first: that is what vLLM reads unless told otherwise.
_CONFIG_NAMES = ("config.json", "params.json")
_INDEX_NAME = "model.safetensors.index.json"
_HEADER_LENGTH = struct.Struct("<Q")


def load_config_json(path: Path, root: str | None = None) -> Mapping[str, Any]:
    """Read config.json, or params.json where there is no config.json, as a dict.

    `path` is the file itself, a directory that holds it, one model's folder in a Hugging Face cache (`models--org--name`), or the
    cache as a whole, in which `root`, the engine's hub name such as `org/name`, tells the model.
    Raises SourceError: `missing` when there is none, `parse` when it is not a JSON object.
    """
    return _read_json(find_config_json(path, root))


def find_config_json(path: Path, root: str | None = None) -> Path:
    """The file that `load_config_json` reads. Raises SourceError (`missing`)."""
    if not path.exists():
        raise SourceError("missing", f"{path} does not exist here")
    if path.is_file():
        return path
    folders = [path, path / "hub"]
    if root is not None:
        folders = [folder / f"models--{root.replace('/', '--')}" for folder in folders] + folders
    for folder in folders:
        for candidate in (folder, *_snapshots(folder)):
            for name in _CONFIG_NAMES:
                if (candidate / name).is_file():
                    return candidate / name
    raise SourceError("missing", f"{path} holds no config.json" + ("" if root is None else f" for {root}"))


def weight_bytes(folder: Path) -> int | None:
    """Bytes of all tensors in the safetensors files of a folder; None when there are none.

    The index states the sum; without one, each file is as long as its tensors, its header, and the header's length. Raises
    SourceError (`parse`) when a file is no safetensors file.
    """
    index = folder / _INDEX_NAME
    if index.is_file():
        total = _read_json(index).get("metadata", {}).get("total_size")
        if isinstance(total, (int, float)):
            return int(total)
    files = sorted(folder.glob("*.safetensors"))
    return sum(_tensor_bytes(file) for file in files) if files else None


def _tensor_bytes(file: Path) -> int:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(_HEADER_LENGTH.size)
    if len(start) == _HEADER_LENGTH.size:
        header_length: int = _HEADER_LENGTH.unpack(start)[0]
        if header_length <= size - _HEADER_LENGTH.size:
            return size - _HEADER_LENGTH.size - header_length
    raise SourceError("parse", f"{file} is not a safetensors file")


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SourceError("missing", f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SourceError("parse", f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise SourceError("parse", f"{file} holds JSON that is not an object")
    return content


def _snapshots(folder: Path) -> list[Path]:
    """Revisions of a model in a Hugging Face cache: the one that `main` points to, else the only one that is there."""
    main = folder / "refs" / "main"
    if main.is_file():
        return [folder / "snapshots" / main.read_text(encoding="utf-8").strip()]
    snapshots = sorted((folder / "snapshots").glob("*"))
    return snapshots if len(snapshots) == 1 else []
