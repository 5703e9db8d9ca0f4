"""Pods of one node over the Kubernetes API: a list, and from there a watch.

That is "Efficient detection of changes" in the Kubernetes documentation of its API.
Only `list` and `watch` of `pods` are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from kvcache_exporter.errors import SourceError
from kvcache_exporter.sources.http import HttpClient, HttpOptions, HttpStatusError
from kvcache_exporter.sources.json_object import json_object

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_LIST_TIMEOUT_SECONDS = 10.0
_GONE = 410


class ExpiredError(SourceError):
    """The version that a watch is to start from is too old for the server: list again."""

    def __init__(self) -> None:
        super().__init__("expired", "the API server no longer has the pods of then (410), so they are listed again")


@dataclass(frozen=True)
class ApiServer:
    """Where the API is, and the files of a service account; None for what is not needed."""

    url: str
    token_file: Path | None = None
    ca_file: Path | None = None


def find_api_server(environment: Mapping[str, str], service_account: Path = _SERVICE_ACCOUNT) -> ApiServer | None:
    """The API server of the cluster that this process runs in, by what every pod is given; None outside of one."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        return None
    return ApiServer(
        f"https://{f'[{host}]' if ':' in host else host}:{port}", service_account / "token", service_account / "ca.crt"
    )


@dataclass(frozen=True)
class PodList:
    """Pods as JSON objects, and the version of the list that a watch starts from."""

    pods: tuple[Mapping[str, Any], ...]
    resource_version: str


@dataclass(frozen=True)
class PodEvent:
    """A change: `ADDED`, `MODIFIED` or `DELETED` with the pod, or `BOOKMARK` with nothing but a newer version."""

    kind: str
    pod: Mapping[str, Any]

    @property
    def resource_version(self) -> str:
        """The version to go on from after this event."""
        return str(self.pod["metadata"]["resourceVersion"])


class PodsApi:
    """The pods of one node in one namespace, or in all of them (None). Not for two threads at once.

    The server is asked to end each watch after `watch_seconds`; a connection that is dead without a sign is given up
    `grace_seconds` later.
    """

    def __init__(
        self,
        server: ApiServer,
        *,
        node_name: str,
        namespace: str | None = None,
        label_selector: str | None = None,
        watch_seconds: int = 60,
        grace_seconds: float = 10.0,
    ) -> None:
        self._server = server
        self._watch_seconds = watch_seconds
        self._grace_seconds = grace_seconds
        self._http = HttpClient(
            HttpOptions(timeout_seconds=_LIST_TIMEOUT_SECONDS, bearer_token_file=server.token_file, ca_file=server.ca_file)
        )
        where = "" if namespace is None else f"/namespaces/{namespace}"
        self._url = f"{server.url.rstrip('/')}/api/v1{where}/pods"
        self._scope = "of all namespaces" if namespace is None else f"of namespace {namespace}"
        self._selectors = {"fieldSelector": f"spec.nodeName={node_name}"}
        if label_selector is not None:
            self._selectors["labelSelector"] = label_selector

    def list(self, *, from_cache: bool = True) -> PodList:
        """All pods. `from_cache` takes what the API server has at hand: no read of its database, and perhaps a little old.

        Raises SourceError: those of HttpClient, and `parse`.
        """
        answer = self._get({"resourceVersion": "0"} if from_cache else {})
        try:
            return PodList(tuple(answer["items"] or ()), str(answer["metadata"]["resourceVersion"]))
        except (KeyError, TypeError) as error:
            raise SourceError("parse", f"{self._url} did not answer a list of pods") from error

    def watch(self, resource_version: str) -> Iterator[PodEvent]:
        """Changes since that version, until the server ends the watch.

        Raises ExpiredError, and SourceError as `list` does.
        """
        query = {
            **self._selectors,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(self._watch_seconds),
        }
        lines = self._http.lines(
            f"{self._url}?{urlencode(query)}",
            accept="application/json",
            idle_timeout_seconds=self._watch_seconds + self._grace_seconds,
        )
        try:
            for line in lines:
                yield self._event(line)
        except HttpStatusError as error:
            raise self._explained(error) from error

    def _get(self, query: Mapping[str, str]) -> Mapping[str, Any]:
        try:
            body = self._http.get(f"{self._url}?{urlencode({**self._selectors, **query})}", accept="application/json")
        except HttpStatusError as error:
            raise self._explained(error) from error
        return json_object(self._url, body.content)

    def _event(self, line: bytes) -> PodEvent:
        event = json_object(self._url, line)
        kind, pod = event.get("type"), event.get("object")
        if not isinstance(kind, str) or not isinstance(pod, dict):
            raise SourceError("parse", f"{self._url} sent a line that is no event of a watch")
        if kind == "ERROR":
            if pod.get("code") == _GONE:
                raise ExpiredError
            raise SourceError("http_status", f"the API server ended the watch: {pod.get('message') or pod.get('reason')}")
        return PodEvent(kind, pod)

    def _explained(self, error: HttpStatusError) -> SourceError:
        if error.status == _GONE:
            return ExpiredError()
        if error.status == 401:
            token = self._server.token_file
            whose = "no token is sent to it" if token is None else f"its token is {token}"
            return SourceError("unauthorized", f"the API server does not know this exporter (401): {whose}")
        if error.status == 403:
            return SourceError(
                "unauthorized",
                f"this exporter may not list and watch the pods {self._scope} (403): bind its service account to a role that has "
                "these two verbs, or set kubernetes.namespaces to those where it has them",
            )
        return error
