"""The fleet board: all engines by model, from the recording rules, so that it is fast however many there are."""

from __future__ import annotations

from dashboards.colors import BAD, GOOD, WATCH
from dashboards.common import ENGINE_UID, FLEET_UID, NODE_UID, Board, Row, firing, shared_variables, url
from dashboards.panels import SHOWN_SECONDS, Column, Look, Query, lines, numbers, rows
from dashboards.promql import ENGINES, SCOPE, select
from dashboards.rules import alert_threshold

# Records of a model are over all jobs, targets and engines: they have no such labels.
_MODELS = 'cluster=~"$cluster", namespace=~"$namespace", model_name=~"$model"'
_SOURCES = f'{SCOPE}, target=~"$target"'
_ALERTS = firing('cluster=~"$cluster", namespace=~"$namespace", job=~"$job|", model_name=~"$model|"')

_FLEET = ((None, WATCH), (alert_threshold("KVCacheFleetHeadroomLow"), GOOD))
_WORST = ((None, BAD), (0.01, WATCH), (alert_threshold("KVCacheHeadroomLow"), GOOD))
_EXHAUSTION = ((None, BAD), (alert_threshold("KVCacheExhaustionPredicted"), GOOD))
_NONE_IS_GOOD = ((None, GOOD), (1, BAD))
_NEVER = {"Infinity": ("never", GOOD)}
_NO_RECORDS = "No data: no engine answers, or the recording rules (alerts/kvcache.rules.yaml) are not loaded."
_BY_MODEL = "One line a model, cluster and namespace; the variables job, target and engine do not narrow it. "


def fleet_board() -> Board:
    """What is left of each model, which engine is worst off, and where batch work fits."""
    return Board(
        uid=FLEET_UID,
        description="All engines by model: what is left, which is worst off, when the first is full, and what is not watched.",
        since="now-6h",
        variables=shared_variables(),
        # One line an alert and model: with thousands of engines, one an engine would hide the graph.
        alerts=f"count by (alertname, severity, model_name) ({_ALERTS})",
        rows=[_answers(), _models(), _over_time(), _engines()],
    )


def _model(record: str) -> str:
    return select(f"model_name:{record}", _MODELS)


_REMAINING = _model("kvcache_remaining_request_slots:sum")
_TOTAL = _model("kvcache_request_slots:sum")
_WAITING = _model("kvcache_requests_waiting_for_capacity:sum")
_ROOM = _model("kvcache_headroom_ratio:fleet")
_WORST_ROOM = _model("kvcache_headroom_ratio:min")
_FIRST_FULL = _model("kvcache_exhaustion_seconds:min")
_BUSY = _model("kvcache_busy_engines:sum")
_ENGINE_COUNT = _model("kvcache_engines:count")
_BATCH = f"clamp_min({_REMAINING} - {_WAITING}, 0)"
# In the order of the table, where they become one row a model: for that none may have a name of its own.
_OF_A_MODEL = (_ENGINE_COUNT, _BUSY, _TOTAL, _REMAINING, _WAITING, _ROOM, _WORST_ROOM, _FIRST_FULL, _BATCH)


def _answers() -> Row:
    return Row(
        [
            numbers(
                Look(
                    title="Is any model short of room?",
                    description=(
                        "Remaining over all slots of the model that has least, all its replicas together. Worry below 15 % "
                        f"while traffic rises or requests wait, as the alert KVCacheFleetHeadroomLow does. {_NO_RECORDS}"
                    ),
                    unit="percentunit",
                    decimals=0,
                    steps=_FLEET,
                    width=4,
                    height=5,
                ),
                Query(f"min ({_ROOM})"),
            ),
            numbers(
                Look(
                    title="How is the worst engine off?",
                    description=(
                        "Remaining over all slots of the single engine that has least; no mean hides it. Worry below 10 % "
                        f"while its load rises: the table at the bottom names it. {_NO_RECORDS}"
                    ),
                    unit="percentunit",
                    decimals=0,
                    steps=_WORST,
                    width=4,
                    height=5,
                ),
                Query(f"min ({_WORST_ROOM})"),
            ),
            numbers(
                Look(
                    title="When is the first engine full?",
                    description=(
                        "The shortest forecast of all engines; 'never' when the present traffic fills none. Worry below ten "
                        f"minutes, as the alert KVCacheExhaustionPredicted does. {_NO_RECORDS}"
                    ),
                    unit="s",
                    decimals=1,
                    steps=_EXHAUSTION,
                    mappings=_NEVER,
                    width=4,
                    height=5,
                ),
                Query(f"min ({_FIRST_FULL})"),
            ),
            numbers(
                Look(
                    title="How many wait for room?",
                    description=(
                        "Requests of all engines that wait for blocks or a seat. Worry when it stays above 0 while slots are "
                        f"free elsewhere: then requests are not spread well. {_NO_RECORDS}"
                    ),
                    unit="none",
                    decimals=0,
                    steps=_NONE_IS_GOOD,
                    width=4,
                    height=5,
                ),
                Query(f"sum ({_WAITING})"),
            ),
            numbers(
                Look(
                    title="How many exporters are down?",
                    description=(
                        "Exporters that Prometheus cannot scrape. Worry above 0, as the alert KVCacheExporterDown does: "
                        "nobody is paged for their engines. No data: no exporter is in Prometheus at all, which is worse."
                    ),
                    unit="none",
                    decimals=0,
                    steps=_NONE_IS_GOOD,
                    width=4,
                    height=5,
                ),
                Query(f"sum (1 - {select('up', SCOPE)})"),
            ),
            numbers(
                Look(
                    title="How many sources fail?",
                    description=(
                        "Engine pages, config.json files, NVML and others that their exporter could not read last. Worry "
                        "above 0: the table at the bottom names them. No data: no exporter is scraped."
                    ),
                    unit="none",
                    decimals=0,
                    steps=_NONE_IS_GOOD,
                    width=4,
                    height=5,
                ),
                Query(f"sum (1 - {select('kvcache_up', _SOURCES)})"),
            ),
        ]
    )


def _models() -> Row:
    return Row(
        [
            rows(
                Look(
                    title="How is each model off?",
                    description=(
                        "A row a model, cluster and namespace. Engines are those that serve or are idle. Total and remaining "
                        "slots are for typical requests, all engines together; worst engine is the one with least room, and "
                        "first full the shortest forecast. Busy engines are those that the present requests fill, queue "
                        "included. For batch: remaining slots minus those that wait, at least 0. Worry where room is below 15 "
                        f"%, the worst engine below 10 %, or the forecast below ten minutes. {_NO_RECORDS}"
                    ),
                    unit="none",
                    width=24,
                    height=9,
                ),
                [
                    Column("model_name", "model"),
                    Column("cluster", "cluster"),
                    Column("namespace", "namespace"),
                    Column("Value #A", "engines", decimals=0),
                    Column("Value #B", "busy engines", decimals=1),
                    Column("Value #C", "slots in total", decimals=0),
                    Column("Value #D", "slots left", decimals=0),
                    Column("Value #E", "waiting", decimals=0, steps=_NONE_IS_GOOD),
                    Column("Value #F", "room, all engines", "percentunit", 0, _FLEET),
                    Column("Value #G", "room, worst engine", "percentunit", 0, _WORST),
                    Column("Value #H", "first full in", "s", 1, _EXHAUSTION, _NEVER),
                    Column("Value #I", "slots for batch", decimals=0),
                ],
                *(Query(f"max by (cluster, namespace, model_name) ({expression})") for expression in _OF_A_MODEL),
                sort_by="room, all engines",
            ),
        ],
        "By model",
    )


def _over_time() -> Row:
    name = "{{model_name}} {{namespace}} {{cluster}}"
    return Row(
        [
            lines(
                Look(
                    title="How many more requests fit, of each model?",
                    description=(
                        f"Remaining slots for typical requests, all engines of a model together. {_BY_MODEL}Worry when it goes "
                        f"to 0 or does not come back after the peak of the day. {_NO_RECORDS}"
                    ),
                    unit="none",
                    decimals=0,
                ),
                Query(_REMAINING, name),
            ),
            lines(
                Look(
                    title="How much room has each model?",
                    description=(
                        f"Remaining over all slots, all engines of a model together. {_BY_MODEL}Worry below the dashed 15 % "
                        f"while traffic rises or requests wait: more replicas are needed. {_NO_RECORDS}"
                    ),
                    unit="percentunit",
                    decimals=0,
                    steps=_FLEET,
                    minimum=0,
                    maximum=1,
                ),
                Query(_ROOM, name),
            ),
            lines(
                Look(
                    title="How much room has the worst engine of each model?",
                    description=(
                        f"The engine with the least room, not their mean. {_BY_MODEL}Worry below the dashed 10 %, most of all "
                        f"while the panel beside it shows plenty: then requests are not spread well. {_NO_RECORDS}"
                    ),
                    unit="percentunit",
                    decimals=0,
                    steps=_WORST,
                    minimum=0,
                    maximum=1,
                ),
                Query(_WORST_ROOM, name),
            ),
            lines(
                Look(
                    title="How long until the first engine of each model is full?",
                    description=(
                        "The shortest forecast among its engines. An hour at most is drawn: a line at the top is that or "
                        f"more, or never. {_BY_MODEL}Worry below the dashed ten minutes. {_NO_RECORDS}"
                    ),
                    unit="s",
                    decimals=0,
                    steps=_EXHAUSTION,
                    minimum=0,
                    maximum=SHOWN_SECONDS,
                ),
                Query(f"clamp_max({_FIRST_FULL}, {SHOWN_SECONDS})", name),
            ),
            lines(
                Look(
                    title="How many engines are busy, and how many are there?",
                    description=(
                        "Engines that the present requests fill, queue included, below the dashed number that there are: what "
                        f"to scale on. {_BY_MODEL}Worry when busy stays near or above the number of engines. {_NO_RECORDS}"
                    ),
                    unit="none",
                    decimals=1,
                ),
                Query(_BUSY, f"busy: {name}"),
                Query(_ENGINE_COUNT, f"engines: {name}", dashed=True),
            ),
            lines(
                Look(
                    title="Who waits, and what room is idle for batch work?",
                    description=(
                        "Slots that are left minus requests that wait, at least 0: what batch work could take without anyone "
                        f"waiting for it; beside it, dashed, the queue. {_BY_MODEL}Worry when both are high: requests wait "
                        f"where there is no room while there is elsewhere. {_NO_RECORDS}"
                    ),
                    unit="none",
                    decimals=0,
                ),
                Query(_BATCH, f"idle: {name}"),
                Query(_WAITING, f"waiting: {name}", dashed=True),
            ),
        ],
        "Over time",
    )


def _engines() -> Row:
    kept = "cluster, namespace, instance, model_name, target, engine"
    engine_link = ("Engine board", url(ENGINE_UID, target="target", engine="engine"))
    node_link = ("Node board", url(NODE_UID, instance="instance"))
    return Row(
        [
            rows(
                Look(
                    title="Which 20 engines have least room?",
                    description=(
                        "Remaining over all slots for typical requests, the worst first. target leads to the engine's board, "
                        "node to that of its node. Worry below 10 % while its load rises. No data: no engine has had a "
                        "request yet, or none answers."
                    ),
                    unit="none",
                    width=12,
                    height=12,
                ),
                [
                    Column("Value", "room", "percentunit", 0, _WORST),
                    Column("target", "target", link=engine_link),
                    Column("engine", "engine"),
                    Column("model_name", "model"),
                    Column("instance", "node", link=node_link),
                    Column("namespace", "namespace"),
                    Column("cluster", "cluster"),
                ],
                Query(f"bottomk(20, min by ({kept}) ({select('kvcache_headroom_ratio', ENGINES)}))"),
                sort_by="room",
            ),
            rows(
                Look(
                    title="Which sources fail?",
                    description=(
                        "Sources that their exporter could not read last, without those of the exporters that are down. Worry "
                        "at each: what rests on it is absent, and an engine whose page fails is not watched. No data: none "
                        "fails, or no exporter is scraped; the number at the top tells which."
                    ),
                    unit="none",
                    width=7,
                    height=12,
                    no_value="none listed",
                ),
                [
                    Column("source", "source"),
                    Column("target", "target", link=("Engine board", url(ENGINE_UID, target="target"))),
                    Column("instance", "node", link=node_link),
                ],
                Query(f"max by (source, target, instance) ({select('kvcache_up', _SOURCES)} == 0)"),
                sort_by="source",
            ),
            rows(
                Look(
                    title="Which exporters are down?",
                    description=(
                        "Exporters that Prometheus cannot scrape. Worry at each: nobody is paged for its engines. No data: "
                        "all are scraped, or none is known; the number at the top tells which."
                    ),
                    unit="none",
                    width=5,
                    height=12,
                    no_value="none listed",
                ),
                [Column("instance", "node"), Column("job", "job")],
                Query(f"max by (instance, job) ({select('up', SCOPE)} == 0)"),
                sort_by="node",
            ),
        ],
        "Engines and sources to look at",
    )
