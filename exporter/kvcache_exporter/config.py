"""The exporter's own configuration: YAML -> Config.

Unknown keys are refused, and every problem is reported at once, each with its line and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from kvcache_exporter.config_values import (
    boolean,
    dtype,
    file_in,
    gpu_list,
    http_url,
    model_source,
    models_source,
    path_in,
    pod_name,
    positive_int,
    seconds,
    share,
    some_text,
    strings,
    token_counts,
)
from kvcache_exporter.errors import ConfigError
from kvcache_exporter.yaml_section import Section, compose

DEFAULT_PORT = 9948


@dataclass(frozen=True)
class ListenAddress:
    """Where the exporter serves. `host` is "" for all addresses of the machine, IPv4 and IPv6."""

    host: str = ""
    port: int = DEFAULT_PORT


@dataclass(frozen=True)
class TargetConfig:
    """One vLLM server and what its pages do not tell about it.

    `model_config` is a path (file, directory, Hugging Face cache), an address in which `{root}` stands for the hub name that
    the engine reports (with the token of `model_config_token_file`), or the content of config.json itself; None means that
    `root`, where it is a path that exists here. `max_model_len` (tokens), `max_num_seqs` and `max_num_active_seqs` are the
    engine's flags; None: not given. `watermark` is the share of blocks that the engine keeps free on admission.
    `kv_cache_bytes_per_token` (over all ranks) stands in for a model whose layout is not known, as if all its layers were
    full attention.

    `gpus` are the GPUs that the engine runs on, as its CUDA_VISIBLE_DEVICES has them; `pod` is where it runs in Kubernetes, as
    `namespace/pod` or `namespace/pod/container`. `weight_bytes_per_gpu` is what the engine logs that loading its model took.

    Four fields are not of the file, but of a target that was found, or whose arguments are given: `container_id` is the
    runtime's; `has_default_seats`: it runs with vLLM's default of max_num_seqs; `num_draft_layers` counts the layers that
    speculation adds (None: one, where it is on); `unknown_arguments` are those of the engine that cannot be told, each as a
    sentence: what follows from them is then not known either.
    """

    name: str
    url: str
    model_config: Path | str | Mapping[str, Any] | None = None
    model_config_token_file: Path | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    max_num_batched_tokens: int | None = None
    num_speculative_tokens: int | None = None
    kv_cache_bytes_per_token: int | None = None
    max_num_seqs: int | None = None
    max_num_active_seqs: int | None = None
    watermark: float = 0.0
    max_model_len: int | None = None
    dtype: str = "auto"
    bearer_token_file: Path | None = None
    ca_file: Path | None = None
    gpus: tuple[str, ...] | None = None
    pod: str | None = None
    weight_bytes_per_gpu: int | None = None
    container_id: str | None = None
    has_default_seats: bool = False
    num_draft_layers: int | None = None
    unknown_arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class KubernetesConfig:
    """How the engines of this node are found through the Kubernetes API.

    `node_name` None: that of the environment. `namespaces` empty: all. `label_selector` is in the API's own syntax; without
    one, pods opt in by label, annotation, or a container port called as one of `port_names`. `model_config` is a directory of
    models as this exporter sees it, or an address with `{root}`; it, its token, `bearer_token_file` and `ca_file` are for all
    engines that are found. `api_server` is an address without credentials, None for the cluster's own.
    """

    node_name: str | None = None
    namespaces: tuple[str, ...] = ()
    label_selector: str | None = None
    port_names: tuple[str, ...] = ("vllm",)
    model_config: Path | str | None = None
    model_config_token_file: Path | None = None
    bearer_token_file: Path | None = None
    ca_file: Path | None = None
    api_server: str | None = None


@dataclass(frozen=True)
class Config:
    """All settings.

    `request_lengths` are tokens (prompt and output) for which slots are shown besides max_model_len, `window_seconds` is how far
    back the requests are looked at that tell what a typical one is. `gpus` are those to show (indexes or uuids), None for all;
    `pod_resources_socket` is the kubelet's, None where it is not asked. `kubernetes` None: no engines are looked for.
    """

    targets: tuple[TargetConfig, ...]
    listen_address: ListenAddress = field(default_factory=ListenAddress)
    poll_interval_seconds: float = 5.0
    poll_timeout_seconds: float = 2.0
    max_body_bytes: int = 32 * 1024 * 1024
    request_lengths: tuple[int, ...] = ()
    window_seconds: float = 300.0
    nvml: bool = True
    gpus: tuple[str, ...] | None = None
    pod_resources_socket: Path | None = None
    kubernetes: KubernetesConfig | None = None


def load_config(path: Path, *, needs_targets: bool = True) -> Config:
    """Read the file, which may do without targets unless `needs_targets`.

    Raises ConfigError with every problem, each starting with `path:line:`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from error
    return parse_config(text, path, needs_targets=needs_targets)


def parse_config(text: str, path: Path, *, needs_targets: bool = True) -> Config:
    """Parse the text of a file; relative paths in it start at the folder of `path`. Raises ConfigError."""
    node = compose(text, path)
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError([f"{path}: is empty or not a mapping; it needs at least `targets:` with one `url:`"])
    problems: list[str] = []
    top = Section(node, "", path, problems)
    kubernetes = _kubernetes(top)
    config = Config(
        targets=_targets(top) if top.gives("targets") or (needs_targets and not top.gives("kubernetes")) else (),
        listen_address=top.take("listen_address", parse_listen_address, ListenAddress()),
        poll_interval_seconds=top.take("poll_interval_seconds", seconds(at_least=1.0), 5.0),
        poll_timeout_seconds=top.take("poll_timeout_seconds", seconds(at_least=0.1), 2.0),
        max_body_bytes=top.take("max_body_bytes", positive_int, Config.max_body_bytes),
        request_lengths=top.take("request_lengths", token_counts, ()),
        window_seconds=top.take("window_seconds", seconds(at_least=10.0), Config.window_seconds),
        nvml=top.take("nvml", boolean, True),
        gpus=top.take("gpus", gpu_list, None),
        pod_resources_socket=top.take("pod_resources_socket", lambda value: path_in(value, path.parent), None),
        kubernetes=kubernetes,
    )
    if config.poll_timeout_seconds >= config.poll_interval_seconds:
        top.problem(
            "poll_timeout_seconds",
            f"{config.poll_timeout_seconds:g} is not below poll_interval_seconds {config.poll_interval_seconds:g}",
        )
    top.refuse_unknown_keys()
    if problems:
        raise ConfigError(problems)
    return config


def parse_listen_address(value: object) -> ListenAddress:
    """Read `host:port`, `[ipv6]:port`, `:port` or a port alone. Raises ValueError."""
    text = str(value)
    host, separator, port = text.rpartition(":")
    if host.startswith("[") != host.endswith("]") or (":" in host and not host.startswith("[")):
        raise ValueError(f"{text!r} is not host:port; an IPv6 address needs brackets, such as [::]:{DEFAULT_PORT}")
    if not (port if separator else text).isdecimal() or int(port) > 65535:
        raise ValueError(f"{text!r} is not host:port, such as 127.0.0.1:{DEFAULT_PORT} or :{DEFAULT_PORT}")
    return ListenAddress(host.strip("[]"), int(port))


def target_for_url(url: str, name: str | None = None) -> TargetConfig:
    """Build the target that `serve --vllm-url` means. Raises ConfigError."""
    try:
        checked = http_url(url)
    except ValueError as error:
        raise ConfigError([f"--vllm-url: {error}"]) from error
    return TargetConfig(name=name or urlsplit(checked).netloc, url=checked)


def _kubernetes(top: Section) -> KubernetesConfig | None:
    section = top.section("kubernetes")
    if section is None:
        return None
    folder = section.path.parent
    kubernetes = KubernetesConfig(
        node_name=section.take("node_name", some_text, None),
        namespaces=section.take("namespaces", strings, ()),
        label_selector=section.take("label_selector", some_text, None),
        port_names=section.take("port_names", strings, KubernetesConfig.port_names),
        model_config=section.take("model_config", lambda value: models_source(value, folder), None),
        model_config_token_file=section.take("model_config_token_file", lambda value: path_in(value, folder), None),
        bearer_token_file=section.take("bearer_token_file", lambda value: path_in(value, folder), None),
        ca_file=section.take("ca_file", lambda value: file_in(value, folder), None),
        api_server=section.take("api_server", http_url, None),
    )
    section.refuse_unknown_keys()
    return kubernetes


def _targets(top: Section) -> tuple[TargetConfig, ...]:
    targets: list[TargetConfig] = []
    for index, node in enumerate(top.items("targets")):
        if not isinstance(node, yaml.MappingNode):
            top.problem("targets", f"entry {index} is not a mapping; write it as `- url: http://127.0.0.1:8000`")
            continue
        target = _target(Section(node, f"targets[{index}].", top.path, top.problems))
        if target is None:
            continue
        if any(target.name == other.name for other in targets):
            top.problem("targets", f"two targets are called {target.name!r}; give each its own name")
        targets.append(target)
    return tuple(targets)


def _target(section: Section) -> TargetConfig | None:
    url = section.take("url", http_url, None)
    if not section.gives("url"):
        section.problem("url", "is missing; give the engine's address, such as http://127.0.0.1:8000")
    folder = section.path.parent
    target = TargetConfig(
        name=section.take("name", some_text, urlsplit(url or "").netloc),
        url=url or "",
        model_config=section.take("model_config", lambda value: model_source(value, folder), None),
        model_config_token_file=section.take("model_config_token_file", lambda value: path_in(value, folder), None),
        tensor_parallel_size=section.take("tensor_parallel_size", positive_int, 1),
        pipeline_parallel_size=section.take("pipeline_parallel_size", positive_int, 1),
        decode_context_parallel_size=section.take("decode_context_parallel_size", positive_int, 1),
        max_num_batched_tokens=section.take("max_num_batched_tokens", positive_int, None),
        num_speculative_tokens=section.take("num_speculative_tokens", positive_int, None),
        kv_cache_bytes_per_token=section.take("kv_cache_bytes_per_token", positive_int, None),
        max_num_seqs=section.take("max_num_seqs", positive_int, None),
        max_num_active_seqs=section.take("max_num_active_seqs", positive_int, None),
        watermark=section.take("watermark", share, 0.0),
        max_model_len=section.take("max_model_len", positive_int, None),
        dtype=section.take("dtype", dtype, "auto"),
        bearer_token_file=section.take("bearer_token_file", lambda value: path_in(value, folder), None),
        ca_file=section.take("ca_file", lambda value: file_in(value, folder), None),
        gpus=section.take("gpus", gpu_list, None),
        pod=section.take("pod", pod_name, None),
        weight_bytes_per_gpu=section.take("weight_bytes_per_gpu", positive_int, None),
    )
    section.refuse_unknown_keys()
    return None if url is None else target
