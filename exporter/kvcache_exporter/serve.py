"""The running exporter: poller, registry and HTTP server, until a signal ends it."""

from __future__ import annotations

import logging
import signal
import threading
import time
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


class Exporter:
    """One exporter in this process; `simulated` marks everything that it shows.

    `discovery` finds targets besides the configured ones. `recorder`, where given, gets every poll. Both end with the exporter.
    `web` says who may read its pages. Raises OSError when the address cannot be bound.
    """

    def __init__(
        self,
        config: Config,
        *,
        gpus: GpuSources | None,
        discovery: Discovery | None = None,
        recorder: Recorder | None = None,
        web: WebAccess | None = None,
        simulated: bool = False,
    ) -> None:
        self._discovery = discovery
        self._recorder = recorder
        self.poller = Poller(config, gpus=gpus, discovery=discovery, recorder=recorder)
        registry = CollectorRegistry()
        stale_seconds = STALE_INTERVALS * config.poll_interval_seconds
        registry.register(KVCacheCollector(self.poller.latest, stale_seconds=stale_seconds, simulated=simulated))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)

        def is_ticking() -> bool:
            return time.time() - self.poller.ticked_at <= stale_seconds + config.poll_timeout_seconds

        app = make_app(registry, self.poller.latest, is_ticking, simulated=simulated)
        self._server = make_http_server(config.listen_address, app, web)
        host, self.port = self._server.server_address[:2]
        is_tls = web is not None and web.latest.tls is not None
        self.url = f"{'https' if is_tls else 'http'}://{_url_host(str(host))}:{self.port}"
        self._stop = threading.Event()

    def start(self) -> None:
        """Begin to poll and to serve, in daemon threads: one that hangs in a driver must not hold up the exit."""
        if self._discovery is not None:
            self._discovery.start()
        threading.Thread(target=self.poller.run, args=(self._stop,), name="poller", daemon=True).start()
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="http", daemon=True).start()

    def close(self) -> None:
        """Stop serving and polling; does not wait for a poll that is under way."""
        self._stop.set()
        self._server.shutdown()
        self._server.server_close()
        if self._discovery is not None:
            self._discovery.close()
        if self._recorder is not None:
            self._recorder.close()


def run(
    config: Config,
    *,
    gpus: GpuSources | None,
    discovery: Discovery | None = None,
    recorder: Recorder | None = None,
    web: WebAccess | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status."""
    exporter = open_exporter(config, gpus=gpus, discovery=discovery, recorder=recorder, web=web)
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


def open_exporter(
    config: Config,
    *,
    gpus: GpuSources | None,
    discovery: Discovery | None = None,
    recorder: Recorder | None = None,
    web: WebAccess | None = None,
    simulated: bool = False,
) -> Exporter | None:
    """Make an Exporter; None, with a line in the log, when its address cannot be bound."""
    try:
        return Exporter(config, gpus=gpus, discovery=discovery, recorder=recorder, web=web, simulated=simulated)
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
