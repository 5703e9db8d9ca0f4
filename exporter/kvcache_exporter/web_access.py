"""Who may ask the exporter's server, by a web configuration file that can change while it runs.

Certificates are rotated by replacing files, so the files are compared at each connection. Their content, not their times: it is
small, and never mistaken.
"""

from __future__ import annotations

import hashlib
import logging
import ssl
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcache_exporter.basic_auth import Passwords
from kvcache_exporter.errors import ConfigError
from kvcache_exporter.server_tls import tls_context
from kvcache_exporter.web_config import WebConfig, load_web_config

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Access:
    """One reading of the file, ready for use. `tls` is None for plain HTTP, `passwords` is None where none are asked for."""

    config: WebConfig
    tls: ssl.SSLContext | None
    passwords: Passwords | None
    fingerprint: bytes

    @property
    def client_names(self) -> frozenset[str]:
        """Names of which a client's certificate must have one; empty for any."""
        return frozenset() if self.config.tls is None else self.config.tls.client_allowed_sans

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers to add to every answer."""
        return self.config.headers


class WebAccess:
    """The newest usable reading of a web configuration file; of a bad one, or of bad certificates, the last good one stays.

    Raises ConfigError, with every problem, where there is no good one to begin with.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reload = threading.Lock()
        self._complaint: tuple[str, ...] = ()
        self.latest = self._read(before=None)

    def refresh(self) -> Access:
        """Read the files again if they have changed, and return `latest`. Never raises, and never waits for another thread."""
        if self._reload.acquire(blocking=False):
            try:
                self._update()
            finally:
                self._reload.release()
        return self.latest

    def _update(self) -> None:
        if _digest(self._path) + _digest(*_tls_files(self.latest.config)) == self.latest.fingerprint:
            self._complaint = ()
            return
        try:
            self.latest = self._read(before=self.latest)
        except ConfigError as error:
            # It may become good by a file that is yet to come, so it is tried again each time, and told once.
            if error.problems != self._complaint:
                fields = {"file": self._path, "problems": "; ".join(error.problems)}
                log.error("bad web configuration; the one before stays in use", extra={"fields": fields})
            self._complaint = error.problems
            return
        self._complaint = ()
        log.info("web configuration read again", extra={"fields": {"file": self._path}})

    def _read(self, before: Access | None) -> Access:
        # Each digest is taken before its files are read for use: one that is replaced meanwhile is seen at the next connection.
        digest = _digest(self._path)
        config = load_web_config(self._path)
        fingerprint = digest + _digest(*_tls_files(config))
        lost = set() if before is None else _protections(before.config) - _protections(config)
        if lost:
            # A file that is just being written may be cut off anywhere, and must not open what was closed.
            raise ConfigError([f"{self._path}: no longer has {', '.join(sorted(lost))}; restart the exporter if that is meant"])
        try:
            tls = None if config.tls is None else tls_context(config.tls)
        except ValueError as error:
            raise ConfigError([f"{self._path}: tls_server_config.cert_file: {error}"]) from error
        if before is not None and before.config.users == config.users:
            passwords = before.passwords
        else:
            passwords = Passwords(config.users) if config.users else None
        return Access(config, tls, passwords, fingerprint)


def _tls_files(config: WebConfig) -> tuple[Path, ...]:
    return () if config.tls is None else config.tls.files


def _protections(config: WebConfig) -> set[str]:
    """What keeps others out, by the keys of the file."""
    tls = config.tls
    return {
        name
        for name, is_on in {
            "tls_server_config": tls is not None,
            "client_auth_type": tls is not None and tls.client_auth == ssl.CERT_REQUIRED,
            "client_allowed_sans": tls is not None and bool(tls.client_allowed_sans),
            "basic_auth_users": bool(config.users),
        }.items()
        if is_on
    }


def _digest(*files: Path) -> bytes:
    digest = hashlib.sha256()
    for file in files:
        try:
            content = file.read_bytes()
        except OSError:
            content = b""
        # The length keeps apart what would read the same when put together.
        digest.update(f"{file}:{len(content)}:".encode())
        digest.update(content)
    return digest.digest()
