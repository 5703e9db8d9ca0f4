"""What the API server would say of a manifest, by the schemas of Kubernetes and of the Prometheus operator."""

from __future__ import annotations

import json
from functools import cache

import kubernetes_validate
from helm_engine import OPERATOR_API, Manifest
from jsonschema import Draft202012Validator

from promtool import ROOT

OPERATOR_SCHEMAS = ROOT / "tests" / "data" / "prometheus-operator"


def complaint(manifest: Manifest, kubernetes: str) -> str | None:
    """What is wrong with a manifest for this version of Kubernetes, None if nothing is; a field that is not known is wrong."""
    return _complaint(json.dumps(manifest, sort_keys=True), kubernetes)


@cache
def _complaint(text: str, kubernetes: str) -> str | None:
    """Variants have many manifests in common, and each takes some 10 ms."""
    manifest = json.loads(text)
    name = f"{manifest['kind']} {manifest['metadata'].get('name')}"
    if manifest["apiVersion"] == OPERATOR_API:
        errors = sorted(_operator_schema(manifest["kind"]).iter_errors(manifest), key=str)
        return f"{name}: {errors[0].json_path}: {errors[0].message}" if errors else None
    try:
        kubernetes_validate.validate(manifest, kubernetes, strict=True)
    except kubernetes_validate.ValidationError as error:
        return f"{name}: {'.'.join(map(str, error.path))}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError as error:
        return f"{name}: {error.message}"
    return None


@cache
def _operator_schema(kind: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads((OPERATOR_SCHEMAS / f"{kind}.json").read_text()))
