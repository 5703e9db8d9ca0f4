"""One vLLM server: its page at every tick, and the facts that hold while it runs, asked once and again after a restart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from kvcache_exporter.capacity import COMPUTED, REPORTED, capacity_of
from kvcache_exporter.config import TargetConfig
from kvcache_exporter.config_values import ROOT
from kvcache_exporter.default_seats import default_max_num_seqs
from kvcache_exporter.engine_state import has_restarted
from kvcache_exporter.errors import KVCacheExporterError, SourceError, UnsupportedModelError
from kvcache_exporter.gpu_reading import GpuReading
from kvcache_exporter.headroom import TYPICAL_LENGTH, headroom_of
from kvcache_exporter.history import EngineHistory
from kvcache_exporter.job import Outcome, attempt
from kvcache_exporter.kv_cache_spec import EngineConfig, KVCacheLayout, kv_cache_layout, plain_layout
from kvcache_exporter.kv_cache_spec.engine_config import NEWEST_VLLM_VERSION, parse_vllm_version
from kvcache_exporter.kv_cache_spec.mamba import MambaSpec
from kvcache_exporter.limits import MEMORY_LIMITS, AdmissionLimits
from kvcache_exporter.memory_bandwidth import StepReads
from kvcache_exporter.model_config import ModelConfig, parse_model_config
from kvcache_exporter.readings import EngineReading, PageReading, ServedModel
from kvcache_exporter.snapshot import EngineSnapshot, TargetSnapshot
from kvcache_exporter.sources.model_files import find_config_json, load_config_json, weight_bytes
from kvcache_exporter.sources.model_url import fetch_config_json
from kvcache_exporter.sources.vllm import VllmClient
from kvcache_exporter.target_weights import ModelOnDisk, TargetWeights, TracedWeights

CONFIGURED = "configured"
DEFAULT = "default"
ASSUMED = "assumed"

SOURCE_PAGE = "vllm"
SOURCE_MODELS = "vllm_models"
SOURCE_VERSION = "vllm_version"
SOURCE_MODEL_CONFIG = "model_config"


LayoutOf: TypeAlias = Callable[[ModelConfig, EngineConfig], KVCacheLayout]
"""Lays out the cache of a model on an engine, as kv_cache_layout does; raises UnsupportedModelError."""


@dataclass(frozen=True)
class Facts:
    """What does not change while a server runs; None where it is not known yet or cannot be had."""

    served: ServedModel | None = None
    version: str | None = None
    files: ModelOnDisk | None = None

    @property
    def model(self) -> ModelConfig | None:
        """What config.json says."""
        return None if self.files is None else self.files.model

    @property
    def complete(self) -> bool:
        """Whether nothing is left to ask."""
        return self.served is not None and self.version is not None and self.model is not None


@dataclass(frozen=True)
class FactsReading:
    """Facts after one attempt to complete them, and how each source that was asked answered."""

    facts: Facts
    outcomes: Mapping[str, Outcome[Any]]


def read_facts(config: TargetConfig, client: VllmClient, known: Facts) -> FactsReading:
    """Ask for the facts that are not known yet. Never raises: each outcome carries its own error."""
    outcomes: dict[str, Outcome[Any]] = {}

    def ask(source: str, call: Callable[[], Any]) -> Any:  # noqa: ANN401  # one value a source, each of its own type
        outcomes[source] = attempt(call)
        return outcomes[source].value

    served = known.served or ask(SOURCE_MODELS, client.served_model)
    version = known.version or ask(SOURCE_VERSION, client.version)
    root = None if served is None else served.root
    files = known.files or ask(SOURCE_MODEL_CONFIG, lambda: _read_model(config, root))
    return FactsReading(Facts(served, version, files), outcomes)


def _read_model(config: TargetConfig, root: str | None) -> ModelOnDisk:
    given = config.model_config
    if isinstance(given, Mapping):
        return ModelOnDisk(given, parse_model_config(given))
    if isinstance(given, str) and not (ROOT in given and _path_here(root)):
        content = fetch_config_json(given, root, config.model_config_token_file)
        return ModelOnDisk(content, parse_model_config(content))
    file = find_config_json(*_where_the_model_is(config, root))
    content = load_config_json(file)
    return ModelOnDisk(content, parse_model_config(content), weight_bytes(file.parent))


def _where_the_model_is(config: TargetConfig, root: str | None) -> tuple[Path, str | None]:
    if isinstance(config.model_config, Path):
        return config.model_config, root
    here = _path_here(root)
    if here is not None:
        return here, None
    where = "the engine does not tell its model's path" if root is None else f"the engine's model {root!r} is not a path here"
    raise SourceError("missing", f"{where} and no model_config is set: give the path of config.json for bytes and slots")


def _path_here(root: str | None) -> Path | None:
    path = Path(root or "")
    return path if path.is_absolute() and path.exists() else None


class TargetHistory:
    """One target from page to page: its engines' pasts, and the layout of their cache, made once while the server runs.

    `window_seconds` is how far back "lately" reaches; `request_lengths` are tokens for which slots are shown.
    """

    def __init__(self, config: TargetConfig, *, request_lengths: Sequence[int], window_seconds: float) -> None:
        self._config = config
        self._request_lengths = tuple(request_lengths)
        self._window_seconds = window_seconds
        # The same at every page while a server runs, and of all its data-parallel ranks.
        self._layout_of = lru_cache(maxsize=1)(kv_cache_layout)
        self._weights = TargetWeights(config)
        self._engines: dict[str, EngineHistory] = {}
        self._page: PageReading | None = None

    def missed(self) -> None:
        """Note that a poll gave no page: another run may answer next, with other flags and another model."""
        self._page = None

    def restarts_with(self, page: PageReading) -> bool:
        """Whether `page` is of another run of the server than the page before it: one of its engines started anew."""
        if self._page is None:
            return False
        earlier = {engine.engine: engine for engine in self._page.engines}
        return any(e.engine in earlier and has_restarted(earlier[e.engine], e) for e in page.engines)

    def observe(
        self, page: PageReading, read_at: float, facts: Facts, gpus: Sequence[GpuReading] = ()
    ) -> tuple[TargetSnapshot, KVCacheExporterError | None]:
        """What the page that was read `read_at` (Unix seconds) means, given the facts and the pages before it.

        `gpus` are those that its engines may run on. Also why no layout could be made, if so: blocks and counts go on without.
        """
        seats = self._seats(facts, gpus)
        self._page = page
        reported = None if facts.served is None else facts.served.max_model_len
        max_model_len = reported or self._config.max_model_len
        refusal: KVCacheExporterError | None = None
        engines = []
        for reading in page.engines:
            layout = None
            try:
                layout = _layout(self._config, facts, reading, max_model_len, self._layout_of)
            except (UnsupportedModelError, SourceError) as error:
                refusal = error
            engines.append(self._engine_snapshot(reading, read_at, layout, facts, max_model_len, seats))
        # A rank that is gone leaves nothing behind.
        self._engines = {reading.engine: self._engines[reading.engine] for reading in page.engines}
        snapshot = TargetSnapshot(
            name=self._config.name,
            url=self._config.url,
            pod=self._config.pod,
            read_at=read_at,
            engines=tuple(engines),
            vllm_version=facts.version,
            max_model_len=max_model_len,
            max_model_len_source=None if max_model_len is None else (REPORTED if reported else CONFIGURED),
            tensor_parallel_size=None if self._config.unknown_arguments else self._config.tensor_parallel_size,
            max_num_seqs=seats,
            max_num_seqs_source=None if seats is None else (DEFAULT if self._config.max_num_seqs is None else CONFIGURED),
        )
        return snapshot, refusal

    def _seats(self, facts: Facts, gpus: Sequence[GpuReading]) -> int | None:
        """max_num_seqs as it is given, or vLLM's default where it is sure that none is given."""
        if not self._config.has_default_seats:
            return self._config.max_num_seqs
        return default_max_num_seqs(parse_vllm_version(facts.version), gpus, self._config.max_num_batched_tokens)

    def _engine_snapshot(
        self,
        reading: EngineReading,
        read_at: float,
        layout: KVCacheLayout | None,
        facts: Facts,
        max_model_len: int | None,
        seats: int | None,
    ) -> EngineSnapshot:
        history = self._engines.setdefault(reading.engine, EngineHistory(self._window_seconds))
        condition = history.observe(read_at, reading)
        weights = None
        if not self._config.unknown_arguments:
            weights = self._weights.of(facts.files, _engine_config(self._config, facts, reading, max_model_len))
        served_name = None if facts.served is None else facts.served.model_name
        snapshot = EngineSnapshot(
            reading=reading,
            model_name=reading.model_name or served_name or "",
            layout=layout,
            layout_source=None if layout is None else _layout_source(self._config, layout),
            capacity=capacity_of(reading, layout, max_model_len),
            state=condition.state,
            usage_suspect=condition.usage_suspect,
            weights=None if weights is None else weights.weights,
            weights_source=None if weights is None else weights.source,
            time_to_first_token=history.time_to_first_token(),
            time_per_output_token=history.time_per_output_token(),
            decode_reads=history.decode_reads(_step_reads(weights, layout)),
        )
        capacity = snapshot.capacity
        if capacity is None:
            return snapshot
        limits = AdmissionLimits(seats, self._config.max_num_active_seqs, self._config.watermark)
        traffic = history.traffic(max_model_len, None if layout is None else layout.tokens_per_block)
        headroom = headroom_of(
            reading,
            capacity,
            layout,
            max_model_len=max_model_len,
            limits=limits,
            request_lengths=self._request_lengths,
            traffic=traffic,
            is_serving=condition.shows_room,
        )
        snapshot = replace(snapshot, headroom=headroom, prefix=traffic.prefix)
        typical = headroom.of(TYPICAL_LENGTH)
        # Without a layout a typical request counts as one of max_model_len, which no forecast can be made of.
        if traffic.mix is None or layout is None or typical is None or typical.remaining is None:
            return snapshot
        forecast = history.forecast(usable_blocks=capacity.usable_blocks, blocks_per_request=typical.blocks, seats=limits.seats)
        is_full = typical.remaining == 0 and headroom.binding_limit in MEMORY_LIMITS
        return replace(
            snapshot,
            exhaustion_seconds=0.0 if is_full else forecast.exhaustion_seconds,
            offered_load_ratio=forecast.offered_load_ratio,
            offered_load_trend_per_second=forecast.offered_load_trend_per_second,
        )


def _step_reads(weights: TracedWeights | None, layout: KVCacheLayout | None) -> StepReads | None:
    """What a step reads on a GPU, in the mean over those of an engine."""
    streamed = None if weights is None else weights.weights.streamed_bytes_per_rank
    if streamed is None or layout is None:
        return None
    stages = len(streamed)
    return StepReads(sum(streamed) / stages, layout.bytes_per_block / layout.engine.tensor_parallel_size / stages)


def _layout(
    config: TargetConfig, facts: Facts, reading: EngineReading, max_model_len: int | None, layout_of: LayoutOf
) -> KVCacheLayout | None:
    if reading.block_size is None:
        return None
    if config.unknown_arguments:
        raise SourceError(
            "unknown_arguments",
            f"no bytes are known, since not all arguments of the engine can be told ({'; '.join(config.unknown_arguments)}): "
            "state them in the annotation kvcache-exporter.io/engine-args of its pod, or with --engine-args",
        )
    engine = _engine_config(config, facts, reading, max_model_len)
    if config.kv_cache_bytes_per_token is not None:
        return plain_layout(engine, reading.block_size, config.kv_cache_bytes_per_token)
    if facts.model is None:
        return None
    layout = layout_of(facts.model, engine)
    pages = {group.spec.page_size_bytes for group in layout.groups if group.spec.kind == MambaSpec.kind}
    padded = reading.mamba_page_size_padded
    if padded is not None and pages and padded not in pages:
        raise UnsupportedModelError(
            f"{facts.model.architecture}: the engine pads its states to {padded} bytes, and config.json makes pages of "
            f"{max(pages)}: it is not the engine's, or a setting of this target is not",
            field="mamba_page_size_padded",
            value=padded,
        )
    return layout


def _layout_source(config: TargetConfig, layout: KVCacheLayout) -> str:
    if config.kv_cache_bytes_per_token is not None:
        return CONFIGURED
    return ASSUMED if layout.is_assumed else COMPUTED


def _engine_config(config: TargetConfig, facts: Facts, reading: EngineReading, max_model_len: int | None) -> EngineConfig:
    """The engine's flags: what its page shows, and for the rest what the operator has configured."""
    speculative_tokens = config.num_speculative_tokens or 0
    flags = EngineConfig(
        block_size=reading.block_size,
        kv_cache_dtype=reading.cache_dtype or "auto",
        dtype=config.dtype,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        decode_context_parallel_size=config.decode_context_parallel_size,
        max_model_len=max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_prefix_caching=_keeps_states_at_block_boundaries(reading),
        mamba_cache_dtype=reading.mamba_cache_dtype or "auto",
        mamba_ssm_cache_dtype=reading.mamba_ssm_cache_dtype or "auto",
        kv_cache_dtype_skip_layers=reading.kv_cache_dtype_skip_layers,
        num_speculative_tokens=speculative_tokens,
        num_draft_layers=(1 if speculative_tokens else 0) if config.num_draft_layers is None else config.num_draft_layers,
        vllm_version=parse_vllm_version(facts.version) or NEWEST_VLLM_VERSION,
    )
    # On Hopper vLLM turns fp8 for sparse latents into its packed format, and the label says so; plain fp8 stayed on Blackwell.
    return replace(flags, gpu_name="B200") if flags.kv_cache_dtype in ("fp8", "fp8_e4m3") else flags


def _keeps_states_at_block_boundaries(reading: EngineReading) -> bool:
    if reading.mamba_cache_mode is not None:
        return reading.mamba_cache_mode != "none"
    return bool(reading.enable_prefix_caching)
