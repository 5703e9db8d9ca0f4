"""`tls_server_config` of the web configuration: which certificate the server shows, and which it wants from its clients.

The format is that of Prometheus's exporter-toolkit, which is written in Go. What Python's ssl cannot do exactly is refused.
"""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache_exporter.config_values import boolean, path_in
from kvcache_exporter.yaml_section import Section

_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}

_CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
# Certificates that are asked for and not verified. Python has no such mode, and they prove nothing.
_CLIENT_AUTH_UNVERIFIED = ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert")

# Go's name -> OpenSSL's, for the suites of TLS 1.2 that both have and that are neither broken nor without forward secrecy.
_CIPHER_SUITES = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
}
# Always on with TLS 1.3, in Go as in OpenSSL; a list may name them or not.
_CIPHER_SUITES_13 = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")


@dataclass(frozen=True)
class TlsSettings:
    """`tls_server_config`. The files are PEM.

    `client_allowed_sans`, where not empty, are the subject alternative names of which a client's certificate must have one.
    `cipher_suites` are OpenSSL's names for TLS 1.2, in order of preference; empty for Python's own choice.
    """

    cert_file: Path
    key_file: Path
    client_auth: ssl.VerifyMode = ssl.CERT_NONE
    client_ca_file: Path | None = None
    client_allowed_sans: frozenset[str] = frozenset()
    min_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2
    max_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
    cipher_suites: tuple[str, ...] = ()
    prefer_server_cipher_suites: bool = True

    @property
    def files(self) -> tuple[Path, ...]:
        """Every file that the settings name."""
        return tuple(file for file in (self.cert_file, self.key_file, self.client_ca_file) if file is not None)


def parse_tls(section: Section) -> TlsSettings:
    """Read the section and try its files. What is wrong is noted as problems of the section, and the value is then of no use."""
    problems_before = len(section.problems)
    folder = section.path.parent

    def file(key: str) -> Path | None:
        return section.take(key, lambda value: _readable_file(value, folder), None)

    for key in ("cert_file", "key_file"):
        if not section.gives(key):
            section.problem(key, "is missing; TLS needs the server's certificate (cert_file) and its key (key_file)")
    for key in ("cert", "key", "client_ca"):
        section.take(
            key, _refusal(f"text in this file is not supported; put it into a file of its own and give {key}_file"), None
        )
    section.take("curve_preferences", _refusal("cannot be chosen here; remove it, and OpenSSL's own order holds"), None)
    settings = TlsSettings(
        cert_file=file("cert_file") or Path(),
        key_file=file("key_file") or Path(),
        client_auth=section.take("client_auth_type", _client_auth, ssl.CERT_NONE),
        client_ca_file=file("client_ca_file"),
        client_allowed_sans=section.take("client_allowed_sans", _names, frozenset()),
        min_version=section.take("min_version", _version, ssl.TLSVersion.TLSv1_2),
        max_version=section.take("max_version", _version, ssl.TLSVersion.TLSv1_3),
        cipher_suites=section.take("cipher_suites", _cipher_suites, ()),
        prefer_server_cipher_suites=section.take("prefer_server_cipher_suites", boolean, True),
    )
    _check_together(section, settings)
    section.refuse_unknown_keys()
    if len(section.problems) == problems_before:
        try:
            tls_context(settings)
        except ValueError as error:
            section.problem("cert_file", str(error))
    return settings


def _check_together(section: Section, settings: TlsSettings) -> None:
    if settings.min_version > settings.max_version:
        section.problem("min_version", "is above max_version")
    if settings.client_auth != ssl.CERT_NONE and not section.gives("client_ca_file"):
        section.problem("client_ca_file", "is missing; client_auth_type needs the certificates of those who may issue clients'")
    if section.gives("client_ca_file") and settings.client_auth == ssl.CERT_NONE:
        section.problem("client_ca_file", "has no effect without client_auth_type: RequireAndVerifyClientCert")
    if section.gives("client_allowed_sans") and settings.client_auth != ssl.CERT_REQUIRED:
        section.problem("client_allowed_sans", "needs client_auth_type: RequireAndVerifyClientCert")


def tls_context(settings: TlsSettings) -> ssl.SSLContext:
    """Load the certificates. Raises ValueError with a sentence that names the file."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = settings.min_version
    context.maximum_version = settings.max_version
    # A client that renegotiates again and again would cost us the work of a handshake each time.
    context.options |= ssl.OP_NO_RENEGOTIATION
    if not settings.prefer_server_cipher_suites:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    if settings.cipher_suites:
        context.set_ciphers(":".join(settings.cipher_suites))
    try:
        # The password is there because OpenSSL would ask the terminal for one.
        context.load_cert_chain(settings.cert_file, settings.key_file, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(f"the key in {settings.key_file} is not that of the certificate in {settings.cert_file}") from error
        raise ValueError(
            f"cannot be used; {settings.cert_file} must be a certificate in PEM, and {settings.key_file} its key in PEM "
            "without a passphrase"
        ) from error
    except OSError as error:
        raise ValueError(f"{settings.cert_file} or {settings.key_file} cannot be read: {error.strerror}") from error
    if settings.client_ca_file is not None:
        _load_client_ca(context, settings.client_ca_file)
    context.verify_mode = settings.client_auth
    return context


def _load_client_ca(context: ssl.SSLContext, file: Path) -> None:
    # As in Go: every certificate of the file is trusted, also one that its own issuer would have to vouch for.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(file)
    except ssl.SSLError as error:
        raise ValueError(f"client_ca_file {file} holds no certificate in PEM") from error
    except OSError as error:
        raise ValueError(f"client_ca_file {file} cannot be read: {error.strerror}") from error


def names_of(certificate: Mapping[str, Any] | None) -> frozenset[str]:
    """Subject alternative names of a certificate that `SSLSocket.getpeercert` gives; an IP address in its short form."""
    names = (certificate or {}).get("subjectAltName", ())
    # OpenSSL ends an IPv6 address with a newline in some versions, and writes out all its zeros.
    return frozenset(str(ipaddress.ip_address(value.strip())) if kind == "IP Address" else value for kind, value in names)


def _refusal(sentence: str) -> Callable[[object], None]:
    def refuse(_value: object) -> None:
        raise ValueError(sentence)

    return refuse


def _readable_file(value: object, folder: Path) -> Path:
    path = path_in(value, folder)
    try:
        path.open("rb").close()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    return path


def _client_auth(value: object) -> ssl.VerifyMode:
    if value in _CLIENT_AUTH_UNVERIFIED:
        raise ValueError(f"{value} does not verify the certificate, so that it proves nothing; use RequireAndVerifyClientCert")
    if not isinstance(value, str) or value not in _CLIENT_AUTH:
        raise ValueError(f"{value!r} is not one of {', '.join(_CLIENT_AUTH)}")
    return _CLIENT_AUTH[value]


def _version(value: object) -> ssl.TLSVersion:
    if value in ("TLS10", "TLS11"):
        raise ValueError(f"{value} is broken and not supported; use TLS12 or TLS13")
    if not isinstance(value, str) or value not in _VERSIONS:
        raise ValueError(f"{value!r} is not one of {', '.join(_VERSIONS)}")
    return _VERSIONS[value]


def _names(value: object) -> frozenset[str]:
    if not isinstance(value, list) or not value or not all(isinstance(name, str) and name for name in value):
        raise ValueError("is not a list of names, such as [prometheus.monitoring.svc]")
    return frozenset(value)


def _cipher_suites(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list of cipher suites, such as [TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256]")
    for name in value:
        if name not in _CIPHER_SUITES and name not in _CIPHER_SUITES_13:
            raise ValueError(f"{name!r} is not one of {', '.join((*_CIPHER_SUITES, *_CIPHER_SUITES_13))}")
    return tuple(_CIPHER_SUITES[name] for name in value if name in _CIPHER_SUITES)
