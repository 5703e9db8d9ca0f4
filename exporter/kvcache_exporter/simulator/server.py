"""The HTTP face of the simulated engine: the three paths of a vLLM server that an exporter asks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvcache_exporter.simulator.engine import SimulatedEngine
from kvcache_exporter.simulator.page import render_page
from kvcache_exporter.simulator.parameters import EngineParameters
from kvcache_exporter.simulator.traffic import SimulatedTraffic, TrafficParameters, arrivals

# Often enough that no request finds a long stretch of simulated time still to be run.
_TICK_SECONDS = 0.25


class SimulatedEngineServer:
    """Serves /metrics, /v1/models and /version of a simulated engine on a free port of 127.0.0.1, from daemon threads.

    `clock` is a monotonic clock in seconds; a second of it is `speed` seconds for the engine, and latencies on the page are the
    engine's seconds. The engine catches up at each request and, so that no request has much to catch up, by itself between them.
    `now` gives the Unix time at which the page says that the engine was created.

    Raises ValueError when `speed` is not above 0. Use as a context manager or call `close()`.
    """

    def __init__(
        self,
        parameters: EngineParameters | None = None,
        traffic: TrafficParameters | None = None,
        *,
        model_name: str = "simulated-llama-3.1-8b",
        root: str = "",
        speed: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        if speed <= 0:
            raise ValueError("speed is above 0")
        self._engine = SimulatedEngine(parameters)
        max_model_len = self._engine.parameters.max_model_len
        self._traffic = SimulatedTraffic(self._engine, arrivals(traffic or TrafficParameters(), max_model_len))
        self._model_name = model_name
        self._root = root
        self._speed = speed
        self._clock = clock
        self._started = clock()
        self._created = now()
        self._engine_lock = threading.Lock()
        self._closing = threading.Event()
        self._bodies: dict[str, tuple[str, Callable[[], str]]] = {
            "/metrics": ("text/plain; version=1.0.0; charset=utf-8", self._metrics),
            "/v1/models": ("application/json", self._models),
            "/version": ("application/json", self._version),
        }
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        # serve_forever looks this often (seconds) whether it was told to stop, so it is what close() waits for.
        serve = threading.Thread(target=self._http.serve_forever, args=(0.1,), name="simulated-engine-http", daemon=True)
        self._threads = (
            serve,
            threading.Thread(target=self._tick, name="simulated-engine", daemon=True),
        )
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> SimulatedEngineServer:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop both threads and free the port; a second call does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._http.shutdown()
        self._http.server_close()
        for thread in self._threads:
            thread.join()

    def _tick(self) -> None:
        while not self._closing.wait(_TICK_SECONDS):
            with self._engine_lock:
                self._catch_up()

    def _catch_up(self) -> None:
        self._traffic.advance_to((self._clock() - self._started) * self._speed)

    def _metrics(self) -> str:
        with self._engine_lock:
            self._catch_up()
            stats = self._engine.stats()
        return render_page(stats, self._engine.parameters, model_name=self._model_name, created=self._created)

    def _models(self) -> str:
        model = {
            "id": self._model_name,
            "object": "model",
            "created": int(self._created),
            "owned_by": "vllm",
            "root": self._root,
            "parent": None,
            "max_model_len": self._engine.parameters.max_model_len,
            "permission": [],
        }
        return json.dumps({"object": "list", "data": [model]})

    def _version(self) -> str:
        return json.dumps({"version": "0.32.0+simulated"})

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        bodies = self._bodies

        class Handler(BaseHTTPRequestHandler):
            # A client that connects and says nothing must not hold a thread for ever.
            timeout = 10

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path not in bodies:
                    self.send_error(404)
                    return
                content_type, body = bodies[path]
                content = body().encode()
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                """Stay silent: each scrape would be a line."""

        return Handler
