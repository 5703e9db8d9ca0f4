"""Published vLLM start-up logs against what `plan` computes from them.

Run it as `python tests/reality.py FILE`. First table: records that state their available KV memory, their layers
and heads, and what vLLM logged; both sides and the error. Second: what is off when only GPU memory, utilization and weights are
given. The exit status is 1 if a logged figure is missed by more than 1 %.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache_exporter.capacity import kv_cache_size_tokens, max_concurrency, num_gpu_blocks_for
from kvcache_exporter.kv_cache_spec import EngineConfig, KVCacheLayout, kv_cache_layout
from kvcache_exporter.kv_cache_spec.engine_config import parse_vllm_version
from kvcache_exporter.model_config import parse_model_config

GIB = 1024**3
TOLERANCE = 0.01


@dataclass(frozen=True)
class Comparison:
    """One figure of one record: what was logged and what we compute."""

    record: int
    what: str
    logged: float
    computed: float

    @property
    def error(self) -> float:
        """Computed over logged, minus 1."""
        return self.computed / self.logged - 1


def load(path: Path) -> list[Mapping[str, Any]]:
    """The records of the file."""
    records: list[Mapping[str, Any]] = json.loads(path.read_text())["records"]
    return records


def layout_of(record: Mapping[str, Any]) -> KVCacheLayout:
    """The layout that the stated layers and heads make."""
    arch = record["arch"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": arch["layers"],
        # Query heads do not enter; any multiple of the KV heads does.
        "num_attention_heads": arch["kv_heads"] * 4,
        "num_key_value_heads": arch["kv_heads"],
        "head_dim": arch["head_dim"],
    }
    stated = str(record.get("kv_cache_dtype") or "auto")
    engine = EngineConfig(
        block_size=record.get("block_size"),
        kv_cache_dtype="fp8" if stated.startswith("fp8") else "auto",
        tensor_parallel_size=record.get("tp") or 1,
    )
    version = parse_vllm_version(record.get("vllm_version"))
    if version is not None:
        engine = EngineConfig(engine.block_size, engine.kv_cache_dtype, "auto", engine.tensor_parallel_size, vllm_version=version)
    return kv_cache_layout(parse_model_config(config), engine)


def comparisons(records: list[Mapping[str, Any]]) -> Iterator[Comparison]:
    """Tokens and concurrency of every record that states its memory and its model."""
    for record in records:
        if not record.get("arch") or not record.get("available_kv_gib"):
            continue
        layout = layout_of(record)
        num_blocks = num_gpu_blocks_for(layout, int(record["available_kv_gib"] * GIB))
        length = record.get("max_model_len")
        tokens = kv_cache_size_tokens(layout, num_blocks, length)
        if record.get("kv_cache_tokens") and tokens is not None:
            yield Comparison(record["n"], "tokens", record["kv_cache_tokens"], tokens)
        if record.get("max_concurrency") and length:
            yield Comparison(record["n"], "concurrency", record["max_concurrency"], max_concurrency(layout, num_blocks, length))


def memory_errors(records: list[Mapping[str, Any]]) -> list[tuple[int, float, float]]:
    """(record, GiB logged, GiB from budget minus weights) where nothing else is given: activation and graphs are missing."""
    found = []
    for record in records:
        total, utilization = record.get("total_gpu_gib"), record.get("gpu_memory_utilization")
        weights, logged = record.get("weights_gib"), record.get("available_kv_gib")
        if total and utilization and weights and logged:
            found.append((record["n"], logged, total * utilization - weights))
    return found


def main(path: Path) -> int:
    """Print both tables; returns the exit status."""
    records = load(path)
    results = list(comparisons(records))
    print(f"{'record':>6} {'figure':<12} {'logged':>12} {'computed':>12} {'error':>8}")
    for result in results:
        print(f"{result.record:>6} {result.what:<12} {result.logged:>12,.2f} {result.computed:>12,.2f} {result.error:>+8.3%}")
    missed = [result for result in results if abs(result.error) > TOLERANCE]
    print(f"{len(results) - len(missed)} of {len(results)} figures within {TOLERANCE:.0%}")
    print(f"\n{'record':>6} {'logged GiB':>11} {'budget - weights':>17} {'error':>8}")
    errors = sorted(memory_errors(records), key=lambda row: row[2] / row[1])
    for number, logged, ours in errors:
        print(f"{number:>6} {logged:>11.2f} {ours:>17.2f} {ours / logged - 1:>+8.1%}")
    if errors:
        _, logged, ours = errors[len(errors) // 2]
        print(f"{len(errors)} records, median error {ours / logged - 1:+.1%}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
