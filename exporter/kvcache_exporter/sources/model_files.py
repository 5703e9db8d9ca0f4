"""config.json of a model, from a file, a model directory or a Hugging Face cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcache_exporter.errors import SourceError


def load_config_json(path: Path, root: str | None = None) -> Mapping[str, Any]:
    """Read config.json as a dict.

    `path` is the file itself, a directory that holds it, one model's folder in a Hugging Face cache (`models--org--name`), or the
    cache as a whole, in which `root`, the engine's hub name such as `org/name`, tells the model.
    Raises SourceError: `missing` when there is none, `parse` when it is not a JSON object.
    """
    file = _find(path, root)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SourceError("missing", f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SourceError("parse", f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise SourceError("parse", f"{file} holds JSON that is not an object")
    return config


def _find(path: Path, root: str | None) -> Path:
    if not path.exists():
        raise SourceError("missing", f"model_config {path} does not exist here")
    if path.is_file():
        return path
    folders = [path, path / "hub"]
    if root is not None:
        folders = [folder / f"models--{root.replace('/', '--')}" for folder in folders] + folders
    for folder in folders:
        for candidate in (folder, *_snapshots(folder)):
            if (candidate / "config.json").is_file():
                return candidate / "config.json"
    raise SourceError("missing", f"model_config {path} holds no config.json" + ("" if root is None else f" for {root}"))


def _snapshots(folder: Path) -> list[Path]:
    """Revisions of a model in a Hugging Face cache: the one that `main` points to, else the only one that is there."""
    main = folder / "refs" / "main"
    if main.is_file():
        return [folder / "snapshots" / main.read_text(encoding="utf-8").strip()]
    snapshots = sorted((folder / "snapshots").glob("*"))
    return snapshots if len(snapshots) == 1 else []
