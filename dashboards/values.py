"""How a value is shown: its unit, its mapping and its threshold, as Grafana has them in a panel's field settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dashboards.colors import BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILLION

TEXT = "#24292e"
MUTED = "#6a737d"
# Without the yellow, which is not seen on white.
PALETTE = (BLUE, VERMILLION, GREEN, PURPLE, SKY, ORANGE, "#7A5195", "#000000")

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SUFFIXES = {"none": "", "cps": " /s"}
_SECONDS = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


def shown(value: float, field: Mapping[str, Any]) -> str:
    """The value as text, mapped or with its unit."""
    if (result := _mapped(value, field)) is not None and result.get("text"):
        return str(result["text"])
    if math.isnan(value):
        return no_value(field)
    return with_unit(value, field.get("unit") or "", field.get("decimals"))


def no_value(field: Mapping[str, Any]) -> str:
    """What stands for no data."""
    return str(field.get("noValue") or "No data")


def with_unit(value: float, unit: str, decimals: int | None = None) -> str:
    """The value with its unit, in about three digits where `decimals` does not say how many."""
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if unit == "s":
        return _duration(value, decimals)
    if unit == "percentunit":
        return f"{_number(value * 100, decimals)}%"
    if unit == "bytes":
        return _bytes(value, decimals)
    return _number(value, decimals) + _SUFFIXES.get(unit, f" {unit}")


def _bytes(value: float, decimals: int | None) -> str:
    power = 0
    while abs(value) >= 1024 and power < len(_BINARY) - 1:
        value /= 1024
        power += 1
    return f"{_number(value, decimals)} {_BINARY[power]}"


def _duration(seconds: float, decimals: int | None) -> str:
    if seconds == 0:
        return "0 s"
    size, unit = next(((size, unit) for size, unit in _SECONDS if abs(seconds) >= size), _SECONDS[-1])
    return f"{_number(seconds / size, decimals)} {unit}"


def _number(value: float, decimals: int | None) -> str:
    if decimals is None:
        decimals = 0 if value == int(value) or abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 3
        text = f"{value:,.{decimals}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    return f"{value:,.{int(decimals)}f}"


def color_of(value: float, field: Mapping[str, Any]) -> str:
    """The color of a value: of its mapping, else of its threshold."""
    if (result := _mapped(value, field)) is not None and result.get("color"):
        return str(result["color"])
    return next((color for start, color in reversed(threshold_steps(field)) if value >= start), TEXT)


def threshold_steps(field: Mapping[str, Any]) -> list[tuple[float, str]]:
    """(from which value on, color) in rising order; the first is from -inf."""
    steps = (field.get("thresholds") or {}).get("steps") or []
    return [(-math.inf if step.get("value") is None else float(step["value"]), step["color"]) for step in steps]


def _mapped(value: float, field: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a value mapping gives; JavaScript's Infinity is a number for float(), too."""
    for mapping in field.get("mappings") or []:
        if mapping["type"] != "value":
            raise ValueError(f"mappings of type {mapping['type']} are not known here")
        for key, result in mapping["options"].items():
            if float(key) == value:
                found: Mapping[str, Any] = result
                return found
    return None
