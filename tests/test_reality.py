"""Published vLLM start-up logs, where they are beside the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from reality import TOLERANCE, comparisons, load, main

LOGS = Path(__file__).parents[2] / "shared" / "reality" / "vllm-logs.json"


@pytest.mark.skipif(not LOGS.exists(), reason="the folder ../shared/reality is not here")
def test_logged_tokens_and_concurrency_are_met(capsys: pytest.CaptureFixture[str]) -> None:
    results = list(comparisons(load(LOGS)))
    assert len(results) >= 24
    assert {result.record: result.error for result in results if abs(result.error) > TOLERANCE} == {}
    assert main(LOGS) == 0
    assert "24 of 24 figures within 1%" in capsys.readouterr().out
