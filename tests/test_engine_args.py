"""What a container's command line says about its engine: as Kubernetes, the shell and vLLM's own parser would read it."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache_exporter.container_words import container_words, words_of_text
from kvcache_exporter.engine_args import EngineArgs, read_engine_args
from kvcache_exporter.human_integer import parse_human_integer
from kvcache_exporter.shell_words import shell_commands


class Container(NamedTuple):
    """A container as a chart renders it, and what it says; `says` without `is_vllm` means that it starts vLLM's server."""

    name: str
    command: Sequence[str]
    args: Sequence[str]
    says: Mapping[str, Any]
    env: Mapping[str, str | None] = {}  # never changed


ALL = {field.name for field in fields(EngineArgs)} - {"unknown", "is_vllm"}

WIDE_EP = """
# One rank a GPU, over all nodes of the group.
if [ -z "$LWS_LEADER_ADDRESS" ]; then
  exit 1
fi
DP_SIZE_LOCAL=8
START_RANK=$(( ${LWS_WORKER_INDEX:-0} * DP_SIZE_LOCAL ))
source /opt/vllm/bin/activate
exec vllm serve \\
  deepseek-ai/DeepSeek-R1-0528 \\
  --port 8200 \\
  --trust-remote-code \\
  --disable-uvicorn-access-log \\
  --data-parallel-hybrid-lb \\
  --enable-expert-parallel \\
  --tensor-parallel-size ${TP_SIZE} \\
  --data-parallel-size $((LWS_GROUP_SIZE * DP_SIZE_LOCAL)) \\
  --data-parallel-size-local ${DP_SIZE_LOCAL} \\
  --data-parallel-start-rank ${START_RANK} \\
  --kv_transfer_config '{"kv_connector":"NixlConnector","kv_role":"kv_both"}' 2>&1 | tee /tmp/vllm.log
"""

KSERVE_TEMPLATE = """eval "vllm serve \\
  /mnt/models \\
  --served-model-name "llama" \\
  --port 8000 \\
  ${VLLM_ADDITIONAL_ARGS} \\
  --max-model-len 8192 \\
  --enable-ssl-refresh \\
  --ssl-certfile /etc/ssl/certs/tls.crt \\
  --ssl-keyfile /etc/ssl/certs/tls.key"
"""

LEADER_OR_WORKER = """
if [ "$ROLE" = leader ]; then
  vllm serve org/large --tensor-parallel-size 8 --pipeline-parallel-size 2
else
  vllm serve org/large --tensor-parallel-size 8 --headless
fi
"""

CONTAINERS = (
    Container(
        "production stack",
        ["vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct"],
        [
            *("--host", "0.0.0.0", "--port", "8000", "--no-enable-prefix-caching", "--max-model-len", "16384"),
            *("--dtype", "bfloat16", "--tensor-parallel-size", "2", "--max-num-seqs", "32", "--gpu-memory-utilization", "0.95"),
            *("--kv-transfer-config", '{"kv_connector":"LMCacheConnectorV1","kv_role":"kv_both"}'),
        ],
        {
            "model": "meta-llama/Llama-3.1-8B-Instruct",
            "port": 8000,
            "max_model_len": 16384,
            "dtype": "bfloat16",
            "tensor_parallel_size": 2,
            "max_num_seqs": 32,
        },
    ),
    Container(
        "vLLM's Kubernetes page: one string for a shell",
        ["/bin/sh", "-c"],
        ["vllm serve mistralai/Mistral-7B-Instruct-v0.3 --trust-remote-code --max_num_batched_tokens 1024"],
        {"model": "mistralai/Mistral-7B-Instruct-v0.3", "max_num_batched_tokens": 1024},
    ),
    Container(
        "vllm-openai, arguments only",
        [],
        ["--model", "Qwen/Qwen3-32B", "--served-model-name", "qwen3", "qwen", "--port=8080", "-tp=4", "--api-key", "$(API_KEY)"],
        {"model": "Qwen/Qwen3-32B", "port": 8080, "tensor_parallel_size": 4},
        {"API_KEY": None},
    ),
    Container(
        "vllm-openai since its entry point is `vllm serve`",
        [],
        ["Qwen/Qwen3-8B", "--max-model-len", "40k", "--kv-cache-dtype", "fp8"],
        {"model": "Qwen/Qwen3-8B", "max_model_len": 40000, "kv_cache_dtype": "fp8"},
    ),
    Container(
        "the module",
        ["python3", "-m", "vllm.entrypoints.openai.api_server"],
        ["--model=/models/llama", "--tensor-parallel-size=$(GPUS)", "--pipeline_parallel_size=2", "--block-size=32"],
        {"model": "/models/llama", "tensor_parallel_size": 8, "pipeline_parallel_size": 2, "block_size": 32},
        {"GPUS": "8"},
    ),
    Container(
        "the module's file",
        ["python3", "/vllm-workspace/vllm/entrypoints/openai/api_server.py", "--model", "org/m", "-pp", "2"],
        [],
        {"model": "org/m", "pipeline_parallel_size": 2},
    ),
    Container(
        "a value from a Secret or ConfigMap",
        ["vllm", "serve", "$(MODEL)"],
        ["--max-num-seqs", "$(MAX_NUM_SEQS)", "--tensor-parallel-size", "2"],
        {"tensor_parallel_size": 2, "unknown": {"model": "$(MODEL)", "max_num_seqs": "$(MAX_NUM_SEQS)"}},
        {"MODEL": None},
    ),
    Container(
        "arguments out of sight: what stands after them holds",
        ["sh", "-c", "exec vllm serve org/m --max-num-seqs 8 $EXTRA_ARGS --tensor-parallel-size 2"],
        [],
        {
            "model": "org/m",
            "tensor_parallel_size": 2,
            "unknown": dict.fromkeys(ALL - {"model", "tensor_parallel_size"}, "$EXTRA_ARGS"),
        },
        {"EXTRA_ARGS": None},
    ),
    Container(
        "arguments in a variable",
        ["bash", "-c", "vllm serve $MODEL ${VLLM_ARGS} --port ${PORT:-8000}"],
        [],
        {"model": "org/m", "max_num_seqs": 64, "tensor_parallel_size": 4, "port": 8000},
        {"MODEL": "org/m", "VLLM_ARGS": "--max-num-seqs 64  -tp 4", "PORT": ""},
    ),
    Container(
        "llm-d: wide expert parallelism over a LeaderWorkerSet",
        ["/bin/bash", "-c"],
        [WIDE_EP],
        {
            "model": "deepseek-ai/DeepSeek-R1-0528",
            "port": 8200,
            "tensor_parallel_size": 1,
            "unknown": {"data_parallel_size": "$((LWS_GROUP_SIZE * DP_SIZE_LOCAL))"},
        },
        {"TP_SIZE": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "leader.ns"},
    ),
    Container(
        "llm-d: decode with a routing sidecar in front",
        ["vllm", "serve"],
        [
            *("Qwen/Qwen3-0.6B", "--port", "8200", "--block-size=64", "--prefix-caching-hash-algo", "sha256_cbor"),
            *("--kv-events-config", '{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://gaie-epp:5557"}'),
        ],
        {"model": "Qwen/Qwen3-0.6B", "port": 8200, "block_size": 64},
    ),
    Container(
        "llm-d: that routing sidecar",
        [],
        ["--port=8000", "--vllm-port=8200", "--connector=nixlv2", "-v=5", "--secure-proxy=false"],
        {"port": 8000, "is_vllm": False},
    ),
    Container(
        "KServe LLMInferenceService: eval, TLS",
        ["/bin/bash", "-c"],
        [KSERVE_TEMPLATE],
        {"model": "/mnt/models", "port": 8000, "max_model_len": 8192, "max_num_seqs": 16, "uses_tls": True},
        {"VLLM_ADDITIONAL_ARGS": "--max-num-seqs=16"},
    ),
    Container(
        "KServe huggingfaceserver",
        [],
        ["--model_name=llama3", "--model_id=meta-llama/meta-llama-3-8b-instruct", "--max_model_len=4096", "--dtype=half"],
        {"max_model_len": 4096, "dtype": "half"},
    ),
    Container("NVIDIA NIM: all from the environment", [], [], {"is_vllm": False}, {"NIM_TENSOR_PARALLEL_SIZE": "4"}),
    Container(
        "a script of the image",
        ["/bin/bash", "/scripts/start.sh"],
        ["--tensor-parallel-size=4"],
        {"tensor_parallel_size": 4, "is_vllm": False},
    ),
    Container(
        "NVIDIA Dynamo",
        ["python3", "-m", "dynamo.vllm"],
        ["--model", "Qwen/Qwen3-0.6B", "--max-model-len", "8192"],
        {"model": "Qwen/Qwen3-0.6B", "max_model_len": 8192, "is_vllm": False},
    ),
    Container(
        "wrappers before the command",
        ["tini", "-s", "--", "/usr/bin/env", "TP=2", "bash", "-euo", "pipefail", "-c"],
        ["numactl --cpunodebind=0 opentelemetry-instrument vllm serve org/m -tp $TP > /dev/null 2>&1 &\nwait"],
        {"model": "org/m", "tensor_parallel_size": 2},
        {"TP": "8"},
    ),
    Container(
        "uv",
        ["uv", "run", "--with", "vllm", "vllm", "serve", "org/m", "--max-num-seqs", "8"],
        [],
        {"model": "org/m", "max_num_seqs": 8},
    ),
    Container(
        "Ray first, then vLLM",
        ["/bin/sh", "-c"],
        [
            "bash /vllm-workspace/examples/online_serving/multi-node-serving.sh leader --ray_cluster_size=$(LWS_GROUP_SIZE);\n"
            "python3 -m vllm.entrypoints.openai.api_server --port 8080 --model meta-llama/Meta-Llama-3.1-405B-Instruct "
            "--tensor-parallel-size 8 --pipeline_parallel_size 2"
        ],
        {
            "model": "meta-llama/Meta-Llama-3.1-405B-Instruct",
            "port": 8080,
            "tensor_parallel_size": 8,
            "pipeline_parallel_size": 2,
        },
    ),
    Container(
        "one of several commands",
        ["bash", "-c", LEADER_OR_WORKER],
        [],
        {"unknown": dict.fromkeys(ALL, "$(arguments of one of 2 commands)")},
    ),
    Container(
        "parameters of the script",
        ["sh", "-c", 'echo "vllm serve $1"; vllm serve "$@"', "--"],
        ["org/m", "--speculative-config", '{"method": "eagle3", "model": "org/d", "num_speculative_tokens": 3}'],
        {"model": "org/m", "num_speculative_tokens": 3, "speculative_method": "eagle3"},
    ),
    Container(
        "vLLM's own file",
        ["vllm", "serve"],
        ["--config", "/etc/vllm/config.yaml", "--port", "8001"],
        {"config_file": "/etc/vllm/config.yaml", "port": 8001},
    ),
    Container(
        "another engine",
        ["python3", "-m", "sglang.launch_server"],
        ["--model-path", "org/m", "--tp", "8", "--port", "30000"],
        {"port": 30000, "is_vllm": False},
    ),
)


@pytest.mark.parametrize("container", CONTAINERS, ids=lambda container: str(container.name))
def test_container(container: Container) -> None:
    read = read_engine_args(container_words(container.command, container.args, container.env))
    assert read == EngineArgs(**{"is_vllm": True, **container.says})


@pytest.mark.parametrize("container", CONTAINERS, ids=lambda container: str(container.name))
def test_container_as_a_text_of_lines(container: Container) -> None:
    """A sidecar gets command and args of its neighbour as lines; what a variable holds is not seen there."""
    of_words = read_engine_args(container_words(container.command, container.args, {}))
    of_text = read_engine_args(words_of_text("\n".join((*container.command, *container.args))))
    if container.name in ("parameters of the script", "wrappers before the command"):  # its words go on after the script
        assert of_text.is_vllm
    else:
        assert of_text == of_words


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--max-num-seqs 8 --max-num-seqs=16", {"max_num_seqs": 16}),
        ("--max_num-seqs 8", {"max_num_seqs": 8}),
        ("-dp 2 -dcp=4", {"data_parallel_size": 2, "decode_context_parallel_size": 4}),
        ("--tensor-parallel 2", {"tensor_parallel_size": 2}),  # argparse takes what is short for one flag
        (
            "--max-num 2",
            {"unknown": dict.fromkeys(("max_num_seqs", "max_num_active_seqs", "max_num_batched_tokens"), "--max-num")},
        ),
        ("-t 2", {"unknown": {"tensor_parallel_size": "-t"}}),
        ("-tp2", {}),  # no form that argparse takes
        ("--model-impl auto --mode x", {}),
        ("--max-num-seqs many", {"unknown": {"max_num_seqs": "many"}}),
        ("--max-num-seqs -1", {"unknown": {"max_num_seqs": "-1"}}),
        ("--max-num-seqs many --max-num-seqs 4", {"max_num_seqs": 4}),
        ("--max-num-seqs --port 8000", {"port": 8000, "unknown": {"max_num_seqs": "--max-num-seqs"}}),
        ("--max-num-seqs", {"unknown": {"max_num_seqs": "--max-num-seqs"}}),
        ("--max-num-seqs None", {}),
        ("--max-model-len auto", {}),
        ("--max-model-len -1", {}),
        ("--max-model-len=128K --max-num-batched-tokens 8k", {"max_model_len": 131072, "max_num_batched_tokens": 8000}),
        ("--max-model-len 1.048576e+06", {"unknown": {"max_model_len": "1.048576e+06"}}),
        ("--seed -1 --new-flag 4 --port 80", {"port": 80}),
        ("--enable-chunked-prefill True --max-num-seqs 4", {"max_num_seqs": 4}),
        ('--hf-overrides \'{"x": "--max-num-seqs 4"}\'', {}),
        ("--kv-cache-dtype fp8_e4m3", {"kv_cache_dtype": "fp8_e4m3"}),
        ("--kv-cache-dtype-skip-layers 0 1", {}),
        ("--dtype '$(D)'", {"unknown": {"dtype": "$(D)"}}),
        ("--ssl-keyfile /k", {"uses_tls": True}),
        (
            "--speculative-config.num_speculative_tokens 3 --speculative_config.method=mtp",
            {"num_speculative_tokens": 3, "speculative_method": "mtp"},
        ),
        ('-sc \'{"num_speculative_tokens": 3, "method": null}\'', {"num_speculative_tokens": 3}),
        ("-sc.num-speculative-tokens=3", {"num_speculative_tokens": 3}),
        # vLLM puts what is given by keys last, whatever the order.
        ("-sc.method=mtp -sc '{\"num_speculative_tokens\": 3}'", {"unknown": {"num_speculative_tokens": '{"method": "mtp"}'}}),
        ("--spec-method ngram --spec-tokens 4", {"num_speculative_tokens": 4, "speculative_method": "ngram"}),
        ("--speculative-model org/d --num-speculative-tokens 5", {"num_speculative_tokens": 5}),
        ('--speculative-config \'{"method": "mtp"}\'', {"unknown": {"num_speculative_tokens": '{"method": "mtp"}'}}),
        ("--speculative-config not-json", {"unknown": {"num_speculative_tokens": "not-json"}}),
        ("--spec-method mtp", {"speculative_method": "mtp", "unknown": {"num_speculative_tokens": "mtp"}}),
        ("--compilation-config.level --max-num-seqs --max-num-seqs 4", {"max_num_seqs": 4}),
    ],
)
def test_flags(arguments: str, says: dict[str, Any]) -> None:
    words = ("vllm", "serve", "org/m", *shlex.split(arguments))
    assert read_engine_args(words) == EngineArgs(**{"model": "org/m", "is_vllm": True, **says})


@pytest.mark.parametrize(
    ("words", "model", "unknown"),
    [
        (["vllm", "serve", "--port", "80", "org/m"], "org/m", {}),
        (["vllm", "serve", "--trust-remote-code", "/m"], "/m", {}),
        (["vllm", "serve", "--served-model-name", "a", "b"], None, {"model": "b"}),
        (["vllm", "serve", "--new-flag", "org/m"], None, {"model": "org/m"}),
        (["vllm", "serve", "org/m", "--served-model-name", "a", "b/c"], "org/m", {}),
        (["python", "-m", "vllm.entrypoints.openai.api_server", "org/m"], None, {}),
        (["vllm", "bench", "serve", "org/m"], None, {}),
        (["/opt/venv/bin/vllm", "serve", "--model=org/m"], "org/m", {}),
        (["python3", "-m", "vllm.entrypoints.cli.main", "serve", "org/m"], "org/m", {}),
        (["serve", "org/m", "--max-num-seqs=4"], "org/m", {}),
    ],
)
def test_model(words: list[str], model: str | None, unknown: dict[str, str]) -> None:
    read = read_engine_args(words)
    assert (read.model, read.unknown) == (model, unknown)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("--tensor-parallel-size=4\n--max-num-seqs 64\n", {"tensor_parallel_size": 4, "max_num_seqs": 64}),
        ("--tensor-parallel-size\n4\n", {"tensor_parallel_size": 4}),
        ("-tp 4 --dtype 'half'", {"tensor_parallel_size": 4, "dtype": "half"}),
        ("-tp 4 \\\n  --max-num-seqs 8 # seats\n", {"tensor_parallel_size": 4, "max_num_seqs": 8}),
        (
            "--speculative-config '{\"num_speculative_tokens\": 2}'\n-tp 2",
            {"num_speculative_tokens": 2, "tensor_parallel_size": 2},
        ),
        ("vllm serve org/m -tp 4", {"model": "org/m", "tensor_parallel_size": 4}),
        ("set -e\nsource /env\nexec vllm serve org/m -tp 4\n", {"model": "org/m", "tensor_parallel_size": 4}),
        ("vllm\nserve\norg/m\n-tp\n4", {"model": "org/m", "tensor_parallel_size": 4}),
        ("/bin/sh\n-c\nvllm serve org/m \\\n  -tp 4", {"model": "org/m", "tensor_parallel_size": 4}),
        ("-tp $TP", {"unknown": {"tensor_parallel_size": "$TP"}}),
    ],
)
def test_text(text: str, says: dict[str, Any]) -> None:
    assert read_engine_args(words_of_text(text)) == EngineArgs(**{"is_vllm": True, **says})


def test_text_of_nothing() -> None:
    assert words_of_text(" \n") == ()


@pytest.mark.parametrize(
    ("word", "expanded"),
    [
        ("$(A)", "1"),
        ("x$(A)-$(A)", "x1-1"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$(B)", "$(B)"),
        ("$(NONE)", "$(NONE)"),
        ("$A $( ${A}", "$A $( ${A}"),
    ],
)
def test_references_of_kubernetes(word: str, expanded: str) -> None:
    assert container_words([word], [], {"A": "1", "NONE": None}) == (expanded,)


SCRIPTS = (
    """f 'a b' "c d" e\\ f g\\\nh '' "" # comment""",
    'f "$A" $A ${A} "${A}x" x${B}y $EMPTY "$EMPTY" ${EMPTY:-d} ${EMPTY-d} ${A:+y} ${EMPTY:+y} ${A:-z}',
    """f '{"a": "$A"}' "{\\"a\\": \\"$A\\"}" \\$A '$A' "\\$A" "a\\b" a#b""",
    "X=1; Y=$X$A; f $X $Y; export Z=3 W=4 && f $Z$W",
    "f a > /dev/null b 2>&1 c 2>/dev/null d; true < /dev/null",
    "f a | cat\nf b || f c; true && f d & wait\n(f e); { f g; }\nif true; then f h; fi; while false; do f i; done",
    'f "$@" end; f $@ end; f "x$1" ${2} $0 "$9"',
    "case $A in 1*) f one;; *) f other;; esac",
    "f ${EMPTY:-$A}x ${EMPTY:-$A}> /dev/null X=$A",
    "B=two; bash -c 'true'; f $B\nf ${EMPTY:-\"q w\"} ${A:-$B}",
)


@pytest.mark.skipif(shutil.which("sh") is None, reason="no shell here")
@pytest.mark.parametrize("script", SCRIPTS)
def test_script_is_read_as_the_shell_reads_it(script: str, tmp_path: Path) -> None:
    """Every command `f` that the shell runs was read, with the same words and in the same order."""
    variables, parameters = {"A": "1 2", "B": "b", "EMPTY": ""}, ("zero", "p q", "r")
    out = tmp_path / "out"
    function = f"f() {{ {{ printf '[%s]' \"$@\"; echo; }} >> {out}; }}\n"
    subprocess.run([str(shutil.which("sh")), "-c", function + script, *parameters], env=variables, check=True)
    commands = shell_commands(script, variables, parameters)
    read = ["".join(f"[{word}]" for word in words[1:]) for words, _ in commands if words[0] == "f"]
    ran = out.read_text().splitlines()
    assert ran
    assert [line for line in read if line in ran] == ran


def test_variable_that_a_condition_sets_is_unknown() -> None:
    script = "A=1; if x; then A=2; fi; test -n y || B=3; for C in 1 2; do x; done; D=$(nproc); f $A $B $C $D"
    *_, (words, _) = shell_commands(script, {"B": "1", "C": "1"})
    assert words == ("f", "$A", "$B", "$C", "$D")


def test_words_that_would_fill_the_memory_or_take_long() -> None:
    doubling = "A=0123456789\n" + "A=$A$A\n" * 60 + "vllm serve org/m --max-num-seqs $A"
    assert read_engine_args(container_words(["sh", "-c", doubling], [], {})).unknown == {"max_num_seqs": "$A"}
    assert container_words(["$(" * 100_000], [], {}) == ("$(" * 100_000,)
    assert container_words(["$(A)" * 10_000], [], {"A": "x" * 10_000}) == ("$(A)" * 10_000,)


@pytest.mark.parametrize(("text", "number"), [("8192", 8192), ("8k", 8000), ("8K", 8192), ("25.6k", 25600), (" 1M ", 2**20)])
def test_human_integer(text: str, number: int) -> None:
    assert parse_human_integer(text) == number


@pytest.mark.parametrize("text", ["", "0", "-1", "k", "1.2.3", "1kk", "1e3", "9" * 5000, "8,192"])
def test_not_a_human_integer(text: str) -> None:
    with pytest.raises(ValueError, match="is not a positive whole number"):
        parse_human_integer(text)


INTEGERS = {
    "port": ("--port",),
    "tensor_parallel_size": ("--tensor-parallel-size", "-tp", "--tensor-parallel"),
    "pipeline_parallel_size": ("--pipeline-parallel-size", "-pp"),
    "decode_context_parallel_size": ("--decode-context-parallel-size", "-dcp"),
    "data_parallel_size": ("--data-parallel-size", "-dp"),
    "max_num_seqs": ("--max-num-seqs",),
    "max_num_active_seqs": ("--max-num-active-seqs",),
    "max_num_batched_tokens": ("--max-num-batched-tokens",),
    "max_model_len": ("--max-model-len", "--max-model"),
    "block_size": ("--block-size",),
    "num_speculative_tokens": ("--spec-tokens", "--num-speculative-tokens", "--speculative-config", "-sc.num_speculative_tokens"),
}
TEXTS = {"dtype": ("--dtype",), "kv_cache_dtype": ("--kv-cache-dtype",)}
OTHERS = (
    ("--trust-remote-code",),
    ("--served-model-name", "a b", "it's"),
    ("--seed", "-1"),
    ("--hf-overrides", '{"a": "$$x"}'),
    ("-q=awq",),
)


class Rendered(NamedTuple):
    """Values of flags, and a container that is given them in some way."""

    values: dict[str, Any]
    command: list[str]
    args: list[str]
    env: dict[str, str | None]


@st.composite
def flags(draw: st.DrawFn) -> tuple[dict[str, Any], list[list[str]]]:
    """Values, and the words of each of their flags in one of its spellings."""
    values = draw(
        st.fixed_dictionaries(
            {},
            optional={name: st.integers(1, 10**6) for name in INTEGERS}
            | {name: st.sampled_from(["auto", "half", "fp8_e4m3"]) for name in TEXTS},
        )
    )
    spelled = []
    for name, value in values.items():
        flag = draw(st.sampled_from((INTEGERS | TEXTS)[name]))
        word = json.dumps({"num_speculative_tokens": value}) if flag == "--speculative-config" else str(value)
        if flag.startswith("--"):
            flag = "--" + "".join(draw(st.sampled_from("-_")) if char == "-" else char for char in flag[2:])
        spelled.append([f"{flag}={word}"] if draw(st.booleans()) else [flag, word])
    return values, draw(st.permutations([*spelled, *map(list, draw(st.lists(st.sampled_from(OTHERS), max_size=3)))]))


@st.composite
def rendered(draw: st.DrawFn) -> Rendered:
    values, pieces = draw(flags())
    values["model"] = "org/my-model"
    words = ["vllm", "serve", values["model"], *(word for piece in pieces for word in piece)]
    env: dict[str, str | None] = {}
    if draw(st.booleans()):  # for a shell
        parts = []
        for word in words:
            if draw(st.booleans()):
                env[f"V{len(env)}"] = word
                parts.append(draw(st.sampled_from(['"$V{}"', '"${{V{}}}"', '"${{V{}:-other}}"'])).format(len(env) - 1))
            else:
                parts.append(shlex.quote(word))
        script = parts[0] + "".join(draw(st.sampled_from([" ", " \\\n  ", "\t"])) + part for part in parts[1:])
        before, after = draw(
            st.sampled_from([("", ""), ("set -e\nexec ", "\n"), ("cd / && ", " 2>&1 | tee log"), ("# go\n", " & wait")])
        )
        return Rendered(
            values, [draw(st.sampled_from(["sh", "/bin/bash"])), "-c"], [(before + script + after).replace("$$", "$$$$")], env
        )
    for index, word in enumerate(words):
        words[index] = word.replace("$$", "$$$$")
        if index > 1 and draw(st.booleans()):
            env[f"V{len(env)}"] = word
            words[index] = f"$(V{len(env) - 1})"
    split = draw(st.integers(0, len(words)))
    return Rendered(values, words[:split], words[split:], env)


@given(rendered())
@settings(max_examples=200, deadline=None)
def test_values_come_back_in_any_spelling(container: Rendered) -> None:
    read = read_engine_args(container_words(container.command, container.args, container.env))
    assert read == EngineArgs(**container.values, is_vllm=True)


@given(flags())
@settings(deadline=None)
def test_values_come_back_from_a_text(given_flags: tuple[dict[str, Any], list[list[str]]]) -> None:
    values, pieces = given_flags
    words = [word for piece in pieces for word in piece]
    for text in ("\n".join(words), shlex.join(words), "\n".join(" ".join(piece) for piece in pieces if len(piece) < 3)):
        read = read_engine_args(words_of_text(text))
        assert {name: getattr(read, name) for name in values} == values


WORDS = st.lists(
    st.text()
    | st.sampled_from(["vllm", "serve", "sh", "-c", "--", "-tp", "--speculative-config", "$(A)", "eval", *map(str, range(3))])
    | st.text("$(){}[]\"'\\`-=;|&<>#@*:+ \nAvllm serve", max_size=40)
)


@given(WORDS, WORDS, st.dictionaries(st.sampled_from("ABC"), st.none() | st.text("$(){}\"'-= A", max_size=20)))
@settings(max_examples=300, deadline=None)
def test_no_words_raise(command: list[str], args: list[str], env: dict[str, str | None]) -> None:
    read_engine_args(container_words(command, args, env))
    read_engine_args(container_words(["sh", "-c", " ".join(command), *args], [], env))
    read_engine_args(words_of_text("\n".join(args)))
    read_engine_args(words_of_text(" ".join(args)))


@pytest.mark.parametrize("deep", ["[" * 100_000, '{"a":' * 100_000, "1" * 100_000])
def test_deep_or_long_json_is_unknown(deep: str) -> None:
    assert read_engine_args(["vllm", "serve", "m", "-sc", deep, "--speculative-config.num_speculative_tokens", deep]).unknown
