"""The command `serve`: from options and files to a running exporter."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from kvcache_exporter.cli_options import address_of, listen_address_option, log_level_option, refuse
from kvcache_exporter.errors import ConfigError

if TYPE_CHECKING:
    from kvcache_exporter.capture import Recorder
    from kvcache_exporter.config import Config, TargetConfig
    from kvcache_exporter.node_gpus import GpuSources

log = logging.getLogger(__name__)

_T = TypeVar("_T")


@click.command()
@click.option("--config", "config_path", type=click.Path(path_type=Path), help="YAML file with targets and settings.")
@click.option("--vllm-url", metavar="URL", help="Address of an engine, such as http://127.0.0.1:8000, besides those of --config.")
@click.option("--target-name", metavar="NAME", help="Its label `target`.  [default: host and port of --vllm-url]")
@click.option(
    "--model-config",
    metavar="PATH|URL",
    help="config.json of its model, its directory, a Hugging Face cache, or an address with {root} for the model's name.",
)
@click.option(
    "--model-config-token-file", metavar="FILE", help="File with the token for such an address, as gated models need it."
)
@click.option(
    "--engine-args",
    metavar="TEXT",
    help="Its own arguments, as for `vllm serve`: in one line, or one in each line. After a form feed come further ones, "
    "which have the last word.",
)
@click.option("--gpus", metavar="LIST", help="Its GPUs, as indexes or uuids with commas between; no others are shown.")
@click.option("--bearer-token-file", metavar="FILE", help="File with its API key.")
@click.option("--no-nvml", is_flag=True, help="Read no GPUs.")
@click.option(
    "--record",
    "record_path",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Keep every page that is polled in this file, *.jsonl.gz, for `replay`; one that is there is carried on. An engine that "
    "is polled every 5 s takes about 4 MB an hour.",
)
@click.option(
    "--web-config-file",
    type=click.Path(path_type=Path),
    help="TLS and basic authentication for the exporter's own pages, in the format of Prometheus's exporter-toolkit.",
)
@listen_address_option
@log_level_option()
def serve(
    config_path: Path | None,
    vllm_url: str | None,
    record_path: Path | None,
    web_config_file: Path | None,
    listen_address: str | None,
    log_level: str,
    *,
    no_nvml: bool,
    **of_the_url: str | None,
) -> None:
    """Poll engines and GPUs, and serve what they say to Prometheus. The options on one engine go with --vllm-url."""
    from kvcache_exporter.discovery import discover
    from kvcache_exporter.logs import set_up_logging
    from kvcache_exporter.serve import Parts, run
    from kvcache_exporter.web_access import WebAccess

    if config_path is None and vllm_url is None:
        raise click.UsageError("give --config FILE, --vllm-url URL, or both")
    stray = [name for name, value in of_the_url.items() if value is not None]
    if vllm_url is None and stray:
        raise click.UsageError(
            f"--{stray[0].replace('_', '-')} goes with --vllm-url; in a --config file each target has such settings of its own"
        )
    set_up_logging(log_level)
    try:
        config = _config(config_path, vllm_url, of_the_url)
        discovery = None if config.kubernetes is None else discover(config.kubernetes, os.environ)
        web = None if web_config_file is None else WebAccess(web_config_file)
    except ConfigError as error:
        refuse(error)
    if listen_address is not None:
        config = replace(config, listen_address=address_of(listen_address))
    recorder = None if record_path is None else _recorder(record_path)
    gpus = _gpu_sources(config) if config.nvml and not no_nvml else None
    sys.exit(run(config, Parts(gpus, discovery, recorder, web)))


def _config(config_path: Path | None, vllm_url: str | None, of_the_url: Mapping[str, str | None]) -> Config:
    """The settings of the file with the engine of --vllm-url as a further target. Raises ConfigError."""
    from kvcache_exporter.config import Config, load_config

    config = Config(targets=()) if config_path is None else load_config(config_path, needs_targets=vllm_url is None)
    if vllm_url is None:
        return config
    target = _target(vllm_url, of_the_url)
    if any(target.name == other.name for other in config.targets):
        raise ConfigError([f"{config_path}: a target is called {target.name!r}, as that of --vllm-url; set --target-name"])
    return replace(config, targets=(*config.targets, target), gpus=config.gpus if target.gpus is None else target.gpus)


def _target(vllm_url: str, of_the_url: Mapping[str, str | None]) -> TargetConfig:
    from kvcache_exporter.config import target_for_url
    from kvcache_exporter.config_values import gpu_list, model_source
    from kvcache_exporter.container_words import words_of_text
    from kvcache_exporter.engine_args import with_further_args
    from kvcache_exporter.target_arguments import with_arguments

    target = target_for_url(vllm_url, of_the_url["target_name"])
    arguments = of_the_url["engine_args"]
    if arguments is not None:
        own, _, further = arguments.partition("\f")
        target = with_arguments(target, with_further_args(words_of_text(own), words_of_text(further)))
    return replace(
        target,
        model_config=_value(of_the_url, "model_config", lambda value: model_source(value, Path())),
        model_config_token_file=_value(of_the_url, "model_config_token_file", Path),
        bearer_token_file=_value(of_the_url, "bearer_token_file", Path),
        gpus=_value(of_the_url, "gpus", gpu_list),
    )


def _value(options: Mapping[str, str | None], name: str, convert: Callable[[str], _T]) -> _T | None:
    """The value of an option, None where it is not given. Raises ConfigError."""
    given = options[name]
    try:
        return None if given is None else convert(given)
    except ValueError as error:
        raise ConfigError([f"--{name.replace('_', '-')}: {error}"]) from error


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


def _recorder(path: Path) -> Recorder:
    from kvcache_exporter.capture import Recorder

    try:
        return Recorder(path)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--record") from error
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be written: {error.strerror or error}", param_hint="--record") from error
