"""Inputs that broke projects like this one, over several polls: engines that stand still, sleep, restart or say what cannot be.

The number of a test is that of its folder in data/cases. Alerts come with their rules: here, the series that one would use.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from fake_nvml import FakeNvml, load_steps
from kvcache_exporter.config import TargetConfig
from kvcache_exporter.sources.nvml import NvmlSource
from lab import CASES, DATA, LLAMA_8B, Lab, Labels, Reply, Upstream, models_answer

ENGINE = b'engine="0",model_name="m"'
ONE_ENGINE: Labels = (("engine", "0"), ("model_name", "m"))
# Bounds as vLLM builds them for max_model_len 8192.
BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
QWEN3_NEXT: Mapping[str, Any] = json.loads((DATA / "models" / "Qwen3-Next-80B-A3B.json").read_text())
LFM2: Mapping[str, Any] = json.loads((DATA / "models" / "LFM2-1.2B.json").read_text())


def page(case: str, name: str = "metrics") -> bytes:
    folder = next(CASES.glob(f"{case}-*"))
    return (folder / f"{name}.prom").read_bytes()


def with_blocks(body: bytes, usable: int = 1000) -> bytes:
    """The page with the block count of its engine 0, which lets slots be shown where nothing else forbids it."""
    return body + b'\nvllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="%d"} 1.0\n' % (usable + 1)


def lab_of(upstream: Upstream, *, lengths: tuple[int, ...] = (), gpus: NvmlSource | None = None, **target: Any) -> Lab:
    """A Lab that polls every 15 seconds, as the pages of the cases were polled."""
    config = TargetConfig(name="t", url=upstream.url, **{"model_config": LLAMA_8B, **target})
    return Lab(config, gpus=gpus, request_lengths=lengths, poll_interval_seconds=15.0)


def show(upstream: Upstream, body: bytes) -> None:
    upstream.page(body, models=models_answer(8192, name="m"))


def polls(upstream: Upstream, lab: Lab, *bodies: bytes) -> Iterator[int]:
    """Poll these pages, 15 s apart; yields the seconds since the first."""
    for index, body in enumerate(bodies):
        show(upstream, body)
        lab.poll()
        yield 15 * index


def holds(lab: Lab, name: str, label: str, engine: str = "0") -> str | None:
    """The value of `label` whose sample is 1; the others are 0, and None means that there are none."""
    values = {dict(labels)[label]: value for labels, value in lab.samples(name, engine=engine).items()}
    assert sorted(values.values()) == [0.0] * (len(values) - 1) + [1.0] * bool(values)
    return next((key for key, value in values.items() if value), None)


def state(lab: Lab, engine: str = "0") -> str | None:
    return holds(lab, "kvcache_engine_state", "state", engine)


def binding_limit(lab: Lab) -> str | None:
    return holds(lab, "kvcache_binding_limit", "limit")


def remaining(lab: Lab, length: str = "typical") -> float | None:
    return lab.value("kvcache_remaining_request_slots", length=length)


def usable_room(lab: Lab) -> set[str]:
    """Names of the series that say that there is room."""
    names = {line.partition("{")[0] for line in lab.text().splitlines() if not line.startswith("#")}
    return {name for name in names if name.startswith("kvcache_headroom_") or name == "kvcache_remaining_request_slots"}


def values_of(lab: Lab) -> dict[str, float]:
    """All samples of the page, by name and labels."""
    lines = [line.rpartition(" ") for line in lab.text().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


STALE = [page("05", f"t{seconds:03d}") for seconds in (0, 15, 30, 45, 60)]
DEAD = [page("06", f"t{seconds:03d}") for seconds in (0, 15, 30, 45)]
UNDER_LOAD = [page("15", f"t{seconds:03d}") for seconds in (0, 15, 30)]
BEFORE_RESET, AFTER_RESET = page("17", "t000"), page("17", "t015")


def test_05_stale_after_abort(upstream: Upstream) -> None:
    """Only the counters tell that the gauges are old: the source is up, and the engine frozen from the 3rd equal page on.

    An alert on a full cache is to leave out frozen engines, and another one may fire on them.
    """
    lab = lab_of(upstream)
    seen = {}
    for at in polls(upstream, lab, *STALE):
        seen[at] = state(lab)
        assert lab.value("kvcache_up", source="vllm") == 1
        assert lab.value("kvcache_usage_suspect") == 0
        assert lab.value("kvcache_usage_ratio") == (0.904 if at < 60 else 0.0)
        assert lab.value("kvcache_requests_running") == (106 if at < 60 else 0)
    assert seen == {0: "serving", 15: "serving", 30: "frozen", 45: "frozen", 60: "idle"}
    assert lab.errors() == {}


def test_05_stale_figures_leave_no_room_and_no_full_cache(upstream: Upstream) -> None:
    """With a block count beside the case: while frozen no slots and no headroom, not even 0, which would say "full"."""
    lab = lab_of(upstream, lengths=(1024,))
    for at in polls(upstream, lab, *map(with_blocks, STALE)):
        if at in (30, 45):
            assert usable_room(lab) == set()
            assert binding_limit(lab) is None
            assert lab.value("kvcache_exhaustion_seconds") is None
        else:
            assert lab.value("kvcache_headroom_blocks") == (96 if at < 60 else 1000)
            assert remaining(lab, "1024") == (0 if at < 60 else 15)


def test_06_dead_engine_looks_idle(upstream: Upstream) -> None:
    """Usage 0 of an engine that does nothing is published, but no free space, and its 6 waiting requests count once.

    An alert on requests that wait although nothing runs has its series at every poll; one on usage never fires.
    """
    lab = lab_of(upstream, lengths=(1024,), max_num_seqs=256)
    for at in polls(upstream, lab, *DEAD):
        assert state(lab) == ("frozen" if at >= 30 else "serving")
        assert lab.value("kvcache_up", source="vllm") == 1
        assert lab.value("kvcache_usage_ratio") == 0.0
        assert lab.value("kvcache_requests_running") == 0
        waiting = {dict(labels)["reason"]: value for labels, value in lab.samples("kvcache_requests_waiting").items()}
        assert waiting == {"capacity": 6, "deferred": 0}
        if at >= 30:
            assert usable_room(lab) == set()
        else:
            assert set(lab.samples("kvcache_remaining_request_slots").values()) == {0}


def test_11_one_full_engine(upstream: Upstream) -> None:
    """Usage and queue of each engine stay under its label; nothing is said of the node that would be less than its worst."""
    show(upstream, page("11"))
    lab = lab_of(upstream).poll()
    usage = {dict(labels)["engine"]: value for labels, value in lab.samples("kvcache_usage_ratio").items()}
    assert usage == {"0": 0.99, "1": 0.10, "2": 0.12, "3": 0.11}
    assert max(usage.values()) == 0.99
    waiting = {dict(labels)["engine"]: value for labels, value in lab.samples("kvcache_requests_waiting").items()}
    assert waiting == {"0": 40, "1": 0, "2": 0, "3": 0}
    assert not any(value == pytest.approx(0.33, abs=1e-9) for value in values_of(lab).values())


def test_11_only_the_full_engine_has_no_slots_left(upstream: Upstream) -> None:
    """With block counts beside the case: saturation shows on engine 0 and on no other."""
    config = b'vllm:cache_config_info{block_size="16",engine="%d",num_gpu_blocks="4004"} 1.0\n'
    show(upstream, page("11") + b"\n" + b"".join(config % engine for engine in range(4)))
    lab = lab_of(upstream, lengths=(1024,)).poll()
    slots = {
        dict(labels)["engine"]: value for labels, value in lab.samples("kvcache_remaining_request_slots", length="1024").items()
    }
    assert slots == {"0": 0, "1": 14, "2": 13, "3": 13}


def test_13_lora_info_is_a_timestamp(upstream: Upstream) -> None:
    """Wall-clock times of adapter sets are no counts, are not added up, and make no series; requests stay with the base model."""
    show(upstream, page("13"))
    lab = lab_of(upstream).poll()
    assert lab.samples("kvcache_requests_running") == {(("engine", "0"), ("model_name", "base")): 5}
    values = {name: value for name, value in values_of(lab).items() if "timestamp" not in name}
    assert max(values.values()) < 1e9
    # No slots of adapters are shown at all; 2 would be left.
    assert not [name for name in values if any(word in name.lower() for word in ("lora", "adapter", "sql", "chat"))]


def test_13_more_adapter_sets_make_no_more_series(upstream: Upstream) -> None:
    line = b'vllm:lora_requests_info{max_lora="4",running_lora_adapters="a%d,b",waiting_lora_adapters=""} 1.7570001%02de+09\n'
    show(upstream, page("13"))
    lab = lab_of(upstream).poll()
    before = set(values_of(lab))
    show(upstream, page("13") + b"\n" + b"".join(line % (number, number) for number in range(60)))
    assert set(values_of(lab.poll())) == before


def test_14_sleep_mode(upstream: Upstream, fake_nvml: FakeNvml) -> None:
    """A sleeping engine has given its memory back: nothing is free in it, the little GPU memory is right, and nothing failed."""
    (step,) = load_steps(CASES / "14-sleep-mode" / "nvml.yaml")
    fake_nvml.show(step)
    lab = lab_of(upstream, lengths=(1024,), gpus=NvmlSource())
    for _ in polls(upstream, lab, page("14"), page("14"), page("14")):
        assert lab.samples("kvcache_engine_state", state="asleep") == {ONE_ENGINE: 1}
        assert state(lab) == "asleep"
        assert usable_room(lab) == set()
        assert lab.value("kvcache_usage_suspect") == 0
        assert lab.value("kvcache_gpu_memory_used_bytes") == 3_220_176_896
        assert lab.value("kvcache_gpu_up") == 1
        assert lab.value("kvcache_engine_metrics_present") == 1
        assert {source: lab.value("kvcache_up", source=source) for source in ("vllm", "nvml")} == {"vllm": 1, "nvml": 1}
        for name in ("kvcache_usage_ratio", "kvcache_requests_running", "kvcache_engine_info"):
            assert len(lab.samples(name)) == 1
    assert lab.errors() == lab.errors("nvml") == {}


def test_14_engine_that_wakes_up_has_its_room_again(upstream: Upstream) -> None:
    awake = page("14").replace(b'"awake"} 0.0', b'"awake"} 1.0').replace(b'"weights_offloaded"} 1.0', b'"weights_offloaded"} 0.0')
    lab = lab_of(upstream, lengths=(1024,))
    seen = [(state(lab), remaining(lab, "1024")) for _ in polls(upstream, lab, page("14"), page("14"), awake)]
    assert seen == [("asleep", None), ("asleep", None), ("idle", 312)]


def test_14_without_sleep_state_the_engine_is_awake(upstream: Upstream) -> None:
    lines = page("14").splitlines(keepends=True)
    show(upstream, b"".join(line for line in lines if b"sleep_state" not in line))
    lab = lab_of(upstream).poll()
    assert state(lab) == "idle"
    assert lab.value("kvcache_headroom_tokens") == 320_000


def test_15_usage_zero_under_load(upstream: Upstream) -> None:
    """12 sequences that hold nothing: suspect from the first page that repeats it, and not frozen, since the counters move."""
    lab = lab_of(upstream, lengths=(1024,))
    for at in polls(upstream, lab, *UNDER_LOAD):
        assert lab.value("kvcache_usage_ratio") == 0.0
        assert lab.value("kvcache_usage_suspect") == (1 if at >= 15 else 0)
        assert state(lab) == "serving"
        if at >= 15:
            assert usable_room(lab) == set()


def test_15_no_free_tokens_of_running_requests_without_the_flag(upstream: Upstream) -> None:
    """At no poll are the 160,000 tokens shown as free with nothing that tells that this cannot be."""
    lab = lab_of(upstream)
    shown = {
        at: (lab.value("kvcache_headroom_tokens"), lab.value("kvcache_usage_suspect")) for at in polls(upstream, lab, *UNDER_LOAD)
    }
    assert {at for at, (free, suspect) in shown.items() if free is not None and free >= 160_000 and not suspect} == set()


def test_15_true_usage_ends_the_suspicion(upstream: Upstream) -> None:
    true = UNDER_LOAD[2].replace(b'"m"} 0.0', b'"m"} 0.5').replace(b"13100.0", b"17000.0")
    lab = lab_of(upstream)
    seen = [lab.value("kvcache_usage_suspect") for _ in polls(upstream, lab, *UNDER_LOAD, true)]
    assert seen == [0, 1, 1, 0]
    assert lab.value("kvcache_headroom_blocks") == 5000


@pytest.mark.parametrize("name", ["metrics", "metrics-colon"])
def test_16_ray_prefix(upstream: Upstream, name: str) -> None:
    """Ray's spellings are read without being configured, its labels are not copied, and no capacity is made up."""
    show(upstream, page("16", name))
    lab = lab_of(upstream, lengths=(1024,)).poll()
    assert lab.samples("kvcache_usage_ratio") == {ONE_ENGINE: 0.27}
    if name == "metrics":
        assert lab.samples("kvcache_requests_running") == {ONE_ENGINE: 3}
    assert lab.value("kvcache_reading_ambiguous") == 0
    text = lab.text()
    for foreign in ("WorkerId", "ReplicaId", "NodeAddress", "Component", "10.0.0.7", "core_worker"):
        assert foreign not in text
    assert not [metric for metric in values_of(lab) if metric.startswith("kvcache_capacity_")]
    assert usable_room(lab) == set()
    assert lab.errors() == {}


@pytest.mark.parametrize("prefix", [b"vllm:", b"vllm_", b"ray_vllm:", b"ray_vllm_"])
def test_16_prefixes(upstream: Upstream, prefix: bytes) -> None:
    show(upstream, page("16").replace(b"ray_vllm_", prefix))
    lab = lab_of(upstream).poll()
    assert lab.samples("kvcache_usage_ratio") == {ONE_ENGINE: 0.27}
    assert lab.samples("kvcache_requests_running") == {ONE_ENGINE: 3}


def test_16_ray_restart_makes_no_new_series(upstream: Upstream) -> None:
    lab = lab_of(upstream)
    seen = [
        set(values_of(lab)) for _ in polls(upstream, lab, page("16"), page("16").replace(b"w1", b"w2").replace(b"abc", b"def"))
    ]
    assert seen[0] == seen[1]


def replicas(line: bytes, *values: float) -> bytes:
    """A line of a Ray page once a replica, in this order."""
    return b"".join(
        b'%s,ReplicaId="r%d",WorkerId="w%d"} %s\n' % (line, index, index, str(value).encode())
        for index, value in enumerate(values)
    )


@pytest.mark.parametrize("values", [(0.9, 0.2), (0.2, 0.9)])
def test_16_replicas_do_not_overwrite_each_other(upstream: Upstream, values: tuple[float, float]) -> None:
    """Two replicas that share model and engine: the fuller one in whatever order, and a flag that says so."""
    body = replicas(b"ray_vllm_kv_cache_usage_perc{" + ENGINE, *values)
    body += replicas(b"ray_vllm_num_requests_running{" + ENGINE, *(10 * value for value in values))
    show(upstream, body)
    lab = lab_of(upstream).poll()
    assert lab.samples("kvcache_usage_ratio") == {ONE_ENGINE: 0.9}
    assert lab.samples("kvcache_requests_running") == {ONE_ENGINE: 9}
    assert lab.samples("kvcache_reading_ambiguous") == {ONE_ENGINE: 1}


@pytest.mark.parametrize("values", [(7, 3), (3, 7)])
def test_16_queues_of_replicas_do_not_overwrite_each_other(upstream: Upstream, values: tuple[int, int]) -> None:
    """The same of the queue by reason, the gauge that new versions tell the queue with."""
    body = replicas(b"ray_vllm_num_requests_waiting_by_reason{" + ENGINE + b',reason="capacity"', *values)
    show(upstream, page("16") + b"\n" + body)
    lab = lab_of(upstream).poll()
    assert lab.value("kvcache_requests_waiting", reason="capacity") == 7
    assert lab.value("kvcache_reading_ambiguous") == 1


def test_17_counter_reset(upstream: Upstream) -> None:
    """A restart: counters go on from what the new run says, no figure is negative, and nothing that alerts look at is set.

    Prometheus takes 40 -> 0 for a reset, so that the increase of preemptions is 0.
    """
    lab = lab_of(upstream)
    preemptions = []
    for _ in polls(upstream, lab, BEFORE_RESET, AFTER_RESET):
        preemptions.append(lab.samples("kvcache_preemptions_total"))
        assert min(values_of(lab).values()) >= 0
        assert lab.value("kvcache_up", source="vllm") == 1
        assert state(lab) == "serving"
        assert lab.value("kvcache_usage_suspect") == 0
    assert preemptions == [{ONE_ENGINE: 40}, {ONE_ENGINE: 0}]
    assert lab.errors() == {}


def test_17_facts_are_read_again_after_a_reset(upstream: Upstream) -> None:
    """Block count, names and lengths are those of the new run."""
    lab = lab_of(upstream)
    usage = b'\nvllm:kv_cache_usage_perc{engine="0",model_name="%s"} 0.5\n'
    upstream.page(with_blocks(BEFORE_RESET + usage % b"m", 1000), models=models_answer(8192, name="m"))
    lab.poll()
    new = with_blocks(AFTER_RESET.replace(b'"m"', b'"new"') + usage % b"new", 2000)
    upstream.page(new, models=models_answer(4096, name="new"))
    lab.poll()
    labels = (("engine", "0"), ("model_name", "new"))
    assert lab.samples("kvcache_capacity_blocks") == {labels: 2000}
    assert lab.samples("kvcache_request_length_tokens", length="max") == {labels: 4096}
    assert lab.samples("kvcache_request_slots", length="max") == {labels: 7}
    assert [path for path, _ in upstream.requests].count("/v1/models") == 2
    assert 'model_name="m"' not in lab.text()


def test_17_facts_of_a_restart_with_the_same_pool_are_read_again(upstream: Upstream) -> None:
    """The counters alone tell the restart: the page shows no start time, and the pool is as it was."""
    lab = lab_of(upstream)
    body = b"vllm:kv_cache_usage_perc{%s} 0.5\nvllm:generation_tokens_total{%s} %d\n"
    upstream.page(with_blocks(body % (ENGINE, ENGINE, 1_000_000)), models=models_answer(8192))
    lab.poll()
    upstream.page(with_blocks(body % (ENGINE, ENGINE, 500)), models=models_answer(4096))
    lab.poll()
    assert lab.value("kvcache_request_length_tokens", length="max") == 4096


def test_17_frozen_starts_afresh(upstream: Upstream) -> None:
    """An engine that was frozen is not after its restart, and has to stand still as long again to be so."""
    gauges = b"\nvllm:num_requests_running{%s} 3\nvllm:kv_cache_usage_perc{%s} 0.5\n" % (ENGINE, ENGINE)
    old, new = BEFORE_RESET + gauges, AFTER_RESET + gauges
    lab = lab_of(upstream)
    seen = [state(lab) for _ in polls(upstream, lab, old, old, old, new, new, new)]
    assert seen == ["serving", "serving", "frozen", "serving", "serving", "frozen"]


@pytest.mark.parametrize(
    "names", [("num_preemptions",), ("num_preemptions_total",), ("num_preemptions", "num_preemptions_total")]
)
def test_17_counters_with_and_without_total(upstream: Upstream, names: tuple[str, ...]) -> None:
    """Also without an engine label, as V0 has none; the restart shows whatever the spelling."""
    lab = lab_of(upstream)
    body = "".join(f'vllm:{name}{{model_name="m"}} 40\n' for name in names).encode()
    shown = [
        lab.samples("kvcache_preemptions_total")
        for _ in polls(upstream, lab, with_blocks(body), with_blocks(body.replace(b"40", b"2")))
    ]
    assert shown == [{ONE_ENGINE: 40}, {ONE_ENGINE: 2}]
    assert lab.value("kvcache_reading_ambiguous") == 0
    assert [path for path, _ in upstream.requests].count("/v1/models") == 2


def histogram(name: str, count: int, length: float) -> bytes:
    """A histogram of so many requests, all of one length."""
    bounds = [*(str(float(bound)) for bound in BOUNDS), "+Inf"]
    lines = [f'vllm:{name}_bucket{{engine="0",model_name="m",le="{le}"}} {count * (length <= float(le))}' for le in bounds]
    lines.append(f'vllm:{name}_sum{{engine="0",model_name="m"}} {count * length}')
    return "\n".join([*lines, ""]).encode()


def traffic_page(
    *,
    usable: int = 1000,
    used: int,
    running: int,
    capacity: int = 0,
    deferred: int = 0,
    finished: int = 0,
    made: int = 0,
    prompt: int = 150,
    output: int = 50,
    block_size: int = 16,
    more_config: str = "",
) -> bytes:
    """The page of an engine whose requests are all alike: so many running, waiting for capacity, deferred and finished.

    `made` are tokens of the running ones.
    """
    values = {
        "kv_cache_usage_perc": used / usable,
        "num_requests_running": running,
        "num_requests_waiting": capacity + deferred,
        "prompt_tokens_total": (finished + running) * prompt,
        "generation_tokens_total": finished * output + made,
    }
    lines = [f'vllm:{name}{{engine="0",model_name="m"}} {value}' for name, value in values.items()]
    lines += [
        f'vllm:num_requests_waiting_by_reason{{engine="0",model_name="m",reason="{reason}"}} {number}'
        for reason, number in (("capacity", capacity), ("deferred", deferred))
    ]
    lines.append(
        f'vllm:cache_config_info{{engine="0",block_size="{block_size}",num_gpu_blocks="{usable + 1}",cache_dtype="auto",'
        f'kv_cache_memory_bytes="None",enable_prefix_caching="False"{more_config}}} 1.0'
    )
    body = "\n".join([*lines, ""]).encode()
    body += histogram("request_prompt_tokens", finished, prompt)
    body += histogram("request_generation_tokens", finished, output)
    return body + histogram("time_to_first_token_seconds", finished + running, 0.1)


@pytest.mark.parametrize("finished", [0, 20])
def test_prefill_engine_that_holds_cache_with_nothing_running(upstream: Upstream, finished: int) -> None:
    """Blocks that a prefill engine has yet to hand over are nobody's: not free, of typical, fixed or longest requests."""
    lab = lab_of(upstream, lengths=(160,))
    bodies = [
        traffic_page(used=400, running=0, finished=finished + 4 * tick if finished else 0, made=tick, output=1)
        for tick in range(6)
    ]
    for _ in polls(upstream, lab, *bodies):
        assert state(lab) == "idle"
        assert lab.value("kvcache_usage_suspect") == 0
        assert lab.value("kvcache_headroom_blocks") == 600
        assert remaining(lab, "160") == 60
        assert remaining(lab, "max") == 1
        assert lab.value("kvcache_request_slots", length="160") == 100
        if finished:
            left, slots = remaining(lab), lab.value("kvcache_request_slots", length="typical")
            assert left is not None
            assert slots is not None
            # 151 tokens hold 10 blocks.
            assert 50 <= left <= 60
            assert 83 <= slots <= 100
            assert lab.value("kvcache_headroom_ratio") == pytest.approx(left / slots)
            assert binding_limit(lab) == "kv_blocks"


def test_prefill_engine_whose_cache_nobody_fetches_is_full(upstream: Upstream) -> None:
    """Nothing runs, and nothing fits either."""
    bodies = [traffic_page(used=996, running=0, finished=20 + 4 * tick, output=1) for tick in range(3)]
    lab = lab_of(upstream, lengths=(160,))
    for _ in polls(upstream, lab, *bodies):
        assert set(lab.samples("kvcache_remaining_request_slots").values()) == {0}
        assert lab.value("kvcache_headroom_ratio") == 0
        assert lab.value("kvcache_exhaustion_seconds") == 0
        assert binding_limit(lab) == "kv_blocks"


@pytest.mark.parametrize(
    ("usable", "finished"),
    [(600, 0), (300, 20), (20_000, 0), (1000, 20)],
    ids=["blocks for 1 of the longest", "blocks for fewer than 30", "blocks for 39 of the longest", "blocks for more than 30"],
)
def test_deferred_requests_hold_seats(upstream: Upstream, usable: int, finished: int) -> None:
    """30 that wait for a transfer and 2 that run take all 32 seats, however many blocks are free."""
    lab = lab_of(upstream, lengths=(160,), max_num_seqs=32)
    bodies = [
        traffic_page(usable=usable, used=20, running=2, deferred=30, finished=finished + tick if finished else 0, made=tick)
        for tick in range(4)
    ]
    for _ in polls(upstream, lab, *bodies):
        assert set(lab.samples("kvcache_remaining_request_slots").values()) == {0}
        assert remaining(lab) == 0
        assert binding_limit(lab) == "deferred"


@pytest.mark.parametrize(
    ("usable", "seats", "queue"),
    [(1000, 64, (2, 5, 9, 14)), (10_000, 64, (40, 60, 80, 100)), (1000, 256, (40, 60, 80, 100))],
    ids=["short queue", "longer than the seats", "longer than the blocks hold"],
)
def test_queue_that_grows_beside_free_blocks_and_seats_waits_for_compute(
    upstream: Upstream, usable: int, seats: int, queue: tuple[int, ...]
) -> None:
    """Told once the queue has stayed for 3 polls; before, the step's token budget may be what holds it up for a moment.

    60 seats and 950 blocks stay free at every poll, however long the queue gets: the engine of case 86 had 20 running, a third of
    its cache in use and a queue without end.
    """
    lab = lab_of(upstream, max_num_seqs=seats)
    bodies = [
        traffic_page(usable=usable, used=50, running=4, capacity=waiting, finished=20 + 4 * tick)
        for tick, waiting in enumerate(queue)
    ]
    seen = []
    for _ in polls(upstream, lab, *bodies):
        seen.append(binding_limit(lab))
        assert state(lab) == "serving"
    assert "compute" not in seen[:2]
    assert seen[2:] == ["compute", "compute"]


def test_cache_with_a_long_queue_and_free_blocks_is_not_exhausted(upstream: Upstream) -> None:
    """5 % in use at every poll: an alert on a cache that is full now, at 0 seconds, would be wrong."""
    lab = lab_of(upstream, max_num_seqs=256)
    bodies = [traffic_page(used=50, running=4, capacity=40 + 20 * tick, finished=20 + 4 * tick) for tick in range(6)]
    for _ in polls(upstream, lab, *bodies):
        assert lab.value("kvcache_usage_ratio") == 0.05
        assert lab.value("kvcache_exhaustion_seconds") != 0


def test_queue_without_a_known_number_of_seats_tells_no_limit(upstream: Upstream) -> None:
    """It may wait for a seat as well as for the engine's speed."""
    lab = lab_of(upstream)
    bodies = [traffic_page(used=50, running=4, capacity=2 + tick, finished=20 + 4 * tick) for tick in range(4)]
    assert [binding_limit(lab) for _ in polls(upstream, lab, *bodies)][2:] == [None, None]


def test_queue_of_a_full_engine_does_not_wait_for_compute(upstream: Upstream) -> None:
    lab = lab_of(upstream, max_num_seqs=256)
    bodies = [traffic_page(used=990, running=80, capacity=5, finished=20 + 4 * tick) for tick in range(4)]
    seen = [(binding_limit(lab), remaining(lab)) for _ in polls(upstream, lab, *bodies)]
    assert set(seen) == {("kv_blocks", 0)}


def test_full_cache_with_room_for_a_moment_does_not_wait_for_compute(upstream: Upstream) -> None:
    """A request that ends gives its blocks back, and the page may come just then: what binds are blocks all the same."""
    lab = lab_of(upstream, max_num_seqs=256)
    bodies = [traffic_page(used=900 if tick % 3 else 990, running=80, capacity=5, finished=20 + 4 * tick) for tick in range(12)]
    assert {binding_limit(lab) for _ in polls(upstream, lab, *bodies)} == {"kv_blocks"}


@pytest.mark.parametrize("capacity", [0, 3])
def test_seats_bind(upstream: Upstream, capacity: int) -> None:
    """Most blocks are free and no seat is: the same with a queue that stays, which waits for a seat."""
    lab = lab_of(upstream, lengths=(160,), max_num_seqs=8)
    bodies = [traffic_page(used=80, running=8, capacity=capacity, finished=20 + 4 * tick) for tick in range(5)]
    for _ in polls(upstream, lab, *bodies):
        assert binding_limit(lab) == "max_num_seqs"
        assert set(lab.samples("kvcache_remaining_request_slots").values()) == {0}
        assert lab.value("kvcache_request_slots", length="typical") == 8
        assert lab.value("kvcache_exhaustion_seconds") != 0
    assert lab.value("kvcache_headroom_blocks") == 920


def test_seats_bind_before_they_are_all_taken(upstream: Upstream) -> None:
    """What a growing load meets first: 3 seats are left, and blocks for far more."""
    lab = lab_of(upstream, max_num_seqs=8)
    for _ in polls(upstream, lab, *[traffic_page(used=50, running=5, finished=20 + 4 * tick) for tick in range(3)]):
        assert binding_limit(lab) == "max_num_seqs"
        assert remaining(lab) == 3
        assert lab.value("kvcache_headroom_ratio") == pytest.approx(3 / 8)


@pytest.mark.parametrize(
    ("model", "block_size", "prompt", "limit"),
    [
        (QWEN3_NEXT, 544, 150, "state_slots"),
        (QWEN3_NEXT, 544, 4000, "kv_blocks"),
        (LFM2, 16, 150, "kv_blocks"),
    ],
    ids=["3 states and 1 block", "3 states and 8 blocks", "2 states and 13 blocks"],
)
def test_states_of_a_hybrid_bind(upstream: Upstream, model: Mapping[str, Any], block_size: int, prompt: int, limit: str) -> None:
    """Where most of a request's blocks are states, these are what the next one lacks."""
    lab = lab_of(upstream, model_config=model)
    bodies = [
        traffic_page(
            used=400,
            running=20,
            finished=20 + 4 * tick,
            prompt=prompt,
            block_size=block_size,
            more_config=',mamba_cache_mode="none"',
        )
        for tick in range(4)
    ]
    for _ in polls(upstream, lab, *bodies):
        assert lab.errors("model_config") == {}
        assert binding_limit(lab) == limit
        left = remaining(lab)
        assert left is not None
        assert 0 < left <= 600 / 4


def test_seats_bind_a_hybrid_too(upstream: Upstream) -> None:
    lab = lab_of(upstream, model_config=QWEN3_NEXT, max_num_seqs=24)
    body = traffic_page(used=80, running=20, finished=20, block_size=544, more_config=',mamba_cache_mode="none"')
    show(upstream, body)
    lab.poll()
    assert binding_limit(lab) == "max_num_seqs"
    assert remaining(lab) == 4


@pytest.mark.parametrize("outage", [False, True])
def test_typical_slots_do_not_survive_a_restart(upstream: Upstream, outage: bool) -> None:
    """The new run's requests are not known before they come, and what the old one's were does not colour them."""
    lab = lab_of(upstream)
    old = [traffic_page(used=100, running=10, finished=100 + 20 * tick, prompt=150) for tick in range(30)]
    for _ in polls(upstream, lab, *old):
        assert lab.value("kvcache_request_length_tokens", length="typical") == 200
    assert lab.value("kvcache_offered_load_ratio") is not None

    if outage:
        upstream.replies = {"/metrics": Reply(status=503)}
        lab.poll()
        assert usable_room(lab) == set()
    new = {
        "nothing came": traffic_page(used=0, running=0),
        "first one runs": traffic_page(used=70, running=1, prompt=1000, output=500),
        "first one ended": traffic_page(used=70, running=1, finished=1, prompt=1000, output=500),
    }
    seen = {}
    for name, _ in zip(new, polls(upstream, lab, *new.values()), strict=True):
        seen[name] = lab.value("kvcache_request_length_tokens", length="typical"), remaining(lab)
        assert lab.value("kvcache_request_length_tokens", length="p95") != 200
        assert lab.value("kvcache_exhaustion_seconds") is None
        assert lab.value("kvcache_offered_load_ratio") is None
    assert seen["nothing came"] == (None, None)
    # As long as the longest: 8192 tokens are 512 blocks.
    assert seen["first one runs"] == (8192, 1)
    length, left = seen["first one ended"]
    assert length == 1500
    # 94 blocks each, and 5 % more; of the old run's kind there would be 70.
    assert left in (8, 9, 10)


def test_max_num_active_seqs_caps_seats(upstream: Upstream) -> None:
    """The smaller of the two flags is the number of seats."""
    lab = lab_of(upstream, lengths=(160,), max_num_seqs=32, max_num_active_seqs=8)
    for _ in polls(upstream, lab, *[traffic_page(used=50, running=5, finished=20 + 4 * tick) for tick in range(3)]):
        assert lab.value("kvcache_request_slots", length="typical") == 8
        assert lab.value("kvcache_request_slots", length="160") == 8
        assert remaining(lab) == remaining(lab, "160") == 3
        assert remaining(lab, "max") == 1
        assert binding_limit(lab) == "max_num_seqs"


@pytest.mark.parametrize(("seqs", "active"), [(None, 8), (8, 32)])
def test_the_smaller_or_the_only_flag_is_the_number_of_seats(upstream: Upstream, seqs: int | None, active: int) -> None:
    lab = lab_of(upstream, max_num_seqs=seqs, max_num_active_seqs=active)
    show(upstream, traffic_page(used=50, running=5, finished=20))
    lab.poll()
    assert remaining(lab) == 3


def test_watermark_keeps_blocks_free(upstream: Upstream) -> None:
    """A request is admitted only while 5 % of the pool stay free behind it."""
    show(upstream, traffic_page(used=400, running=0, output=1))
    without, with_watermark = lab_of(upstream, lengths=(160,)).poll(), lab_of(upstream, lengths=(160,), watermark=0.05).poll()
    assert (remaining(without, "160"), remaining(with_watermark, "160")) == (60, 55)
    assert (remaining(without, "max"), remaining(with_watermark, "max")) == (1, 1)
    assert with_watermark.value("kvcache_headroom_blocks") == 600

    # One of the longest takes 512 blocks: they are there, but not with 50 more.
    show(upstream, traffic_page(used=450, running=0, output=1))
    assert (remaining(without.poll(), "max"), remaining(with_watermark.poll(), "max")) == (1, 0)


def test_watermark_keeps_blocks_free_of_typical_requests(upstream: Upstream) -> None:
    """Requests that do not grow, so that nothing but the moment of admission counts."""
    show(upstream, traffic_page(used=400, running=0, finished=20, output=1))
    without, with_watermark = lab_of(upstream).poll(), lab_of(upstream, watermark=0.05).poll()
    more, fewer = remaining(without), remaining(with_watermark)
    assert more is not None
    assert fewer is not None
    assert fewer / more == pytest.approx(550 / 600, abs=1 / more)
    slots = [lab.value("kvcache_request_slots", length="typical") for lab in (without, with_watermark)]
    assert slots[0] is not None
    assert slots[1] is not None
    assert slots[1] / slots[0] == pytest.approx(0.95, abs=1 / slots[0])


def test_watermark_of_a_nearly_full_engine_leaves_none(upstream: Upstream) -> None:
    lab = lab_of(upstream, lengths=(160,), watermark=0.05)
    for _ in polls(upstream, lab, *[traffic_page(used=945, running=80, finished=20 + 8 * tick) for tick in range(3)]):
        assert set(lab.samples("kvcache_remaining_request_slots").values()) == {0}
        assert lab.value("kvcache_headroom_ratio") == 0


def test_figures_of_typical_traffic_agree(upstream: Upstream) -> None:
    """No more than prompts fit now and than whole requests fit into the empty engine; the ratio is that of the two figures."""
    lab = lab_of(upstream)
    for _ in polls(upstream, lab, *[traffic_page(used=200, running=20, finished=20 + 10 * tick) for tick in range(30)]):
        left, slots, ratio = (
            remaining(lab),
            lab.value("kvcache_request_slots", length="typical"),
            lab.value("kvcache_headroom_ratio"),
        )
        assert left is not None
        assert slots is not None
        assert 0 < left <= 800 / 10
        assert left <= slots <= 1000 / 12.5
        assert ratio == pytest.approx(left / slots)
    load = lab.value("kvcache_offered_load_ratio")
    assert load == pytest.approx(0.2, rel=0.25)
    assert lab.value("kvcache_exhaustion_seconds") == math.inf
