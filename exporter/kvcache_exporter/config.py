"""The exporter's own configuration: YAML -> Config.

Unknown keys are refused, and every problem is reported at once, each with its line and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import yaml

from kvcache_exporter.errors import ConfigError

DEFAULT_PORT = 9948

_T = TypeVar("_T")
_DTYPES = ("auto", "bfloat16", "float16", "half", "float", "float32")


@dataclass(frozen=True)
class ListenAddress:
    """Where the exporter serves. `host` is "" for all addresses of the machine, IPv4 and IPv6."""

    host: str = ""
    port: int = DEFAULT_PORT


@dataclass(frozen=True)
class TargetConfig:
    """One vLLM server and what its pages do not tell about it.

    `model_config` is a path (file, directory, Hugging Face cache) or the content of config.json itself; None means the `root`
    that the engine reports, where that path exists here. `max_model_len` (tokens), `max_num_seqs` and `max_num_active_seqs` are
    the engine's flags; None: not given. `watermark` is the share of blocks that the engine keeps free on admission.
    `kv_cache_bytes_per_token` (over all ranks)
    stands in for a model whose layout is not known, as if all its layers were full attention.

    `gpus` are the GPUs that the engine runs on, as its CUDA_VISIBLE_DEVICES has them; `pod` is where it runs in Kubernetes, as
    `namespace/pod` or `namespace/pod/container`. `weight_bytes_per_gpu` is what the engine logs that loading its model took.
    """

    name: str
    url: str
    model_config: Path | Mapping[str, Any] | None = None
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


@dataclass(frozen=True)
class Config:
    """All settings.

    `request_lengths` are tokens (prompt and output) for which slots are shown besides max_model_len, `window_seconds` is how far
    back the requests are looked at that tell what a typical one is. `gpus` are those to show (indexes or uuids), None for all;
    `pod_resources_socket` is the kubelet's, None where it is not asked.
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


def load_config(path: Path) -> Config:
    """Read the file. Raises ConfigError with every problem, each starting with `path:line:`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: cannot be read: {error}"]) from error
    return parse_config(text, path)


def parse_config(text: str, path: Path) -> Config:
    """Parse the text of a file; relative paths in it start at the folder of `path`. Raises ConfigError."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f"{mark.line + 1}:"
        problem = getattr(error, "problem", None) or error
        raise ConfigError([f"{path}:{line} is not YAML: {problem}"]) from error
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError([f"{path}: is empty or not a mapping; it needs at least `targets:` with one `url:`"])
    problems: list[str] = []
    top = _Section(node, "", path, problems)
    config = Config(
        targets=_targets(top),
        listen_address=top.take("listen_address", parse_listen_address, ListenAddress()),
        poll_interval_seconds=top.take("poll_interval_seconds", _seconds(at_least=1.0), 5.0),
        poll_timeout_seconds=top.take("poll_timeout_seconds", _seconds(at_least=0.1), 2.0),
        max_body_bytes=top.take("max_body_bytes", _positive_int, Config.max_body_bytes),
        request_lengths=top.take("request_lengths", _lengths, ()),
        window_seconds=top.take("window_seconds", _seconds(at_least=10.0), Config.window_seconds),
        nvml=top.take("nvml", _boolean, True),
        gpus=top.take("gpus", _gpus, None),
        pod_resources_socket=top.take("pod_resources_socket", lambda value: _path(value, path.parent), None),
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


def target_for_url(url: str, model_config: Path | None = None) -> TargetConfig:
    """Build the target that `serve --vllm-url` means. Raises ConfigError."""
    try:
        checked = _url(url)
    except ValueError as error:
        raise ConfigError([f"--vllm-url: {error}"]) from error
    return TargetConfig(name=urlsplit(checked).netloc, url=checked, model_config=model_config)


class _Section:
    """One mapping of the file while it is being read: takes known keys, remembers the rest, collects problems with their line."""

    def __init__(self, node: yaml.MappingNode, where: str, path: Path, problems: list[str]) -> None:
        self.path = path
        self.problems = problems
        self._where = where
        self._line = node.start_mark.line + 1
        self._nodes: dict[str, yaml.Node] = {}
        self._known: set[str] = set()
        self._lines: dict[str, int] = {}
        for key, value in node.value:
            name = str(key.value)
            self._lines[name] = key.start_mark.line + 1
            if name in self._nodes:
                self.problem(name, "is given twice; keep one")
            self._nodes[name] = value

    def problem(self, key: str, sentence: str) -> None:
        line = self._lines.get(key, self._line)
        self.problems.append(f"{self.path}:{line}: {self._where}{key}: {sentence}")

    def take(self, key: str, convert: Callable[[object], _T], default: _T) -> _T:
        """Convert the value of `key`; missing or null gives the default, and a ValueError of `convert` becomes a problem."""
        self._known.add(key)
        value = self._construct(key)
        if value is None:
            return default
        try:
            return convert(value)
        except ValueError as error:
            self.problem(key, str(error))
            return default

    def gives(self, key: str) -> bool:
        """Whether the file has a value for `key`, good or not."""
        return self._construct(key) is not None

    def items(self, key: str) -> list[yaml.Node]:
        """Nodes of the list under `key`."""
        self._known.add(key)
        node = self._nodes.get(key)
        if isinstance(node, yaml.SequenceNode) and node.value:
            return list(node.value)
        self.problem(key, "needs a list with at least one entry, such as `- url: http://127.0.0.1:8000`")
        return []

    def refuse_unknown_keys(self) -> None:
        """Report every key that nothing took, with the nearest known one."""
        for key in self._nodes.keys() - self._known:
            near = difflib.get_close_matches(key, self._known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(self._known))}"
            self.problem(key, f"is not a setting; {hint}")
        self.problems.sort(key=lambda problem: int(problem.removeprefix(f"{self.path}:").partition(":")[0]))

    def _construct(self, key: str) -> object:
        node = self._nodes.get(key)
        if node is None:
            return None
        loader = yaml.SafeLoader("")
        try:
            return loader.construct_object(node, deep=True)
        finally:
            loader.dispose()


def _targets(top: _Section) -> tuple[TargetConfig, ...]:
    targets: list[TargetConfig] = []
    for index, node in enumerate(top.items("targets")):
        if not isinstance(node, yaml.MappingNode):
            top.problem("targets", f"entry {index} is not a mapping; write it as `- url: http://127.0.0.1:8000`")
            continue
        target = _target(_Section(node, f"targets[{index}].", top.path, top.problems))
        if target is None:
            continue
        if any(target.name == other.name for other in targets):
            top.problem("targets", f"two targets are called {target.name!r}; give each its own name")
        targets.append(target)
    return tuple(targets)


def _target(section: _Section) -> TargetConfig | None:
    url = section.take("url", _url, None)
    if not section.gives("url"):
        section.problem("url", "is missing; give the engine's address, such as http://127.0.0.1:8000")
    folder = section.path.parent
    target = TargetConfig(
        name=section.take("name", _name, urlsplit(url or "").netloc),
        url=url or "",
        model_config=section.take("model_config", lambda value: _model_config(value, folder), None),
        tensor_parallel_size=section.take("tensor_parallel_size", _positive_int, 1),
        pipeline_parallel_size=section.take("pipeline_parallel_size", _positive_int, 1),
        decode_context_parallel_size=section.take("decode_context_parallel_size", _positive_int, 1),
        max_num_batched_tokens=section.take("max_num_batched_tokens", _positive_int, None),
        num_speculative_tokens=section.take("num_speculative_tokens", _positive_int, None),
        kv_cache_bytes_per_token=section.take("kv_cache_bytes_per_token", _positive_int, None),
        max_num_seqs=section.take("max_num_seqs", _positive_int, None),
        max_num_active_seqs=section.take("max_num_active_seqs", _positive_int, None),
        watermark=section.take("watermark", _share, 0.0),
        max_model_len=section.take("max_model_len", _positive_int, None),
        dtype=section.take("dtype", _dtype, "auto"),
        bearer_token_file=section.take("bearer_token_file", lambda value: _path(value, folder), None),
        ca_file=section.take("ca_file", lambda value: _existing_file(value, folder), None),
        gpus=section.take("gpus", _gpus, None),
        pod=section.take("pod", _pod, None),
        weight_bytes_per_gpu=section.take("weight_bytes_per_gpu", _positive_int, None),
    )
    section.refuse_unknown_keys()
    return None if url is None else target


def _url(value: object) -> str:
    text = str(value)
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{text!r} is not an http or https address, such as http://127.0.0.1:8000")
    if parts.username is not None:
        raise ValueError("a user or password in the address would show in labels and logs; use bearer_token_file")
    if parts.query or parts.fragment:
        raise ValueError(f"{text!r} has a query or fragment; give the address without it")
    return text


def _name(value: object) -> str:
    text = str(value).strip()
    if not text:
        raise ValueError("is empty; give the name that the label `target` is to carry")
    return text


def _model_config(value: object, folder: Path) -> Path | Mapping[str, Any]:
    return value if isinstance(value, dict) else _path(value, folder)


def _gpus(value: object) -> tuple[str, ...]:
    entries = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    gpus = tuple(str(entry).strip() for entry in entries)
    for gpu in gpus:
        if not gpu.isdecimal() and not gpu.startswith(("GPU-", "MIG-")):
            raise ValueError(f"{gpu!r} names no GPU; give indexes, or uuids as nvidia-smi -L shows them, such as [0, 1]")
    if len(set(gpus)) < len(gpus):
        raise ValueError("names a GPU twice")
    return gpus


def _pod(value: object) -> str:
    text = str(value)
    if text.count("/") not in (1, 2) or not all(text.split("/")):
        raise ValueError(f"{text!r} is not a pod; write it as namespace/pod or namespace/pod/container")
    return text


def _path(value: object, folder: Path) -> Path:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{value!r} is not a path")
    return folder / value


def _existing_file(value: object, folder: Path) -> Path:
    path = _path(value, folder)
    if not path.is_file():
        raise ValueError(f"{path} is not a file here")
    return path


def _dtype(value: object) -> str:
    if value not in _DTYPES:
        raise ValueError(f"{value!r} is not one of {', '.join(_DTYPES)}")
    return str(value)


def _positive_int(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ValueError(f"{value!r} is not a positive whole number")
    return value


def _share(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ValueError(f"{value!r} is not a share of at least 0 and below 1, such as 0.01")
    return float(value)


def _lengths(value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list of token counts, such as [8192, 32768]")
    return tuple(sorted({_positive_int(length) for length in value}))


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def _seconds(*, at_least: float) -> Callable[[object], float]:
    def convert(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not at_least <= value < float("inf"):
            raise ValueError(f"{value!r} is not a number of seconds of at least {at_least:g}")
        return float(value)

    return convert
