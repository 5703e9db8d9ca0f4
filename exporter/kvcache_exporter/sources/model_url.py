"""config.json by its address, for exporters that see no model's files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcache_exporter.errors import SourceError
from kvcache_exporter.sources.http import HttpClient, HttpOptions, HttpStatusError
from kvcache_exporter.sources.json_object import json_object

ROOT = "{root}"
_TIMEOUT_SECONDS = 10.0
# The largest known are some hundred KB: one entry for each layer, or each module that is quantized.
_MAX_BYTES = 4 * 1024 * 1024
# As on the hub. Nothing else goes into an address, such as dots that lead elsewhere.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def fetch_config_json(url: str, root: str | None, token_file: Path | None = None) -> Mapping[str, Any]:
    """Fetch config.json from `url`, in which `{root}` stands for the engine's hub name, such as `org/name`.

    `token_file` has the bearer token that gated models need. Raises SourceError: `missing` when the engine's `root` is not known
    or is no hub name, `parse` when the answer is not a JSON object, and those of HttpClient.
    """
    if ROOT in url:
        if root is None or not _HUB_NAME.fullmatch(root):
            what = "the engine does not tell its model" if root is None else f"the engine's model {root!r} is no name of a hub"
            raise SourceError("missing", f"{what}, so {url} cannot be asked: give the path of its config.json as model_config")
        url = url.replace(ROOT, root)
    client = HttpClient(HttpOptions(_TIMEOUT_SECONDS, _MAX_BYTES, bearer_token_file=token_file))
    try:
        return json_object(url, client.get(url, accept="application/json").content)
    except HttpStatusError as error:
        if error.reason == "unauthorized":
            sentence = (
                f"{url} answered {error.status}: set model_config_token_file to a file with a token that may read this model"
            )
            raise SourceError("unauthorized", sentence) from error
        raise
