"""The readers of model configs, against the layers that vLLM's own classes build.

`data/vllm-layers.jsonl.gz` holds one case a line: a config (a family's default values, with one or two fields changed or left
out) and the layers of vLLM 0.32.0 for it, in bfloat16 without weights, each as [kind, bytes of one token or of the state, window
or chunk, number of layers]. Every family has as many cases as it has different outcomes, twelve at most.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from kvcache_exporter.kv_cache_spec import EngineConfig
from kvcache_exporter.kv_cache_spec.layers import place_layers
from kvcache_exporter.kv_cache_spec.mamba import MambaSpec
from kvcache_exporter.kv_cache_spec.spec import KVCacheSpec
from kvcache_exporter.model_config import parse_model_config
from lab import DATA

ENGINE = EngineConfig(block_size=16, dtype="bfloat16", enable_prefix_caching=False)


def cases_by_architecture() -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    with gzip.open(DATA / "vllm-layers.jsonl.gz", "rt") as lines:
        for case in map(json.loads, lines):
            found[case["config"]["architectures"][0]].append(case)
    return dict(found)


CASES = cases_by_architecture()


def described(spec: KVCacheSpec) -> tuple[str, float, int | None]:
    if isinstance(spec, MambaSpec):
        return spec.kind, float(spec.state_bytes), None
    window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
    return spec.kind, spec.unpadded_page_size_bytes / spec.block_size, window


def ours(config: dict[str, Any]) -> list[Sequence[object]]:
    placed, _ = place_layers(parse_model_config(config), ENGINE)
    return [[*what, number] for what, number in Counter(described(layer.spec) for layer in placed).items()]


@pytest.mark.parametrize("architecture", sorted(CASES))
def test_layers_are_those_that_vllm_builds(architecture: str) -> None:
    wrong = [
        case["id"] for case in CASES[architecture] if sorted(map(str, ours(case["config"]))) != sorted(map(str, case["layers"]))
    ]
    assert wrong == []


def test_cases_are_many() -> None:
    assert len(CASES) > 100
    assert sum(map(len, CASES.values())) > 600
