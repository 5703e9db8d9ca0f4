"""Basic authentication against bcrypt hashes, which are slow by design: what was right once is remembered."""

from __future__ import annotations

import base64
import hmac
import re
import secrets
import threading
from collections.abc import Mapping

# Version, cost, salt of 16 bytes and hash of 23 bytes, as htpasswd -B and Go write them.
_BCRYPT_HASH = re.compile(r"\$2[aby]\$(0[4-9]|[12][0-9]|3[01])\$[./A-Za-z0-9]{21}[.Oeu][./A-Za-z0-9]{31}")

# bcrypt reads no further. Go and htpasswd cut silently, the Python package refuses a longer password.
_MAX_PASSWORD_BYTES = 72

# One check runs at a time, since each takes a core for long (about 60 ms at cost 10); so many more may wait for it.
_MAX_WAITING = 16

_NOT_A_DIGEST = bytes(32)


class TooManyChecksError(Exception):
    """So many passwords wait to be checked that this one is not."""


def bcrypt_problem() -> str | None:
    """Sentence for the user where the package bcrypt is missing."""
    try:
        import bcrypt  # noqa: F401  # only whether it is there
    except ImportError:
        return "needs the package bcrypt; install it with: pip install 'kvcache-exporter[web]'"
    return None


def check_hash(value: object) -> str:
    """Return the value if it is a bcrypt hash. Raises ValueError, with a sentence that does not repeat the value."""
    if not isinstance(value, str) or not _BCRYPT_HASH.fullmatch(value):
        raise ValueError("is not a bcrypt hash; htpasswd -nBC 10 '' prints one, which begins with $2y$")
    return value


def credentials(authorization: str) -> tuple[bytes, bytes] | None:
    """User and password of an Authorization header; None where it holds none of the scheme Basic."""
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
    except ValueError:
        return None
    return (user, password) if colon else None


class Passwords:
    """The users and what has been found right about them. Needs the package bcrypt."""

    def __init__(self, users: Mapping[str, str]) -> None:
        import bcrypt

        self._matches = bcrypt.checkpw
        self._hashes = {name.encode(): bcrypt_hash.encode() for name, bcrypt_hash in users.items()}
        self._secret = secrets.token_bytes(32)
        # User -> keyed digest of the password that was right. The password itself is not kept.
        self._right: dict[bytes, bytes] = {}
        self._places = threading.BoundedSemaphore(_MAX_WAITING)
        self._one_at_a_time = threading.Lock()

    def accepts(self, user: bytes, password: bytes) -> bool:
        """Whether this is the user's password. Raises TooManyChecksError."""
        digest = self._digest(password)
        if self._is_remembered(user, digest):
            return True
        if not self._places.acquire(blocking=False):
            raise TooManyChecksError
        try:
            with self._one_at_a_time:
                # Of several requests that came at once with the same password, the first has found the answer.
                return self._is_remembered(user, digest) or self._check(user, password, digest)
        finally:
            self._places.release()

    def _is_remembered(self, user: bytes, digest: bytes) -> bool:
        return hmac.compare_digest(self._right.get(user, _NOT_A_DIGEST), digest)

    def _check(self, user: bytes, password: bytes, digest: bytes) -> bool:
        # A user who is not there is checked against the hash of another, always the same one for the same name: the time of the
        # answer then does not tell which names exist, whatever the costs of the hashes.
        hashes = list(self._hashes.values())
        stand_in = hashes[int.from_bytes(self._digest(user), "big") % len(hashes)]
        matches = self._matches(password[:_MAX_PASSWORD_BYTES], self._hashes.get(user, stand_in))
        right = matches and user in self._hashes
        if right:
            self._right[user] = digest
        return right

    def _digest(self, text: bytes) -> bytes:
        return hmac.digest(self._secret, text, "sha256")
