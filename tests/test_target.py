"""One target over time: failures, restarts, facts, model files. Through the real HTTP client, poller and collector."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from kvcache_exporter.config import TargetConfig
from lab import LLAMA_8B, TINY_LLAMA, Lab, Reply, Upstream, capture, lab_for, models_answer

PAGE = (
    b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5\n'
    b'vllm:prompt_tokens_total{engine="0",model_name="m"} %d\n'
    b'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="%d",cache_dtype="%s"} 1.0\n'
)


def page(*, tokens: int = 100, blocks: int = 1001, cache_dtype: str = "auto") -> bytes:
    return PAGE % (tokens, blocks, cache_dtype.encode())


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(status=500), "http_status"),
        (Reply(status=404), "http_status"),
        (Reply(status=403), "unauthorized"),
        (Reply(b"\x00\xff garbage"), "parse"),
        (Reply(b'{"a": 1}', content_type="application/json"), "not_an_exposition"),
        (Reply(b"  <html></html>"), "not_an_exposition"),
        (Reply(b"compressed?", headers={"Content-Encoding": "gzip"}), "http_status"),
        (Reply(status=302, headers={"Location": "/metrics"}), "redirect"),
        (Reply(page(), delay_seconds=10), "timeout"),
    ],
)
def test_failure_leaves_no_number_and_its_reason(upstream: Upstream, reply: Reply, reason: str) -> None:
    lab = Lab(TargetConfig(name="t", url=upstream.url), poll_timeout_seconds=0.3)
    upstream.page(page())
    assert lab.poll().value("kvcache_usage_ratio") == 0.5
    upstream.replies = {"/metrics": reply}
    lab.poll()
    names = {line.partition("{")[0] for line in lab.text().splitlines() if line.startswith("kvcache_")}
    assert names == {
        "kvcache_target_info",
        "kvcache_up",
        "kvcache_last_success_timestamp_seconds",
        "kvcache_poll_duration_seconds",
        "kvcache_poll_errors_total",
        "kvcache_exporter_build_info",
    }
    assert lab.value("kvcache_up", source="vllm") == 0
    assert lab.errors()[reason] == 1


def test_body_that_breaks_off_is_a_failure(upstream: Upstream) -> None:
    """A connection that ends before Content-Length is not a shorter page."""
    upstream.replies = {"/metrics": Reply(page(), headers={"Content-Length": "100000"})}
    assert "connection" in lab_for(upstream).poll().errors()


def test_connection_refused() -> None:
    with Upstream() as upstream:
        lab = lab_for(upstream)
    lab.poll()
    assert lab.errors() == {"connection": 1}
    assert lab.samples("kvcache_last_success_timestamp_seconds") == {}


def test_stale_reading_is_not_shown(upstream: Upstream) -> None:
    """If the tick itself stops, values go after three intervals, and health stays with the time of the last success."""
    upstream.page(page())
    lab = lab_for(upstream).poll()
    lab.clock.now += 15
    assert lab.value("kvcache_usage_ratio") == 0.5
    lab.clock.now += 1
    assert lab.value("kvcache_usage_ratio") is None
    assert lab.value("kvcache_last_success_timestamp_seconds", source="vllm") == lab.clock.now - 16


def test_facts_are_asked_once(upstream: Upstream) -> None:
    upstream.page(page(), models=models_answer(8192))
    lab = lab_for(upstream, model_config=LLAMA_8B)
    for _ in range(3):
        lab.poll()
    assert [path for path, _ in upstream.requests] == ["/metrics", "/v1/models", "/version", "/metrics", "/metrics"]


def test_missing_facts_are_asked_again_after_a_while(upstream: Upstream) -> None:
    upstream.page(page())
    lab = lab_for(upstream, model_config=LLAMA_8B)
    for _ in range(6):
        lab.poll()
    upstream.replies["/v1/models"] = Reply(models_answer(8192))
    assert lab.poll().value("kvcache_request_length_tokens") == 8192
    assert [path for path, _ in upstream.requests].count("/v1/models") == 2


@pytest.mark.parametrize("after", [page(tokens=3), page(tokens=200, blocks=2001)])
def test_restart_drops_the_facts(upstream: Upstream, after: bytes) -> None:
    """A counter that went down, or another pool: another run, whose length and version are asked anew."""
    upstream.page(page(), models=models_answer(8192))
    lab = lab_for(upstream, model_config=LLAMA_8B).poll()
    assert lab.value("kvcache_request_length_tokens") == 8192
    upstream.page(after, models=models_answer(4096))
    lab.poll()
    assert lab.value("kvcache_request_length_tokens") == 4096


def test_facts_are_asked_again_after_an_outage(upstream: Upstream) -> None:
    upstream.page(page(), models=models_answer(8192))
    lab = lab_for(upstream, model_config=LLAMA_8B).poll()
    upstream.replies["/metrics"] = Reply(status=503)
    lab.poll()
    upstream.page(page(), models=models_answer(4096))
    assert lab.poll().value("kvcache_request_length_tokens") == 4096


def test_slow_page_is_asked_at_every_second_tick(upstream: Upstream) -> None:
    """A page that takes more than a tenth of the interval costs the engine; its values stay until the next one."""
    upstream.page(page())
    lab = Lab(TargetConfig(name="t", url=upstream.url), poll_interval_seconds=1.0, poll_timeout_seconds=0.9)
    lab.poll()
    upstream.replies["/metrics"] = Reply(page(), delay_seconds=0.2)
    asked = []
    for _ in range(4):
        lab.poll()
        assert lab.value("kvcache_usage_ratio") == 0.5
        asked.append([path for path, _ in upstream.requests].count("/metrics"))
    assert asked == [2, 2, 3, 3]


def test_unknown_architecture_keeps_blocks_and_says_so(upstream: Upstream) -> None:
    upstream.page(page(), models=models_answer(8192))
    lab = lab_for(upstream, model_config={"architectures": ["NewForCausalLM"]}).poll()
    assert lab.value("kvcache_headroom_blocks") == 500
    for name in ("kvcache_capacity_bytes", "kvcache_capacity_tokens", "kvcache_bytes_per_token", "kvcache_request_slots"):
        assert lab.value(name) is None
    assert lab.value("kvcache_up", source="model_config") == 0
    assert lab.errors("model_config") == {"unsupported_model": 1}


def test_unknown_cache_dtype_keeps_blocks_and_says_so(upstream: Upstream) -> None:
    upstream.page(page(cache_dtype="int3_magic"), models=models_answer(8192))
    lab = lab_for(upstream, model_config=LLAMA_8B).poll()
    assert lab.value("kvcache_headroom_blocks") == 500
    assert lab.value("kvcache_capacity_bytes") is None
    assert lab.value("kvcache_up", source="model_config") == 0


def test_config_json_of_another_model_shows_as_mismatch(upstream: Upstream) -> None:
    """A hybrid engine with a full-attention config.json: the engine's own token count tells that they are not the same."""
    upstream.page(capture("0.32.0_gemma3_idle"), models=models_answer(4096))
    lab = lab_for(upstream, model_config=TINY_LLAMA).poll()
    assert lab.value("kvcache_capacity_mismatch_ratio") == 493 / 128 - 1
    assert lab.value("kvcache_capacity_tokens") == 6380


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    return folder


def bytes_per_token(upstream: Upstream, model_config: Path | None, root: str) -> float | None:
    upstream.page(page(), models=models_answer(8192, root=root))
    return lab_for(upstream, model_config=model_config).poll().value("kvcache_bytes_per_token")


def test_model_config_file_and_directory(upstream: Upstream, tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "llama")
    assert bytes_per_token(upstream, folder / "config.json", "x/y") == 131_072
    assert bytes_per_token(upstream, folder, "x/y") == 131_072


def test_model_config_is_found_where_the_engine_says_its_model_is(upstream: Upstream, tmp_path: Path) -> None:
    assert bytes_per_token(upstream, None, str(model_folder(tmp_path / "llama"))) == 131_072


def test_model_config_in_a_hugging_face_cache(upstream: Upstream, tmp_path: Path) -> None:
    """The cache as a whole (the engine's hub name tells the model), its `hub` folder, or one model's folder in it."""
    cache = tmp_path / "hub" / "models--meta-llama--Llama-3.1-8B"
    model_folder(cache / "snapshots" / "abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    for path in (tmp_path, tmp_path / "hub", cache):
        assert bytes_per_token(upstream, path, "meta-llama/Llama-3.1-8B") == 131_072
    assert bytes_per_token(upstream, tmp_path, "meta-llama/Other") is None


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "missing"), ("{", "parse"), ("[]", "parse"), ('{"architectures": ["X"]}', "unsupported_model")]
)
def test_model_config_that_cannot_be_used(upstream: Upstream, tmp_path: Path, content: str | None, reason: str) -> None:
    file = tmp_path / "config.json"
    if content is not None:
        file.write_text(content)
    upstream.page(page())
    assert lab_for(upstream, model_config=file).poll().errors("model_config") == {reason: 1}


def test_hub_name_without_a_config_says_what_to_do(upstream: Upstream) -> None:
    upstream.page(page(), models=models_answer(8192, root="meta-llama/Llama-3.1-8B"))
    lab = lab_for(upstream).poll()
    (health,) = [h for h in lab.poller.poll_once().health if h.source == "model_config"]
    assert health.message == (
        "the engine's model 'meta-llama/Llama-3.1-8B' is not a path here and no model_config is set: "
        "give the path of config.json for bytes and slots"
    )


def test_bearer_token_is_read_again_at_each_request(upstream: Upstream, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("one\n")
    upstream.page(page())
    lab = lab_for(upstream, bearer_token_file=token).poll()
    token.write_text("two\n")
    lab.poll()
    sent = [headers["Authorization"] for path, headers in upstream.requests if path == "/metrics"]
    assert sent == ["Bearer one", "Bearer two"]


@pytest.mark.parametrize("content", [None, "", "\n"])
def test_token_file_without_a_token(upstream: Upstream, tmp_path: Path, content: str | None) -> None:
    token = tmp_path / "token"
    if content is not None:
        token.write_text(content)
    upstream.page(page())
    assert lab_for(upstream, bearer_token_file=token).poll().errors() == {"missing": 1}
    assert upstream.requests == []


def test_credentials_and_proxies_of_the_environment_are_not_used(
    upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login user password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    upstream.page(page())
    assert lab_for(upstream).poll().value("kvcache_usage_ratio") == 0.5
    assert "Authorization" not in upstream.requests[0][1]


def test_https_with_a_ca_file(tmp_path: Path) -> None:
    """The engine's certificate is checked against ca_file, and refused without it."""
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *names, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    with Upstream(tls=(certificate, key)) as upstream:
        upstream.page(page())
        assert lab_for(upstream, ca_file=certificate).poll().value("kvcache_usage_ratio") == 0.5
        assert lab_for(upstream).poll().errors() == {"connection": 1}


def test_address_may_name_the_metrics_path(upstream: Upstream) -> None:
    upstream.page(page(), models=models_answer(8192))
    assert lab_for(upstream, path="/metrics", model_config=LLAMA_8B).poll().value("kvcache_request_length_tokens") == 8192


def test_poll_returns_within_the_timeout_whatever_happens(upstream: Upstream) -> None:
    upstream.replies = {"/metrics": Reply(page(), delay_seconds=30)}
    lab = Lab(*(TargetConfig(name=str(n), url=upstream.url) for n in range(8)), poll_timeout_seconds=0.5)
    started = time.monotonic()
    lab.poll()
    assert time.monotonic() - started < 1.5


def test_same_failure_is_logged_once(upstream: Upstream, caplog: pytest.LogCaptureFixture) -> None:
    lab = lab_for(upstream)
    for _ in range(5):
        lab.poll()
    assert [record.getMessage() for record in caplog.records] == ["source down"]
    caplog.set_level("INFO")
    upstream.page(page())
    lab.poll().poll()
    up = [record for record in caplog.records if record.getMessage() == "source up"]
    assert len([record for record in up if record.fields["source"] == "vllm"]) == 1  # type: ignore[attr-defined]  # our extra
