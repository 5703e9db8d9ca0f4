"""The page parser, against what prometheus_client writes and reads."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kvcache_exporter.errors import SourceError
from kvcache_exporter.sources.exposition import Sample, samples
from lab import capture

ANY = re.compile(rb".*")


def read(body: bytes) -> list[Sample]:
    return list(samples(body, ANY))


@pytest.mark.parametrize(
    "name", ["0.6.6.post1_v0.driven", "0.20.0_v1_dp2.driven", "0.32.0_lora_loaded", "0.32.0_dp2_idle_2apiservers"]
)
def test_same_samples_as_the_library_on_real_pages(name: str) -> None:
    page = capture(name)
    expected = [
        (sample.name, sample.labels, sample.value)
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    ]
    # The library puts families together; order within a page means nothing.
    assert sorted(map(repr, read(page))) == sorted(repr(Sample(*sample)) for sample in expected)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.floats(allow_nan=False))
def test_any_label_value_comes_back(text: str, value: float) -> None:
    """Quotes, backslashes, newlines, braces, commas: what the library escapes, the parser gives back, in both text formats."""
    registry = CollectorRegistry()
    Gauge("g", "documentation", ["a", "b"], registry=registry).labels(text, "x").set(value)
    for page in (generate_latest(registry), openmetrics.generate_latest(registry)):  # type: ignore[no-untyped-call]
        assert read(page) == [Sample("g", {"a": text, "b": "x"}, value)]


@given(st.binary())
def test_garbage_is_samples_or_one_clear_error(body: bytes) -> None:
    error = None
    try:
        read(body)
    except SourceError as raised:
        error = raised
    if error is not None:
        assert error.reason == "parse"
        assert re.match(r"line \d+ of the page is not a Prometheus sample: ", str(error))


@pytest.mark.parametrize(
    ("line", "sample"),
    [
        (b"a 1", Sample("a", {}, 1)),
        (b"a{} 1", Sample("a", {}, 1)),
        (b'  a { x = "y" , } 1.5e3 1757000000000', Sample("a", {"x": "y"}, 1500)),
        (b'a{x="y"}1', Sample("a", {"x": "y"}, 1)),
        (b"a -Inf\r", Sample("a", {}, float("-inf"))),
        (b'a{x="' + b"y" * 5000 + b'"} 1', Sample("a", {"x": "y" * 5000}, 1)),
        (b'a_bucket{le="1"} 3 # {trace_id="x"} 0.5 1.5', Sample("a_bucket", {"le": "1"}, 3)),
    ],
)
def test_legal_lines(line: bytes, sample: Sample) -> None:
    assert read(line) == [sample]


@pytest.mark.parametrize(
    "line", [b"a", b"a{", b'a{x="y} 1', b"a{x=y} 1", b'a{x="1" y="2"} 1', b"a 1_0", b"a one", b"1a 1", b"a 1 2 3", b'a{x="y"} ']
)
def test_broken_lines(line: bytes) -> None:
    with pytest.raises(SourceError, match="line 2 of the page is not a Prometheus sample"):
        read(b"good 1\n" + line + b"\ngood 2")


def test_only_wanted_names_are_read() -> None:
    assert [sample.name for sample in samples(b"a 1\na 2\nab 3\nab 4\nb 5", re.compile(rb"a|b"))] == ["a", "a", "b"]


def test_same_labels_are_read_once() -> None:
    """Label sets come back at every poll; these would be most of its time."""
    body = b'a{x="seen at every poll"} 1'
    (first,), (second,) = read(body), read(body)
    assert first.labels is second.labels
