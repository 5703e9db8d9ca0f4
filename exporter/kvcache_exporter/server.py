"""/metrics, /healthz, /readyz and the landing page, on the standard library's WSGI server.

A request reads the latest snapshot and nothing else: no page of ours ever waits for an engine or a GPU.
"""

from __future__ import annotations

import socket
import socketserver
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from kvcache_exporter.config import ListenAddress
from kvcache_exporter.landing_page import landing_page
from kvcache_exporter.snapshot import Snapshot

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

# A client that sends nothing must not hold a thread for ever.
_CLIENT_TIMEOUT_SECONDS = 10


def make_app(
    registry: CollectorRegistry, latest: Callable[[], Snapshot | None], is_ticking: Callable[[], bool], *, simulated: bool = False
) -> WSGIApplication:
    """Return the WSGI application. `latest` gives the newest snapshot, `is_ticking` whether the poller is on time."""
    metrics = make_wsgi_app(registry)

    def healthz() -> tuple[str, str]:
        # Liveness is the tick alone: restarting the exporter cures no engine and no GPU.
        return ("200 OK", "ok\n") if is_ticking() else ("503 Service Unavailable", "the poller does not tick\n")

    def readyz() -> tuple[str, str]:
        return ("200 OK", "ok\n") if latest() else ("503 Service Unavailable", "no source has been polled yet\n")

    plain: Mapping[str, Callable[[], tuple[str, str]]] = {"/healthz": healthz, "/readyz": readyz}

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if environ.get("REQUEST_METHOD", "GET") not in ("GET", "HEAD"):
            body = _answer(start_response, "405 Method Not Allowed", "text/plain", "only GET and HEAD are served\n")
        elif path.rstrip("/") == "/metrics":
            body = metrics({**environ, "REQUEST_METHOD": "GET"}, start_response)
        elif path in plain:
            status, text = plain[path]()
            body = _answer(start_response, status, "text/plain", text)
        elif path == "/":
            body = _answer(start_response, "200 OK", "text/html", landing_page(latest(), simulated=simulated))
        else:
            body = _answer(start_response, "404 Not Found", "text/plain", "not found; the metrics are at /metrics\n")
        return [b""] if environ.get("REQUEST_METHOD") == "HEAD" else body

    return app


def _answer(start_response: StartResponse, status: str, media_type: str, text: str) -> list[bytes]:
    body = text.encode("utf-8")
    headers = [
        ("Content-Type", f"{media_type}; charset=utf-8"),
        ("Content-Length", str(len(body))),
        ("X-Content-Type-Options", "nosniff"),
    ]
    start_response(status, headers)
    return [body]


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    # The default of 5 drops scrapes when several Prometheus servers and probes come at once.
    request_queue_size = 64

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6 and self.server_address[0] == "::":
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Not WSGIServer's own, which asks the name service who we are: that can take seconds, and nobody needs it.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_TIMEOUT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: ANN401  # the name and types that the base class has
        """Log no scrape: there are thousands a day, and Prometheus counts them."""

    def address_string(self) -> str:
        return str(self.client_address[0])


def make_http_server(address: ListenAddress, app: WSGIApplication) -> WSGIServer:
    """Bind `address` and return the server, ready for `serve_forever`. Raises OSError when the address cannot be bound."""
    host = address.host or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")  # noqa: S104  # all addresses, as asked
    family = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)[0][0]

    class Server(_Server):
        address_family = family

    server = Server((host, address.port), _Handler)
    server.set_app(app)
    return server
