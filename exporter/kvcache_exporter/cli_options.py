"""What several commands share: the address to serve on, the log level, and how a bad configuration ends them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvcache_exporter.errors import ConfigError

if TYPE_CHECKING:
    from kvcache_exporter.config import ListenAddress

_LOG_LEVELS = ("debug", "info", "warning", "error")

listen_address_option = click.option(
    "--listen-address", metavar="HOST:PORT", help="Address to serve on, such as 127.0.0.1:9948 or [::]:9948.  [default: :9948]"
)


def log_level_option(default: str = "info") -> Callable[[Any], Any]:
    """The option --log-level."""
    return click.option("--log-level", type=click.Choice(_LOG_LEVELS), default=default, show_default=True)


def address_of(listen_address: str | None) -> ListenAddress:
    """The value of --listen-address. Raises click.BadParameter."""
    from kvcache_exporter.config import ListenAddress, parse_listen_address

    if listen_address is None:
        return ListenAddress()
    try:
        return parse_listen_address(listen_address)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--listen-address") from error


def refuse(error: ConfigError) -> NoReturn:
    """End with every problem on a line of its own, and exit status 2."""
    for problem in error.problems:
        click.echo(problem, err=True)
    sys.exit(2)
