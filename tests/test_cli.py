"""The program as a user runs it: real processes, real signals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import bcrypt
import pytest
import requests

from certificates import make_certificate
from fake_nvml import FakeNvml
from kvcache_exporter import __version__
from lab import LLAMA_8B, Reply, Upstream, free_port, models_answer, wait_until
from pods_api_server import NODE, PodsApiServer, pod

PAGE = (
    b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5\n'
    b'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="1001",cache_dtype="auto"} 1.0\n'
)
GIB = 1024**3


@contextmanager
def started(*arguments: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """The program in a process of its own, which does not outlive the test."""
    command = [sys.executable, "-m", "kvcache_exporter", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def run(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    with started(*arguments, env=env) as process:
        output, errors = process.communicate(timeout=30)
    return process.returncode, output, errors


def fetch(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            text: str = response.read().decode()
            return text
    except OSError:
        return ""


def end(process: subprocess.Popen[str]) -> tuple[int, str, float]:
    """(exit status, standard error, seconds that it took) after SIGTERM."""
    asked = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=10)
    return process.returncode, errors, time.monotonic() - asked


def test_version() -> None:
    assert run("--version") == (0, f"kvcache-exporter, version {__version__}\n", "")


def test_serve_one_engine_by_url(upstream: Upstream, tmp_path: Path) -> None:
    """The whole path: engine over HTTP, config.json from a file, our page over HTTP, an end on SIGTERM within 2 s."""
    config_json = tmp_path / "config.json"
    config_json.write_text(json.dumps(LLAMA_8B))
    upstream.page(PAGE, models=models_answer(8192))
    address = f"127.0.0.1:{free_port()}"
    with started("serve", "--vllm-url", upstream.url, "--model-config", str(config_json), "--listen-address", address) as process:
        wait_until(lambda: "kvcache_capacity_bytes" in fetch(f"http://{address}/metrics"))
        page = fetch(f"http://{address}/metrics")
        status, errors, seconds = end(process)
    assert re.search(r'kvcache_remaining_request_slots\{.*length="max".*\} 0\.0\n', page)
    assert re.search(r"kvcache_headroom_blocks\{.*\} 500\.0\n", page)
    assert status == 0
    assert seconds < 2
    assert "msg=serving" in errors
    assert errors.strip().splitlines()[-1].endswith("msg=stopped")


def test_sigterm_ends_it_during_a_poll_that_hangs(upstream: Upstream) -> None:
    upstream.replies = {"/metrics": Reply(delay_seconds=60)}
    address = f"127.0.0.1:{free_port()}"
    with started("serve", "--vllm-url", upstream.url, "--listen-address", address) as process:
        wait_until(lambda: upstream.requests)
        status, _, seconds = end(process)
    assert status == 0
    assert seconds < 2


def test_sigterm_ends_it_while_nvml_hangs(upstream: Upstream, fake_nvml: FakeNvml) -> None:
    memory = {"total": 1, "reserved": 0, "free": 0, "used": 1}
    fake_nvml.show({"hang_seconds": 600, "devices": [{"index": 0, "uuid": "GPU-a", "memory_v2": memory}]})
    upstream.page(PAGE)
    address = f"127.0.0.1:{free_port()}"
    arguments = ("serve", "--vllm-url", upstream.url, "--listen-address", address)
    with started(*arguments, env=fake_nvml.environment()) as process:
        wait_until(lambda: 'reason="hung",source="nvml"' in fetch(f"http://{address}/metrics"), seconds=20)
        assert "kvcache_headroom_blocks" in fetch(f"http://{address}/metrics")
        status, _, seconds = end(process)
    assert status == 0
    assert seconds < 2


def test_settings_from_the_environment(upstream: Upstream) -> None:
    upstream.page(PAGE)
    address = f"127.0.0.1:{free_port()}"
    settings = {"KVCACHE_EXPORTER_SERVE_VLLM_URL": upstream.url, "KVCACHE_EXPORTER_SERVE_LISTEN_ADDRESS": address}
    with started("serve", env={**os.environ, **settings}) as process:
        wait_until(lambda: "kvcache_usage_ratio" in fetch(f"http://{address}/metrics"))
        assert end(process)[0] == 0


def test_serve_as_a_sidecar(upstream: Upstream, tmp_path: Path, fake_nvml: FakeNvml) -> None:
    """An address, its name and its arguments on the command line, the rest from a file; and of all GPUs the engine's only."""
    memory = {"total": 8 * GIB, "reserved": 0, "free": GIB, "used": 7 * GIB}
    fake_nvml.show({"devices": [{"index": n, "uuid": f"GPU-{n}{n}", "memory_v2": memory} for n in range(4)]})
    upstream.page(PAGE, models=models_answer(8192))
    settings = tmp_path / "settings.yml"
    settings.write_text("request_lengths: [4096]\n")
    address = f"127.0.0.1:{free_port()}"
    arguments = ("--config", str(settings), "--vllm-url", upstream.url, "--target-name", "ml/vllm-0", "--gpus", "GPU-11")
    # One argument a line, as the chart passes those of the engine's container on.
    env = {**fake_nvml.environment(), "KVCACHE_EXPORTER_SERVE_ENGINE_ARGS": "--model\nm\n--max-num-seqs\n70\f--max-num-seqs 7"}
    with started("serve", *arguments, "--listen-address", address, env=env) as process:
        wait_until(lambda: "kvcache_gpu_memory_total_bytes" in fetch(f"http://{address}/metrics"))
        page = fetch(f"http://{address}/metrics")
        end(process)
    assert re.search(r'kvcache_engine_info\{.*max_num_seqs="7".*target="ml/vllm-0"', page)
    assert re.search(r"kvcache_gpus 1\.0\n", page)
    assert set(re.findall(r'uuid="(GPU-\d+)"', page)) == {"GPU-11"}
    assert re.search(r'kvcache_engine_gpu_info\{.*method="configured".*uuid="GPU-11"\} 1\.0\n', page)


def test_arguments_said_beside_a_hidden_command_line_leave_its_sizes_open(upstream: Upstream, tmp_path: Path) -> None:
    """Nothing before the form feed: as a sidecar gets it from a container whose image has the arguments."""
    config_json = tmp_path / "config.json"
    config_json.write_text(json.dumps(LLAMA_8B))
    upstream.page(PAGE, models=models_answer(8192))
    address = f"127.0.0.1:{free_port()}"
    arguments = ("serve", "--vllm-url", upstream.url, "--model-config", str(config_json), "--engine-args", "\f--max-num-seqs 7")
    with started(*arguments, "--no-nvml", "--listen-address", address) as process:
        wait_until(lambda: 'reason="unknown_arguments"' in fetch(f"http://{address}/metrics"))
        page = fetch(f"http://{address}/metrics")
        end(process)
    assert re.search(r'kvcache_engine_info\{.*max_num_seqs="7"', page)
    assert "kvcache_capacity_blocks{" in page
    assert "kvcache_capacity_bytes{" not in page


def test_serve_without_nvml(upstream: Upstream, fake_nvml: FakeNvml) -> None:
    fake_nvml.show({"devices": []})
    upstream.page(PAGE)
    address = f"127.0.0.1:{free_port()}"
    arguments = ("serve", "--vllm-url", upstream.url, "--no-nvml", "--listen-address", address)
    with started(*arguments, env=fake_nvml.environment()) as process:
        wait_until(lambda: "kvcache_usage_ratio" in fetch(f"http://{address}/metrics"))
        page = fetch(f"http://{address}/metrics")
        end(process)
    assert "kvcache_gpus" not in page
    assert 'source="nvml"' not in page


def test_address_that_the_file_has_under_the_same_name_is_refused(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yml"
    settings.write_text("targets: [{name: t, url: http://a:1}]\n")
    status, _, errors = run("serve", "--config", str(settings), "--vllm-url", "http://a:2", "--target-name", "t")
    assert (status, errors) == (2, f"{settings}: a target is called 't', as that of --vllm-url; set --target-name\n")


def test_serve_over_https_with_a_password(upstream: Upstream, tmp_path: Path) -> None:
    """The web configuration is that of Prometheus's own exporters; kubelet's probes need no password."""
    made = make_certificate(tmp_path, "exporter")
    web_config = tmp_path / "web.yml"
    hashed = bcrypt.hashpw(b"right", bcrypt.gensalt(4)).decode()
    web_config.write_text(
        f"tls_server_config: {{cert_file: {made.cert}, key_file: {made.key}}}\nbasic_auth_users: {{prometheus: '{hashed}'}}\n"
    )
    upstream.page(PAGE)
    address = f"127.0.0.1:{free_port()}"
    arguments = ("serve", "--vllm-url", upstream.url, "--web-config-file", str(web_config), "--listen-address", address)
    with started(*arguments) as process:
        ask = partial(requests.get, verify=str(made.cert), timeout=5)
        wait_until(lambda: "msg=serving" in str(process.stderr and process.stderr.readline()))
        assert ask(f"https://{address}/healthz").status_code == 200
        assert ask(f"https://{address}/metrics").status_code == 401
        assert ask(f"https://{address}/metrics", auth=("prometheus", "wrong")).status_code == 401
        assert "kvcache_exporter_build_info" in ask(f"https://{address}/metrics", auth=("prometheus", "right")).text
        status, _, seconds = end(process)
    assert (status, seconds < 2) == (0, True)


def test_kubernetes_outside_of_a_cluster_is_refused(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yml"
    settings.write_text("kubernetes: {}\n")
    env = {name: value for name, value in os.environ.items() if not name.startswith("KUBERNETES_") and name != "NODE_NAME"}
    status, output, errors = run("serve", "--config", str(settings), env=env)
    assert (status, output) == (2, "")
    assert errors.splitlines() == [
        "kubernetes.node_name: is not set, nor is NODE_NAME: give the name of the node whose pods are to be watched",
        "kubernetes.api_server: is not set, nor is KUBERNETES_SERVICE_HOST, so this is no pod: give the address",
    ]


def test_serve_engines_of_a_node(upstream: Upstream, tmp_path: Path) -> None:
    """The program as the DaemonSet starts it, against a pods API: nothing but `kubernetes: {}` and the node's name."""
    upstream.page(PAGE)
    address = f"127.0.0.1:{free_port()}"
    with PodsApiServer() as api:
        settings = tmp_path / "config.yaml"
        settings.write_text(f"kubernetes: {{api_server: '{api.url}'}}\npoll_interval_seconds: 1\npoll_timeout_seconds: 0.9\n")
        api.apply(pod("vllm-0", port=int(upstream.url.rpartition(":")[2])))
        arguments = ("serve", "--config", str(settings), "--listen-address", address, "--no-nvml")
        with started(*arguments, env={**os.environ, "NODE_NAME": NODE}) as process:
            wait_until(
                lambda: 'kvcache_usage_ratio{engine="0",model_name="m",target="ml/vllm-0"}' in fetch(f"http://{address}/metrics")
            )
            api.delete("vllm-0")
            wait_until(lambda: "vllm-0" not in fetch(f"http://{address}/metrics"), seconds=2.5)
            assert "kvcache_exporter_build_info" in fetch(f"http://{address}/metrics")
            status, errors, seconds = end(process)
    assert (status, seconds < 2) == (0, True)
    assert 'msg="target gone" target=ml/vllm-0' in errors


def test_port_in_use_is_one_clear_line(upstream: Upstream) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, output, errors = run(
            "serve", "--vllm-url", upstream.url, "--listen-address", f"127.0.0.1:{taken.getsockname()[1]}"
        )
    assert (status, output) == (1, "")
    assert 'msg="cannot serve"' in errors
    assert 'error="Address already in use"' in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("serve",), "give --config FILE, --vllm-url URL, or both"),
        (("serve", "--config", "x", "--model-config", "y"), "--model-config goes with --vllm-url"),
        (("serve", "--config", "x", "--engine-args", "-tp 2"), "--engine-args goes with --vllm-url"),
        (("serve", "--vllm-url", "http://a:1", "--gpus", "first"), "--gpus: 'first' names no GPU"),
        (("serve", "--vllm-url", "http://a:1", "--web-config-file", "/no/such/file"), "/no/such/file: cannot be read"),
        (("serve", "--vllm-url", "a:1"), "--vllm-url: 'a:1' is not an http or https address"),
        (("serve", "--vllm-url", "http://a:1", "--listen-address", "nowhere"), "'nowhere' is not host:port"),
        (("serve", "--config", "/no/such/file"), "/no/such/file: cannot be read"),
        (("serve", "--vllm-url", "http://a:1", "--record", "a.json"), "a.json is not called *.jsonl.gz"),
        (("replay", "a.jsonl.gz"), "give --engine FILE, --config FILE, or both"),
        (("replay", "a.jsonl.gz", "--engine", "/no/such/file"), "/no/such/file: cannot be read"),
        (("demo", "--listen-address", "::1:80"), "an IPv6 address needs brackets"),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    status, output, errors = run(*arguments)
    assert (status, output) == (2, "")
    assert sentence in errors
    assert "Traceback" not in errors


def test_check_config(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yml", tmp_path / "bad.yml"
    good.write_text("targets: [{url: http://a:1}]\n")
    bad.write_text("targets: [{url: http://a:1}]\nnvml: 1\nfoo: 2\n")
    assert run("check-config", str(good)) == (0, f"{good}: good; 1 target\n", "")
    status, output, errors = run("check-config", str(bad))
    assert (status, output) == (2, "")
    assert errors.splitlines()[0] == f"{bad}:2: nvml: 1 is neither true nor false"
    assert errors.splitlines()[1].startswith(f"{bad}:3: foo: is not a setting; known here: gpus, kubernetes, listen_address")
    settings, found = tmp_path / "settings.yml", tmp_path / "found.yml"
    settings.write_text("nvml: false\n")
    found.write_text("kubernetes: {}\n")
    assert run("check-config", str(settings)) == (0, f"{settings}: good; 0 targets; it goes with --vllm-url\n", "")
    assert run("check-config", str(found)) == (0, f"{found}: good; 0 targets, and those that Kubernetes tells\n", "")


def test_demo_in_a_pipe_is_a_line_now_and_then() -> None:
    status, output, errors = run("demo", "--listen-address", "127.0.0.1:0", "--duration", "7")
    assert (status, errors) == (0, "")
    first, *lines = output.splitlines()
    assert re.fullmatch(r"simulated engine and GPU; metrics at http://127\.0\.0\.1:\d+/metrics", first)
    assert len(lines) == 2
    for line in lines:
        assert re.fullmatch(
            r"simulated t=\d+s usage=0\.\d+ running=\d+ waiting=\d+ preemptions=\d+ slots\[typical\]=\d+/\d+ "
            r"slots\[p95\]=\d+/\d+ slots\[max\]=\d+/52 slots\[2048\]=\d+/211",
            line,
        )


def test_demo_in_a_terminal_redraws_a_screen() -> None:
    parent, child = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvcache_exporter", "demo", "--listen-address", "127.0.0.1:0", "--duration", "4"],
        stdout=child,
        stderr=subprocess.PIPE,
    )
    os.close(child)
    shown = b""
    while True:
        try:
            shown += os.read(parent, 65536)
        except OSError:
            break
    os.close(parent)
    assert process.communicate()[1] == b""
    assert process.returncode == 0
    screens = shown.decode().split("\x1b[H\x1b[2J")[1:]
    assert len(screens) >= 3
    assert "SIMULATED engine and GPU" in screens[-1]
    assert re.search(r"fits now +\d+ more requests of 8,192 tokens \(52 when empty\)", screens[-1])
