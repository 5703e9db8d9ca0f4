"""The node board: GPUs and engines on the page of one exporter."""

from __future__ import annotations

from dashboards.colors import (
    BAD,
    BLUE,
    GOOD,
    GRAY,
    NEUTRAL,
    ORANGE,
    PURPLE,
    THROTTLE_REASONS,
    VERMILLION,
    WATCH,
    YELLOW,
)
from dashboards.common import ENGINE_UID, NODE_UID, Board, Row, firing, instance_variable, repeated, shared_variables, url
from dashboards.panels import Column, Look, Query, bars, codes, lines, memory, numbers, rows, timeline
from dashboards.promql import FOR_CAPACITY, PAGE, SCOPE, coded, select
from dashboards.rules import alert_threshold

_NODE = f'{SCOPE}, instance="$instance"'
_GPU = f"{PAGE}, gpu, uuid"

# None at all is what users feel; little is what the alert speaks of.
_HEADROOM = ((None, BAD), (0.01, WATCH), (alert_threshold("KVCacheHeadroomLow"), GOOD))
_OTHERS = ((None, GOOD), (alert_threshold("KVCacheForeignProcess"), BAD))
_NONE_IS_GOOD = ((None, GOOD), (1, BAD))
_NO_NVML = "No data: there is no NVML on this node, it fails, or the exporter is not scraped."
# The first GPUs of a node, told apart; those beyond have Grafana's own colors.
_GPU_COLORS = {
    f"GPU {index}": color for index, color in enumerate((BLUE, ORANGE, NEUTRAL, VERMILLION, PURPLE, GOOD, YELLOW, GRAY))
}


def node_board() -> Board:
    """What fills each GPU, who is on it, and whether it is well."""
    return Board(
        uid=NODE_UID,
        description="One node: what fills each GPU, which engines are on it, and whether any GPU is lost or held back.",
        since="now-1h",
        # It is about all of the node: model and target choose the node, and engine is kept for the way back.
        variables=[
            *shared_variables(hidden=("engine",)),
            instance_variable(),
            repeated("gpu", select("kvcache_gpu_info", _NODE)),
        ],
        alerts=firing(_NODE),
        rows=[_answers(), _memory(), _owners(), _health()],
    )


def _on_node(metric: str, *matchers: str) -> str:
    return select(metric, _NODE, *matchers)


def _answers() -> Row:
    return Row(
        [
            numbers(
                Look(
                    title="How many GPUs answer?",
                    description=(
                        "GPUs of this machine that NVML shows and that answer, MIG instances not counted. Worry when it is "
                        f"fewer than the machine has. {_NO_NVML}"
                    ),
                    unit="none",
                    decimals=0,
                    steps=((None, BAD), (1, GOOD)),
                    width=4,
                    height=5,
                ),
                Query(_on_node("kvcache_gpus")),
            ),
            numbers(
                Look(
                    title="Is a GPU lost?",
                    description=(
                        "GPUs that were seen, or are counted or configured, and do not answer. Worry above 0, as the alert "
                        f"KVCacheGpuLost does: an engine on it is dead or about to be. {_NO_NVML}"
                    ),
                    unit="none",
                    decimals=0,
                    steps=_NONE_IS_GOOD,
                    width=4,
                    height=5,
                ),
                Query(f"sum (1 - {_on_node('kvcache_gpu_up')})"),
            ),
            numbers(
                Look(
                    title="Is a GPU held back?",
                    description=(
                        "GPUs that run slower now for their power limit, their temperature or the board. Worry when it stays: "
                        "tokens come slower, so requests hold their cache for longer. No data: NVML does not tell, or is not "
                        "there."
                    ),
                    unit="none",
                    decimals=0,
                    steps=((None, GOOD), (1, WATCH)),
                    width=4,
                    height=5,
                ),
                Query(f"sum (max by (gpu, uuid) ({_on_node('kvcache_gpu_throttled')}))"),
            ),
            numbers(
                Look(
                    title="Does anyone else use a GPU?",
                    description=(
                        "Memory that processes that are no engine's hold, on the GPU where they hold most. Worry above 1 GB "
                        "on a GPU with an engine, as the alert KVCacheForeignProcess does. No data: other processes cannot be "
                        "told from the engines', as in a container that does not see the host's, or there is no NVML."
                    ),
                    unit="bytes",
                    decimals=1,
                    steps=_OTHERS,
                    width=4,
                    height=5,
                ),
                Query("max (" + _on_node("kvcache_gpu_memory_component_bytes", 'component="other_processes"') + ")"),
            ),
            numbers(
                Look(
                    title="How many sources fail?",
                    description=(
                        "Sources of this exporter (engine pages, config.json, NVML and others) whose last reading failed. "
                        "Worry above 0: what rests on them is absent. No data: the exporter is not scraped."
                    ),
                    unit="none",
                    decimals=0,
                    steps=_NONE_IS_GOOD,
                    width=4,
                    height=5,
                ),
                Query(f"sum (1 - {_on_node('kvcache_up')})"),
            ),
            bars(
                Look(
                    title="Which engine is short?",
                    description=(
                        "Remaining over all slots for typical requests. Worry below 10 % while its load rises. No data: no "
                        "engine of this node has had a request yet, or none answers."
                    ),
                    unit="percentunit",
                    decimals=0,
                    steps=_HEADROOM,
                    width=4,
                    height=5,
                    minimum=0,
                    maximum=1,
                ),
                Query(_on_node("kvcache_headroom_ratio"), "{{target}} engine {{engine}}"),
            ),
        ]
    )


def _memory() -> Row:
    panel = memory(
        Look(
            title="What fills GPU $gpu?",
            description=(
                "Memory of the GPU by what holds it; the parts add up to the dashed total. kv_cache is the engines' whole "
                "pools, used or not, and free is not room for requests. unknown stands for overhead and all else that cannot "
                "be told apart. Worry when other_processes grows. No data: NVML has no figures for this GPU, as where it "
                "shares the system's memory or is cut into MIG instances, which have their own."
            ),
            unit="bytes",
            decimals=1,
            width=24,
            height=9,
            minimum=0,
        ),
        f'{_NODE}, gpu=~"$gpu"',
    )
    panel.repeat("gpu")
    panel.repeat_direction("h")
    panel.max_per_row(4)
    return Row([panel], "What fills each GPU")


def _owners() -> Row:
    named = f"{_on_node('kvcache_gpu_up')} * on ({_GPU}) group_left (name, mig_profile) {_on_node('kvcache_gpu_info')}"
    owned = f"{_on_node('kvcache_engine_gpu_info')} * on ({_GPU}) group_left (name, mig_profile) ({named})"
    # A GPU that is lost can be without a name, and one can be without an engine: both have a row.
    every = f"({owned}) or on ({_GPU}) ({named}) or on ({_GPU}) {_on_node('kvcache_gpu_up')}"
    kept = "gpu, uuid, name, mig_profile, target, engine, model_name, method"
    return Row(
        [
            rows(
                Look(
                    title="Which GPUs are there, and which engine is on each?",
                    description=(
                        "A row a GPU or MIG instance and engine on it. Known by: configured, the kubelet's pod_resources, or "
                        "process (the engine's process holds memory there); an empty cell is a GPU whose engine is not known, "
                        f"or that has none. Worry at lost. {_NO_NVML}"
                    ),
                    unit="none",
                    width=24,
                    height=8,
                    no_value="none",
                ),
                [
                    Column("gpu", "GPU"),
                    Column("name", "name"),
                    Column("mig_profile", "MIG profile"),
                    Column("Value", "answers", mappings={"0": ("lost", BAD), "1": ("yes", GOOD)}, steps=((None, BAD), (1, GOOD))),
                    Column("target", "target", link=("Engine board", url(ENGINE_UID, target="target", engine="engine"))),
                    Column("engine", "engine"),
                    Column("model_name", "model"),
                    Column("method", "known by"),
                    Column("uuid", "uuid"),
                ],
                Query(f"max by ({kept}) ({every})"),
                sort_by="GPU",
            ),
            lines(
                Look(
                    title="How many more typical requests fit on each engine?",
                    description=(
                        "Remaining slots for typical requests, engine by engine; they are not added up, since a request "
                        "cannot be split. Worry when one is at 0 while another has many: requests are not spread evenly. No "
                        "data: no engine of this node has had a request yet, or none answers."
                    ),
                    unit="none",
                    decimals=0,
                    width=12,
                ),
                Query(_on_node("kvcache_remaining_request_slots", 'length="typical"'), "{{target}} engine {{engine}}"),
            ),
            lines(
                Look(
                    title="Who waits for room, on which engine?",
                    description=(
                        "Requests in the queue that wait for blocks or a seat, engine by engine. Worry when one stays above "
                        "0. No data: no engine answers."
                    ),
                    unit="none",
                    decimals=0,
                    width=12,
                ),
                Query(
                    f"sum without (reason) ({_on_node('kvcache_requests_waiting', FOR_CAPACITY)})",
                    "{{target}} engine {{engine}}",
                ),
            ),
        ],
        "Engines and their GPUs",
    )


def _health() -> Row:
    return Row(
        [
            timeline(
                Look(
                    title="Which GPU was lost, and when?",
                    description=f"Whether each GPU answers NVML. Worry at lost, as the alert KVCacheGpuLost does. {_NO_NVML}",
                    unit="none",
                    mappings={"0": ("lost", BAD), "1": ("answers", GOOD)},
                ),
                # MIG instances have the index of their GPU.
                Query(f"min by (gpu) ({_on_node('kvcache_gpu_up')})", "GPU {{gpu}}"),
            ),
            timeline(
                Look(
                    title="Which GPU was held back, and why?",
                    description=(
                        "Why a GPU runs slower than it could: its power limit, its temperature, the board or the power "
                        "supply; the gravest if there are several. Worry at all but the power limit, which is normal at full "
                        "load. No data: NVML does not tell, or is not there."
                    ),
                    unit="none",
                    mappings={"0": ("full speed", GOOD)} | codes(THROTTLE_REASONS.values()),
                ),
                Query(f"max by (gpu) ({coded('kvcache_gpu_throttled', _NODE, 'reason', THROTTLE_REASONS)})", "GPU {{gpu}}"),
            ),
            lines(
                Look(
                    title="Do GPUs report errors?",
                    description=(
                        "Uncorrected memory errors and Xid errors within an hour. Worry at any: the driver may take memory or "
                        "the whole GPU away. No data: ECC is off, no Xid has ever come, or there is no NVML."
                    ),
                    unit="none",
                    decimals=0,
                    steps=_NONE_IS_GOOD,
                ),
                Query(f"increase({_on_node('kvcache_gpu_ecc_uncorrected_errors_total')}[1h])", "GPU {{gpu}}: ECC", VERMILLION),
                Query(f"increase({_on_node('kvcache_gpu_xid_errors_total')}[1h])", "GPU {{gpu}}: Xid {{xid}}", BLUE),
            ),
            lines(
                Look(
                    title="How busy is each GPU?",
                    description=(
                        "Share of time in which any kernel ran; it says nothing of how much of the GPU that kernel used. "
                        "Worry at 0 while its engine has requests. No data: NVML does not tell, as on MIG instances, or is "
                        "not there."
                    ),
                    unit="percentunit",
                    decimals=0,
                    series_colors=_GPU_COLORS,
                    width=12,
                    minimum=0,
                    maximum=1,
                ),
                Query(_on_node("kvcache_gpu_utilization_ratio"), "GPU {{gpu}}"),
            ),
            lines(
                Look(
                    title="How busy is the memory of each GPU?",
                    description=(
                        "Share of time in which memory was read or written: not the share of its bandwidth, which the engine "
                        "board has. Nothing to worry about by itself: decoding is bound by memory. No data: NVML does not "
                        "tell, as on MIG instances, or is not there."
                    ),
                    unit="percentunit",
                    decimals=0,
                    series_colors=_GPU_COLORS,
                    width=12,
                    minimum=0,
                    maximum=1,
                ),
                Query(_on_node("kvcache_gpu_memory_controller_utilization_ratio"), "GPU {{gpu}}"),
            ),
        ],
        "Are the GPUs well?",
    )
