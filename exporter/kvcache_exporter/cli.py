"""The command line: serve, demo, plan, replay, check-config.

What is only needed to run is imported by the command that runs it, so that `--help` and offline commands start at once.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from kvcache_exporter import __version__
from kvcache_exporter.cli_options import address_of, listen_address_option, log_level_option, refuse
from kvcache_exporter.cli_plan import plan
from kvcache_exporter.cli_replay import replay
from kvcache_exporter.cli_serve import serve
from kvcache_exporter.errors import ConfigError


@click.group(context_settings={"auto_envvar_prefix": "KVCACHE_EXPORTER", "help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvcache-exporter")
def main() -> None:
    """Prometheus exporter for the KV cache of vLLM engines."""


main.add_command(serve)
main.add_command(plan)
main.add_command(replay)


@main.command("check-config")
@click.argument("config_path", metavar="FILE", type=click.Path(path_type=Path))
def check_config(config_path: Path) -> None:
    """Check a configuration file and report everything that is wrong with it."""
    from kvcache_exporter.config import load_config

    try:
        config = load_config(config_path, needs_targets=False)
    except ConfigError as error:
        refuse(error)
    found = "" if config.kubernetes is None else ", and those that Kubernetes tells"
    alone = "; it goes with --vllm-url" if not config.targets and config.kubernetes is None else ""
    click.echo(f"{config_path}: good; {len(config.targets)} target{'s' if len(config.targets) != 1 else ''}{found}{alone}")


@main.command()
@listen_address_option
@click.option("--duration", type=click.FloatRange(min=1), metavar="SECONDS", help="End by itself after this long.")
@log_level_option("warning")
def demo(listen_address: str | None, duration: float | None, log_level: str) -> None:
    """Show the exporter at work on a simulated engine and GPU, under traffic that rises and falls."""
    from kvcache_exporter.demo import run_demo
    from kvcache_exporter.logs import set_up_logging

    set_up_logging(log_level)
    sys.exit(run_demo(address_of(listen_address), duration_seconds=duration))
