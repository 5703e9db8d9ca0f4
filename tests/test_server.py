"""The HTTP face: what a scraper, a probe, a browser and a hostile client get. Through the real sockets of an Exporter."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from kvcache_exporter import server
from kvcache_exporter.config import Config, ListenAddress, TargetConfig
from kvcache_exporter.serve import Exporter, Parts
from lab import CASES, Upstream, wait_until

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

PAGE = b'vllm:kv_cache_usage_perc{engine="0",model_name="<b>m</b>"} 0.5\n'


def exporter_for(upstream: Upstream, host: str = "127.0.0.1", **parts: Any) -> Exporter:
    config = Config(
        targets=(TargetConfig(name="t", url=upstream.url),),
        listen_address=ListenAddress(host, 0),
        poll_interval_seconds=0.2,
        poll_timeout_seconds=0.1,
    )
    return Exporter(config, Parts(**parts))


@pytest.fixture
def exporter(upstream: Upstream) -> Iterator[Exporter]:
    upstream.page(PAGE)
    exporter = exporter_for(upstream)
    exporter.start()
    wait_until(exporter.poller.latest)
    yield exporter
    exporter.close()


def ask(
    exporter: Exporter, path: str = "/metrics", *, method: str = "GET", host: str = "127.0.0.1", headers: Mapping[str, str] = {}
) -> tuple[int, Mapping[str, str], bytes]:
    connection = http.client.HTTPConnection(host, exporter.port, timeout=5)
    connection.request(method, path, headers=dict(headers))
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, body


def checks_67() -> list[dict[str, Any]]:
    checks: list[dict[str, Any]] = yaml.safe_load((CASES / "67-content-type" / "checks.yaml").read_text())
    return checks


@pytest.mark.parametrize(
    "check", [check for check in checks_67() if "want_type" in check], ids=lambda check: check["accept"][:30]
)
def test_67_format_and_type_agree(exporter: Exporter, check: Mapping[str, str]) -> None:
    status, headers, body = ask(exporter, headers={"Accept": check["accept"]} if check["accept"] else {})
    assert status == 200
    media_type, _, parameters = headers["content-type"].partition(";")
    assert media_type == check["want_type"]
    assert int(headers["content-length"]) == len(body)
    assert (body.decode().splitlines()[-1] == "# EOF") == (media_type == "application/openmetrics-text")
    if "want_version" in check:
        assert any(f"version={version}" in parameters for version in ("0.0.4", "1.0.0"))


def test_67_head_has_no_body(exporter: Exporter) -> None:
    for path in ("/metrics", "/healthz", "/"):
        status, _, body = ask(exporter, path, method="HEAD")
        assert (status, body) == (200, b"")


def test_67_other_paths_and_methods(exporter: Exporter) -> None:
    assert ask(exporter, "/metrics/")[0] == 200
    assert ask(exporter, "/nope")[0] == 404
    assert ask(exporter, method="POST")[0] == 405


def test_67_gzip_where_asked_for(exporter: Exporter) -> None:
    _, headers, body = ask(exporter, headers={"Accept-Encoding": "gzip"})
    assert headers["content-encoding"] == "gzip"
    assert b"kvcache_usage_ratio" in gzip.decompress(body)


def test_every_answer_has_type_and_length(exporter: Exporter) -> None:
    for path in ("/", "/metrics", "/healthz", "/readyz", "/nope"):
        _, headers, body = ask(exporter, path)
        assert headers["content-type"].partition(";")[0] in ("text/plain", "text/html")
        assert int(headers["content-length"]) == len(body)


def test_metrics_hold_the_exporters_own_process(exporter: Exporter) -> None:
    body = ask(exporter)[2].decode()
    for name in ("process_resident_memory_bytes", "python_info", "kvcache_exporter_build_info"):
        assert f"\n{name}" in body


def test_healthy_although_the_engine_is_down() -> None:
    """Neither probe fails because of an engine: a restart of the exporter would cure nothing."""
    with Upstream() as upstream:
        exporter = exporter_for(upstream)
    exporter.start()
    wait_until(exporter.poller.latest)
    assert ask(exporter, "/healthz")[::2] == (200, b"ok\n")
    assert ask(exporter, "/readyz")[::2] == (200, b"ok\n")
    exporter.close()


def test_not_ready_before_the_first_poll_and_not_healthy_when_the_tick_stops(upstream: Upstream) -> None:
    exporter = exporter_for(upstream)
    exporter.poller.run = lambda stop: None  # type: ignore[method-assign]  # a poller thread that has died
    exporter.start()
    assert ask(exporter, "/readyz")[::2] == (503, b"no source has been polled yet\n")
    assert ask(exporter, "/healthz")[0] == 200
    wait_until(lambda: ask(exporter, "/healthz")[::2] == (503, b"the poller does not tick\n"))
    exporter.close()


def test_landing_page_shows_engines_and_escapes_names(exporter: Exporter) -> None:
    body = ask(exporter, "/")[2].decode()
    assert "&lt;b&gt;m&lt;/b&gt;" in body
    assert "<b>m</b>" not in body
    assert "50%" in body
    assert "simulated" not in body.partition("</style>")[2]


def test_simulated_exporter_says_so_everywhere(upstream: Upstream) -> None:
    upstream.page(PAGE)
    exporter = exporter_for(upstream, simulated=True)
    exporter.start()
    wait_until(exporter.poller.latest)
    assert b"simulated" in ask(exporter, "/")[2].partition(b"</style>")[2]
    infos = [line for line in ask(exporter)[2].decode().splitlines() if line.startswith("kvcache_") and "_info{" in line]
    assert len(infos) == 3
    assert all('simulated="true"' in line for line in infos)
    exporter.close()


@pytest.mark.parametrize(
    ("bind", "connect"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("", "127.0.0.1"), ("::", "127.0.0.1")]
)
def test_addresses_of_both_families(upstream: Upstream, bind: str, connect: str) -> None:
    if ":" in bind and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    exporter = exporter_for(upstream, host=bind)
    exporter.start()
    assert ask(exporter, "/healthz", host=connect)[0] == 200
    exporter.close()


def test_silent_client_holds_up_nobody(exporter: Exporter) -> None:
    with socket.create_connection(("127.0.0.1", exporter.port)):
        started = time.monotonic()
        assert ask(exporter)[0] == 200
        assert time.monotonic() - started < 1


def test_clients_that_go_away_leave_no_trace(
    exporter: Exporter,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    wait_for_threads: Callable[[], None],
) -> None:
    """Neither one that says nothing, nor one that leaves in the middle, nor one that does not wait for its answer."""
    monkeypatch.setattr(server._Handler, "timeout", 0.2)
    with socket.create_connection(("127.0.0.1", exporter.port), timeout=5) as client:
        assert client.recv(1) == b""
    for said in (b"", b"GET /metr", b"GET /metrics HTTP/1.0\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", exporter.port), timeout=5) as client:
            client.sendall(said)
            # Ends with a reset, not with the polite end of a connection.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    wait_for_threads()
    assert [record for record in caplog.records if record.levelname != "DEBUG"] == []
    assert capfd.readouterr().err == ""


@contextlib.contextmanager
def serving(app: WSGIApplication) -> Iterator[int]:
    """Serve an application by our server; gives the port."""
    http_server = server.make_http_server(ListenAddress("127.0.0.1", 0), app)
    threading.Thread(target=http_server.serve_forever, args=(0.02,), daemon=True).start()
    yield http_server.server_port
    http_server.shutdown()
    http_server.server_close()


def test_client_that_does_not_read_its_answer_is_let_go(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    wait_for_threads: Callable[[], None],
) -> None:
    def endless(environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
        start_response("200 OK", [])
        while True:
            yield bytes(1_000_000)

    monkeypatch.setattr(server._Handler, "timeout", 0.2)
    with serving(endless) as port, socket.create_connection(("127.0.0.1", port), timeout=5) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        wait_for_threads()
    assert caplog.records == []
    assert capfd.readouterr().err == ""


def test_failure_of_ours_is_logged_and_answered(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> bool:
        raise OSError("ours")

    with serving(server.make_app(CollectorRegistry(), lambda: None, fail)) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 500
        connection.close()
    assert [record.getMessage() for record in caplog.records] == ["request failed"]
    assert "OSError: ours" in caplog.text


def test_request_line_that_is_too_long(exporter: Exporter) -> None:
    assert ask(exporter, "/" + "x" * 70_000)[0] == 414
