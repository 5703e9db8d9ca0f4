"""config.json by its address: what an exporter asks a hub for, over real HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcache_exporter.errors import SourceError
from kvcache_exporter.sources.model_url import fetch_config_json
from lab import TINY_LLAMA, Lab, Reply, Upstream, capture, lab_for, models_answer

PATH = "/org/tiny/resolve/main/config.json"
JSON = Reply(json.dumps(TINY_LLAMA).encode(), content_type="application/json")


@pytest.fixture
def hub(upstream: Upstream) -> str:
    """Address of config.json on a hub, which is the engine too."""
    upstream.page(capture("0.32.0_moderate"), models=models_answer(root="org/tiny"))
    upstream.replies[PATH] = JSON
    return f"{upstream.url}/{{root}}/resolve/main/config.json"


def failure(url: str, root: str | None, token_file: Path | None = None) -> SourceError:
    with pytest.raises(SourceError) as error:
        fetch_config_json(url, root, token_file)
    return error.value


def shown(lab: Lab) -> float | None:
    return lab.poll().value("kvcache_bytes_per_token")


def test_model_of_the_engine_is_asked_for_once(upstream: Upstream, hub: str) -> None:
    lab = lab_for(upstream, model_config=hub)
    assert shown(lab) == shown(lab_for(upstream, model_config=TINY_LLAMA))
    lab.poll().poll()
    assert [path for path, _ in upstream.requests].count(PATH) == 1


def test_address_of_one_model(upstream: Upstream, hub: str) -> None:
    assert shown(lab_for(upstream, model_config=f"{upstream.url}{PATH}")) is not None


def test_token_is_sent_to_the_hub_alone(upstream: Upstream, hub: str, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hf_secret\n")
    lab_for(upstream, model_config=hub, model_config_token_file=token).poll()
    assert {path: headers.get("Authorization") for path, headers in upstream.requests} == {
        "/metrics": None,
        "/v1/models": None,
        "/version": None,
        PATH: "Bearer hf_secret",
    }


def test_gated_model_says_what_it_needs(upstream: Upstream, hub: str) -> None:
    upstream.replies[PATH] = Reply(status=401)
    error = failure(hub, "org/tiny")
    assert error.reason == "unauthorized"
    assert str(error) == (
        f"{upstream.url}{PATH} answered 401: set model_config_token_file to a file with a token that may read this model"
    )
    lab = lab_for(upstream, model_config=hub)
    assert shown(lab) is None
    assert lab.errors("model_config") == {"unauthorized": 1}


@pytest.mark.parametrize(
    ("root", "words"),
    [
        (None, "the engine does not tell its model"),
        ("/models/tiny", "the engine's model '/models/tiny' is no name of a hub"),
        ("../../secret", "is no name of a hub"),
        ("org/../../secret", "is no name of a hub"),
        ("org/tiny?x=1", "is no name of a hub"),
        ("org/tiny#", "is no name of a hub"),
        ("@evil.example/x", "is no name of a hub"),
    ],
)
def test_nothing_but_a_name_goes_into_the_address(upstream: Upstream, hub: str, root: str | None, words: str) -> None:
    error = failure(hub, root)
    assert error.reason == "missing"
    assert words in str(error)
    assert upstream.requests == []


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(status=404), "http_status"),
        (Reply(b"<html>", content_type="text/html"), "parse"),
        (Reply(b"[]", content_type="application/json"), "parse"),
        (Reply(b" " * (4 * 1024 * 1024 + 1)), "body_too_large"),
        (Reply(status=302, headers={"Location": "http://elsewhere.invalid/config.json"}), "redirect"),
    ],
)
def test_answer_that_is_no_config(upstream: Upstream, hub: str, reply: Reply, reason: str) -> None:
    upstream.replies[PATH] = reply
    assert failure(hub, "org/tiny").reason == reason


def test_model_that_is_a_path_here_is_read_from_disk(upstream: Upstream, hub: str, tmp_path: Path) -> None:
    """An engine started with a directory has no name that a hub would know."""
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    upstream.replies["/v1/models"] = Reply(models_answer(root=str(tmp_path)), content_type="application/json")
    assert shown(lab_for(upstream, model_config=hub)) is not None
    assert PATH not in [path for path, _ in upstream.requests]


def test_redirect_within_the_hub_is_followed(upstream: Upstream, hub: str) -> None:
    upstream.replies[PATH] = Reply(status=307, headers={"Location": "/cached"})
    upstream.replies["/cached"] = JSON
    assert fetch_config_json(hub, "org/tiny") == TINY_LLAMA
