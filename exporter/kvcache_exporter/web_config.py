"""The web configuration: TLS and basic authentication of the exporter's own server. YAML -> WebConfig.

The format is that of Prometheus's exporter-toolkit,
https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md. What is not supported is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from kvcache_exporter.basic_auth import bcrypt_problem, check_hash
from kvcache_exporter.config_values import boolean
from kvcache_exporter.errors import ConfigError
from kvcache_exporter.server_tls import TlsSettings, parse_tls
from kvcache_exporter.yaml_section import Section, compose

# Header -> the values that it may have; empty for any. The list is the toolkit's.
_HEADERS: Mapping[str, tuple[str, ...]] = {
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
    "Content-Security-Policy": (),
}


@dataclass(frozen=True)
class WebConfig:
    """What the file says. `tls` is None for plain HTTP; `users` is name -> bcrypt hash, empty for no authentication.

    `headers` are added to every answer.
    """

    tls: TlsSettings | None = None
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict)


def load_web_config(path: Path) -> WebConfig:
    """Read the file and try the certificates that it names. Raises ConfigError with every problem."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from error
    return parse_web_config(text, path)


def parse_web_config(text: str, path: Path) -> WebConfig:
    """Parse the text of a file; relative paths in it start at the folder of `path`. Raises ConfigError."""
    node = compose(text, path)
    if node is None:
        return WebConfig()
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError([f"{path}: is not a mapping; it needs `tls_server_config:`, `basic_auth_users:` or both"])
    problems: list[str] = []
    top = Section(node, "", path, problems)
    tls = top.section("tls_server_config")
    users = top.section("basic_auth_users")
    http = top.section("http_server_config")
    config = WebConfig(
        tls=None if tls is None else parse_tls(tls),
        users={} if users is None else _users(users),
        headers={} if http is None else _http(http),
    )
    if config.users and (problem := bcrypt_problem()):
        top.problem("basic_auth_users", problem)
    top.take("rate_limit", _rate_limit, None)
    top.refuse_unknown_keys()
    if problems:
        raise ConfigError(problems)
    return config


def _users(section: Section) -> dict[str, str]:
    users = {}
    for name in section.names():
        if not name or ":" in name:
            section.problem(name, "is not a user name; it is empty or has a colon, which basic authentication cannot carry")
        if not section.gives(name):
            section.problem(name, "has no bcrypt hash")
        users[name] = section.take(name, check_hash, "")
    return users


def _http(section: Section) -> Mapping[str, str]:
    # The server speaks HTTP/1 alone. A client that could do more falls back to it by itself, so either value is honoured.
    section.take("http2", boolean, True)
    headers = section.section("headers")
    section.refuse_unknown_keys()
    if headers is None:
        return {}
    taken = {name: headers.take(name, _header_value(allowed), "") for name, allowed in _HEADERS.items()}
    headers.refuse_unknown_keys()
    return {name: value for name, value in taken.items() if value}


def _header_value(allowed: tuple[str, ...]) -> Callable[[object], str]:
    def convert(value: object) -> str:
        text = str(value)
        if not text.isascii() or not text.isprintable():
            raise ValueError(f"{text!r} is not printable ASCII text, which is all that a header can carry")
        if text and allowed and text not in allowed:
            raise ValueError(f"{text!r} is not {' or '.join(allowed)}")
        return text

    return convert


def _rate_limit(_value: object) -> None:
    raise ValueError("is not supported; remove it: a request reads what is there already, and asks no engine and no GPU")
