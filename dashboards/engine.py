"""The engine board: for the person on call, one engine (or the data-parallel ranks of one server)."""

from __future__ import annotations

from dashboards.colors import (
    BAD,
    BLUE,
    GOOD,
    GRAY,
    GREEN,
    LIMITS,
    NEUTRAL,
    ORANGE,
    PURPLE,
    SKY,
    STATES,
    VERMILLION,
    WATCH,
)
from dashboards.common import ENGINE_UID, Board, Row, firing, length_variable, shared_variables
from dashboards.panels import SHOWN_SECONDS, Column, Look, Query, bars, codes, lines, memory, numbers, rows, timeline
from dashboards.promql import FOR_CAPACITY, PAGE, SCOPE, coded, select
from dashboards.rules import alert_threshold

_TARGET = f'{SCOPE}, target="$target"'
_ENGINE = f'{_TARGET}, engine=~"$engine"'
_ON_ITS_GPUS = f" and on ({PAGE}, uuid) " + select("kvcache_engine_gpu_info", _ENGINE)

# None at all is what users feel; little is what the alert speaks of.
_HEADROOM = ((None, BAD), (0.01, WATCH), (alert_threshold("KVCacheHeadroomLow"), GOOD))
_EXHAUSTION = ((None, BAD), (alert_threshold("KVCacheExhaustionPredicted"), GOOD))
_YES_NO = {"0": ("no", GOOD), "1": ("yes", BAD)}
_DOWN = "No data: the engine does not answer, or the exporter is not scraped."


def engine_board() -> Board:
    """What fits, what binds, when it is full, who waits; then why."""
    return Board(
        uid=ENGINE_UID,
        description="One engine: how many more requests fit, what binds, when it is full, who waits, and why.",
        since="now-1h",
        variables=[*shared_variables(one_target=True), length_variable()],
        # Alerts about a source of the target have no engine.
        alerts=firing(f'{_TARGET}, engine=~"$engine|"'),
        rows=[_answers(), _load(), _users(), _gpus(), _what_if(), _trust()],
    )


def _engine(metric: str, *matchers: str) -> str:
    return select(metric, _ENGINE, *matchers)


def _slots(length: str) -> str:
    return _engine("kvcache_remaining_request_slots", f'length="{length}"')


def _waiting() -> str:
    # As the rule kvcache:requests_waiting_for_capacity:sum, but of now, and there without the rules, too.
    return f"sum without (reason) ({_engine('kvcache_requests_waiting', FOR_CAPACITY)})"


def _answers() -> Row:
    return Row(
        [
            numbers(
                Look(
                    title="How many more requests fit?",
                    description=(
                        "Further requests of the kind that comes that fit now without waiting and without preempting any. "
                        "Predicted from the requests of late; until the first has finished, requests of max_model_len are "
                        "counted. One number a data-parallel rank. Worry at 0 while requests wait. No data: usage is not "
                        "known, or the engine sleeps, is frozen or does not answer."
                    ),
                    unit="none",
                    decimals=0,
                    steps=((None, BAD), (1, GOOD)),
                    width=4,
                    height=6,
                ),
                Query(f"{_slots('typical')} or ignoring (length) {_slots('max')}", "engine {{engine}}"),
            ),
            numbers(
                Look(
                    title="What binds?",
                    description=(
                        "What a growing load meets first: blocks of the KV cache, seats (max_num_seqs), states of a hybrid "
                        "model, requests that are deferred and hold seats, or compute (a queue stays although there is room). "
                        "Worry when requests wait: more cache helps only where blocks or state slots bind. No data: it cannot "
                        "be told, mostly since max_num_seqs is not configured while requests wait."
                    ),
                    unit="none",
                    mappings=codes(LIMITS.values()),
                    width=4,
                    height=6,
                ),
                Query(coded("kvcache_binding_limit", _ENGINE, "limit", LIMITS), "engine {{engine}}"),
            ),
            numbers(
                Look(
                    title="When is it full?",
                    description=(
                        "Predicted time until no typical request fits into the KV cache, at the present trend of traffic; "
                        "'never' when the present traffic does not fill it. Worry below ten minutes, as the alert "
                        "KVCacheExhaustionPredicted does; 0 is harmless while nobody waits. No data: traffic has not been "
                        "seen for long enough, or config.json is not known."
                    ),
                    unit="s",
                    decimals=1,
                    steps=_EXHAUSTION,
                    mappings={"Infinity": ("never", GOOD)},
                    width=4,
                    height=6,
                ),
                Query(_engine("kvcache_exhaustion_seconds"), "engine {{engine}}"),
            ),
            numbers(
                Look(
                    title="Is anyone waiting?",
                    description=(
                        "Requests in the queue that wait for blocks or a seat; those that wait for a transfer, an adapter or "
                        "a grammar are not counted. Worry when it stays above 0: users see a slow first token. " + _DOWN
                    ),
                    unit="none",
                    decimals=0,
                    steps=((None, GOOD), (1, BAD)),
                    width=4,
                    height=6,
                ),
                Query(_waiting(), "engine {{engine}}"),
            ),
            numbers(
                Look(
                    title="What state is it in?",
                    description=(
                        "serving: it has requests. idle: none. starting: it has not reported a usage yet. asleep: its cache "
                        "is given back. frozen: it has requests and no figure moves. Worry at frozen: it is stuck or dead "
                        "behind a server that still answers. " + _DOWN
                    ),
                    unit="none",
                    mappings=codes(STATES.values()),
                    width=4,
                    height=6,
                ),
                Query(coded("kvcache_engine_state", _ENGINE, "state", STATES), "engine {{engine}}"),
            ),
            bars(
                Look(
                    title="How much room is left?",
                    description=(
                        "Remaining over all slots for typical requests: how much more of this traffic fits. Worry below 10 % "
                        "while the load rises, as the alert KVCacheHeadroomLow does; a low level that stays is good use. No "
                        "data: the engine has had no request yet, sleeps, is frozen or does not answer."
                    ),
                    unit="percentunit",
                    decimals=0,
                    steps=_HEADROOM,
                    width=4,
                    height=6,
                    minimum=0,
                    maximum=1,
                ),
                Query(_engine("kvcache_headroom_ratio"), "engine {{engine}}"),
            ),
        ]
    )


def _load() -> Row:
    return Row(
        [
            lines(
                Look(
                    title="How many more fit, by length, and how many run and wait?",
                    description=(
                        "Remaining slots for typical, long (p95), longest (max_model_len) and configured lengths, beside the "
                        "requests that run and those that wait for room. Worry when the slots of typical requests go to 0 and "
                        "the queue grows. No data: usage is not known, or the engine sleeps, is frozen or does not answer; "
                        "p95 and typical need a request that has finished."
                    ),
                    unit="none",
                    decimals=0,
                    width=12,
                    height=9,
                ),
                Query(_slots("typical"), "fits: {{length}}, engine {{engine}}", GREEN),
                Query(_slots("p95"), "fits: {{length}}, engine {{engine}}", SKY),
                Query(_slots("max"), "fits: {{length}}, engine {{engine}}", PURPLE),
                Query(
                    _engine("kvcache_remaining_request_slots", 'length!~"typical|p95|max"'),
                    "fits: {{length}} tokens, engine {{engine}}",
                    ORANGE,
                ),
                Query(_engine("kvcache_requests_running"), "running, engine {{engine}}", BLUE),
                Query(_waiting(), "waiting, engine {{engine}}", VERMILLION),
            ),
            lines(
                Look(
                    title="How full is the cache, in blocks?",
                    description=(
                        "Blocks that live requests hold, below the usable ones. vLLM gives cache in whole blocks, so this is "
                        "the exact figure. Worry when it touches the capacity: then requests wait or are preempted. No data: "
                        "the block count is not reported and cannot be computed, or the engine does not answer."
                    ),
                    unit="none",
                    decimals=0,
                    width=6,
                    height=9,
                ),
                Query(_engine("kvcache_used_blocks"), "used, engine {{engine}}", ORANGE),
                Query(_engine("kvcache_capacity_blocks"), "capacity, engine {{engine}}", GRAY, dashed=True),
            ),
            lines(
                Look(
                    title="How full is the cache, in bytes?",
                    description=(
                        "The same in bytes, over all ranks. NVML cannot show this: vLLM takes its pool at start. Worry as for "
                        "blocks. No data: config.json is not known or its architecture is not, so that bytes would be a guess."
                    ),
                    unit="bytes",
                    decimals=1,
                    width=6,
                    height=9,
                ),
                Query(_engine("kvcache_used_bytes"), "used, engine {{engine}}", ORANGE),
                Query(_engine("kvcache_capacity_bytes"), "capacity, engine {{engine}}", GRAY, dashed=True),
            ),
            lines(
                Look(
                    title="Is more asked for than fits?",
                    description=(
                        "Blocks that the present arrivals, lengths and residence times need in the long run (Little's law), "
                        "over the usable ones. Worry above 100 %: the queue grows for as long as it lasts. No data: traffic "
                        "has not been seen for long enough, or config.json is not known."
                    ),
                    unit="percentunit",
                    decimals=0,
                    steps=((None, GOOD), (1, BAD)),
                ),
                Query(_engine("kvcache_offered_load_ratio"), "offered load, engine {{engine}}", BLUE),
            ),
            lines(
                Look(
                    title="How long until it is full?",
                    description=(
                        "The forecast of the row above over time. An hour at most is drawn, so a line at the top is an hour "
                        "or more, or never. Worry below the dashed ten minutes. No data: traffic has not been seen for long "
                        "enough, or config.json is not known."
                    ),
                    unit="s",
                    decimals=0,
                    steps=_EXHAUSTION,
                    minimum=0,
                    maximum=SHOWN_SECONDS,
                ),
                Query(f"clamp_max({_engine('kvcache_exhaustion_seconds')}, {SHOWN_SECONDS})", "full in, engine {{engine}}", BLUE),
            ),
            timeline(
                Look(
                    title="What bound, and in which state was it?",
                    description=(
                        "The limit that a growing load would have met first, and the state of the engine, over time. Worry "
                        "when the state is frozen, or the limit changes to compute: then more cache would not help. No data: "
                        "the limit cannot be told, or the engine does not answer."
                    ),
                    unit="none",
                    mappings=codes(LIMITS.values())
                    # The states stand on the same panel, so their codes begin above those of the limits.
                    | {str(_STATES_FROM + place): text for place, text in enumerate(STATES.values(), start=1)},
                ),
                Query(coded("kvcache_binding_limit", _ENGINE, "limit", LIMITS), "limit, engine {{engine}}"),
                Query(f"{_STATES_FROM} + {coded('kvcache_engine_state', _ENGINE, 'state', STATES)}", "state, engine {{engine}}"),
            ),
        ],
        "Room and load",
    )


_STATES_FROM = 10


def _users() -> Row:
    first, each = "kvcache_time_to_first_token_seconds", "kvcache_time_per_output_token_seconds"
    hit, shared = _engine("kvcache_prefix_cache_hit_ratio"), _engine("kvcache_prefix_cache_shared_ratio")
    return Row(
        [
            lines(
                Look(
                    title="How long do users wait for the first token?",
                    description=(
                        "Time from the arrival of a request to its first token, of the requests of late: the queue and the "
                        "prefill. Worry when it rises as headroom falls: then requests wait for room. No data: no request has "
                        "started within the exporter's window, or the engine does not answer."
                    ),
                    unit="s",
                    decimals=2,
                ),
                Query(_engine(first, 'quantile="0.5"'), "half below, engine {{engine}}", SKY),
                Query(_engine(first, 'quantile="0.95"'), "95 % below, engine {{engine}}", BLUE),
            ),
            lines(
                Look(
                    title="How fast do tokens come then?",
                    description=(
                        "Time between two output tokens of a request, of late: the decoding. Worry when it rises with the "
                        "number of running requests while headroom is there: then the engine is short of bandwidth or "
                        "compute, not of cache. No data: no token was made within the exporter's window, or the engine does "
                        "not answer."
                    ),
                    unit="s",
                    decimals=3,
                ),
                Query(_engine(each, 'quantile="0.5"'), "half below, engine {{engine}}", SKY),
                Query(_engine(each, 'quantile="0.95"'), "95 % below, engine {{engine}}", BLUE),
            ),
            lines(
                Look(
                    title="How much room was left?",
                    description=(
                        "Remaining over all slots for typical requests, beside what users saw. Worry below the dashed 10 % "
                        "while the load rises. No data: the engine has had no request yet, sleeps, is frozen or does not "
                        "answer."
                    ),
                    unit="percentunit",
                    decimals=0,
                    steps=_HEADROOM,
                    minimum=0,
                    maximum=1,
                ),
                Query(_engine("kvcache_headroom_ratio"), "headroom, engine {{engine}}", GREEN),
            ),
            lines(
                Look(
                    title="Do running requests lose their cache?",
                    description=(
                        "Preemptions a second over five minutes: a request lost its blocks to others, and its tokens are "
                        "computed again. Single ones are normal on a full engine. Worry above the dashed 0.1 a second, as the "
                        "alert KVCachePreemptionStorm does. " + _DOWN
                    ),
                    unit="cps",
                    decimals=2,
                    steps=((None, GOOD), (alert_threshold("KVCachePreemptionStorm"), BAD)),
                ),
                Query(f"rate({_engine('kvcache_preemptions_total')}[5m])", "preemptions, engine {{engine}}", VERMILLION),
            ),
            lines(
                Look(
                    title="How long are the requests?",
                    description=(
                        "Prompt and output tokens of the requests of late: the mean (typical) and the 95th percentile. Slots "
                        "are counted for these lengths, so a change here changes them. Worry when typical comes near p95 of "
                        "before: fewer will fit. No data: no request has finished yet, or the engine does not answer."
                    ),
                    unit="none",
                    decimals=0,
                ),
                Query(
                    _engine("kvcache_request_length_tokens", 'length="typical"'), "{{length}} (mean), engine {{engine}}", GREEN
                ),
                Query(_engine("kvcache_request_length_tokens", 'length="p95"'), "{{length}}, engine {{engine}}", SKY),
            ),
            lines(
                Look(
                    title="What does the prefix cache save?",
                    description=(
                        "hit: share of prompt tokens that is not computed. shared: the part of it that needs no block either, "
                        "since a running request holds it. Worry when it drops: prompts take more time and, where shared "
                        "drops, more room. No data: prefix caching is off, no prompt has come, or vLLM is older than 0.9."
                    ),
                    unit="percentunit",
                    decimals=0,
                    minimum=0,
                    maximum=1,
                ),
                Query(hit, "hit, engine {{engine}}", BLUE),
                Query(shared, "shared, engine {{engine}}", GREEN),
            ),
        ],
        "What users feel, and why",
    )


def _gpus() -> Row:
    return Row(
        [
            memory(
                Look(
                    title="What fills the GPUs of this engine?",
                    description=(
                        "Memory of all GPUs that the engine runs on, by what holds it; the parts add up to the dashed total. "
                        "kv_cache is the whole pool, used or not, and free is not room for requests. Worry when "
                        "other_processes or overhead grows: a start of the engine then gets less, or fails. No data: there is "
                        "no NVML here, or nothing tells which GPUs the engine is on (set gpus of the target)."
                    ),
                    unit="bytes",
                    decimals=1,
                    width=16,
                    height=9,
                    minimum=0,
                ),
                SCOPE,
                _ON_ITS_GPUS,
            ),
            lines(
                Look(
                    title="How much of the memory bandwidth does decoding take?",
                    description=(
                        "Share of the peak memory bandwidth of the engine's GPUs that decoding reads: weights and live cache. "
                        "Worry near 100 %: tokens then come slower with each further request. No data: mixtures of experts "
                        "that do not report it, MIG instances, or GPUs, weights or layout not known."
                    ),
                    unit="percentunit",
                    decimals=0,
                    height=9,
                    minimum=0,
                    maximum=1,
                ),
                Query(_engine("kvcache_memory_bandwidth_utilization_ratio"), "{{source}}, engine {{engine}}", BLUE),
            ),
        ],
        "What fills the GPUs",
    )


def _what_if() -> Row:
    blocks = _engine("kvcache_capacity_blocks")
    request = f"({_engine('kvcache_bytes_per_token')} * $length + {_engine('kvcache_bytes_per_request')})"
    block = f"({_engine('kvcache_capacity_bytes')} / {blocks})"
    blocks_a_request = f"ceil({request} / {block})"
    longest = _engine("kvcache_request_length_tokens", 'length="max"')
    allowed = f"unless ignoring (length) {longest} < $length"
    rest = (
        "Reckoned here from bytes a token, rounded up to whole blocks and down to whole requests; what running requests will "
        "still grow is not subtracted, nor are seats (max_num_seqs), and models with several kinds of attention round up in "
        "each of them. "
    )
    no_data = "No data: no config.json, or the length is above max_model_len: the engine would refuse it."
    return Row(
        [
            numbers(
                Look(
                    title="How many requests of $length tokens does the empty engine hold?",
                    description=(
                        f"All usable blocks over those of one request of the length in the box above. {rest}Worry when it is "
                        f"below the number that is meant to run at once. {no_data}"
                    ),
                    unit="none",
                    decimals=0,
                    height=5,
                ),
                Query(f"floor({blocks} / {blocks_a_request}) {allowed}", "engine {{engine}}"),
            ),
            numbers(
                Look(
                    title="How many more requests of $length tokens fit now?",
                    description=(
                        f"Free bytes over those of one request of the length in the box above. {rest}Worry at 0. Where this "
                        f"length is among request_lengths of the exporter, its own figure is the better one. {no_data}"
                    ),
                    unit="none",
                    decimals=0,
                    steps=((None, BAD), (1, GOOD)),
                    height=5,
                ),
                Query(
                    f"floor({_engine('kvcache_headroom_bytes')} / ({blocks_a_request} * {block})) {allowed}", "engine {{engine}}"
                ),
            ),
            numbers(
                Look(
                    title="How much cache does one request of $length tokens take?",
                    description=(
                        f"Bytes over all ranks, in whole blocks. {rest}Nothing to worry about by itself: it is what the two "
                        f"numbers beside it rest on. {no_data}"
                    ),
                    unit="bytes",
                    decimals=1,
                    steps=((None, NEUTRAL),),
                    height=5,
                ),
                Query(f"{blocks_a_request} * {block} {allowed}", "engine {{engine}}"),
            ),
        ],
        "What if requests had $length tokens",
    )


def _trust() -> Row:
    up = select("kvcache_up", _TARGET)
    of_node = select("kvcache_up", SCOPE, 'target=""') + f" and on ({PAGE}) {up}"
    mismatch = alert_threshold("KVCacheCapacityMismatch")
    errors = select("kvcache_poll_errors_total", _TARGET)
    return Row(
        [
            timeline(
                Look(
                    title="Can each source be read?",
                    description=(
                        "vllm is the engine's metrics page, vllm_models and vllm_version its other pages, model_config the "
                        "model's config.json; nvml, processes and pod_resources are those of the node. Worry when one fails: "
                        "what rests on it is absent then, bytes and slots for model_config, GPU series for nvml. No data: a "
                        "source was never tried, or the exporter is not scraped."
                    ),
                    unit="none",
                    mappings={"0": ("fails", BAD), "1": ("reads", GOOD)},
                ),
                Query(up, "{{source}}"),
                Query(of_node, "node: {{source}}"),
            ),
            lines(
                Look(
                    title="Is the computed capacity the one that the engine reports?",
                    description=(
                        "Tokens computed from config.json over those that the engine reports, minus 1. Worry outside of the "
                        "dashed 2 % on either side, as the alert KVCacheCapacityMismatch does: config.json or a setting of "
                        "the target is not the engine's, and bytes, slots and forecasts are wrong. No data: one of the two is "
                        "not known."
                    ),
                    unit="percentunit",
                    decimals=1,
                    steps=((None, BAD), (-mismatch, GOOD), (mismatch, BAD)),
                    at_least=(-2 * mismatch, 2 * mismatch),
                ),
                Query(_engine("kvcache_capacity_mismatch_ratio"), "computed vs reported, engine {{engine}}", BLUE),
            ),
            lines(
                Look(
                    title="How often does reading fail, and why?",
                    description=(
                        "Failed tries to read a source of this target, and single figures without a usable value, a second "
                        "over five minutes, by source and reason. Worry when it does not go back to 0. No data: the exporter "
                        "is not scraped, or does not know the target."
                    ),
                    unit="cps",
                    decimals=2,
                ),
                # A reason has no series before it first comes: a source without any is at 0.
                Query(f"rate({errors}[5m]) or on ({PAGE}, source) 0 * {up}", "{{source}} {{reason}}"),
            ),
            numbers(
                Look(
                    title="Are the engine's own figures doubtful?",
                    description=(
                        "usage: it cannot be true of the requests that run, and no slots are shown. several: the page held "
                        "several samples of one gauge, and the largest was taken. Worry at yes: what this board shows is "
                        "wrong or too high. " + _DOWN
                    ),
                    unit="none",
                    mappings=_YES_NO,
                    width=8,
                    height=6,
                ),
                Query(_engine("kvcache_usage_suspect"), "usage, engine {{engine}}"),
                Query(_engine("kvcache_reading_ambiguous"), "several, engine {{engine}}"),
            ),
            rows(
                Look(
                    title="What do the numbers rest on?",
                    description=(
                        "Where the exporter has its facts from: the block count, the layout of the cache and the weights, and "
                        "the engine's own settings. An empty cell is not known. Worry where layout is assumed: bytes and "
                        "slots may then be wrong. " + _DOWN
                    ),
                    unit="none",
                    width=16,
                    height=6,
                ),
                [
                    Column("engine", "engine"),
                    Column("vllm_version", "vLLM"),
                    Column("source", "blocks from"),
                    Column("layout_source", "layout"),
                    Column("weights_source", "weights from"),
                    Column("attention", "attention"),
                    Column("cache_dtype", "cache type"),
                    Column("block_size", "block size"),
                    Column("max_num_seqs", "max_num_seqs"),
                    Column("tensor_parallel_size", "tensor parallel"),
                    Column("prefix_caching", "prefix caching"),
                ],
                Query(f"max by ({', '.join(_INFO)}) ({_engine('kvcache_engine_info')})"),
                sort_by="engine",
            ),
        ],
        "Can these numbers be trusted?",
    )


_INFO = (
    "engine",
    "vllm_version",
    "source",
    "layout_source",
    "weights_source",
    "attention",
    "cache_dtype",
    "block_size",
    "max_num_seqs",
    "tensor_parallel_size",
    "prefix_caching",
)
