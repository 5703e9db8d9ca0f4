"""Inputs that broke projects like this one, each with the right answer; the number is that of its folder in data/cases."""

from __future__ import annotations

import json
import math
import resource
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvcache_exporter.config import TargetConfig
from lab import CASES, LLAMA_8B, Lab, Reply, Upstream, lab_for, models_answer


def page(case: str, name: str = "metrics") -> bytes:
    folder = next(CASES.glob(f"{case}-*"))
    return (folder / f"{name}.prom").read_bytes()


@pytest.mark.parametrize(("name", "usage"), [("old", 0.31), ("both", 0.32), ("new", 0.32), ("v0-no-engine", 0.5)])
def test_01_metric_rename(upstream: Upstream, name: str, usage: float) -> None:
    """One usage series whichever name the version uses; the new name wins, and the value stays a ratio."""
    upstream.page(page("01", name))
    assert lab_for(upstream).poll().samples("kvcache_usage_ratio") == {(("engine", "0"), ("model_name", "m")): usage}


def test_01_upgrade_keeps_one_series(upstream: Upstream) -> None:
    lab = lab_for(upstream)
    seen = set()
    for name in ("old", "both", "new"):
        upstream.page(page("01", name))
        seen |= set(lab.poll().samples("kvcache_usage_ratio"))
    assert len(seen) == 1


def test_02_num_gpu_blocks_none(upstream: Upstream) -> None:
    """Without a block count usage goes on, and nothing that needs blocks is shown; it appears with the count."""
    upstream.page(page("02"), models=models_answer(8192))
    lab = lab_for(upstream, model_config=LLAMA_8B).poll()
    assert lab.value("kvcache_usage_ratio") == 0.35
    for name in ("kvcache_capacity_blocks", "kvcache_capacity_tokens", "kvcache_headroom_tokens", "kvcache_request_slots"):
        assert lab.value(name) is None
    assert lab.samples("kvcache_engine_info", source="") != {}

    upstream.page(page("02").replace(b'num_gpu_blocks="None"', b'num_gpu_blocks="10001"'), models=models_answer(8192))
    lab.poll().poll()
    assert lab.value("kvcache_capacity_tokens") == 160_016
    assert lab.value("kvcache_headroom_tokens") == 104_000


def test_03_pid_label_multi_api_server(upstream: Upstream) -> None:
    """One series without `pid`: the largest value, marked as ambiguous; other pids at the next poll change nothing."""
    upstream.page(page("03"))
    lab = lab_for(upstream).poll()
    before = lab.text().count("\nkvcache_")
    assert lab.samples("kvcache_usage_ratio") == {(("engine", "0"), ("model_name", "m")): 0.653}
    assert lab.value("kvcache_reading_ambiguous") == 1
    assert lab.value("kvcache_requests_running") == 14

    upstream.page(page("03").replace(b'pid="2', b'pid="9'))
    assert lab.poll().text().count("\nkvcache_") == before


def test_04_usage_out_of_range(upstream: Upstream) -> None:
    """What no engine can say is absent and counted; a little above 1 is rounding."""
    upstream.page(page("04"))
    lab = lab_for(upstream).poll()
    usage = {dict(labels)["engine"]: value for labels, value in lab.samples("kvcache_usage_ratio").items()}
    assert usage == {"4": 0.12, "5": 1.0}
    assert lab.errors() == {"invalid_sample": 4}
    assert lab.value("kvcache_up", source="vllm") == 1


def test_04_headroom_of_impossible_usage_is_absent(upstream: Upstream) -> None:
    blocks = b'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="6006"} 1.0\n'
    upstream.page(page("04") + b"\n" + b"".join(blocks % engine for engine in range(3, 9)))
    lab = lab_for(upstream).poll()
    free = {dict(labels)["engine"]: value for labels, value in lab.samples("kvcache_headroom_blocks").items()}
    assert free == {"4": 880, "5": 0}


def test_07_huge_page_within_the_limit(upstream: Upstream) -> None:
    """A 22 MB label before the wanted gauges: they are read, and the label goes no further."""
    giant = b"QuantLayer(bits=4);" * 1_150_000
    upstream.page(
        b'vllm:vllm_config_info{model_config_hf_config="' + giant + b'"} 1.0\n'
        b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.44\n'
        b'vllm:num_requests_running{engine="0",model_name="m"} 9.0\n'
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lab = lab_for(upstream).poll()
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert lab.value("kvcache_usage_ratio") == 0.44
    assert lab.value("kvcache_requests_running") == 9
    assert len(lab.text()) < 1_000_000
    assert grown_kib < 150 * 1024, "the server of this test, in the same process, holds a copy too"


def test_07_huge_page_over_the_limit(upstream: Upstream) -> None:
    """A page over max_body_bytes gives nothing at all, not what came before the cut."""
    upstream.page(b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.44\n' + b"# " + b"x" * 200_000)
    lab = Lab(TargetConfig(name="t", url=upstream.url), max_body_bytes=100_000).poll()
    assert lab.value("kvcache_usage_ratio") is None
    assert lab.value("kvcache_up", source="vllm") == 0
    assert lab.errors() == {"body_too_large": 1}


def test_08_hybrid_capacity(upstream: Upstream) -> None:
    """The engine's own token figure and concurrency, never blocks times the smallest block size."""
    upstream.page(page("08"))
    lab = lab_for(upstream, max_model_len=131_072).poll()
    assert lab.value("kvcache_capacity_tokens") == 1_638_400
    assert lab.value("kvcache_headroom_tokens") == pytest.approx(983_040, abs=1_638_400 / 29_999)
    assert lab.value("kvcache_remaining_request_slots", length="max") == 7
    assert lab.value("kvcache_bytes_per_token") is None


def test_09_hybrid_without_token_label(upstream: Upstream) -> None:
    """A hybrid model whose engine gives no token figure has none; blocks and usage go on, and the reason is there."""
    upstream.page(page("09"), models=models_answer(8192))
    lab = lab_for(upstream, model_config=CASES / "09-stale-block-size-hybrid-mamba" / "config.json").poll()
    assert lab.value("kvcache_usage_ratio") == 0.25
    assert lab.value("kvcache_capacity_tokens") is None
    assert lab.value("kvcache_up", source="model_config") == 0
    assert lab.errors("model_config") == {"unsupported_model": 1}


def test_11_one_full_engine_stays_visible(upstream: Upstream) -> None:
    """Each data-parallel engine has its own series; none is averaged away."""
    upstream.page(page("11"))
    usage = {dict(labels)["engine"]: value for labels, value in lab_for(upstream).poll().samples("kvcache_usage_ratio").items()}
    assert sorted(usage.values()) == [0.10, 0.11, 0.12, 0.99]


@pytest.mark.parametrize("name", ["empty", "process-only"])
def test_12_page_without_engine_metrics(upstream: Upstream, name: str) -> None:
    """Status 200 without vLLM series is not an idle engine: no number, and a series that says so. It needs no restart."""
    upstream.page(page("12", name))
    lab = lab_for(upstream).poll()
    assert lab.value("kvcache_engine_metrics_present") == 0
    assert lab.value("kvcache_up", source="vllm") == 1
    for metric in ("kvcache_usage_ratio", "kvcache_capacity_blocks", "kvcache_request_slots", "kvcache_requests_running"):
        assert lab.value(metric) is None

    upstream.page(page("01", "new"))
    assert lab.poll().value("kvcache_engine_metrics_present") == 1


def test_21_redirect_on_the_same_host_is_followed(upstream: Upstream) -> None:
    script = yaml.safe_load((CASES / "21-redirect-empty-body" / "http.yaml").read_text())
    upstream.replies = {step["path"]: _scripted(step) for step in script}
    lab = lab_for(upstream).poll()
    assert lab.value("kvcache_usage_ratio") == 0.5
    assert lab.value("kvcache_up", source="vllm") == 1


def test_21_redirect_to_another_host_is_refused(upstream: Upstream, tmp_path: Path) -> None:
    """Another host is not asked, and never sees the token; neither is another port of this one."""
    token = tmp_path / "token"
    token.write_text("secret\n")
    with Upstream() as other:
        other.page(page("01", "new"))
        upstream.replies = {"/other/metrics": Reply(status=307, headers={"Location": f"{other.url}/metrics"})}
        lab = lab_for(upstream, path="/other", bearer_token_file=token).poll()
        assert lab.value("kvcache_up", source="vllm") == 0
        assert lab.errors() == {"redirect": 1}
        assert other.requests == []
    assert upstream.requests[0][1]["Authorization"] == "Bearer secret"


def test_21_login_page_is_no_exposition(upstream: Upstream) -> None:
    upstream.replies = {"/login/metrics": Reply(b"<html>sign in</html>", content_type="text/html")}
    lab = lab_for(upstream, path="/login").poll()
    assert lab.value("kvcache_up", source="vllm") == 0
    assert lab.errors() == {"not_an_exposition": 1}


def test_21_empty_redirect_is_not_up(upstream: Upstream) -> None:
    upstream.replies = {"/metrics": Reply(status=307)}
    assert lab_for(upstream).poll().errors() == {"redirect": 1}


def _scripted(step: dict[str, Any]) -> Reply:
    headers = {name.title(): value for name, value in step["headers"].items()}
    content_type = headers.pop("Content-Type", "text/plain")
    return Reply(step["body"].encode(), status=step["status"], content_type=content_type, headers=headers)


@pytest.mark.parametrize("reply", [Reply(page("01", "new"), delay_seconds=24), Reply(page("01", "new"), drip_seconds=0.2)])
def test_22_slow_upstream(upstream: Upstream, reply: Reply) -> None:
    """An engine that answers late, or a byte at a time, meets one total deadline: values go, and nothing piles up."""
    lab = Lab(TargetConfig(name="t", url=upstream.url), poll_timeout_seconds=0.3)
    upstream.page(page("01", "new"))
    assert lab.poll().value("kvcache_usage_ratio") == 0.32
    last_success = lab.value("kvcache_last_success_timestamp_seconds", source="vllm")

    upstream.replies = {"/metrics": reply}
    asked_before = len(upstream.requests)
    for _ in range(4):
        started = time.monotonic()
        lab.poll()
        assert time.monotonic() - started < 1
        assert lab.value("kvcache_usage_ratio") is None
        assert lab.value("kvcache_up", source="vllm") == 0
    assert set(lab.errors()) == {"timeout"}
    assert len(upstream.requests) == asked_before + 4, "one try a poll, and nothing else asked of an engine that is down"
    assert lab.value("kvcache_last_success_timestamp_seconds", source="vllm") == last_success


def test_22_our_page_answers_while_a_poll_is_pending(upstream: Upstream) -> None:
    upstream.replies = {"/metrics": Reply(delay_seconds=24)}
    lab = Lab(TargetConfig(name="t", url=upstream.url), poll_timeout_seconds=2.0)
    polling = threading.Thread(target=lab.poll, daemon=True)
    polling.start()
    started = time.monotonic()
    lab.text()
    assert time.monotonic() - started < 0.2
    assert polling.is_alive()
    polling.join()


def test_22_one_slow_target_does_not_hide_another(upstream: Upstream) -> None:
    with Upstream() as good:
        good.page(page("01", "new"))
        upstream.replies = {"/metrics": Reply(delay_seconds=24)}
        lab = Lab(
            TargetConfig(name="slow", url=upstream.url), TargetConfig(name="good", url=good.url), poll_timeout_seconds=0.5
        ).poll()
        assert lab.value("kvcache_usage_ratio") == 0.32


def test_23_block_granularity(upstream: Upstream) -> None:
    """Free space counts whole blocks, and a request takes whole blocks."""
    upstream.page(page("23"), models=models_answer(8192))
    lab = lab_for(upstream, model_config=LLAMA_8B, lengths=(17,)).poll()
    assert lab.value("kvcache_headroom_blocks") == 334
    assert lab.value("kvcache_headroom_tokens") == 5344
    assert lab.value("kvcache_remaining_request_slots", length="17") == 167


def test_24_two_names_one_engine(upstream: Upstream) -> None:
    """Families disagree on the model's name: still one engine, called as the KV gauge calls it on every series."""
    upstream.page(page("24"), models=models_answer(8192, name="my-model"))
    lab = lab_for(upstream).poll()
    labels = (("engine", "0"), ("model_name", "my-model"))
    assert lab.samples("kvcache_usage_ratio") == {labels: 0.6}
    assert lab.samples("kvcache_requests_running") == {labels: 4}


def test_29_model_length_comes_from_the_engine(upstream: Upstream) -> None:
    """max_model_len is what /v1/models says of the base model, not what config.json would allow."""
    folder = CASES / "29-model-length-not-from-config"
    upstream.page(page("29"), models=(folder / "models.json").read_bytes())
    lab = lab_for(upstream, model_config=folder / "config.json").poll()
    assert lab.value("kvcache_request_length_tokens", length="max") == 8192
    assert lab.value("kvcache_request_slots", length="max") == 19
    assert len(lab.samples("kvcache_usage_ratio")) == 1


def test_29_api_key_on_models_only(upstream: Upstream) -> None:
    """Without the key the full length is not known and not guessed; the reason is there, and all else works."""
    folder = CASES / "29-model-length-not-from-config"
    upstream.page(page("29"))
    upstream.replies["/v1/models"] = Reply(b'{"error":"Unauthorized"}', status=401, content_type="application/json")
    lab = lab_for(upstream, model_config=folder / "config.json", lengths=(8192,)).poll()
    assert lab.samples("kvcache_request_slots", length="max") == {}
    assert lab.value("kvcache_request_slots", length="8192") == 19
    assert lab.errors("vllm_models") == {"unauthorized": 1}
    assert lab.value("kvcache_capacity_blocks") == 10_000


def test_29_length_by_flag(upstream: Upstream) -> None:
    """A configured max_model_len serves where the engine does not tell; where it does, the engine wins."""
    folder = CASES / "29-model-length-not-from-config"
    upstream.page(page("29"))
    lab = lab_for(upstream, model_config=folder / "config.json", max_model_len=8192).poll()
    assert lab.value("kvcache_request_slots", length="max") == 19
    assert lab.samples("kvcache_engine_info", max_model_len_source="configured") != {}

    upstream.page(page("29"), models=models_answer(4096))
    lab = lab_for(upstream, model_config=folder / "config.json", max_model_len=8192).poll()
    assert lab.value("kvcache_request_slots", length="max") == 39


def test_65_disappeared_label_sets() -> None:
    """What the newest page does not hold is gone at once; a failed poll leaves no number."""
    with Upstream() as upstream:
        lab = lab_for(upstream)
        upstream.page(page("65", "t000"))
        assert len(lab.poll().samples("kvcache_usage_ratio")) == 2
        upstream.page(page("65", "t015"))
        assert lab.poll().samples("kvcache_usage_ratio") == {(("engine", "0"), ("model_name", "new-model")): 0.03}
    lab.poll()
    assert lab.samples("kvcache_usage_ratio") == {}
    assert lab.value("kvcache_up", source="vllm") == 0
    assert lab.errors() == {"connection": 1}


def test_65_a_scrape_sees_one_snapshot(upstream: Upstream) -> None:
    """While pages alternate, no scrape mixes the engines of two of them."""
    both = {frozenset({"a0", "a1"}), frozenset({"b0", "b1"})}
    pages = [
        b"".join(b'vllm:kv_cache_usage_perc{engine="%d",model_name="%s%d"} 0.5\n' % (e, name, e) for e in (0, 1))
        for name in (b"a", b"b")
    ]
    lab = lab_for(upstream)
    upstream.page(pages[0])
    lab.poll()
    stop = threading.Event()
    scrapes: list[frozenset[str]] = []

    def alternate() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            upstream.replies["/metrics"] = Reply(pages[turn % 2])
            lab.poller.poll_once()

    thread = threading.Thread(target=alternate)
    thread.start()
    seen: set[frozenset[str]] = set()
    try:
        deadline = time.monotonic() + 10
        while (seen != both or len(scrapes) < 60) and time.monotonic() < deadline:
            scrapes.append(frozenset(dict(labels)["model_name"] for labels in lab.samples("kvcache_usage_ratio")))
            seen.add(scrapes[-1])
    finally:
        stop.set()
        thread.join()
    assert seen == both


def test_66_hostile_label_values(upstream: Upstream) -> None:
    upstream.page(page("66"))
    usage = {
        dict(labels)["model_name"]: value for labels, value in lab_for(upstream).poll().samples("kvcache_usage_ratio").items()
    }
    assert usage == {'org/a,b}{"c" \\ d\nline2 é模型': 0.25, "": 0.5, "sp aced": 0.75}


def test_66_time_stamps_are_not_passed_on(upstream: Upstream) -> None:
    upstream.page(page("66"))
    assert "1757000000000" not in lab_for(upstream).poll().text()


@pytest.mark.parametrize("broken", [b'vllm:kv_cache_usage_perc{engine="1",model_name="x} 0.5', b'other{a="x} 1', b"half a li"])
def test_66_broken_line_loses_the_page(upstream: Upstream, broken: bytes) -> None:
    """No half-read snapshot, whichever family the broken line is of."""
    good = b'vllm:kv_cache_usage_perc{engine="%d",model_name="m"} 0.5\n'
    upstream.page(good % 0 + broken + b"\n" + good % 2)
    lab = lab_for(upstream).poll()
    assert lab.value("kvcache_usage_ratio") is None
    assert lab.value("kvcache_up", source="vllm") == 0
    assert lab.errors() == {"parse": 1}


def test_no_sample_is_nan(upstream: Upstream) -> None:
    """A value that is not known is absent: none of these cases puts NaN on our page."""
    for file in CASES.glob("*/*.prom"):
        upstream.page(file.read_bytes())
        text = lab_for(upstream).poll().text()
        values = [float(line.rpartition(" ")[2]) for line in text.splitlines() if not line.startswith("#")]
        assert not any(math.isnan(value) for value in values), file


def test_json_answers_that_are_no_models(upstream: Upstream) -> None:
    """Whatever /v1/models answers, the page's numbers go on."""
    for answer in (b"[]", b"{}", b"garbage", json.dumps({"data": [{"id": 7, "root": [], "max_model_len": "x"}]}).encode()):
        upstream.page(page("01", "new"), models=answer)
        lab = lab_for(upstream).poll()
        assert lab.value("kvcache_usage_ratio") == 0.32
        assert lab.value("kvcache_request_slots") is None
