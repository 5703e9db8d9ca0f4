"""The web configuration file: what it means, and the exact sentence for each thing that can be wrong."""

from __future__ import annotations

import ssl
import subprocess
import sys
from pathlib import Path

import pytest

from certificates import Certificate, make_certificate
from kvcache_exporter.errors import ConfigError
from kvcache_exporter.server_tls import TlsSettings
from kvcache_exporter.web_config import WebConfig, load_web_config, parse_web_config

ALICE = "$2y$04$adXdwh1ALqDvKEo9dR59a.nR75/s8M/KjZHqTspt7ighzD.KPbbT."
TLS = "tls_server_config: {cert_file: server.crt, key_file: server.key"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of a file in a folder that has certificates, and files that are none."""
    folder = tmp_path_factory.mktemp("web")
    make_certificate(folder, "server")
    make_certificate(folder, "other")
    (folder / "no.pem").write_text("no certificate\n")
    return folder / "web.yml"


def problems(text: str, file: Path) -> list[str]:
    """The problems without the folder of the file."""
    with pytest.raises(ConfigError) as error:
        parse_web_config(text, file)
    return [problem.replace(f"{file.parent}/", "") for problem in error.value.problems]


def test_every_setting(file: Path) -> None:
    text = f"""
tls_server_config:
  cert_file: server.crt
  key_file: {file.parent}/server.key
  client_auth_type: RequireAndVerifyClientCert
  client_ca_file: other.crt
  client_allowed_sans: [prometheus.monitoring.svc, "spiffe://cluster/prometheus"]
  min_version: TLS12
  max_version: TLS13
  cipher_suites:
  - TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256
  - TLS_AES_128_GCM_SHA256
  prefer_server_cipher_suites: false
http_server_config:
  http2: true
  headers:
    Strict-Transport-Security: max-age=31536000
    X-Frame-Options: deny
    X-XSS-Protection: ""
basic_auth_users:
  alice: {ALICE}
  "7": {ALICE}
"""
    assert parse_web_config(text, file) == WebConfig(
        tls=TlsSettings(
            cert_file=file.parent / "server.crt",
            key_file=file.parent / "server.key",
            client_auth=ssl.CERT_REQUIRED,
            client_ca_file=file.parent / "other.crt",
            client_allowed_sans=frozenset({"prometheus.monitoring.svc", "spiffe://cluster/prometheus"}),
            cipher_suites=("ECDHE-ECDSA-CHACHA20-POLY1305",),
            prefer_server_cipher_suites=False,
        ),
        users={"alice": ALICE, "7": ALICE},
        headers={"Strict-Transport-Security": "max-age=31536000", "X-Frame-Options": "deny"},
    )


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}", "tls_server_config:\nbasic_auth_users: {}\nhttp_server_config:\n"])
def test_file_that_asks_for_nothing(text: str, file: Path) -> None:
    assert parse_web_config(text, file) == WebConfig()


def test_every_client_auth_that_is_kept_exactly(file: Path) -> None:
    modes = {
        "NoClientCert}": ssl.CERT_NONE,
        "VerifyClientCertIfGiven, client_ca_file: other.crt}": ssl.CERT_OPTIONAL,
        "RequireAndVerifyClientCert, client_ca_file: other.crt}": ssl.CERT_REQUIRED,
    }
    for text, mode in modes.items():
        tls = parse_web_config(f"{TLS}, client_auth_type: {text}", file).tls
        assert tls is not None
        assert tls.client_auth == mode


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- a", " is not a mapping; it needs `tls_server_config:`, `basic_auth_users:` or both"),
        ("a: [", "1: is not YAML: expected the node content, but found '<stream end>'"),
        ("tls_server_confg: {}", "1: tls_server_confg: is not a setting; did you mean tls_server_config?"),
        ("tls_server_config: on", "1: tls_server_config: is not a mapping; write its settings below it, each indented"),
        (
            "tls_server_config: {cert_file: server.crt}",
            "1: tls_server_config.key_file: is missing; TLS needs the server's certificate (cert_file) and its key (key_file)",
        ),
        (
            "tls_server_config: {cert_file: [], key_file: server.key}",
            "1: tls_server_config.cert_file: [] is not a path",
        ),
        (
            "tls_server_config:\n  cert_file: none.crt\n  key_file: server.key",
            "2: tls_server_config.cert_file: none.crt cannot be read: No such file or directory",
        ),
        (
            "tls_server_config: {cert_file: !x server.crt, key_file: server.key}",
            "1: tls_server_config.cert_file: cannot be read: could not determine a constructor for the tag '!x'",
        ),
        (
            "tls_server_config: {cert_file: server.crt, key_file: other.key}",
            "1: tls_server_config.cert_file: the key in other.key is not that of the certificate in server.crt",
        ),
        (
            "tls_server_config: {cert_file: no.pem, key_file: server.key}",
            "1: tls_server_config.cert_file: cannot be used; no.pem must be a certificate in PEM, and server.key its key in "
            "PEM without a passphrase",
        ),
        (
            TLS + ", client_auth_type: RequireAndVerifyClientCert, client_ca_file: no.pem}",
            "1: tls_server_config.cert_file: client_ca_file no.pem holds no certificate in PEM",
        ),
        (
            TLS + ", cert: x}",
            "1: tls_server_config.cert: text in this file is not supported; put it into a file of its own and give cert_file",
        ),
        (
            TLS + ", client_auth_type: RequireAnyClientCert}",
            "1: tls_server_config.client_auth_type: RequireAnyClientCert does not verify the certificate, so that it proves "
            "nothing; use RequireAndVerifyClientCert",
        ),
        (
            TLS + ", client_auth_type: Verify}",
            "1: tls_server_config.client_auth_type: 'Verify' is not one of NoClientCert, VerifyClientCertIfGiven, "
            "RequireAndVerifyClientCert",
        ),
        (
            TLS + ", client_auth_type: RequireAndVerifyClientCert}",
            "1: tls_server_config.client_ca_file: is missing; client_auth_type needs the certificates of those who may "
            "issue clients'",
        ),
        (
            TLS + ", client_ca_file: other.crt}",
            "1: tls_server_config.client_ca_file: has no effect without client_auth_type: RequireAndVerifyClientCert",
        ),
        (
            TLS + ", client_allowed_sans: [a]}",
            "1: tls_server_config.client_allowed_sans: needs client_auth_type: RequireAndVerifyClientCert",
        ),
        (
            TLS + ", client_auth_type: RequireAndVerifyClientCert, client_ca_file: other.crt, client_allowed_sans: a}",
            "1: tls_server_config.client_allowed_sans: is not a list of names, such as [prometheus.monitoring.svc]",
        ),
        (
            TLS + ", min_version: TLS10}",
            "1: tls_server_config.min_version: TLS10 is broken and not supported; use TLS12 or TLS13",
        ),
        (TLS + ", min_version: 1.2}", "1: tls_server_config.min_version: 1.2 is not one of TLS12, TLS13"),
        (TLS + ", min_version: TLS13, max_version: TLS12}", "1: tls_server_config.min_version: is above max_version"),
        (
            TLS + ", cipher_suites: [TLS_RSA_WITH_AES_128_CBC_SHA]}",
            "1: tls_server_config.cipher_suites: 'TLS_RSA_WITH_AES_128_CBC_SHA' is not one of "
            "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, "
            "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384, TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384, "
            "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256, TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256, TLS_AES_128_GCM_SHA256, "
            "TLS_AES_256_GCM_SHA384, TLS_CHACHA20_POLY1305_SHA256",
        ),
        (
            TLS + ", cipher_suites: all}",
            "1: tls_server_config.cipher_suites: 'all' is not a list of cipher suites, such as "
            "[TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256]",
        ),
        (
            TLS + ", curve_preferences: [X25519]}",
            "1: tls_server_config.curve_preferences: cannot be chosen here; remove it, and OpenSSL's own order holds",
        ),
        (
            "basic_auth_users: {alice: secret}",
            "1: basic_auth_users.alice: is not a bcrypt hash; htpasswd -nBC 10 '' prints one, which begins with $2y$",
        ),
        ("basic_auth_users:\n  alice:", "2: basic_auth_users.alice: has no bcrypt hash"),
        (
            f"basic_auth_users: {{'a:b': {ALICE}}}",
            "1: basic_auth_users.a:b: is not a user name; it is empty or has a colon, which basic authentication cannot carry",
        ),
        ("http_server_config: {http2: 2}", "1: http_server_config.http2: 2 is neither true nor false"),
        (
            "http_server_config: {headers: {Server: x}}",
            "1: http_server_config.headers.Server: is not a setting; known here: Content-Security-Policy, "
            "Strict-Transport-Security, X-Content-Type-Options, X-Frame-Options, X-XSS-Protection",
        ),
        (
            "http_server_config: {headers: {X-Frame-Options: allow}}",
            "1: http_server_config.headers.X-Frame-Options: 'allow' is not deny or sameorigin",
        ),
        (
            'http_server_config: {headers: {X-XSS-Protection: "1\\r\\nSet-Cookie: a"}}',
            "1: http_server_config.headers.X-XSS-Protection: '1\\r\\nSet-Cookie: a' is not printable ASCII text, which is all "
            "that a header can carry",
        ),
        (
            "rate_limit: {interval: 1s, burst: 20}",
            "1: rate_limit: is not supported; remove it: a request reads what is there already, and asks no engine and no GPU",
        ),
    ],
)
def test_what_is_wrong(text: str, problem: str, file: Path) -> None:
    assert problems(text, file)[0] == f"web.yml:{problem}"


def test_every_problem_at_once_in_the_order_of_the_file(file: Path) -> None:
    text = """
basic_auth_users:
  alice: secret
rate_limit: {}
tls_server_config:
  cert_file: none.crt
  min_version: TLS11
"""
    assert [problem.partition(": ")[2].partition(":")[0] for problem in problems(text, file)] == [
        "basic_auth_users.alice",
        "rate_limit",
        "tls_server_config.key_file",
        "tls_server_config.cert_file",
        "tls_server_config.min_version",
    ]


def test_key_with_a_passphrase_is_refused_without_asking_for_it(file: Path, tmp_path: Path) -> None:
    server = Certificate(file.with_name("server.crt"), file.with_name("server.key"))
    command = ["openssl", "ec", "-in", str(server.key), "-aes256", "-passout", "pass:x", "-out", str(tmp_path / "locked.key")]
    subprocess.run(command, check=True, capture_output=True)
    text = f"tls_server_config: {{cert_file: {server.cert}, key_file: {tmp_path}/locked.key}}"
    assert problems(text, file)[0].endswith(f"{tmp_path}/locked.key its key in PEM without a passphrase")


def test_missing_package(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bcrypt", None)
    assert problems(f"\nbasic_auth_users: {{alice: {ALICE}}}", file) == [
        "web.yml:2: basic_auth_users: needs the package bcrypt; install it with: pip install 'kvcache-exporter[web]'"
    ]
    assert parse_web_config(TLS + "}", file).users == {}


def test_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r" cannot be read: .*No such file"):
        load_web_config(tmp_path / "web.yml")


def test_hashes_are_not_shown(file: Path) -> None:
    assert ALICE not in repr(parse_web_config(f"basic_auth_users: {{alice: {ALICE}}}", file))
