"""Bounded GETs: deadlines, size limits, redirects on the same origin only, optional bearer token and CA file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import requests
import urllib3

from kvcache_exporter.errors import SourceError

_CHUNK_BYTES = 65536
_MAX_REDIRECTS = 3
_REDIRECT_STATUSES = (301, 302, 303, 307, 308)


class HttpStatusError(SourceError):
    """The server answered `status` instead of 200."""

    def __init__(self, reason: str, message: str, status: int) -> None:
        super().__init__(reason, message)
        self.status = status


@dataclass(frozen=True)
class HttpOptions:
    """How to talk to one target. The token file is read again at every request, since tokens rotate.

    `unauthorized_remedy` is what to do when the server answers 401 or 403.
    """

    timeout_seconds: float = 2.0
    max_body_bytes: int = 32 * 1024 * 1024
    bearer_token_file: Path | None = None
    ca_file: Path | None = None
    unauthorized_remedy: str = "set bearer_token_file to a file with the engine's API key"


@dataclass(frozen=True)
class HttpBody:
    """A whole body of status 200, and its media type in lower case without parameters ("" when the server named none)."""

    content: bytes
    media_type: str


class HttpClient:
    """GETs for one target, one after the other. Every failure is a SourceError."""

    def __init__(self, options: HttpOptions) -> None:
        self._options = options
        self._session = requests.Session()
        # Neither proxies nor .netrc credentials from the environment: an engine is a neighbour, and its token is configured.
        self._session.trust_env = False
        if options.ca_file is not None:
            self._session.verify = str(options.ca_file)

    def get(self, url: str, *, accept: str) -> HttpBody:
        """Fetch `url` within the deadline, following redirects on its own origin.

        Raises SourceError: `timeout`, `connection`, `unauthorized`, `http_status` (both as HttpStatusError), `redirect`,
        `body_too_large`, `missing` (token file).
        """
        deadline = time.monotonic() + self._options.timeout_seconds
        headers = self._headers(accept)
        next_url = url
        for _ in range(_MAX_REDIRECTS + 1):
            with self._request(next_url, headers, deadline) as response:
                if response.status_code in _REDIRECT_STATUSES:
                    next_url = _redirect_target(url, next_url, response)
                    continue
                self._check_status(next_url, response)
                content = self._read(next_url, response, deadline)
                media_type = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
                return HttpBody(content, media_type)
        raise SourceError("redirect", f"{url} redirects more than {_MAX_REDIRECTS} times")

    def lines(self, url: str, *, accept: str, idle_timeout_seconds: float) -> Iterator[bytes]:
        """Yield the lines of an answer that goes on, until the server ends it.

        The connection has to be there within `timeout_seconds`, and each piece of the answer within `idle_timeout_seconds` after
        the one before. Raises SourceError as `get` does, but follows no redirect; `body_too_large` is of one line.
        """
        deadline = time.monotonic() + self._options.timeout_seconds
        with self._request(url, self._headers(accept), deadline, idle_timeout_seconds) as response:
            self._check_status(url, response)
            line = bytearray()
            try:
                while chunk := response.raw.read1(_CHUNK_BYTES):
                    *ended, rest = chunk.split(b"\n")
                    for piece in ended:
                        yield bytes(line + piece)
                        line.clear()
                    line += rest
                    self._check_size(url, len(line))
            except urllib3.exceptions.TimeoutError as error:
                raise SourceError("timeout", f"{url} said nothing for {idle_timeout_seconds:g} s") from error
            except (urllib3.exceptions.HTTPError, OSError) as error:
                raise _broken(url, error) from error

    def _headers(self, accept: str) -> dict[str, str]:
        headers = {
            "Accept": accept,
            # A compressed page costs the engine's event loop more than it saves on a node-local connection.
            "Accept-Encoding": "identity",
            # uvicorn closes idle connections after 5 s, our default interval: a kept connection would be lost at random.
            "Connection": "close",
        }
        if self._options.bearer_token_file is not None:
            headers["Authorization"] = f"Bearer {_read_token(self._options.bearer_token_file)}"
        return headers

    def _request(
        self, url: str, headers: dict[str, str], deadline: float, read_timeout_seconds: float | None = None
    ) -> requests.Response:
        """Send the request; between two pieces of the answer may be what is left, or `read_timeout_seconds`."""
        left = deadline - time.monotonic()
        if left <= 0:
            raise self._timeout(url)
        timeout = (left, read_timeout_seconds or left)
        try:
            return self._session.get(url, headers=headers, timeout=timeout, stream=True, allow_redirects=False)
        except requests.Timeout as error:
            raise self._timeout(url) from error
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            raise SourceError("connection", f"cannot fetch {url}: {_cause(error)}") from error

    def _read(self, url: str, response: requests.Response, deadline: float) -> bytes:
        """Read the body. read1 returns what has arrived, so that a server which drips bytes meets the total deadline too."""
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise SourceError("http_status", f"{url} answered compressed although plain was asked for")
        body = bytearray()
        try:
            while chunk := response.raw.read1(_CHUNK_BYTES):
                body += chunk
                self._check_size(url, len(body))
                if time.monotonic() > deadline:
                    raise self._timeout(url)
        except urllib3.exceptions.TimeoutError as error:
            raise self._timeout(url) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise _broken(url, error) from error
        return bytes(body)

    def _check_status(self, url: str, response: requests.Response) -> None:
        if response.status_code in (401, 403):
            raise HttpStatusError(
                "unauthorized",
                f"{url} answered {response.status_code}: {self._options.unauthorized_remedy}",
                response.status_code,
            )
        if response.status_code != 200:
            raise HttpStatusError("http_status", f"{url} answered {response.status_code} instead of 200", response.status_code)

    def _check_size(self, url: str, size_bytes: int) -> None:
        if size_bytes > self._options.max_body_bytes:
            raise SourceError(
                "body_too_large",
                f"the body of {url} is larger than max_body_bytes {self._options.max_body_bytes}; raise it, or find out "
                "which label of the page has grown",
            )

    def _timeout(self, url: str) -> SourceError:
        return SourceError("timeout", f"{url} gave no whole answer within {self._options.timeout_seconds:g} s")


def _read_token(path: Path) -> str:
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError("missing", f"the bearer token file {path} cannot be read: {error}") from error
    if not token:
        raise SourceError("missing", f"the bearer token file {path} is empty")
    return token


def _redirect_target(origin: str, url: str, response: requests.Response) -> str:
    target = urljoin(url, response.headers.get("Location", ""))
    if _origin(target) != _origin(origin):
        raise SourceError("redirect", f"{url} redirects to another host ({urlsplit(target).netloc}), which is not followed")
    return target


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def _broken(url: str, error: BaseException) -> SourceError:
    return SourceError("connection", f"the connection to {url} broke in the body: {_cause(error)}")


def _cause(error: BaseException) -> str:
    """What went wrong (connection refused, name not known), without the layers that requests and urllib3 put around it."""
    inner = error.args[0] if error.args else error
    return str(getattr(inner, "reason", None) or inner)
