"""What the exporter's container of a pod makes of what the chart hands it: arguments, environment, files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest
from helm_engine import Pod, Render

from kvcache_exporter.cli import main


def serve_options(pod: Pod) -> dict[str, Any]:
    """The options of `serve` in a pod, as the real command line reads its arguments and environment."""
    environment = {key: value if isinstance(value, str) else "from-the-cluster" for key, value in pod.environment.items()}
    # Kubernetes puts variables into arguments before the container starts.
    command, *arguments = [re.sub(r"\$\((\w+)\)", lambda found: environment[found[1]], each) for each in pod.exporter["args"]]
    assert command == "serve"
    assert isinstance(main, click.Group)
    serve = main.commands[command]
    settings = {key: value for key, value in environment.items() if key.startswith("KVCACHE_EXPORTER_")}
    assert settings.keys() <= {f"KVCACHE_EXPORTER_SERVE_{str(parameter.name).upper()}" for parameter in serve.params}
    with pytest.MonkeyPatch.context() as patch:
        for key, value in settings.items():
            patch.setenv(key, value)
        return serve.make_context(command, arguments, auto_envvar_prefix="KVCACHE_EXPORTER_SERVE").params


def config_text(result: Render, pod: Pod) -> str | None:
    """The configuration file that the exporter is started with, None if it is started without."""
    path: Path | None = serve_options(pod)["config_path"]
    return None if path is None else mounted_text(result, pod, path)


def mounted_text(result: Render, pod: Pod, path: Path) -> str:
    """What the exporter reads from a file that comes out of a ConfigMap of the release."""
    mount = next(mount for mount in pod.exporter["volumeMounts"] if path.is_relative_to(mount["mountPath"]))
    (source,) = (volume["configMap"] for volume in pod.spec["volumes"] if volume["name"] == mount["name"])
    (config_map,) = (found for found in result.all("ConfigMap") if found["metadata"]["name"] == source["name"])
    place = str(path.relative_to(mount["mountPath"]))
    keys = {item["path"]: item["key"] for item in source.get("items", ())}
    text: str = config_map["data"][keys.get(place, place)]
    return text
