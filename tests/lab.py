"""What tests are made of: a scripted server in the place of vLLM, and the real poller and collector on a clock of one's own.

The expectation of a test is the exposition text, read back with prometheus_client's parser.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kvcache_exporter.collector import STALE_INTERVALS, KVCacheCollector
from kvcache_exporter.config import Config, TargetConfig
from kvcache_exporter.discovery import Discovery
from kvcache_exporter.node_gpus import GpuSource, GpuSources, PodResourcesSource, ProcessSource
from kvcache_exporter.poller import Poller

DATA = Path(__file__).with_name("data")
CASES = DATA / "cases"
TINY_LLAMA: Mapping[str, Any] = json.loads((DATA / "models" / "tiny-llama.json").read_text())
TINY_GEMMA3: Mapping[str, Any] = json.loads((DATA / "models" / "tiny-gemma3.json").read_text())
LLAMA_8B: Mapping[str, Any] = json.loads((DATA / "models" / "Meta-Llama-3.1-8B.json").read_text())

Labels = tuple[tuple[str, str], ...]


def capture(name: str) -> bytes:
    """The page of a real engine, by the name of its file without `.prom.gz`."""
    return gzip.decompress((DATA / "vllm" / f"{name}.prom.gz").read_bytes())


def models_answer(max_model_len: int | None = 4096, root: str = "/nowhere/model", name: str = "tiny") -> bytes:
    """An answer of /v1/models with one base model."""
    entry = {"id": name, "object": "model", "root": root, "parent": None, "max_model_len": max_model_len}
    return json.dumps({"object": "list", "data": [entry]}).encode()


@dataclass(frozen=True)
class Reply:
    """What the scripted server answers: at once, after `delay_seconds`, or a byte every `drip_seconds`."""

    body: bytes = b""
    status: int = 200
    content_type: str = "text/plain; version=0.0.4; charset=utf-8"
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_seconds: float = 0.0
    drip_seconds: float = 0.0


class Upstream:
    """An HTTP server on loopback, with TLS if given (certificate, key).

    `replies` maps a path to a Reply; `requests` lists (path, headers) of what was asked.
    """

    def __init__(self, *, tls: tuple[Path, Path] | None = None) -> None:
        self.replies: dict[str, Reply] = {}
        self.requests: list[tuple[str, Mapping[str, str]]] = []
        self._closing = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*tls)
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Upstream:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the server; from then on connections are refused."""
        self._closing.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def page(self, body: bytes, *, models: bytes | None = None) -> None:
        """Answer like a vLLM server with this /metrics page; without `models`, /v1/models is 404."""
        self.replies = {"/metrics": Reply(body), "/version": Reply(b'{"version":"0.32.0"}', content_type="application/json")}
        if models is not None:
            self.replies["/v1/models"] = Reply(models, content_type="application/json")

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                upstream.requests.append((self.path, dict(self.headers.items())))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    self._answer(upstream.replies.get(self.path, Reply(b"not found", status=404)))

            def _answer(self, reply: Reply) -> None:
                if upstream._closing.wait(reply.delay_seconds):
                    return
                self.send_response(reply.status)
                headers = {"Content-Type": reply.content_type, "Content-Length": str(len(reply.body)), **reply.headers}
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if not reply.drip_seconds:
                    self.wfile.write(reply.body)
                    return
                for index in range(len(reply.body)):
                    if upstream._closing.wait(reply.drip_seconds):
                        return
                    self.wfile.write(reply.body[index : index + 1])

            def log_message(self, format: str, *args: object) -> None:
                """Stay silent."""

        return Handler


class Clock:
    """Unix seconds that move when told to."""

    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


class Lab:
    """The real poller and collector for some targets. `gpus` reads GPUs, `show_gpus` are those to show; the rest is Config's."""

    def __init__(
        self,
        *targets: TargetConfig,
        gpus: GpuSource | None = None,
        processes: ProcessSource | None = None,
        pod_resources: PodResourcesSource | None = None,
        show_gpus: tuple[str, ...] | None = None,
        discovery: Discovery | None = None,
        **settings: Any,
    ) -> None:
        self.clock = Clock()
        self.config = Config(targets=targets, gpus=show_gpus, **{"poll_timeout_seconds": 1.0, **settings})
        sources = None if gpus is None else GpuSources(gpus, processes, pod_resources)
        self.poller = Poller(self.config, clock=self.clock, gpus=sources, discovery=discovery)
        self.registry = CollectorRegistry()
        stale_seconds = STALE_INTERVALS * self.config.poll_interval_seconds
        self.registry.register(KVCacheCollector(self.poller.latest, clock=self.clock, stale_seconds=stale_seconds))

    def poll(self) -> Lab:
        """One tick, one interval after the one before."""
        self.clock.now += self.config.poll_interval_seconds
        self.poller.poll_once()
        return self

    def text(self) -> str:
        """The page that a scrape gets now."""
        return generate_latest(self.registry).decode()

    def samples(self, name: str, /, **only: str) -> dict[Labels, float]:
        """Samples of one name whose labels include `only`, by their other labels; the target is left out."""
        found = {}
        for family in text_string_to_metric_families(self.text()):
            for sample in family.samples:
                labels = dict(sample.labels)
                if sample.name == name and all(labels.get(key) == value for key, value in only.items()):
                    key = tuple(sorted((k, v) for k, v in labels.items() if k not in only and k != "target"))
                    assert key not in found, f"two samples of {name} with labels {key}"
                    found[key] = sample.value
        return found

    def value(self, name: str, /, **only: str) -> float | None:
        """The one value of a name, whatever its other labels; None when there is no sample."""
        found = self.samples(name, **only)
        assert len(found) <= 1, f"{len(found)} samples of {name}: {found}"
        return next(iter(found.values()), None)

    def errors(self, source: str = "vllm") -> dict[str, float]:
        """Errors of a source so far, by reason."""
        return {
            dict(labels)["reason"]: value for labels, value in self.samples("kvcache_poll_errors_total", source=source).items()
        }


def lab_for(
    upstream: Upstream, *, path: str = "", gpus: GpuSource | None = None, lengths: tuple[int, ...] = (), **target: Any
) -> Lab:
    """A Lab with one target, called `t`, at the upstream."""
    return Lab(TargetConfig(name="t", url=upstream.url + path, **target), gpus=gpus, request_lengths=lengths)


def wait_until(condition: Callable[[], object], *, seconds: float = 10.0) -> None:
    """Wait for something that another process or thread does; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
