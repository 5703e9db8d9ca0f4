"""The exporter's YAML file: what it means, and the exact sentence for each thing that can be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcache_exporter.config import (
    Config,
    KubernetesConfig,
    ListenAddress,
    TargetConfig,
    load_config,
    parse_config,
    parse_listen_address,
)
from kvcache_exporter.errors import ConfigError

FILE = Path("/etc/kvcache/config.yml")


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse_config(text, FILE)
    return list(error.value.problems)


def test_shortest_file() -> None:
    assert parse_config("targets:\n- url: http://127.0.0.1:8000\n", FILE) == Config(
        targets=(TargetConfig(name="127.0.0.1:8000", url="http://127.0.0.1:8000"),)
    )


def test_every_setting() -> None:
    text = """
listen_address: "[::]:9000"
poll_interval_seconds: 10
poll_timeout_seconds: 1.5
max_body_bytes: 1000000
request_lengths: [32768, 8192]
nvml: false
gpus: 0,GPU-8d2f
pod_resources_socket: /run/kubelet.sock
kubernetes:
  node_name: node-1
  namespaces: [ml, prod]
  label_selector: app in (vllm, sglang)
  port_names: http
  model_config: https://hub/{root}/config.json
  model_config_token_file: hub-token
  bearer_token_file: token
  api_server: http://127.0.0.1:8001
targets:
- name: llama
  url: https://llama:8000
  model_config: models/llama
  model_config_token_file: hub-token
  tensor_parallel_size: 4
  pipeline_parallel_size: 2
  decode_context_parallel_size: 2
  max_num_batched_tokens: 4096
  num_speculative_tokens: 1
  kv_cache_bytes_per_token: 131072
  max_num_seqs: 256
  max_model_len: 8192
  dtype: float16
  bearer_token_file: token
  gpus: [MIG-1a, 3]
  pod: ml/llama-0/vllm
  weight_bytes_per_gpu: 16000000000
- name: fetched
  url: http://fetched:8000
  model_config: https://hub/org/name/config.json
- name: inline
  url: http://inline:8000
  model_config: {architectures: [LlamaForCausalLM]}
"""
    assert parse_config(text, FILE) == Config(
        listen_address=ListenAddress("::", 9000),
        poll_interval_seconds=10.0,
        poll_timeout_seconds=1.5,
        max_body_bytes=1_000_000,
        request_lengths=(8192, 32768),
        nvml=False,
        gpus=("0", "GPU-8d2f"),
        pod_resources_socket=Path("/run/kubelet.sock"),
        kubernetes=KubernetesConfig(
            node_name="node-1",
            namespaces=("ml", "prod"),
            label_selector="app in (vllm, sglang)",
            port_names=("http",),
            model_config="https://hub/{root}/config.json",
            model_config_token_file=Path("/etc/kvcache/hub-token"),
            bearer_token_file=Path("/etc/kvcache/token"),
            api_server="http://127.0.0.1:8001",
        ),
        targets=(
            TargetConfig(
                name="llama",
                url="https://llama:8000",
                model_config=Path("/etc/kvcache/models/llama"),
                model_config_token_file=Path("/etc/kvcache/hub-token"),
                tensor_parallel_size=4,
                pipeline_parallel_size=2,
                decode_context_parallel_size=2,
                max_num_batched_tokens=4096,
                num_speculative_tokens=1,
                kv_cache_bytes_per_token=131_072,
                max_num_seqs=256,
                max_model_len=8192,
                dtype="float16",
                bearer_token_file=Path("/etc/kvcache/token"),
                gpus=("MIG-1a", "3"),
                pod="ml/llama-0/vllm",
                weight_bytes_per_gpu=16_000_000_000,
            ),
            TargetConfig(name="fetched", url="http://fetched:8000", model_config="https://hub/org/name/config.json"),
            TargetConfig(name="inline", url="http://inline:8000", model_config={"architectures": ["LlamaForCausalLM"]}),
        ),
    )


def test_kubernetes_finds_targets_so_none_are_needed() -> None:
    assert parse_config("kubernetes: {}", FILE) == Config(targets=(), kubernetes=KubernetesConfig())


def test_file_beside_an_address_on_the_command_line_needs_no_targets() -> None:
    assert parse_config("nvml: false", FILE, needs_targets=False) == Config(targets=(), nvml=False)
    assert problems("nvml: false") == [
        "/etc/kvcache/config.yml:1: targets: needs a list with at least one entry, such as `- url: http://127.0.0.1:8000`"
    ]


def test_directory_of_one_model_is_not_for_all_engines(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert problems(f"kubernetes: {{model_config: {tmp_path}}}") == [
        f"/etc/kvcache/config.yml:1: kubernetes.model_config: {tmp_path} is the directory of one model, and engines that are "
        "found may run others: give the one above it"
    ]


TARGETS = "targets: [{url: http://a:1}]\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "/etc/kvcache/config.yml: is empty or not a mapping; it needs at least `targets:` with one `url:`"),
        ("- a", "/etc/kvcache/config.yml: is empty or not a mapping; it needs at least `targets:` with one `url:`"),
        ("a: [", "/etc/kvcache/config.yml:1: is not YAML: expected the node content, but found '<stream end>'"),
        (
            "targets: []",
            "/etc/kvcache/config.yml:1: targets: needs a list with at least one entry, such as `- url: http://127.0.0.1:8000`",
        ),
        (
            "targets: [http://a:1]",
            "/etc/kvcache/config.yml:1: targets: entry 0 is not a mapping; write it as `- url: http://127.0.0.1:8000`",
        ),
        (
            "targets: [{name: x}]",
            "/etc/kvcache/config.yml:1: targets[0].url: is missing; give the engine's address, such as http://127.0.0.1:8000",
        ),
        (
            "targets: [{url: a:1}]",
            "/etc/kvcache/config.yml:1: targets[0].url: 'a:1' is not an http or https address, such as http://127.0.0.1:8000",
        ),
        (
            "targets: [{url: 'http://u:p@a:1'}]",
            "/etc/kvcache/config.yml:1: targets[0].url: a user or password in the address would show in labels and logs; "
            "use bearer_token_file",
        ),
        (
            "targets: [{url: 'http://a:1?x=1'}]",
            "/etc/kvcache/config.yml:1: targets[0].url: 'http://a:1?x=1' has a query or fragment; give the address without it",
        ),
        (
            "targets:\n- url: http://a:1\n- url: http://a:1",
            "/etc/kvcache/config.yml:1: targets: two targets are called 'a:1'; give each its own name",
        ),
        (
            TARGETS + "pol_interval_seconds: 5",
            "/etc/kvcache/config.yml:2: pol_interval_seconds: is not a setting; did you mean poll_interval_seconds?",
        ),
        (
            "targets: [{url: http://a:1, zzz: 1}]",
            "/etc/kvcache/config.yml:1: targets[0].zzz: is not a setting; known here: bearer_token_file, ca_file, "
            "decode_context_parallel_size, dtype, gpus, kv_cache_bytes_per_token, max_model_len, max_num_active_seqs, "
            "max_num_batched_tokens, max_num_seqs, model_config, model_config_token_file, name, "
            "num_speculative_tokens, pipeline_parallel_size, pod, tensor_parallel_size, url, watermark, weight_bytes_per_gpu",
        ),
        (
            "kubernetes: true",
            "/etc/kvcache/config.yml:1: kubernetes: is not a mapping; write its settings below it, each indented",
        ),
        (
            "kubernetes: {model_config: 'https://hub/org/name/config.json'}",
            "/etc/kvcache/config.yml:1: kubernetes.model_config: 'https://hub/org/name/config.json' is of one model, and "
            "engines that are found may run others: put {root} for the name",
        ),
        (
            "targets: [{url: 'http://a:1', model_config: 'https://u:p@hub/config.json'}]",
            "/etc/kvcache/config.yml:1: targets[0].model_config: a user or password in the address would show in labels and "
            "logs; use bearer_token_file",
        ),
        (
            "kubernetes: {namespace: ml}",
            "/etc/kvcache/config.yml:1: kubernetes.namespace: is not a setting; did you mean namespaces?",
        ),
        (
            "kubernetes: {port_names: [1]}",
            "/etc/kvcache/config.yml:1: kubernetes.port_names: [1] is not a list of names",
        ),
        (
            "kubernetes: {api_server: node:6443}",
            "/etc/kvcache/config.yml:1: kubernetes.api_server: 'node:6443' is not an http or https address, such as "
            "http://127.0.0.1:8000",
        ),
        (
            TARGETS + "gpus: [0, first]",
            "/etc/kvcache/config.yml:2: gpus: 'first' names no GPU; give indexes, or uuids as nvidia-smi -L shows them, "
            "such as [0, 1]",
        ),
        (TARGETS + "gpus: 1,GPU-8d2f,1", "/etc/kvcache/config.yml:2: gpus: names a GPU twice"),
        (
            "targets: [{url: http://a:1, pod: llama-0}]",
            "/etc/kvcache/config.yml:1: targets[0].pod: 'llama-0' is not a pod; write it as namespace/pod or "
            "namespace/pod/container",
        ),
        (
            "targets: [{url: http://a:1, weight_bytes_per_gpu: 15 GiB}]",
            "/etc/kvcache/config.yml:1: targets[0].weight_bytes_per_gpu: '15 GiB' is not a positive whole number",
        ),
        (TARGETS + "nvml: maybe", "/etc/kvcache/config.yml:2: nvml: 'maybe' is neither true nor false"),
        (TARGETS + "nvml: true\nnvml: false", "/etc/kvcache/config.yml:3: nvml: is given twice; keep one"),
        (
            TARGETS + "poll_interval_seconds: 0.5",
            "/etc/kvcache/config.yml:2: poll_interval_seconds: 0.5 is not a number of seconds of at least 1",
        ),
        (
            TARGETS + "poll_timeout_seconds: 5s",
            "/etc/kvcache/config.yml:2: poll_timeout_seconds: '5s' is not a number of seconds of at least 0.1",
        ),
        (
            TARGETS + "poll_timeout_seconds: 5",
            "/etc/kvcache/config.yml:2: poll_timeout_seconds: 5 is not below poll_interval_seconds 5",
        ),
        (TARGETS + "max_body_bytes: -1", "/etc/kvcache/config.yml:2: max_body_bytes: -1 is not a positive whole number"),
        (
            TARGETS + "request_lengths: 8192",
            "/etc/kvcache/config.yml:2: request_lengths: 8192 is not a list of token counts, such as [8192, 32768]",
        ),
        (TARGETS + "request_lengths: [8k]", "/etc/kvcache/config.yml:2: request_lengths: '8k' is not a positive whole number"),
        (
            TARGETS + "listen_address: nowhere",
            "/etc/kvcache/config.yml:2: listen_address: 'nowhere' is not host:port, such as 127.0.0.1:9948 or :9948",
        ),
        (
            TARGETS + "listen_address: '::1:9948'",
            "/etc/kvcache/config.yml:2: listen_address: '::1:9948' is not host:port; an IPv6 address needs brackets, "
            "such as [::]:9948",
        ),
        (
            "targets: [{url: http://a:1, tensor_parallel_size: true}]",
            "/etc/kvcache/config.yml:1: targets[0].tensor_parallel_size: True is not a positive whole number",
        ),
        (
            "targets: [{url: http://a:1, dtype: int4}]",
            "/etc/kvcache/config.yml:1: targets[0].dtype: 'int4' is not one of auto, bfloat16, float16, half, float, float32",
        ),
        ("targets: [{url: http://a:1, model_config: 7}]", "/etc/kvcache/config.yml:1: targets[0].model_config: 7 is not a path"),
        (
            "targets: [{url: http://a:1, ca_file: no/such.pem}]",
            "/etc/kvcache/config.yml:1: targets[0].ca_file: /etc/kvcache/no/such.pem is not a file here",
        ),
        (
            "targets: [{url: http://a:1, name: '  '}]",
            "/etc/kvcache/config.yml:1: targets[0].name: is empty; give a name, or leave it out",
        ),
    ],
)
def test_problem_has_its_sentence(text: str, problem: str) -> None:
    assert problems(text) == [problem]


def test_all_problems_at_once_in_the_order_of_the_file() -> None:
    text = "nvml: 3\ntargets:\n- url: ftp://x\n  nam: y\n- name: z\npoll_interval_seconds: x\n"
    assert [problem.split(": ")[0:2] for problem in problems(text)] == [
        ["/etc/kvcache/config.yml:1", "nvml"],
        ["/etc/kvcache/config.yml:3", "targets[0].url"],
        ["/etc/kvcache/config.yml:4", "targets[0].nam"],
        ["/etc/kvcache/config.yml:5", "targets[1].url"],
        ["/etc/kvcache/config.yml:6", "poll_interval_seconds"],
    ]


def test_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-file: cannot be read"):
        load_config(tmp_path / "no-such-file")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9948", ListenAddress("127.0.0.1", 9948)),
        (":9000", ListenAddress("", 9000)),
        ("9000", ListenAddress("", 9000)),
        ("[::1]:9948", ListenAddress("::1", 9948)),
        ("localhost:0", ListenAddress("localhost", 0)),
    ],
)
def test_listen_address(text: str, address: ListenAddress) -> None:
    assert parse_listen_address(text) == address


@pytest.mark.parametrize("text", ["", ":", "a:b", "1.2.3.4", "[::1]", "host:99999", "[::1:9948"])
def test_listen_address_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        parse_listen_address(text)
