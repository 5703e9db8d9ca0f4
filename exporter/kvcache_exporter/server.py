"""/metrics, /healthz, /readyz and the landing page, on the standard library's WSGI server.

A request reads the latest snapshot and nothing else: no page of ours ever waits for an engine or a GPU. TLS and passwords are
the affair of a web configuration file, where there is one.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import ssl
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import IO, TYPE_CHECKING, Any, cast
from wsgiref.simple_server import ServerHandler, WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from kvcache_exporter.basic_auth import TooManyChecksError, credentials
from kvcache_exporter.config import ListenAddress
from kvcache_exporter.landing_page import landing_page
from kvcache_exporter.server_tls import names_of
from kvcache_exporter.snapshot import Snapshot
from kvcache_exporter.web_access import Access, WebAccess

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

log = logging.getLogger(__name__)

# A client that sends nothing must not hold a thread for ever.
_CLIENT_TIMEOUT_SECONDS = 10

# What the kubelet asks, which has neither a password nor a certificate to show; they tell no more than that the exporter works.
_OPEN_PATHS = ("/healthz", "/readyz")

_MAX_REQUEST_LINE_BYTES = 65536
# The first byte of every TLS connection: the type of record that carries a handshake.
_TLS_HANDSHAKE = b"\x16"


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


def _guarded(app: WSGIApplication, web: WebAccess) -> WSGIApplication:
    """Ask for TLS and a password, where they are configured, before `app` answers; add the configured headers."""

    def guarded(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        access = web.latest

        def start(status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], object]:  # noqa: ANN401  # WSGI's
            given = {name.lower() for name, _ in headers}
            added = [(name, value) for name, value in access.headers.items() if name.lower() not in given]
            return start_response(status, [*headers, *added], exc_info)

        refusal = None if environ.get("PATH_INFO") in _OPEN_PATHS else _refusal(access, environ)
        if refusal is None:
            return app(environ, start)
        status, text, headers = refusal
        body = _answer(start, status, "text/plain", text, *headers)
        return [b""] if environ.get("REQUEST_METHOD") == "HEAD" else body

    return guarded


def _refusal(access: Access, environ: WSGIEnvironment) -> tuple[str, str, list[tuple[str, str]]] | None:
    """Status, sentence and further headers for a client that is not let in."""
    if access.tls is not None and environ["wsgi.url_scheme"] != "https":
        return "400 Bad Request", "this port speaks https, not http\n", []
    if access.passwords is None:
        return None
    given = credentials(environ.get("HTTP_AUTHORIZATION", ""))
    try:
        if given is not None and access.passwords.accepts(*given):
            return None
    except TooManyChecksError:
        return "503 Service Unavailable", "too many passwords to check\n", [("Retry-After", "1")]
    challenge = ("WWW-Authenticate", 'Basic realm="kvcache-exporter", charset="UTF-8"')
    return "401 Unauthorized", "user and password are needed\n", [challenge]


def _answer(start_response: StartResponse, status: str, media_type: str, text: str, *more: tuple[str, str]) -> list[bytes]:
    body = text.encode("utf-8")
    headers = [
        ("Content-Type", f"{media_type}; charset=utf-8"),
        ("Content-Length", str(len(body))),
        ("X-Content-Type-Options", "nosniff"),
        *more,
    ]
    start_response(status, headers)
    return [body]


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    # The default of 5 drops scrapes when several Prometheus servers and probes come at once.
    request_queue_size = 64
    app: WSGIApplication
    web: WebAccess | None

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6 and self.server_address[0] == "::":
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # Not WSGIServer's own, which asks the name service who we are: that can take seconds, and nobody needs it.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def finish_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401  # the types that the base class has
        """Answer one client. This runs in a thread of its own, and so does all that waits for the client, TLS's handshake too."""
        access = None if self.web is None else self.web.refresh()
        request.settimeout(_CLIENT_TIMEOUT_SECONDS)
        if access is None or access.tls is None or request.recv(1, socket.MSG_PEEK) != _TLS_HANDSHAKE:
            # What comes in by plain HTTP although there is TLS is refused by the application, but for the probes.
            super().finish_request(request, client_address)
            return
        with access.tls.wrap_socket(request, server_side=True) as secure:
            if access.client_names and not access.client_names & names_of(secure.getpeercert()):
                return
            super().finish_request(secure, client_address)
            _say_end_of_tls(secure)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401  # the types that the base class has
        """Log what a request failed at, unless it is the client's or the network's doing: that is nothing to act on here."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            log.debug("connection failed", extra={"fields": {"client": client_address[0], "error": error}})
        else:
            log.error("request failed", exc_info=True)


def _say_end_of_tls(secure: ssl.SSLSocket) -> None:
    """Tell the client that nothing is missing at the end, without waiting for it to say the same."""
    secure.settimeout(0)
    with contextlib.suppress(OSError):
        secure.unwrap()


class _ServerHandler(ServerHandler):
    request_handler: WSGIRequestHandler
    headers_sent: bool

    def log_exception(self, exc_info: Any) -> None:  # noqa: ANN401  # the type that the base class has
        """Log what an answer failed at, unless it was under way and the client would not take it."""
        if not (self.headers_sent and isinstance(exc_info[1], OSError)):
            log.error("request failed", exc_info=exc_info)


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_TIMEOUT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: ANN401  # the name and types that the base class has
        """Log no scrape: there are thousands a day, and Prometheus counts them."""

    def handle(self) -> None:
        """Read one request and answer it, as the base class does, with a handler that does not log clients that went away."""
        self.raw_requestline = self.rfile.readline(_MAX_REQUEST_LINE_BYTES + 1)
        if len(self.raw_requestline) > _MAX_REQUEST_LINE_BYTES:
            self.requestline, self.request_version, self.command = "", "", ""
            self.send_error(414)
        elif self.parse_request():
            output = cast("IO[bytes]", self.wfile)
            handler = _ServerHandler(self.rfile, output, self.get_stderr(), self.get_environ(), multithread=True)
            handler.request_handler = self
            handler.run(cast("_Server", self.server).app)

    def get_environ(self) -> WSGIEnvironment:
        return {**super().get_environ(), "HTTPS": "on" if isinstance(self.connection, ssl.SSLSocket) else "off"}

    def address_string(self) -> str:
        return str(self.client_address[0])


def make_http_server(address: ListenAddress, app: WSGIApplication, web: WebAccess | None = None) -> WSGIServer:
    """Bind `address` and return the server, ready for `serve_forever`. Raises OSError when the address cannot be bound.

    `web` says who may ask, and whether by TLS; None: plain HTTP for everybody.
    """
    host = address.host or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")  # noqa: S104  # all addresses, as asked
    family = socket.getaddrinfo(host, address.port, type=socket.SOCK_STREAM)[0][0]

    class Server(_Server):
        address_family = family

    server = Server((host, address.port), _Handler)
    server.web = web
    server.app = app if web is None else _guarded(app, web)
    return server
