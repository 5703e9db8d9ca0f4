"""The command line: serve, demo, plan, replay, check-config.

What is only needed to run is imported by the command that runs it, so that `--help` and offline commands start at once.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvcache_exporter import __version__
from kvcache_exporter.cli_plan import plan
from kvcache_exporter.cli_replay import replay
from kvcache_exporter.errors import ConfigError

if TYPE_CHECKING:
    from kvcache_exporter.capture import Recorder
    from kvcache_exporter.config import Config, ListenAddress
    from kvcache_exporter.node_gpus import GpuSources

log = logging.getLogger(__name__)

_LOG_LEVELS = ("debug", "info", "warning", "error")

_listen_address = click.option(
    "--listen-address", metavar="HOST:PORT", help="Address to serve on, such as 127.0.0.1:9948 or [::]:9948.  [default: :9948]"
)
_log_level = click.option("--log-level", type=click.Choice(_LOG_LEVELS), default="info", show_default=True)


@click.group(context_settings={"auto_envvar_prefix": "KVCACHE_EXPORTER", "help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvcache-exporter")
def main() -> None:
    """Prometheus exporter for the KV cache of vLLM engines."""


@main.command()
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="YAML file with targets and settings.")
@click.option("--vllm-url", metavar="URL", help="Address of one engine, such as http://127.0.0.1:8000, instead of --config.")
@click.option(
    "--model-config",
    type=click.Path(path_type=Path),
    help="config.json of the engine's model, its directory, or a Hugging Face cache. With --vllm-url only.",
)
@click.option(
    "--record",
    "record_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Keep every page that is polled in this file, *.jsonl.gz, for `replay`; one that is there is carried on. An engine that "
    "is polled every 5 s takes about 4 MB an hour.",
)
@_listen_address
@_log_level
def serve(
    config_path: Path | None,
    vllm_url: str | None,
    model_config: Path | None,
    record_path: Path | None,
    listen_address: str | None,
    log_level: str,
) -> None:
    """Poll engines and GPUs, and serve what they say to Prometheus."""
    from kvcache_exporter.config import Config, load_config, target_for_url
    from kvcache_exporter.logs import set_up_logging
    from kvcache_exporter.serve import run

    if (config_path is None) == (vllm_url is None):
        raise click.UsageError("give either --config FILE or --vllm-url URL")
    if config_path is not None and model_config is not None:
        raise click.UsageError("--model-config goes with --vllm-url; in a --config file each target has its own model_config")
    set_up_logging(log_level)
    try:
        config = (
            load_config(config_path)
            if config_path is not None
            else Config(targets=(target_for_url(str(vllm_url), model_config),))
        )
    except ConfigError as error:
        _refuse(error)
    config = _listen(config, listen_address)
    recorder = None if record_path is None else _recorder(record_path)
    sys.exit(run(config, gpus=_gpu_sources(config) if config.nvml else None, recorder=recorder))


main.add_command(plan)
main.add_command(replay)


@main.command("check-config")
@click.argument("config_path", metavar="FILE", type=click.Path(path_type=Path))
def check_config(config_path: Path) -> None:
    """Check a configuration file and report everything that is wrong with it."""
    from kvcache_exporter.config import load_config

    try:
        config = load_config(config_path)
    except ConfigError as error:
        _refuse(error)
    click.echo(f"{config_path}: good; {len(config.targets)} target{'s' if len(config.targets) != 1 else ''}")


@main.command()
@_listen_address
@click.option("--duration", type=click.FloatRange(min=1), metavar="SECONDS", help="End by itself after this long.")
@click.option("--log-level", type=click.Choice(_LOG_LEVELS), default="warning", show_default=True)
def demo(listen_address: str | None, duration: float | None, log_level: str) -> None:
    """Show the exporter at work on a simulated engine and GPU, under traffic that rises and falls."""
    from kvcache_exporter.demo import run_demo
    from kvcache_exporter.logs import set_up_logging

    set_up_logging(log_level)
    sys.exit(run_demo(_address(listen_address), duration_seconds=duration))


def _gpu_sources(config: Config) -> GpuSources:
    from kvcache_exporter.node_gpus import GpuSources
    from kvcache_exporter.sources.nvml import NvmlSource
    from kvcache_exporter.sources.nvml.bindings import describe_bindings
    from kvcache_exporter.sources.pod_resources import PodResources
    from kvcache_exporter.sources.processes import ProcessTable, sees_host_processes

    log.info("reading NVML", extra={"fields": {"bindings": describe_bindings()}})
    timeout = config.poll_timeout_seconds
    socket = config.pod_resources_socket
    return GpuSources(
        # A part of it, so that the GPUs behind two that begin to hang are read in time.
        NvmlSource(device_timeout_seconds=timeout / 3),
        # NVML's pids are the host's: in a container with pids of its own they would be those of others.
        processes=ProcessTable() if sees_host_processes() else None,
        pod_resources=None if socket is None else PodResources(socket, timeout_seconds=timeout),
    )


def _listen(config: Config, listen_address: str | None) -> Config:
    return config if listen_address is None else replace(config, listen_address=_address(listen_address))


def _address(listen_address: str | None) -> ListenAddress:
    from kvcache_exporter.config import ListenAddress, parse_listen_address

    if listen_address is None:
        return ListenAddress()
    try:
        return parse_listen_address(listen_address)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--listen-address") from error


def _recorder(path: Path) -> Recorder:
    from kvcache_exporter.capture import Recorder

    try:
        return Recorder(path)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--record") from error
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be written: {error.strerror or error}", param_hint="--record") from error


def _refuse(error: ConfigError) -> None:
    for problem in error.problems:
        click.echo(problem, err=True)
    sys.exit(2)
