"""The policy that adds the sidecar: its expressions are evaluated on pods, and what comes out has to be what Kubernetes takes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any

import helm_python
import pytest
import yaml

pytest.importorskip("cel_expr_python", reason="Google's evaluator of CEL is for Python 3.11 and later")

from cel_admission import Admission, RefusedError, as_read
from cel_expressions import CelError
from exporter_container import serve_options
from helm_engine import KUBERNETES, Manifest, Pod, chart_files, load, render
from pod_security import violations

PREFIX = "kvcache-exporter.io/"
OPTED_IN = {f"{PREFIX}inject": "true"}
INJECTION: dict[str, Any] = {"mode": "sidecar", "sidecar": {"injection": {"enabled": True}}}
STRICT: dict[str, Any] = {"mode": "sidecar", "sidecar": {"injection": {"enabled": True, "failurePolicy": "Fail"}}}
TEMPLATE = "templates/injection.yaml"
HELPERS = "templates/_injection.tpl"

ENGINE: dict[str, Any] = {
    "name": "vllm",
    "image": "vllm/vllm-openai:v0.11.0",
    "args": ["--model=Qwen/Qwen3-8B", "--tensor-parallel-size", "2"],
    "ports": [{"name": "http", "containerPort": 8080}],
}
ENGINE_ARGS = "--model=Qwen/Qwen3-8B\n--tensor-parallel-size\n2"
MODEL: dict[str, Any] = {"name": "model", "persistentVolumeClaim": {"claimName": "qwen"}}
RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def engine(**fields: Any) -> dict[str, Any]:
    return {**ENGINE, **fields}


def pod(
    *containers: dict[str, Any],
    annotations: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = OPTED_IN,
    **spec: Any,
) -> Manifest:
    """A pod that opts in, of an engine if no containers are given; `annotations` are without their prefix."""
    metadata: dict[str, Any] = {"name": "qwen-0", "namespace": "ml"}
    if labels is not None:
        metadata["labels"] = dict(labels)
    if annotations is not None:
        metadata["annotations"] = {PREFIX + name: value for name, value in annotations.items()}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": list(containers or [ENGINE]), **spec}}


@cache
def _admission(chart: helm_python.Chart | None, values: str, kubernetes: str) -> Admission:
    return Admission(render(yaml.safe_load(values), chart=chart, kubernetes=kubernetes), kubernetes)


def admit(created: Manifest, values: Mapping[str, Any] = INJECTION, kubernetes: str = "1.36") -> Manifest:
    """The pod as it is created in a namespace that opts in."""
    return _admission(None, yaml.safe_dump(values), kubernetes).admit(created, OPTED_IN)


@cache
def _parts(values: str) -> dict[str, Any]:
    named = "\n".join(
        f'{part}: {{{{ include "kvcache-exporter.sidecar.{part}" (index .Subcharts "kvcache-exporter") | quote }}}}'
        for part in ("container", "volumes", "podLabels")
    )
    files = {
        "Chart.yaml": b"apiVersion: v2\nname: parent\nversion: 0.1.0\n",
        "templates/parts.yaml": f"apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: parts\ndata:\n{_indented(named)}".encode(),
        **{f"charts/kvcache-exporter/{path}": content for path, content in chart_files().items()},
    }
    manifests = render({"kvcache-exporter": yaml.safe_load(values)}, chart=load(files)).manifests
    (parts,) = (manifest["data"] for manifest in manifests if manifest["metadata"]["name"] == "parts")
    return {name: yaml.safe_load(text) for name, text in parts.items()}


def _indented(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())


def templates(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a chart of one's own has from the named templates: `container`, `volumes` and `podLabels`."""
    return deepcopy(_parts(yaml.safe_dump({"mode": "sidecar", **values})))


def with_sidecar(
    created: Manifest, values: Mapping[str, Any] | None = None, engine_args: str = "", mounts: tuple[dict[str, Any], ...] = ()
) -> Manifest:
    """The pod with what the named templates yield for these values, and with what is of the pod itself."""
    parts = templates(values or {})
    container = parts["container"]
    if engine_args:
        container["env"].append({"name": "KVCACHE_EXPORTER_SERVE_ENGINE_ARGS", "value": engine_args})
    if mounts:
        container["volumeMounts"] = [*container.get("volumeMounts", ()), *mounts]
    expected = deepcopy(created)
    expected["metadata"]["labels"].update(parts["podLabels"])
    spec = expected["spec"]
    spec["initContainers"] = [*spec.get("initContainers", ()), container]
    own = [volume["name"] for volume in spec.get("volumes", ())]
    volumes = [*spec.get("volumes", ()), *(volume for volume in parts["volumes"] or () if volume["name"] not in own)]
    if volumes:
        spec["volumes"] = volumes
    return expected


def test_sidecar_of_a_plain_pod() -> None:
    """In words of its own: all else here is compared with what the chart's own templates yield."""
    (container,) = admit(pod())["spec"]["initContainers"]
    assert (container["name"], container["restartPolicy"]) == ("kvcache-exporter", "Always")
    assert container["args"] == [
        "serve",
        "--listen-address=:9948",
        "--log-level=info",
        "--vllm-url=http://127.0.0.1:8000",
        "--target-name=$(POD_NAMESPACE)/$(POD_NAME)",
        "--no-nvml",
    ]
    assert container["env"] == [
        {"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"},
        {"name": "KVCACHE_EXPORTER_SERVE_ENGINE_ARGS", "value": ENGINE_ARGS},
    ]
    assert container["ports"] == [{"name": "kvcache-metrics", "containerPort": 9948, "protocol": "TCP"}]
    assert container["resources"] == {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}}
    assert "volumeMounts" not in container


ENGINE_WITH_MODEL = engine(
    volumeMounts=[
        {"name": "cache", "mountPath": "/root/.cache"},
        {"name": "model", "mountPath": "/models/qwen", "subPath": "qwen3"},
        {"name": "model", "mountPath": "/models/draft", "readOnly": False},
    ]
)
MODEL_VOLUMES = [{"name": "cache", "emptyDir": {}}, MODEL]
MODEL_MOUNTS = (
    {"name": "model", "mountPath": "/models/qwen", "readOnly": True, "subPath": "qwen3"},
    {"name": "model", "mountPath": "/models/draft", "readOnly": True},
)
ODD_ARGS = [
    "sh",
    "-c",
    'exec vllm serve "$MODEL" \\\n  --max-model-len 4096',
    "--hf={\"a\": [1, 'b']}",
    "$(POD_NAME) $$(X) «ü»",
    "",
]
CONFIG = {"config": {"targets": [{"url": "http://127.0.0.1:1"}]}, "fullnameOverride": "engine-config"}

# A pod, and what makes its sidecar differ from that of the named templates without any values.
INJECTED: dict[str, tuple[Manifest, dict[str, Any]]] = {
    "plain": (pod(), {"engine_args": ENGINE_ARGS}),
    "init containers": (
        pod(initContainers=[{"name": "download", "image": "i"}, {"name": "proxy", "image": "i", "restartPolicy": "Always"}]),
        {"engine_args": ENGINE_ARGS},
    ),
    "restricted": (
        pod(
            engine(securityContext=RESTRICTED),
            securityContext={
                "runAsNonRoot": True,
                "runAsUser": 1000,
                "fsGroup": 1000,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
        ),
        {"engine_args": ENGINE_ARGS},
    ),
    "root": (pod(securityContext={"runAsUser": 0}), {"engine_args": ENGINE_ARGS}),
    "port": (pod(annotations={"port": "9000"}), {"values": {"sidecar": {"vllmPort": 9000}}, "engine_args": ENGINE_ARGS}),
    **{
        f"port of {what}": (
            pod(engine(command=[], args=args), annotations=annotations),
            {"values": {"sidecar": {"vllmPort": port}}, "engine_args": "\f".join(["\n".join(args), *annotations.values()])},
        )
        for what, args, annotations, port in (
            ("arguments", ["--model=m", "--port", "9000", "-tp", "2"], {}, 9000),
            ("one argument", ["--model=m", "--port=9000"], {}, 9000),
            ("a script", ["vllm serve m --port 9000 --max-num-seqs 4 | tee log"], {}, 9000),
            ("the last of several", ["--port=1", "--port", "9000"], {}, 9000),
            ("the annotation's arguments", ["--port=1"], {"engine-args": "--max-num-seqs 4 --port 9000"}, 9000),
            ("a variable", ["--port=$(PORT)"], {}, 8000),
            ("another flag", ["--data-parallel-rpc-port", "9000", "--data-parallel-rpc-port=9000"], {}, 8000),
            ("no value", ["--port"], {}, 8000),
        )
    },
    "port by name": (pod(annotations={"port": "http"}), {"values": {"sidecar": {"vllmPort": 8080}}, "engine_args": ENGINE_ARGS}),
    "config": (pod(annotations={"config": "engine-config"}), {"values": CONFIG, "engine_args": ENGINE_ARGS}),
    "visible devices": (
        pod(annotations={"visible-devices": "GPU-aaaa,GPU-bbbb"}),
        {"values": {"gpu": {"uuids": ["GPU-aaaa", "GPU-bbbb"]}}, "engine_args": ENGINE_ARGS},
    ),
    "model volume": (
        pod(ENGINE_WITH_MODEL, annotations={"model-volume": "model"}, volumes=MODEL_VOLUMES),
        {"engine_args": ENGINE_ARGS, "mounts": MODEL_MOUNTS},
    ),
    "model volume with a path from variables": (
        pod(
            engine(volumeMounts=[{"name": "model", "mountPath": "/models", "subPathExpr": "$(MODEL)"}]),
            annotations={"model-volume": "model"},
            volumes=[MODEL],
        ),
        {"engine_args": ENGINE_ARGS},
    ),
    "model volume of nobody": (pod(annotations={"model-volume": "model"}), {"engine_args": ENGINE_ARGS}),
    "volumes": (pod(ENGINE_WITH_MODEL, volumes=MODEL_VOLUMES), {"engine_args": ENGINE_ARGS}),
    "engine arguments": (
        pod(annotations={"engine-args": "--max-num-seqs=64  --block-size 16"}),
        {"engine_args": f"{ENGINE_ARGS}\f--max-num-seqs=64  --block-size 16"},
    ),
    "engine arguments in lines": (
        pod(annotations={"engine-args": '--hf-overrides={"a": 1}\n--block-size 16\n'}),
        {"engine_args": f'{ENGINE_ARGS}\f--hf-overrides={{"a": 1}}\n--block-size 16\n'},
    ),
    "every annotation, engine second": (
        pod(
            {"name": "proxy", "image": "p", "ports": [{"name": "http", "containerPort": 80}]},
            ENGINE_WITH_MODEL,
            annotations={
                "container": "vllm",
                "port": "http",
                "config": "engine-config",
                "visible-devices": "GPU-aaaa",
                "model-volume": "model",
                "engine-args": "--block-size 16",
            },
            volumes=MODEL_VOLUMES,
        ),
        {
            "values": {**CONFIG, "sidecar": {"vllmPort": 8080}, "gpu": {"uuids": ["GPU-aaaa"]}},
            "engine_args": f"{ENGINE_ARGS}\f--block-size 16",
            "mounts": MODEL_MOUNTS,
        },
    ),
    "engine first of several": (
        pod(engine(name="engine"), {"name": "proxy", "image": "p", "args": ["--verbose"]}),
        {"engine_args": ENGINE_ARGS},
    ),
    "command and odd arguments": (pod(engine(command=ODD_ARGS[:2], args=ODD_ARGS[2:])), {"engine_args": "\n".join(ODD_ARGS)}),
    "no command, no arguments": (pod({"name": "vllm", "image": "my-model"}), {}),
    # What the image starts stays unseen, whatever the annotation says of it.
    "arguments in the annotation alone": (
        pod({"name": "vllm", "image": "my-model"}, annotations={"engine-args": "--max-num-seqs 4"}),
        {"engine_args": "\f--max-num-seqs 4"},
    ),
    "empty annotations": (pod(annotations={}), {"engine_args": ENGINE_ARGS}),
    "other annotations": (
        {**pod(), "metadata": {**pod()["metadata"], "annotations": {"example.com/port": "http"}}},
        {"engine_args": ENGINE_ARGS},
    ),
    "volume of the sidecar's name": (
        pod(annotations={"config": "engine-config"}, volumes=[{"name": "kvcache-exporter-config", "emptyDir": {}}]),
        {"values": CONFIG, "engine_args": ENGINE_ARGS},
    ),
    "name from a prefix": (
        {**pod(), "metadata": {"generateName": "qwen-", "namespace": "ml", "labels": dict(OPTED_IN)}},
        {"engine_args": ENGINE_ARGS},
    ),
    "host network": (pod(hostNetwork=True), {"engine_args": ENGINE_ARGS}),
}
LEFT_ALONE: dict[str, Manifest] = {
    "sidecar is there": pod(initContainers=[{"name": "kvcache-exporter", "image": "own"}]),
    "ordinary container of its name": pod(ENGINE, {"name": "kvcache-exporter", "image": "own"}),
    "no labels": pod(labels=None),
    "other labels": pod(labels={"app": "qwen"}),
    "label says false": pod(labels={f"{PREFIX}inject": "false"}),
}


@pytest.mark.parametrize("name", INJECTED)
def test_pod_gets_the_sidecar_of_the_templates(name: str) -> None:
    created, differing = INJECTED[name]
    assert admit(created) == as_read(with_sidecar(created, **differing))


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_pod_is_left_alone(name: str) -> None:
    assert admit(LEFT_ALONE[name]) == LEFT_ALONE[name]


@pytest.mark.parametrize("kubernetes", KUBERNETES)
@pytest.mark.parametrize("name", INJECTED)
def test_no_pod_is_refused_for_its_sidecar(name: str, kubernetes: str) -> None:
    """Also where expressions that cannot be evaluated are no excuse."""
    created, _ = INJECTED[name]
    assert admit(created, STRICT, kubernetes)["spec"]["initContainers"][-1]["name"] == "kvcache-exporter"


@pytest.mark.parametrize("name", INJECTED)
def test_sidecar_is_added_once(name: str) -> None:
    once = admit(INJECTED[name][0])
    assert admit(once) == once


def test_restricted_pod_stays_restricted() -> None:
    created, _ = INJECTED["restricted"]
    assert violations(created["spec"]) == []
    assert violations(admit(created)["spec"]) == []


@pytest.mark.parametrize(
    ("annotations", "word"),
    [({"container": "engine"}, "container"), ({"port": "metrics"}, "port"), ({"port": "0"}, "port"), ({"port": ""}, "port")],
)
def test_annotation_that_names_nothing(annotations: dict[str, str], word: str) -> None:
    created = pod(annotations=annotations)
    assert admit(created) == created
    with pytest.raises(RefusedError, match=word):
        admit(created, STRICT)


def test_only_namespaces_that_opt_in() -> None:
    created = pod()
    assert Admission(render(INJECTION)).admit(created, {}) == created
    chosen = {
        "mode": "sidecar",
        "sidecar": {"injection": {"enabled": True, "namespaceSelector": {"matchLabels": {"team": "ml"}}}},
    }
    assert Admission(render(chosen)).admit(created, OPTED_IN) == created
    assert Admission(render(chosen)).admit(created, {"team": "ml"}) == with_sidecar(created, engine_args=ENGINE_ARGS)


OF_THE_CHART: dict[str, dict[str, Any]] = {
    "port": {"sidecar": {"vllmPort": 8001}, "port": 9000},
    "user of OpenShift": {"sidecar": {"runAsUser": 1000700000}},
    "no user": {"sidecar": {"runAsUser": None}},
    "probes": {"sidecar": {"readinessProbe": {"periodSeconds": 5}, "startupProbe": {"failureThreshold": 30}}},
    "secrets": {"bearerTokenSecret": {"name": "key"}, "webConfigSecret": {"name": "tls"}},
    "further": {
        "extraArgs": ["--record=/data/{pod}.jsonl.gz"],
        "extraEnv": [{"name": "QUOTES", "value": "\"'\\ <&> 50%"}, {"name": "NUMBER", "value": "1000000"}],
        "extraVolumes": [{"name": "data", "emptyDir": {"sizeLimit": "1Gi"}}, {"name": "empty", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "data", "mountPath": "/data"}],
    },
}


@pytest.mark.parametrize("name", OF_THE_CHART)
def test_values_reach_the_injected_sidecar(name: str) -> None:
    values = OF_THE_CHART[name]
    sidecar = {**values.get("sidecar", {}), **STRICT["sidecar"]}
    created = pod()
    assert admit(created, {**values, "mode": "sidecar", "sidecar": sidecar}) == with_sidecar(created, values, ENGINE_ARGS)


@pytest.mark.parametrize("name", INJECTED)
def test_exporter_understands_its_arguments(name: str) -> None:
    created = admit(INJECTED[name][0])
    injected = Pod(created, {}, {}, created["spec"])
    options = serve_options(injected)
    assert options["vllm_url"] in ("http://127.0.0.1:8000", "http://127.0.0.1:8080", "http://127.0.0.1:9000")
    assert options["engine_args"] == injected.environment.get("KVCACHE_EXPORTER_SERVE_ENGINE_ARGS")
    assert options["no_nvml"] == (options["gpus"] is None)


def _edited(path: str, old: str, new: str) -> helm_python.Chart:
    """The chart with something else in one of its templates."""
    files = chart_files()
    text = files[path].decode()
    assert old in text
    return load({**files, path: text.replace(old, new).encode()})


@pytest.mark.parametrize(
    ("path", "old", "new", "word"),
    [
        (HELPERS, "dyn(%s)", "%s", "more than one type"),
        (TEMPLATE, "variables.portOrName.matches", "variables.portOrNumber.matches", "portOrNumber"),
        (TEMPLATE, "variables.portOrName.matches", "variables.portOrName.size().matches", "matches"),
        (TEMPLATE, 'JSONPatch{op: "add", path', 'JSONPatch{operation: "add", path', "operation"),
    ],
)
def test_policy_that_the_api_server_would_not_take(path: str, old: str, new: str, word: str) -> None:
    with pytest.raises(CelError, match=word):
        Admission(render(STRICT, chart=_edited(path, old, new)))


@pytest.mark.parametrize(
    ("path", "old", "new", "word"),
    [
        ("templates/_sidecar.tpl", "imagePullPolicy:", "imagePullPolice:", "imagePullPolice"),
        (TEMPLATE, '"readOnly": dyn(true), ?"subPath"', '"readOnly": dyn(true), ?"subpath"', "subpath"),
        (TEMPLATE, "has(object.spec.initContainers) ? [] : ", "true ? [] : ", "initContainers"),
        (TEMPLATE, ".filter(v, !object.spec.?volumes.orValue([]).exists(o, o.name == v.name))", "", "twice"),
        (TEMPLATE, "object.metadata.?annotations.orValue({})", "object.metadata.annotations", "annotations"),
    ],
)
def test_patch_that_some_pod_does_not_survive(path: str, old: str, new: str, word: str) -> None:
    admission = Admission(render(STRICT, chart=_edited(path, old, new)))
    problems = []
    for created, _ in INJECTED.values():
        try:
            admission.admit(created, OPTED_IN)
        except RefusedError as error:
            problems.append(str(error))
    assert any(word in problem for problem in problems)
