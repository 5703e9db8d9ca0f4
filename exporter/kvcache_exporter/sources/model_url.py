"""config.json by its address, for exporters that see no model's files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvcache_exporter.config_values import ROOT
from kvcache_exporter.errors import SourceError
from kvcache_exporter.sources.http import HttpClient, HttpOptions
from kvcache_exporter.sources.json_object import json_object

_TIMEOUT_SECONDS = 10.0
# The largest known are some hundred KB: one entry for each layer, or each module that is quantized.
_MAX_BYTES = 4 * 1024 * 1024
_REMEDY = "set model_config_token_file to a file with a token that may read this model"
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
    options = HttpOptions(_TIMEOUT_SECONDS, _MAX_BYTES, bearer_token_file=token_file, unauthorized_remedy=_REMEDY)
    return json_object(url, HttpClient(options).get(url, accept="application/json").content)
