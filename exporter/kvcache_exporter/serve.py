"""The running exporter: poller, registry and HTTP server, until a signal ends it."""

from __future__ import annotations

import logging
import signal
import threading
import time
from dataclasses import dataclass
from types import FrameType

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from kvcache_exporter import __version__
from kvcache_exporter.capture import Recorder
from kvcache_exporter.collector import STALE_INTERVALS, KVCacheCollector
from kvcache_exporter.config import Config
from kvcache_exporter.discovery import Discovery
from kvcache_exporter.node_gpus import GpuSources
from kvcache_exporter.poller import Poller
from kvcache_exporter.server import make_app, make_http_server
from kvcache_exporter.web_access import WebAccess

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parts:
    """What an exporter is made of besides its configuration; None for what it does without.

    `gpus` tell of GPUs, `discovery` finds targets besides the configured ones, `recorder` gets every poll, `web` says who may
    read the pages. `simulated` marks everything that is shown.
    """

    gpus: GpuSources | None = None
    discovery: Discovery | None = None
    recorder: Recorder | None = None
    web: WebAccess | None = None
    simulated: bool = False


class Exporter:
    """One exporter in this process; discovery and recorder end with it. Raises OSError when the address cannot be bound."""

    def __init__(self, config: Config, parts: Parts) -> None:
        self._parts = parts
        self.poller = Poller(config, gpus=parts.gpus, discovery=parts.discovery, recorder=parts.recorder)
        registry = CollectorRegistry()
        stale_seconds = STALE_INTERVALS * config.poll_interval_seconds
        registry.register(KVCacheCollector(self.poller.latest, stale_seconds=stale_seconds, simulated=parts.simulated))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)

        def is_ticking() -> bool:
            return time.time() - self.poller.ticked_at <= stale_seconds + config.poll_timeout_seconds

        app = make_app(registry, self.poller.latest, is_ticking, simulated=parts.simulated)
        self._server = make_http_server(config.listen_address, app, parts.web)
        host, self.port = self._server.server_address[:2]
        is_tls = parts.web is not None and parts.web.latest.tls is not None
        self.url = f"{'https' if is_tls else 'http'}://{_url_host(str(host))}:{self.port}"
        self._stop = threading.Event()

    def start(self) -> None:
        """Begin to poll and to serve, in daemon threads: one that hangs in a driver must not hold up the exit."""
        if self._parts.discovery is not None:
            self._parts.discovery.start()
        threading.Thread(target=self.poller.run, args=(self._stop,), name="poller", daemon=True).start()
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="http", daemon=True).start()

    def close(self) -> None:
        """Stop serving and polling; does not wait for a poll that is under way."""
        self._stop.set()
        self._server.shutdown()
        self._server.server_close()
        if self._parts.discovery is not None:
            self._parts.discovery.close()
        if self._parts.recorder is not None:
            self._parts.recorder.close()


def run(config: Config, parts: Parts) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    exporter = open_exporter(config, parts)
    if exporter is None:
        return 1
    stop = stop_on_signal()
    exporter.start()
    fields = {"version": __version__, "address": exporter.url, "targets": len(config.targets)}
    log.info("serving", extra={"fields": fields})
    stop.wait()
    exporter.close()
    log.info("stopped")
    return 0


def open_exporter(config: Config, parts: Parts) -> Exporter | None:
    """Make an Exporter; None, with a line in the log, when its address cannot be bound."""
    try:
        return Exporter(config, parts)
    except OSError as error:
        address = config.listen_address
        fields = {
            "address": f"{address.host}:{address.port}",
            "error": error.strerror or str(error),
            "remedy": "free the port or choose another with --listen-address",
        }
        log.error("cannot serve", extra={"fields": fields})
        return None


def stop_on_signal() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set."""
    stop = threading.Event()

    def set_stop(_signal: int, _frame: FrameType | None) -> None:
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, set_stop)
    return stop


def _url_host(host: str) -> str:
    shown = {"::": "localhost", "0.0.0.0": "localhost"}.get(host, host)  # noqa: S104  # shown to a person, not bound
    return f"[{shown}]" if ":" in shown else shown
