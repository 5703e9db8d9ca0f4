"""CPU time of a poll of one engine, from the bytes of its page to the snapshot, and how much its history holds after hours.

Run it as `python tests/bench/poll_engine.py`, or with `--capture FILE` for the pages of a capture (`serve --record` makes one).
Without one, the pages are a recorded one of a nearly full engine whose counters rise and whose gauges swing. The history knows
300 pages, 1 s apart, before the clock runs, and has seen their labels, as at every poll but the first; prometheus_client's parser
is timed in turn on the same pages. The ten hours of the second table take a minute or two.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, TypeVar

from prometheus_client.parser import text_string_to_metric_families

sys.path.insert(0, str(Path(__file__).parents[1]))

from kvcache_exporter.capture import read_capture
from kvcache_exporter.config import Config, TargetConfig
from kvcache_exporter.model_config import parse_model_config
from kvcache_exporter.readings import EngineReading, Histogram, PageReading, ServedModel
from kvcache_exporter.sources.vllm_page import parse_metrics
from kvcache_exporter.target import Facts, TargetHistory
from kvcache_exporter.target_weights import ModelOnDisk
from lab import TINY_LLAMA, capture

PAGE = "0.32.0_nearfull_waiting"
WARM_UP = 300
ROUNDS = 300
# The library takes long, and each of its rounds is much like the others.
LIBRARY_EVERY = 10
HOURS = (1, 2, 10)
FACTS = Facts(
    served=ServedModel("tiny", 4096, None), version="0.32.0", files=ModelOnDisk(TINY_LLAMA, parse_model_config(TINY_LLAMA))
)

_COUNTER = re.compile(rb"^(vllm:\w+_(?:total|bucket|sum|count)\{.*\} )(\S+)$", re.MULTILINE)
_GAUGE = re.compile(rb"^(vllm:(?:kv_cache_usage_perc|num_requests_(?:running|waiting))\{.*\} )(\S+)$", re.MULTILINE)
_COUNTER_FIELDS = (
    "num_preemptions",
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries_tokens",
    "prefix_cache_hits_tokens",
    "request_success",
    "request_prompt_tokens",
    "request_generation_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
)

_T = TypeVar("_T")


def synthetic_pages(number: int) -> list[bytes]:
    """A recorded page again and again: each counts as many requests more as the first had; its gauges are up to 40 % lower."""
    body = capture(PAGE)

    def page(index: int) -> bytes:
        ebb = 0.8 + 0.2 * math.cos(index / 7)

        def swing(match: re.Match[bytes]) -> bytes:
            value = float(match[2]) * ebb
            return match[1] + repr(value if b"perc" in match[1] else float(round(value))).encode()

        risen = _COUNTER.sub(lambda match: match[1] + repr(float(match[2]) * (index + 1)).encode(), body)
        return _GAUGE.sub(swing, risen)

    return [page(index) for index in range(number)]


def captured_pages(path: Path) -> list[bytes]:
    """The pages of a capture."""
    polls = read_capture(path, lambda sentence: print(f"{path}: {sentence}", file=sys.stderr))
    return [poll.page for poll in polls if poll.page is not None]


def new_history() -> TargetHistory:
    """A history as the poller makes it, of an engine whose model and seats are known."""
    return TargetHistory(
        TargetConfig("bench", "http://bench", max_num_seqs=32), request_lengths=(), window_seconds=Config.window_seconds
    )


def timed(call: Callable[[], _T]) -> tuple[float, _T]:
    """CPU seconds of a call, and what it returned."""
    started = time.process_time()
    result = call()
    return time.process_time() - started, result


def print_times(pages: Sequence[bytes]) -> None:
    """Medians over the pages that follow the warm-up, which go round where there are few; and the best poll."""
    history = new_history()
    parse, observe, library = [], [], []
    readings = iter(endless([parse_metrics(page) for page in pages]))
    for at in range(WARM_UP):
        history.observe(next(readings), at, FACTS)
    bodies = itertools.islice(itertools.cycle(pages), WARM_UP, WARM_UP + ROUNDS)
    for at, body in enumerate(bodies, WARM_UP):
        seconds, _ = timed(lambda body=body: parse_metrics(body))  # type: ignore[misc]  # bound at once
        parse.append(seconds)
        reading = next(readings)
        seconds, _ = timed(lambda reading=reading, at=at: history.observe(reading, at, FACTS))  # type: ignore[misc]
        observe.append(seconds)
        if at % LIBRARY_EVERY == 0:
            text = body.decode()
            seconds, _ = timed(lambda text=text: list(text_string_to_metric_families(text)))  # type: ignore[misc]
            library.append(seconds)
    parse_ms, observe_ms, library_ms = (statistics.median(seconds) * 1e3 for seconds in (parse, observe, library))
    poll = [a + b for a, b in zip(parse, observe, strict=True)]
    poll_ms, best_ms = statistics.median(poll) * 1e3, min(poll) * 1e3
    print(f"{'bytes':>7} {'parse ms':>9} {'observe ms':>11} {'poll ms':>8} {'best ms':>8} {'library ms':>11} {'ratio':>6}")
    print(
        f"{statistics.median(map(len, pages)):>7.0f} {parse_ms:>9.2f} {observe_ms:>11.2f} {poll_ms:>8.2f} {best_ms:>8.2f} "
        f"{library_ms:>11.2f} {library_ms / poll_ms:>6.1f}"
    )


def endless(pages: Sequence[PageReading]) -> Iterator[PageReading]:
    """The pages in a circle, whose counters go on from one round to the next."""
    for turn in itertools.count():
        for page in pages:
            engines = zip(page.engines, pages[0].engines, pages[-1].engines, strict=True)
            yield replace(page, engines=tuple(risen(engine, first, last, turn) for engine, first, last in engines))


def risen(engine: EngineReading, first: EngineReading, last: EngineReading, turns: int) -> EngineReading:
    """The reading with `turns` times as much on its counters as they gained from `first` to `last`."""
    if not turns:
        return engine
    changes: dict[str, Any] = {}
    for name in _COUNTER_FIELDS:
        now, low, high = (getattr(reading, name) for reading in (engine, first, last))
        if isinstance(now, Histogram):
            counts = (n + turns * (b - a) for n, a, b in zip(now.counts, low.counts, high.counts, strict=True))
            changes[name] = replace(now, counts=tuple(counts), sum=now.sum + turns * (high.sum - low.sum))
        elif now is not None:
            changes[name] = now + turns * (high - low)
    return replace(engine, **changes)


def size_bytes(root: object) -> int:
    """Memory of an object and of all it leads to, code aside."""
    seen, todo, size = set[int](), [root], 0
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, (type, ModuleType, FunctionType, BuiltinFunctionType)):
            continue
        seen.add(id(item))
        size += sys.getsizeof(item)
        todo += gc.get_referents(item)
    return size


def print_sizes(pages: Sequence[PageReading]) -> None:
    """What a history holds after so many hours of a page a second; a first line after 5 minutes, the window."""
    history = new_history()
    for at, page in enumerate(endless(pages), 1):
        history.observe(page, at, FACTS)
        if at == Config.window_seconds or at in [hours * 3600 for hours in HOURS]:
            print(f"after {at:>6} pages, {at / 3600:>5.2f} h: {size_bytes(history) / 1024:7.1f} KiB")
        if at >= HOURS[-1] * 3600:
            return


def main() -> None:
    """Print a table of times and one of sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capture", type=Path, metavar="FILE", help="pages of a capture instead")
    path = parser.parse_args().capture
    pages = synthetic_pages(WARM_UP) if path is None else captured_pages(path)
    print_times(pages)
    print()
    print_sizes([parse_metrics(page) for page in pages])


if __name__ == "__main__":
    main()
