"""Thresholds, as the alerts have them: a line on a board is where an alert begins."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import yaml

RULES = Path(__file__).parent.parent / "alerts" / "kvcache.rules.yaml"
_COMPARISON = re.compile(r"[<>]\s*(\d[\d.]*(?:e\d+)?)")


def alert_threshold(alert: str) -> float:
    """The number that an alert's own metric is compared with: the first in its expression."""
    match = _COMPARISON.search(_expressions()[alert])
    if match is None:
        raise ValueError(f"the expression of {alert} compares nothing with a number")
    return float(match[1])


@cache
def _expressions() -> dict[str, str]:
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"] if "alert" in rule}
