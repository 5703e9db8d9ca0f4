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
from pathlib import Path

import pytest

from fake_nvml import FakeNvml
from kvcache_exporter import __version__
from lab import LLAMA_8B, Reply, Upstream, free_port, models_answer, wait_until

PAGE = (
    b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5\n'
    b'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="1001",cache_dtype="auto"} 1.0\n'
)


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
        (("serve",), "give either --config FILE or --vllm-url URL"),
        (("serve", "--vllm-url", "http://a:1", "--config", "x"), "give either --config FILE or --vllm-url URL"),
        (("serve", "--config", "x", "--model-config", "y"), "--model-config goes with --vllm-url"),
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
    assert errors.splitlines()[1].startswith(f"{bad}:3: foo: is not a setting; known here: gpus, listen_address")


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
