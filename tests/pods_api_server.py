"""An HTTP server that speaks the part of the Kubernetes API that lists and watches pods.

Its answers have the shape and the rules of the real one: versions that rise with every change, selectors, watches that start at a
version and end after `timeoutSeconds`, 410 for versions that it has forgotten, bearer tokens.
"""

from __future__ import annotations

import contextlib
import copy
import json
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

NODE = "node-1"


def pod(
    name: str,
    *,
    namespace: str = "ml",
    ip: str = "127.0.0.1",
    port: int = 8000,
    port_name: str = "vllm",
    node: str = NODE,
    phase: str = "Running",
    labels: Mapping[str, str] | None = None,
    annotations: Mapping[str, str] | None = None,
    containers: list[dict[str, Any]] | None = None,
    uid: str | None = None,
) -> dict[str, Any]:
    """A Pod as the API has it, with one container `vllm` unless `containers` are given."""
    engine = {
        "name": "vllm",
        "image": "vllm/vllm-openai:v0.11.2",
        "args": ["--model", "meta-llama/Llama-3.1-8B", "--port", str(port)],
        "ports": [{"name": port_name, "containerPort": port, "protocol": "TCP"}],
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }
    containers = [engine] if containers is None else containers
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid or f"uid-of-{namespace}-{name}",
            "labels": dict(labels or {}),
            "annotations": dict(annotations or {}),
        },
        "spec": {"nodeName": node, "containers": containers},
        "status": {
            "phase": phase,
            "podIP": ip,
            "containerStatuses": [
                {"name": one["name"], "containerID": f"containerd://{name}-{one['name']}"} for one in containers
            ],
        },
    }


@dataclass(frozen=True)
class _Change:
    """What happened at a version; `before` is the pod as it was until then."""

    version: int
    kind: str
    pod: dict[str, Any]
    before: dict[str, Any] | None = None


class PodsApiServer:
    """The server, on loopback, with TLS if given (certificate, key).

    `token` is the one that it accepts, None for any. `status` answers every request with that status. `hold_seconds` is how
    long it waits before a list. With `is_deaf` open watches neither tell anything nor end, as over a connection that is dead.
    `asked` has the query of every request, `watches` how many are open.
    """

    def __init__(self, *, token: str | None = None, tls: tuple[Path, Path] | None = None) -> None:
        self.token = token
        self.status: int | None = None
        self.hold_seconds = 0.0
        self.is_deaf = False
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.watches = 0
        self._changed = threading.Condition()
        self._version = 100
        self._oldest = 100
        self._pods: dict[tuple[str, str], dict[str, Any]] = {}
        self._events: list[_Change] = []
        self._cut = 0
        self._ended = 0
        self._closing = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"api": self}))
        self._http.daemon_threads = True
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self.port = self._http.server_port
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def __enter__(self) -> PodsApiServer:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server and every watch."""
        self._closing.set()
        self.cut_watches()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def apply(self, new: dict[str, Any]) -> None:
        """Create the pod, or change it."""
        key = (new["metadata"]["namespace"], new["metadata"]["name"])
        self._change("MODIFIED" if key in self._pods else "ADDED", key, new)

    def delete(self, name: str, namespace: str = "ml") -> None:
        """Remove the pod."""
        self._change("DELETED", (namespace, name), self._pods[namespace, name])

    def forget_history(self, *, without: str | None = None) -> None:
        """Compact: watches from versions before now are answered 410. A pod called `without` goes, and no event tells."""
        with self._changed:
            self._version += 1
            self._oldest = self._version
            self._events.clear()
            self._pods = {key: one for key, one in self._pods.items() if key[1] != without}

    def forget_before(self, version: int) -> None:
        """Compact up to that version."""
        with self._changed:
            self._oldest = version

    def expire_watches(self, *, without: str | None = None) -> None:
        """Compact as `forget_history`, and end every open watch with an ERROR event of 410."""
        self.forget_history(without=without)
        with self._changed:
            self._events.append(_Change(self._version, "EXPIRED", {}))
            self._changed.notify_all()

    def end_watches(self) -> None:
        """End every open watch as after its time."""
        with self._changed:
            self._ended += 1
            self._changed.notify_all()

    def bookmark(self) -> None:
        """Tell watchers a newer version without any change."""
        with self._changed:
            self._version += 1
            self._events.append(_Change(self._version, "BOOKMARK", {}))
            self._changed.notify_all()

    def cut_watches(self) -> None:
        """Drop the connection of every open watch in the middle."""
        with self._changed:
            self._cut += 1
            self._changed.notify_all()

    def lists(self) -> int:
        """How many times the pods were listed."""
        return sum("watch" not in query for _, query in self.asked)

    def _change(self, kind: str, key: tuple[str, str], new: dict[str, Any]) -> None:
        with self._changed:
            self._version += 1
            stored = copy.deepcopy(new)
            stored["metadata"]["resourceVersion"] = str(self._version)
            before = self._pods.get(key)
            if kind == "DELETED":
                del self._pods[key]
            else:
                self._pods[key] = stored
            self._events.append(_Change(self._version, kind, stored, before))
            self._changed.notify_all()


class _Handler(BaseHTTPRequestHandler):
    api: PodsApiServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        self.api.asked.append((parts.path, query))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._answer(parts.path, query)

    def _answer(self, path: str, query: dict[str, str]) -> None:
        expected = None if self.api.token is None else f"Bearer {self.api.token}"
        if expected is not None and self.headers.get("Authorization") != expected:
            return self._fail(401, "Unauthorized")
        if self.api.status is not None:
            return self._fail(self.api.status, "Forbidden" if self.api.status == 403 else "Failure")
        if "watch" in query:
            return self._watch(path, query)
        if self.api._closing.wait(self.api.hold_seconds):
            return None
        with self.api._changed:
            items = [one for one in self.api._pods.values() if _selected(one, path, query)]
            answer = {
                "kind": "PodList",
                "apiVersion": "v1",
                "metadata": {"resourceVersion": str(self.api._version)},
                # The real list has no version of its own in each item's kind, and null for no items.
                "items": [{key: one[key] for key in ("metadata", "spec", "status")} for one in items] or None,
            }
        return self._json(200, answer)

    def _watch(self, path: str, query: dict[str, str]) -> None:
        version = int(query["resourceVersion"])
        if version < self.api._oldest:
            return self._fail(410, "Expired")
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        self.api.watches += 1
        try:
            self._stream(path, query, version)
        finally:
            self.api.watches -= 1
        return None

    def _stream(self, path: str, query: dict[str, str], version: int) -> None:
        cut, ended = self.api._cut, self.api._ended
        timeout = float(query["timeoutSeconds"])
        while True:
            with self.api._changed:
                self.api._changed.wait_for(partial(self._has_news, cut, ended, version), None if self.api.is_deaf else timeout)
                if self.api._cut != cut or self.api._closing.is_set():
                    self.close_connection = True
                    return
                changes = [change for change in self.api._events if change.version > version]
            for change in changes:
                version = change.version
                event = _event(change, path, query)
                if event is not None:
                    self._chunk(event)
            if not changes or changes[-1].kind == "EXPIRED":
                self.wfile.write(b"0\r\n\r\n")
                return

    def _has_news(self, cut: int, ended: int, version: int) -> bool:
        is_over = self.api._closing.is_set() or (self.api._cut, self.api._ended) != (cut, ended)
        return is_over or (not self.api.is_deaf and any(change.version > version for change in self.api._events))

    def _chunk(self, event: dict[str, Any]) -> None:
        line = json.dumps(event).encode() + b"\n"
        # In two pieces, as a network may deliver it.
        for piece in (line[:20], line[20:]):
            self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.flush()

    def _fail(self, status: int, reason: str) -> None:
        self._json(status, {"kind": "Status", "status": "Failure", "reason": reason, "code": status})

    def _json(self, status: int, answer: dict[str, Any]) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent."""


def _event(change: _Change, path: str, query: Mapping[str, str]) -> dict[str, Any] | None:
    """What a watcher is told of a change; a pod that begins or ceases to match its selectors comes and goes to it."""
    if change.kind == "EXPIRED":
        return {"type": "ERROR", "object": {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}}
    if change.kind == "BOOKMARK":
        return {"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": str(change.version)}}}
    was = change.before is not None and _selected(change.before, path, query)
    is_now = change.kind != "DELETED" and _selected(change.pod, path, query)
    kind = {(False, True): "ADDED", (True, True): "MODIFIED", (True, False): "DELETED"}.get((was, is_now))
    return None if kind is None else {"type": kind, "object": change.pod}


def _selected(one: dict[str, Any], path: str, query: Mapping[str, str]) -> bool:
    metadata = one["metadata"]
    if path.startswith("/api/v1/namespaces/") and path.split("/")[4] != metadata["namespace"]:
        return False
    if query.get("fieldSelector", f"spec.nodeName={one['spec']['nodeName']}") != f"spec.nodeName={one['spec']['nodeName']}":
        return False
    wanted = [part.partition("=") for part in query.get("labelSelector", "").split(",") if part]
    return all(metadata["labels"].get(name) == value for name, _, value in wanted)
