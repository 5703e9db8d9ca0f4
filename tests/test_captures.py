"""Pages recorded from real engines, against what each is known to mean (data/vllm/expected.json): all of it, and no more."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from lab import DATA, Upstream, capture, lab_for

EXPECTED: Mapping[str, Mapping[str, Mapping[str, Any]]] = json.loads((DATA / "vllm" / "expected.json").read_text())

METRICS = {
    "usable_blocks": "kvcache_capacity_blocks",
    "used_blocks": "kvcache_used_blocks",
    "usage_ratio": "kvcache_usage_ratio",
    "capacity_tokens": "kvcache_capacity_tokens",
    "running": "kvcache_requests_running",
    "preemptions": "kvcache_preemptions_total",
}


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_page_means_what_is_known_of_it(upstream: Upstream, name: str) -> None:
    """A figure that is missing in the expectation is missing on our page."""
    upstream.page(capture(name.removesuffix(".prom")))
    lab = lab_for(upstream).poll()
    assert {dict(labels)["engine"] for labels in lab.samples("kvcache_engine_info")} == set(EXPECTED[name])
    for engine, expected in EXPECTED[name].items():
        for key, metric in METRICS.items():
            assert lab.value(metric, engine=engine) == expected.get(key), (engine, metric)
        waiting = {dict(k)["reason"]: v for k, v in lab.samples("kvcache_requests_waiting", engine=engine).items()}
        if "waiting" in expected:
            assert waiting == expected.get("waiting_by_reason", {"unknown": expected["waiting"]})
            assert sum(waiting.values()) == expected["waiting"]
        else:
            assert waiting == {}
        (info,) = lab.samples("kvcache_engine_info", engine=engine)
        assert dict(info)["block_size"] == str(expected.get("block_size_label", ""))
        if "model_name" in expected:
            assert dict(info)["model_name"] == expected["model_name"]


def test_slots_at_full_length_follow_from_the_engines_concurrency(upstream: Upstream) -> None:
    """Usable blocks over the blocks that one request of max_model_len takes: 511 // 128, since the null block holds nothing."""
    upstream.page(capture("0.32.0_idle"))
    assert lab_for(upstream).poll().value("kvcache_request_slots", length="max") == 3


def test_no_slot_is_left_while_requests_wait(upstream: Upstream) -> None:
    for name in ("0.32.0_nearfull_waiting", "0.32.0_seqbound_waiting", "0.29.0_nearfull_waiting"):
        upstream.page(capture(name))
        assert lab_for(upstream).poll().value("kvcache_remaining_request_slots", length="max") == 0
