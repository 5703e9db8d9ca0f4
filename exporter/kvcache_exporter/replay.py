"""A capture through the code that `serve` runs, on the recording's clock: what it would have said after each poll."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from kvcache_exporter.capture import CapturedPoll
from kvcache_exporter.config import Config, TargetConfig, parse_config
from kvcache_exporter.errors import ConfigError, SourceError, UnsupportedModelError
from kvcache_exporter.families import ENGINE_FAMILIES
from kvcache_exporter.headroom import TYPICAL_LENGTH
from kvcache_exporter.kv_cache_spec.engine_config import parse_vllm_version
from kvcache_exporter.model_config import parse_model_config
from kvcache_exporter.readings import PageReading
from kvcache_exporter.snapshot import EngineSnapshot
from kvcache_exporter.sources.model_files import load_config_json
from kvcache_exporter.sources.model_url import fetch_config_json
from kvcache_exporter.sources.vllm_page import parse_metrics
from kvcache_exporter.target import Facts, TargetHistory
from kvcache_exporter.target_weights import ModelOnDisk

_PREFIX = "kvcache_"
# What tells an engine that is asked; a capture has been.
_ADDRESS = {"name", "url", "bearer_token_file", "ca_file"}
_ANY_URL = "http://capture"
_SLOTS = "slots"
_EXHAUSTION = "exhaustion_seconds"
# Polls of a timer come so much of the interval early now and then.
_JITTER = 0.02


@dataclass(frozen=True)
class Subject:
    """What no page of a capture tells: how its engine runs, and the version, for which `serve` asks the server.

    `block_size` (tokens) is the one to expect, None for any.
    """

    target: TargetConfig
    vllm_version: str | None = None
    block_size: int | None = None

    def facts(self, on_problem: Callable[[str], None]) -> Facts:
        """Read the model. One whose layout is not known is a sentence to `on_problem`: blocks go on. Raises SourceError."""
        file = self.target.model_config
        if file is None:
            return Facts(version=self.vllm_version)
        try:
            if isinstance(file, str):
                content = fetch_config_json(file, None, self.target.model_config_token_file)
            else:
                content = load_config_json(file) if isinstance(file, Path) else file
            model = parse_model_config(content)
        except UnsupportedModelError as error:
            on_problem(str(error))
            return Facts(version=self.vllm_version)
        return Facts(version=self.vllm_version, files=ModelOnDisk(content, model))


def subject_of_file(path: Path, target: TargetConfig | None = None) -> Subject:
    """Read engine.json: the settings of a target in config.yml, as a JSON object, over those of `target`.

    Beside them it may have `vllm_version`, and `block_size` and `bytes_per_token` as simulated captures come with: the latter
    counts where the file names no model. What else is in it is passed over. Raises ConfigError.
    """
    content = _json_object(path)
    given = {field.name: content[field.name] for field in fields(TargetConfig) if content.get(field.name) is not None}
    given = {name: value for name, value in given.items() if name not in _ADDRESS}
    bytes_per_token = _positive(content, "bytes_per_token", path)
    if bytes_per_token is not None and not {"model_config", "kv_cache_bytes_per_token"} & given.keys():
        given["kv_cache_bytes_per_token"] = bytes_per_token
    version = content.get("vllm_version")
    if version is not None and (not isinstance(version, str) or parse_vllm_version(version) is None):
        raise ConfigError([f'{path}: vllm_version: {version!r} is not a version such as "0.32.0"'])
    read = _target(given, path)
    settings = {name: getattr(read, name) for name in given}
    return Subject(
        replace(target or TargetConfig("capture", _ANY_URL), **settings), version, _positive(content, "block_size", path)
    )


def _target(given: Mapping[str, Any], path: Path) -> TargetConfig:
    """The settings as config.yml would take them: JSON that holds no more than numbers and words is YAML too."""
    # An object is the content of a config.json, which is not for YAML to read.
    inline = given.get("model_config") if isinstance(given.get("model_config"), dict) else None
    entry = {name: value for name, value in given.items() if name != "model_config" or inline is None}
    text = json.dumps({"targets": [{"url": _ANY_URL, **entry}]}, ensure_ascii=False)
    try:
        (target,) = parse_config(text, path).targets
    except ConfigError as error:
        raise ConfigError([problem.replace(f"{path}:1: targets[0].", f"{path}: ") for problem in error.problems]) from None
    return target if inline is None else replace(target, model_config=inline)


def _json_object(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror or error}"]) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"{path}: is not JSON: {error}"]) from error
    if not isinstance(content, dict):
        raise ConfigError([f'{path}: is not a JSON object, such as {{"max_num_seqs": 128}}'])
    return content


def _positive(content: Mapping[str, Any], key: str, path: Path) -> int | None:
    value = content.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError([f"{path}: {key}: {value!r} is not a positive whole number"])
    return value


class Replay:
    """Polls in, JSON lines out.

    Of a capture of several targets, `only_target` names the one to take. Polls closer than `interval_seconds` to the one taken
    before are passed over. `on_problem` gets a sentence about what is of no use.

    Raises SourceError when the model's config.json cannot be read.
    """

    def __init__(
        self,
        subject: Subject,
        *,
        request_lengths: Sequence[int] = (),
        window_seconds: float = Config.window_seconds,
        interval_seconds: float = 0.0,
        only_target: str | None = None,
        on_problem: Callable[[str], None],
    ) -> None:
        self._subject = subject
        self._request_lengths = request_lengths
        self._window_seconds = window_seconds
        self._seconds_apart = (1 - _JITTER) * interval_seconds
        self._only_target = only_target
        self._on_problem = on_problem
        self._facts = subject.facts(on_problem)
        self._said: set[str] = set()
        self._history = self._new_history()
        # In the order in which they show.
        self._targets: dict[str, None] = {}
        self._pages = self._failed = self._pages_without_slots = 0
        self._has_begun = False

    @property
    def pages(self) -> int:
        """Pages that could be read so far."""
        return self._pages

    @property
    def targets(self) -> tuple[str, ...]:
        """Targets that the capture has named so far."""
        return tuple(self._targets)

    def lines(self, polls: Iterable[CapturedPoll]) -> Iterator[str]:
        """One JSON object for each engine of each page, from the first page on at which slots are known.

        Before a request has finished or run for a while nothing can be said of a typical one. Raises ConfigError when several
        targets show and none was named.
        """
        for poll in self._polls_to_take(polls):
            page = self._page(poll)
            if page is None:
                self._failed += 1
                self._history.missed()
                continue
            self._pages += 1
            snapshot, refusal = self._history.observe(page, poll.t, self._facts)
            if refusal is not None:
                self._say_once(str(refusal))
            records = [_record(poll.t, engine) for engine in snapshot.engines]
            self._has_begun = self._has_begun or any(_SLOTS in record for record in records)
            if not self._has_begun:
                self._pages_without_slots += 1
                continue
            for record in records:
                yield _as_json(record)

    def summary(self) -> str | None:
        """A sentence about what gave no line; None when everything did."""
        parts = []
        if self._failed:
            parts.append(f"{self._failed} polls without a page that can be read")
        if self._pages_without_slots:
            until = "" if self._has_begun else ", so none was shown: see the sentences above, or no request has told its length"
            parts.append(f"{self._pages_without_slots} pages before slots were known{until}")
        return f"{self._pages} pages read; {'; '.join(parts)}" if parts else None

    def _polls_to_take(self, polls: Iterable[CapturedPoll]) -> Iterator[CapturedPoll]:
        before = taken = -math.inf
        for poll in polls:
            if not self._is_wanted(poll):
                continue
            if poll.t < before:
                # As after a restart of the exporter: the clock was set back, or a capture of another time was appended.
                self._on_problem(
                    f"line {poll.line} is {before - poll.t:g} s earlier than the poll before it: history begins anew"
                )
                self._history = self._new_history()
                taken = -math.inf
            elif poll.t == before:
                self._on_problem(f"line {poll.line} has the time of the poll before it: passed over")
                continue
            before = poll.t
            if poll.t - taken >= self._seconds_apart:
                taken = poll.t
                yield poll

    def _is_wanted(self, poll: CapturedPoll) -> bool:
        if poll.target is None:
            return True
        self._targets.setdefault(poll.target)
        if self._only_target is None and len(self._targets) > 1:
            raise ConfigError(
                [f"the capture is of several targets, {', '.join(self._targets)} among them: say which by --target"]
            )
        return self._only_target in (None, poll.target)

    def _page(self, poll: CapturedPoll) -> PageReading | None:
        if poll.page is None:
            return None
        try:
            page = parse_metrics(poll.page)
        except SourceError as error:
            self._on_problem(f"line {poll.line}: {error}")
            return None
        for engine in page.engines:
            expected = self._subject.block_size
            if expected is not None and engine.block_size not in (None, expected):
                self._say_once(
                    f"block_size is {engine.block_size} on the page, not {expected}: are these settings of this engine?"
                )
        return page

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._on_problem(sentence)

    def _new_history(self) -> TargetHistory:
        return TargetHistory(self._subject.target, request_lengths=self._request_lengths, window_seconds=self._window_seconds)


def _record(t: float, engine: EngineSnapshot) -> dict[str, Any]:
    """The metrics of one engine by name; those with a label of their own as an object by its values."""
    metrics: dict[str, Any] = {}
    for family in ENGINE_FAMILIES:
        samples = {labels: value for labels, value in family.read(engine) if value is not None and not math.isnan(value)}
        if samples:
            by_label = {",".join(labels): value for labels, value in samples.items()}
            metrics[family.name.removeprefix(_PREFIX)] = samples.get((), by_label)
    record = {"t": t, "engine": engine.reading.engine}
    slots = metrics.get("remaining_request_slots", {}).get(TYPICAL_LENGTH)
    if slots is not None:
        record[_SLOTS] = slots
    if _EXHAUSTION in metrics:
        record[_EXHAUSTION] = metrics.pop(_EXHAUSTION)
    return record | metrics


def _as_json(value: object) -> str:
    """JSON of a record, infinity included.

    JSON has no word for it (`Infinity` is Python's own, and parsers refuse it), but the number 1e999 is valid and beyond what a
    double holds: Python and JavaScript read it as infinity, jq as the largest double.
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {_as_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, float) and math.isinf(value):
        return "1e999" if value > 0 else "-1e999"
    return json.dumps(value)
