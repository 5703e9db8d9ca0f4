"""A vLLM server: fetches its /metrics page, /v1/models and /version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvcache_exporter.errors import SourceError
from kvcache_exporter.readings import PageReading, ServedModel
from kvcache_exporter.sources.http import HttpClient
from kvcache_exporter.sources.json_object import json_object
from kvcache_exporter.sources.vllm_page import parse_metrics

# With this, and no slash behind /metrics, every version answers in the plain text format with unescaped names.
_ACCEPT_METRICS = "text/plain;version=0.0.4;q=1,*/*;q=0.1"
_EXPOSITION_TYPES = ("", "text/plain", "application/openmetrics-text")


class VllmClient:
    """One vLLM server. `base_url` is its address without /metrics; `http` says how to reach it.

    `on_page` gets the body of each /metrics page before it is read, so those too that cannot be.
    """

    def __init__(self, base_url: str, http: HttpClient, *, on_page: Callable[[bytes], None] | None = None) -> None:
        self._base_url = base_url.rstrip("/").removesuffix("/metrics")
        self._http = http
        self._on_page = on_page

    def metrics(self) -> PageReading:
        """Read /metrics. Raises SourceError; a page without vLLM series (statistics off) gives no engines."""
        url = f"{self._base_url}/metrics"
        body = self._http.get(url, accept=_ACCEPT_METRICS)
        if body.media_type not in _EXPOSITION_TYPES or body.content.lstrip()[:1] == b"<":
            raise SourceError(
                "not_an_exposition", f"{url} answered {body.media_type or 'an untyped page'}, which is not Prometheus text"
            )
        if self._on_page is not None:
            self._on_page(body.content)
        return parse_metrics(body.content)

    def served_model(self) -> ServedModel:
        """Read /v1/models. Raises SourceError; needs the bearer token where the engine has an API key."""
        url = f"{self._base_url}/v1/models"
        return parse_models(json_object(url, self._http.get(url, accept="application/json").content))

    def version(self) -> str | None:
        """Read /version, such as `0.32.0`. Raises SourceError; None when the answer names none."""
        url = f"{self._base_url}/version"
        version = json_object(url, self._http.get(url, accept="application/json").content).get("version")
        return version if isinstance(version, str) else None


def parse_models(answer: Mapping[str, Any]) -> ServedModel:
    """The base model in the answer of /v1/models: its first entry without a parent (LoRA adapters have one)."""
    entries = answer.get("data")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, Mapping) and entry.get("parent") is None:
            length = entry.get("max_model_len")
            return ServedModel(
                model_name=entry["id"] if isinstance(entry.get("id"), str) else None,
                max_model_len=length if isinstance(length, int) and length > 0 else None,
                root=entry["root"] if isinstance(entry.get("root"), str) else None,
            )
    return ServedModel()
