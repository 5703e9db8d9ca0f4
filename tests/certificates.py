"""Certificates for tests, made by the openssl command on the spot."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificate:
    """A certificate and its key, in PEM."""

    cert: Path
    key: Path


def make_certificate(
    folder: Path, name: str, *, sans: str = "DNS:localhost,IP:127.0.0.1", issuer: Certificate | None = None
) -> Certificate:
    """Make `<name>.crt` and `<name>.key`; signed by itself if there is no `issuer`. `sans` is as in openssl's configuration."""
    made = Certificate(folder / f"{name}.crt", folder / f"{name}.key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command += ["-subj", f"/CN={name}", "-addext", f"subjectAltName={sans}"]
    if issuer is not None:
        command += ["-CA", str(issuer.cert), "-CAkey", str(issuer.key), "-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run([*command, "-keyout", str(made.key), "-out", str(made.cert)], check=True, capture_output=True)
    return made
