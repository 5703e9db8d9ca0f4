"""TLS and passwords at the exporter's own server, over real sockets, with files that change while it runs."""

from __future__ import annotations

import base64
import contextlib
import http.client
import logging
import os
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import bcrypt
import pytest
from prometheus_client import CollectorRegistry

from certificates import Certificate, make_certificate
from kvcache_exporter import server as server_module
from kvcache_exporter.config import ListenAddress
from kvcache_exporter.errors import ConfigError
from kvcache_exporter.server import make_app, make_http_server
from kvcache_exporter.web_access import WebAccess
from lab import wait_until

Answer = tuple[int, Mapping[str, str], bytes]


@dataclass(frozen=True)
class Certificates:
    """Of the server, now and later; of a client that `authority` vouches for; of a stranger that vouches for itself."""

    server: Certificate
    renewed: Certificate
    authority: Certificate
    client: Certificate
    stranger: Certificate


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    authority = make_certificate(folder, "authority")
    return Certificates(
        server=make_certificate(folder, "server"),
        renewed=make_certificate(folder, "renewed"),
        authority=authority,
        client=make_certificate(
            folder, "client", sans="DNS:prometheus,URI:spiffe://cluster/prometheus,IP:2001:db8::1", issuer=authority
        ),
        stranger=make_certificate(folder, "stranger", sans="DNS:prometheus"),
    )


@pytest.fixture(autouse=True)
def nothing_on_stderr(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """The standard library's server prints a traceback for whatever a client does; ours prints nothing."""
    yield
    assert capfd.readouterr().err == ""


@dataclass(frozen=True)
class Site:
    """A running server and the folder of its web.yml; `trusted` are the server certificates that its client trusts."""

    folder: Path
    port: int
    trusted: tuple[Path, ...]

    def client_context(self, certificate: Certificate | None = None) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for file in self.trusted:
            context.load_verify_locations(file)
        if certificate is not None:
            context.load_cert_chain(certificate.cert, certificate.key)
        return context

    def get(
        self,
        path: str = "/metrics",
        *,
        certificate: Certificate | None = None,
        tls: ssl.SSLContext | None = None,
        password: str | None = None,
        method: str = "GET",
    ) -> Answer:
        """Ask by https and, where one is given, with `user:password`."""
        context = tls or self.client_context(certificate)
        return self._ask(http.client.HTTPSConnection("127.0.0.1", self.port, timeout=5, context=context), path, password, method)

    def get_plain(self, path: str = "/metrics", *, password: str | None = None, method: str = "GET") -> Answer:
        return self._ask(http.client.HTTPConnection("127.0.0.1", self.port, timeout=5), path, password, method)

    @staticmethod
    def _ask(connection: http.client.HTTPConnection, path: str, password: str | None, method: str) -> Answer:
        headers = {} if password is None else {"Authorization": f"Basic {base64.b64encode(password.encode()).decode()}"}
        with contextlib.closing(connection):
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            answered = {name.lower(): ", ".join(response.headers.get_all(name, [])) for name in response.headers}
            return response.status, answered, response.read()

    def peer_certificate(self) -> bytes | None:
        """The certificate that the server shows, in DER."""
        with (
            socket.create_connection(("127.0.0.1", self.port), timeout=5) as plain,
            self.client_context().wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            return secure.getpeercert(binary_form=True)

    def write(self, text: str) -> None:
        (self.folder / "web.yml").write_text(text)

    def install(self, certificate: Certificate) -> None:
        shutil.copy(certificate.cert, self.folder / "server.crt")
        shutil.copy(certificate.key, self.folder / "server.key")


Start = Callable[[str], Site]


@pytest.fixture
def start(tmp_path: Path, certificates: Certificates) -> Iterator[Start]:
    """Serve with this web.yml; beside it lie server.crt, server.key, authority.crt and client.crt."""
    with contextlib.ExitStack() as ends:

        def start(text: str) -> Site:
            site = Site(tmp_path, 0, (certificates.server.cert, certificates.renewed.cert))
            site.write(text)
            site.install(certificates.server)
            shutil.copy(certificates.authority.cert, tmp_path / "authority.crt")
            shutil.copy(certificates.client.cert, tmp_path / "client.crt")
            app = make_app(CollectorRegistry(), lambda: None, lambda: True)
            server = make_http_server(ListenAddress("127.0.0.1", 0), app, web=WebAccess(tmp_path / "web.yml"))
            thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
            thread.start()
            for end in (thread.join, server.server_close, server.shutdown):
                ends.callback(end)
            return Site(tmp_path, server.server_port, site.trusted)

        yield start


TLS = "tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n"
CLIENT_REQUIRED = TLS + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: authority.crt\n"


def users(**passwords: str) -> str:
    lines = [f"  {name}: {bcrypt.hashpw(password.encode(), bcrypt.gensalt(4)).decode()}" for name, password in passwords.items()]
    return "\n".join(["basic_auth_users:", *lines, ""])


def messages(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


# TLS


def test_https(start: Start) -> None:
    status, headers, body = start(TLS).get()
    assert status == 200
    assert int(headers["content-length"]) == len(body)


def test_end_of_the_answer_is_told(start: Start) -> None:
    """A client that reads to the end, and wants to know that nothing was cut off, gets its close_notify."""
    site = start(TLS)
    with (
        socket.create_connection(("127.0.0.1", site.port), timeout=5) as plain,
        site.client_context().wrap_socket(plain, server_hostname="localhost", suppress_ragged_eofs=False) as secure,
    ):
        secure.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        answer = b"".join(iter(lambda: secure.recv(4096), b""))
    assert answer.endswith(b"\r\n\r\nok\n")


def test_versions_and_cipher_suites(start: Start) -> None:
    site = start(TLS + "  cipher_suites: [TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256]\n")
    old = site.client_context()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    assert site.get(tls=old)[0] == 200
    old.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
    with pytest.raises(OSError, match=r"(?i)handshake failure"):
        site.get(tls=old)
    site.write(TLS + "  min_version: TLS13\n")
    with pytest.raises(OSError, match=r"(?i)protocol version"):
        site.get(tls=old)
    assert site.get()[0] == 200


def test_client_certificate_is_required(
    start: Start, certificates: Certificates, caplog: pytest.LogCaptureFixture, wait_for_threads: Callable[[], None]
) -> None:
    site = start(CLIENT_REQUIRED)
    assert site.get(certificate=certificates.client)[0] == 200
    for certificate in (None, certificates.stranger):
        with pytest.raises(OSError):  # noqa: PT011  # alert or reset, as the client happens to see it
            site.get("/healthz", certificate=certificate)
    wait_for_threads()
    assert messages(caplog) == []


def test_client_certificate_is_verified_if_given(start: Start, certificates: Certificates) -> None:
    site = start(CLIENT_REQUIRED.replace("RequireAndVerifyClientCert", "VerifyClientCertIfGiven"))
    assert site.get()[0] == 200
    assert site.get(certificate=certificates.client)[0] == 200
    with pytest.raises(OSError):  # noqa: PT011
        site.get(certificate=certificates.stranger)


def test_client_certificate_itself_may_be_what_is_trusted(start: Start, certificates: Certificates) -> None:
    site = start(CLIENT_REQUIRED.replace("authority.crt", "client.crt"))
    assert site.get(certificate=certificates.client)[0] == 200


@pytest.mark.parametrize("name", ["prometheus", "spiffe://cluster/prometheus", "2001:db8::1"])
def test_client_with_an_allowed_name(start: Start, certificates: Certificates, name: str) -> None:
    site = start(CLIENT_REQUIRED + f'  client_allowed_sans: ["other", "{name}"]\n')
    assert site.get(certificate=certificates.client)[0] == 200


def test_client_without_an_allowed_name(start: Start, certificates: Certificates) -> None:
    site = start(CLIENT_REQUIRED + "  client_allowed_sans: [grafana, client]\n")
    with pytest.raises(OSError):  # noqa: PT011
        site.get(certificate=certificates.client)


# What clients do


def test_silent_clients_hold_up_nobody(start: Start) -> None:
    """Neither those that say nothing nor one that stops amid its handshake."""
    site = start(TLS)
    with contextlib.ExitStack() as clients:
        silent = [clients.enter_context(socket.create_connection(("127.0.0.1", site.port))) for _ in range(50)]
        for client in silent[:10]:
            client.sendall(b"\x16\x03\x01\x02")
        started = time.monotonic()
        assert site.get()[0] == 200
        assert time.monotonic() - started < 1


def test_silent_client_is_let_go(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, wait_for_threads: Callable[[], None]
) -> None:
    monkeypatch.setattr(server_module, "_CLIENT_TIMEOUT_SECONDS", 0.2)
    monkeypatch.setattr(server_module._Handler, "timeout", 0.2)
    site = start(TLS)
    for said in (b"", b"\x16\x03\x01\x02"):
        with socket.create_connection(("127.0.0.1", site.port), timeout=5) as client:
            client.sendall(said)
            assert client.recv(1) == b""
    with (
        socket.create_connection(("127.0.0.1", site.port), timeout=5) as plain,
        site.client_context().wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        assert secure.recv(1) == b""
    wait_for_threads()
    assert messages(caplog) == []


def test_http_on_the_https_port(
    start: Start,
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wait_for_threads: Callable[[], None],
) -> None:
    """It is told so. Probes alone are answered, as the kubelet has no certificate to show."""
    monkeypatch.setenv("HTTPS", "on")  # as the standard library's server would believe
    site = start(CLIENT_REQUIRED + users(alice="a"))
    for path in ("/metrics", "/"):
        assert site.get_plain(path, password="alice:a")[::2] == (400, b"this port speaks https, not http\n")
    assert site.get_plain("/healthz")[::2] == (200, b"ok\n")
    assert site.get(certificate=certificates.client, password="alice:a")[0] == 200
    wait_for_threads()
    assert messages(caplog) == []


def test_clients_that_break_off_leave_no_trace(
    start: Start, caplog: pytest.LogCaptureFixture, wait_for_threads: Callable[[], None]
) -> None:
    site = start(TLS)
    for said in (b"", b"\x00" * 100, b"\x16\x03\x01\x00\x05hello", b"\x16"):
        with socket.create_connection(("127.0.0.1", site.port), timeout=5) as client:
            client.sendall(said)
            # Ends with a reset, not with the polite end of a connection.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    with pytest.raises(ssl.SSLCertVerificationError):
        site.get(tls=ssl.create_default_context())
    assert site.get()[0] == 200
    wait_for_threads()
    assert messages(caplog) == []


def test_http_in_parallel_with_tls(start: Start) -> None:
    site = start(TLS + users(alice="a"))
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: site.get(password="alice:a")[0], range(64)))
    assert answers == [200] * 64


# Files that change


def test_certificate_is_rotated(
    start: Start, certificates: Certificates, caplog: pytest.LogCaptureFixture, wait_for_threads: Callable[[], None]
) -> None:
    """Certificate first, key later: until both are there, the old ones are shown, and that is told once."""
    site = start(TLS)
    before = site.peer_certificate()
    shutil.copy(certificates.renewed.cert, site.folder / "server.crt")
    for _ in range(5):
        assert site.peer_certificate() == before
    wait_for_threads()
    assert messages(caplog) == ["bad web configuration; the one before stays in use"]
    shutil.copy(certificates.renewed.key, site.folder / "server.key")
    assert site.peer_certificate() == ssl.PEM_cert_to_DER_cert(certificates.renewed.cert.read_text())
    site.install(certificates.server)
    assert site.peer_certificate() == before


def test_certificate_in_a_secret_is_rotated(start: Start, certificates: Certificates) -> None:
    """As the kubelet does it: the files are links through a folder that is itself a link, and that one is switched."""
    site = start(TLS)
    for name, certificate in (("first", certificates.server), ("second", certificates.renewed)):
        (site.folder / name).mkdir()
        shutil.copy(certificate.cert, site.folder / name / "tls.crt")
        shutil.copy(certificate.key, site.folder / name / "tls.key")
    (site.folder / "data").symlink_to("first")
    site.write(TLS.replace("server", "data/tls").replace("tls_data/tls", "tls_server"))
    before = site.peer_certificate()
    (site.folder / "next").symlink_to("second")
    (site.folder / "next").rename(site.folder / "data")
    assert site.peer_certificate() != before


def test_users_change(start: Start) -> None:
    site = start(users(alice="a"))
    assert site.get_plain(password="alice:a")[0] == 200
    site.write(users(alice="new", bob="b"))
    assert [site.get_plain(password=password)[0] for password in ("alice:a", "alice:new", "bob:b")] == [401, 200, 200]


def test_bad_file_leaves_the_old_one_in_use(
    start: Start, caplog: pytest.LogCaptureFixture, wait_for_threads: Callable[[], None]
) -> None:
    text = users(alice="a")
    site = start(text)
    site.write("basic_auth_users: {alice: a}")
    assert [site.get_plain(password=password)[0] for password in ("alice:a", "alice:b", "alice:a")] == [200, 401, 200]
    (site.folder / "web.yml").unlink()
    assert [site.get_plain(password=password)[0] for password in ("alice:a", "alice:b")] == [200, 401]
    site.write(text)
    assert site.get_plain(password="alice:a")[0] == 200
    (site.folder / "web.yml").unlink()
    assert site.get_plain()[0] == 401
    wait_for_threads()
    assert len(messages(caplog)) == 3, "bad, gone, and gone again after it was good"
    problems = [record.fields["problems"] for record in caplog.records]  # type: ignore[attr-defined]  # our extra
    assert "basic_auth_users.alice: is not a bcrypt hash" in problems[0]
    assert "cannot be read" in problems[1]


def test_only_what_changed_is_made_anew(start: Start, certificates: Certificates) -> None:
    """Sessions go on while nothing changes, and passwords that were right stay known when a certificate is rotated."""
    folder = start(TLS + users(alice="a")).folder
    access = WebAccess(folder / "web.yml")
    before = access.latest
    assert access.refresh() is before
    shutil.copy(certificates.renewed.cert, folder / "server.crt")
    shutil.copy(certificates.renewed.key, folder / "server.key")
    assert access.refresh().tls is not before.tls
    assert access.latest.passwords is before.passwords


def test_disk_that_hangs_holds_up_one_client(start: Start) -> None:
    """Who comes meanwhile is answered by what was read before."""
    file = start(users(alice="a")).folder / "web.yml"
    access = WebAccess(file)
    before = access.latest
    file.unlink()
    os.mkfifo(file)
    with ThreadPoolExecutor(1) as pool:
        held_up = pool.submit(access.refresh)
        wait_until(access._reload.locked)
        assert access.refresh() is before
        assert not held_up.done()
        while not held_up.done():
            with contextlib.suppress(OSError):
                os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
        assert held_up.result() is before


def test_file_that_becomes_good_by_another_file_is_read(start: Start, certificates: Certificates) -> None:
    site = start(TLS)
    site.write(TLS.replace("server.", "later.").replace("tls_later.", "tls_server."))
    before = site.peer_certificate()
    shutil.copy(certificates.renewed.cert, site.folder / "later.crt")
    shutil.copy(certificates.renewed.key, site.folder / "later.key")
    assert site.peer_certificate() != before


@pytest.mark.parametrize(
    ("cut", "lost"),
    [
        ("", "basic_auth_users, client_allowed_sans, client_auth_type, tls_server_config"),
        (TLS, "basic_auth_users, client_allowed_sans, client_auth_type"),
        (CLIENT_REQUIRED, "basic_auth_users, client_allowed_sans"),
    ],
)
def test_file_that_is_cut_off_opens_nothing(
    start: Start,
    certificates: Certificates,
    caplog: pytest.LogCaptureFixture,
    cut: str,
    lost: str,
    wait_for_threads: Callable[[], None],
) -> None:
    """A file is not always replaced in one go: what is on stays on, until the exporter is started again."""
    site = start(CLIENT_REQUIRED + "  client_allowed_sans: [prometheus]\n" + users(alice="a"))
    site.write(cut)
    assert site.get(certificate=certificates.client)[0] == 401
    assert site.get(certificate=certificates.client, password="alice:a")[0] == 200
    wait_for_threads()
    (record,) = caplog.records
    assert f"no longer has {lost}; restart" in record.fields["problems"]  # type: ignore[attr-defined]  # our extra


def test_tls_and_passwords_may_be_added(start: Start) -> None:
    site = start("")
    assert site.get_plain()[0] == 200
    site.write(TLS + users(alice="a"))
    assert site.get_plain()[0] == 400
    assert site.get()[0] == 401
    assert site.get(password="alice:a")[0] == 200


def test_bad_file_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "web.yml").write_text(TLS + "basic_auth_users: {alice: a}\n")
    with pytest.raises(ConfigError) as error:
        WebAccess(tmp_path / "web.yml")
    assert len(error.value.problems) == 3


# Passwords


def test_everything_but_the_probes_needs_a_password(start: Start) -> None:
    site = start(users(alice="a"))
    for path in ("/", "/metrics", "/metrics/", "/nope", "/healthz/", "/healthz/../metrics"):
        status, headers, body = site.get_plain(path)
        assert (status, headers["www-authenticate"][:6]) == (401, "Basic ")
        assert int(headers["content-length"]) == len(body)
    assert site.get_plain("/healthz")[::2] == (200, b"ok\n")
    assert site.get_plain("/readyz")[0] == 503, "nothing has been polled"
    assert site.get_plain("/metrics", method="HEAD")[::2] == (401, b"")
    assert site.get_plain("/metrics", method="POST")[0] == 401
    assert site.get_plain("/metrics", method="POST", password="alice:a")[0] == 405


def test_right_and_wrong_passwords(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[bytes] = []
    checkpw = bcrypt.checkpw

    def counted(password: bytes, hashed: bytes) -> bool:
        checks.append(password)
        return checkpw(password, hashed)

    monkeypatch.setattr(bcrypt, "checkpw", counted)
    site = start(users(alice="a:ä", bob="b"))
    for wrong in ("alice:b", "carol:b", "alice:", "", "alice"):
        assert site.get_plain(password=wrong)[0] == 401
    checks.clear()
    assert [site.get_plain(password="alice:a:ä")[0] for _ in range(50)] == [200] * 50
    assert checks == ["a:ä".encode()]


def test_passwords_that_wait_too_many(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is known is answered while others try passwords; one too many is told to come again."""
    gate = threading.Event()
    gate.set()
    checkpw = bcrypt.checkpw
    monkeypatch.setattr(bcrypt, "checkpw", lambda password, hashed: gate.wait(10) and checkpw(password, hashed))
    site = start(users(alice="a"))
    assert site.get_plain(password="alice:a")[0] == 200
    gate.clear()
    with ThreadPoolExecutor(40) as pool:
        answers = [pool.submit(site.get_plain, password=f"alice:{number}") for number in range(40)]
        wait_until(lambda: sum(answer.done() for answer in answers) == 24)
        turned_away = [answer for answer in answers if answer.done()]
        assert site.get_plain(password="alice:a")[0] == 200
        gate.set()
    assert {answer.result()[0] for answer in turned_away} == {503}
    assert {answer.result()[1]["retry-after"] for answer in turned_away} == {"1"}
    assert sorted(answer.result()[0] for answer in answers) == [401] * 16 + [503] * 24


# Headers


def test_headers_are_added_to_every_answer(start: Start) -> None:
    headers = "http_server_config: {headers: {X-Frame-Options: deny, X-Content-Type-Options: nosniff}}\n"
    site = start(users(alice="a") + headers)
    for password in (None, "alice:a"):
        answered = site.get_plain(password=password)[1]
        assert answered["x-frame-options"] == "deny"
        assert answered["x-content-type-options"] == "nosniff"
