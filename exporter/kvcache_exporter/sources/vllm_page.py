"""The /metrics page of a vLLM server, 0.6 to 0.33.

What each family means, by version, was read in vLLM's `v1/metrics/loggers.py` and `v1/core/block_pool.py`, and checked on pages
recorded from real engines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType

from kvcache_exporter.readings import EngineReading, Histogram, PageReading
from kvcache_exporter.sources.exposition import Sample, samples
from kvcache_exporter.sources.histograms import HistogramLines

_USAGE = "kv_cache_usage_perc"
_USAGE_BEFORE_0_9 = "gpu_cache_usage_perc"
_GAUGES = (_USAGE, _USAGE_BEFORE_0_9, "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason")
# The prefix-cache counters with `gpu_` in front count blocks in vLLM 0.7 and 0.8, tokens later: only the later names are read.
_COUNTERS = (
    "num_preemptions",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "external_prefix_cache_queries",
    "external_prefix_cache_hits",
    "prompt_tokens",
    "generation_tokens",
    "request_success",
    "estimated_read_bytes_per_gpu",
    # Only the count of this histogram is wanted: it is the number of steps.
    "iteration_tokens_total_count",
)
_LATENCY = "inter_token_latency_seconds"
# vLLM 0.8 has this name, 0.11 has both, 0.20 and later have the one above.
_LATENCY_OLD_NAME = "time_per_output_token_seconds"
_HISTOGRAMS = (
    "request_prompt_tokens",
    "request_generation_tokens",
    "time_to_first_token_seconds",
    _LATENCY,
    _LATENCY_OLD_NAME,
)
_START_TIME = "process_start_time_seconds"
# Ray puts its own prefix in front, and some paths turn the colon into an underscore.
_NAME = re.compile(
    r"(?:ray_)?vllm[:_](?:("
    + "|".join(_GAUGES)
    + "|engine_sleep_state|cache_config_info|lora_requests_info)|("
    + "|".join(_COUNTERS)
    + ")(?:_total)?|("
    + "|".join(_HISTOGRAMS)
    + f")_(bucket|sum))|({_START_TIME})"
)
_NAME_BYTES = re.compile(_NAME.pattern.encode("ascii"))
# An entry of a Python list of strings, as labels print it.
_QUOTED = re.compile(r"'([^']*)'")
# Floats that stand for 1 may come out a little above it.
_USAGE_ROUNDING = 1e-6
# Unix times of one server are closer than this ratio, unless several processes have added theirs up.
_ADDED_UP = 1.5


def parse_metrics(body: bytes) -> PageReading:
    """Read the engines of one /metrics page, in the order of their index.

    Raises SourceError (`parse`) when any line of the page is no sample.
    """
    page = _Page()
    for sample in samples(body, _NAME_BYTES):
        page.add(sample)
    return page.reading()


@dataclass
class _Engine:
    """What the page says of one engine while it is being read. A value that cannot be true is kept as None."""

    values: dict[str, float | None] = field(default_factory=dict)
    waiting_by_reason: dict[str, int] = field(default_factory=dict)
    success_by_reason: dict[str, float | None] = field(default_factory=dict)
    sleep_state: dict[str, float | None] = field(default_factory=dict)
    histograms: HistogramLines = field(default_factory=HistogramLines)
    model_name: str | None = None
    has_engine_label: bool = False
    ambiguous: bool = False

    def add(self, name: str, labels: Mapping[str, str], value: float | None) -> None:
        if name == "engine_sleep_state":
            state = labels.get("sleep_state", "")
            self.sleep_state[state] = _larger(self.sleep_state.get(state), value)
        elif name == "num_requests_waiting_by_reason":
            if value is not None:
                reason = labels.get("reason", "")
                self.ambiguous |= reason in self.waiting_by_reason
                self.waiting_by_reason[reason] = max(round(value), self.waiting_by_reason.get(reason, 0))
        elif name == "request_success":
            reason = labels.get("finished_reason", "")
            self.success_by_reason[reason] = _larger(self.success_by_reason.get(reason), value)
        elif name in self.values:
            # One engine, several samples: API-server processes (`pid`) or Ray replicas that saw it at other moments. The
            # largest is a safe bound of usage; a sum or a mean is nobody's usage.
            self.ambiguous |= name in _GAUGES
            self.values[name] = _larger(self.values[name], value)
        else:
            self.values[name] = value


@dataclass(frozen=True)
class _Server:
    """What the page says of the API server, not of one engine."""

    start_time: float | None
    max_lora: int | None
    running_lora_adapters: int | None


class _Page:
    """The engines of one page while it is being read.

    They are joined by the `engine` label alone, since families differ in `model_name`; a page of vLLM V0 has no such label and
    one engine, "0".
    """

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._cache_config: dict[str | None, Mapping[str, str]] = {}
        self._lora: list[tuple[float, Mapping[str, str]]] = []
        self._start_time: float | None = None
        self._invalid_samples = 0

    def add(self, sample: Sample) -> None:
        name, part = _family(sample.name)
        labels = sample.labels
        if name == "cache_config_info":
            self._cache_config[labels.get("engine")] = labels
        elif part is not None:
            self._engine(name, labels).histograms.add(name, part, labels, sample.value)
        else:
            value = _valid(name, sample.value)
            self._invalid_samples += value is None
            if name == _START_TIME:
                self._start_time = value
            elif name == "lora_requests_info":
                if value is not None:
                    self._lora.append((value, labels))
            else:
                self._engine(name, labels).add(name, labels, value)

    def _engine(self, name: str, labels: Mapping[str, str]) -> _Engine:
        label = labels.get("engine")
        engine = self._engines.get(label or "0")
        if engine is None:
            engine = self._engines[label or "0"] = _Engine()
        engine.has_engine_label |= label is not None
        if engine.model_name is None or name == _USAGE:
            engine.model_name = labels.get("model_name")
        return engine

    def reading(self) -> PageReading:
        for label in self._cache_config:
            if label is not None or not self._engines:
                self._engines.setdefault(label or "0", _Engine(has_engine_label=label is not None))
        blocks = _num_gpu_blocks_by_engine(self._cache_config)
        max_lora, running_lora_adapters = _lora(self._lora) if len(self._engines) == 1 else (None, None)
        server = _Server(self._start_time, max_lora, running_lora_adapters)
        engines = []
        for name in sorted(self._engines, key=lambda engine: (len(engine), engine)):
            engine = self._engines[name]
            label = name if name in self._cache_config else None
            histograms, impossible = engine.histograms.read()
            self._invalid_samples += impossible
            engines.append(
                _engine_reading(name, engine, histograms, self._cache_config.get(label, {}), blocks.get(label), server)
            )
        return PageReading(tuple(engines), self._invalid_samples)


def _engine_reading(
    name: str,
    engine: _Engine,
    histograms: Mapping[str, Histogram | None],
    config: Mapping[str, str],
    num_gpu_blocks: int | None,
    server: _Server,
) -> EngineReading:
    usage = engine.values.get(_USAGE) if _USAGE in engine.values else engine.values.get(_USAGE_BEFORE_0_9)
    pool = _Pool.of(engine, config, num_gpu_blocks)
    concurrency = _number(config.get("kv_cache_max_concurrency"))
    awake = engine.sleep_state.get("awake")
    latency = _LATENCY if _LATENCY in histograms else _LATENCY_OLD_NAME
    return EngineReading(
        engine=name,
        model_name=engine.model_name,
        usage_ratio=usage,
        num_gpu_blocks=num_gpu_blocks,
        usable_blocks=None if pool is None else pool.usable_blocks,
        used_blocks=None if pool is None or usage is None else pool.used_blocks(usage),
        # Without a block count the labels are the front-end's copy from before the engine resolved them (vLLM 0.8 V1).
        block_size=None if num_gpu_blocks is None else _whole(config.get("block_size")),
        cache_dtype=config.get("cache_dtype"),
        enable_prefix_caching={"True": True, "False": False}.get(config.get("enable_prefix_caching", "")),
        mamba_cache_mode=config.get("mamba_cache_mode"),
        mamba_page_size_padded=_whole(config.get("mamba_page_size_padded")),
        mamba_cache_dtype=config.get("mamba_cache_dtype"),
        mamba_ssm_cache_dtype=config.get("mamba_ssm_cache_dtype"),
        kv_cache_dtype_skip_layers=tuple(_QUOTED.findall(config.get("kv_cache_dtype_skip_layers", ""))),
        kv_cache_size_tokens=_whole(config.get("kv_cache_size_tokens")),
        kv_cache_max_concurrency=concurrency if concurrency is not None and concurrency > 0 else None,
        num_requests_running=_count(engine, "num_requests_running"),
        num_requests_waiting=_count(engine, "num_requests_waiting"),
        num_requests_waiting_by_reason=MappingProxyType(dict(sorted(engine.waiting_by_reason.items()))),
        num_preemptions=_count(engine, "num_preemptions"),
        prompt_tokens=_count(engine, "prompt_tokens"),
        generation_tokens=_count(engine, "generation_tokens"),
        prefix_cache_queries_tokens=_count(engine, "prefix_cache_queries"),
        prefix_cache_hits_tokens=_count(engine, "prefix_cache_hits"),
        external_prefix_cache_queries_tokens=_count(engine, "external_prefix_cache_queries"),
        external_prefix_cache_hits_tokens=_count(engine, "external_prefix_cache_hits"),
        request_success=_total(engine.success_by_reason.values()),
        request_prompt_tokens=histograms.get("request_prompt_tokens"),
        request_generation_tokens=histograms.get("request_generation_tokens"),
        time_to_first_token_seconds=histograms.get("time_to_first_token_seconds"),
        inter_token_latency_seconds=histograms.get(latency),
        process_start_time_seconds=server.start_time,
        engine_steps=_count(engine, "iteration_tokens_total_count"),
        estimated_read_bytes_per_gpu=engine.values.get("estimated_read_bytes_per_gpu"),
        max_lora=server.max_lora,
        running_lora_adapters=server.running_lora_adapters,
        awake=None if awake is None else awake == 1,
        ambiguous=engine.ambiguous,
    )


@dataclass(frozen=True)
class _Pool:
    """How the usage gauge of this version counts: usage = (used + `always_used`) / `divisor`."""

    usable_blocks: int
    divisor: int
    always_used: int

    @classmethod
    def of(cls, engine: _Engine, config: Mapping[str, str], num_gpu_blocks: int | None) -> _Pool | None:
        if num_gpu_blocks is None:
            return None
        since_0_10_2 = "kv_cache_memory_bytes" in config
        if not engine.has_engine_label and not since_0_10_2:
            # V0 has no null block.
            return cls(num_gpu_blocks, num_gpu_blocks, 0)
        usable = num_gpu_blocks - 1
        if "swap_space" in config and not since_0_10_2:
            # The first V1 releases count the null block as used: an idle engine reads 1/num_gpu_blocks.
            return cls(usable, num_gpu_blocks, 1)
        return cls(usable, usable, 0)

    def used_blocks(self, usage_ratio: float) -> int:
        return min(self.usable_blocks, max(0, round(usage_ratio * self.divisor) - self.always_used))


def _num_gpu_blocks_by_engine(configs: Mapping[str | None, Mapping[str, str]]) -> dict[str | None, int]:
    """Blocks of each engine, null block included.

    With data parallelism the label is the sum over the ranks, repeated on each. A rank's own share follows exactly from its
    `kv_cache_max_concurrency` (its blocks over a cost that all ranks share); without that label, an even split is the only one
    that can be stated, and a sum that does not divide is left unknown.
    """
    totals = {label: _whole(config.get("num_gpu_blocks")) for label, config in configs.items()}
    ranks = len(configs)
    concurrency = {label: _number(config.get("kv_cache_max_concurrency")) or 0.0 for label, config in configs.items()}
    concurrency_sum = sum(concurrency.values())
    blocks = {}
    for label, total in totals.items():
        if total is None:
            continue
        if ranks == 1:
            blocks[label] = total
        elif all(concurrency.values()):
            blocks[label] = round(total * concurrency[label] / concurrency_sum)
        elif total % ranks == 0:
            blocks[label] = total // ranks
    return blocks


@lru_cache(256)
def _family(name: str) -> tuple[str, str | None]:
    """A name that is wanted, without its prefix and what stands behind; with "bucket" or "sum" where that is of a histogram."""
    match = _NAME.fullmatch(name)
    return (match[1] or match[2] or match[3] or match[5], match[4]) if match else (name, None)


def _valid(name: str, value: float) -> float | None:
    """The value, or None when no engine can be in that state (seen in the field: negative usage, NaN, percent)."""
    if not math.isfinite(value) or value < 0:
        return None
    if name in (_USAGE, _USAGE_BEFORE_0_9):
        return min(value, 1.0) if value <= 1 + _USAGE_ROUNDING else None
    return value


def _larger(a: float | None, b: float | None) -> float | None:
    return max((value for value in (a, b) if value is not None), default=None)


def _total(values: Collection[float | None]) -> int | None:
    """All added up; None when there is none, and when one of them is unknown."""
    known = [value for value in values if value is not None]
    return round(sum(known)) if known and len(known) == len(values) else None


def _lora(lines: Sequence[tuple[float, Mapping[str, str]]]) -> tuple[int | None, int | None]:
    """Adapters that can run at once, and adapters that do, from (value, labels) of lora_requests_info.

    There is a line for each set of adapters that was ever running or waiting, and its value is when it last was: only the newest
    holds. Several API servers add up these times, and with them the newest cannot be told.
    """
    if not lines:
        return None, None
    oldest, newest = min(time for time, _ in lines), max(time for time, _ in lines)
    labels = next(labels for time, labels in lines if time == newest)
    running = [adapter for adapter in labels.get("running_lora_adapters", "").split(",") if adapter]
    return _whole(labels.get("max_lora")), len(running) if newest < _ADDED_UP * oldest else None


def _count(engine: _Engine, name: str) -> int | None:
    value = engine.values.get(name)
    return None if value is None else round(value)


def _number(label: str | None) -> float | None:
    """A number in a label of cache_config_info, where every attribute is printed as Python prints it: "None" is common."""
    try:
        value = float(label or "None")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _whole(label: str | None) -> int | None:
    value = _number(label)
    return int(value) if value is not None and value >= 1 else None
