"""What a table panel shows: the answers of its queries as rows, after the panel's transformations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dashboards.queries import Panel, Query, Series

Cell = float | str | None
Row = dict[str, Cell]


@dataclass(frozen=True)
class Table:
    """Columns with their field settings, and rows of cells; None is a cell without a value."""

    names: tuple[str, ...]
    fields: tuple[dict[str, Any], ...]
    rows: tuple[tuple[Cell, ...], ...]


def table_of(panel: Panel, answers: Sequence[tuple[Query, Sequence[Series]]]) -> Table:
    """The table of a panel. Raises ValueError for a transformation that is not known here."""
    frames = [_frame(query, series, alone=len(answers) == 1) for query, series in answers]
    order: dict[str, float] = {}
    renamed: dict[str, str] = {}
    hidden = {"Time"}
    for transformation in panel.transformations:
        kind, options = transformation["id"], transformation.get("options", {})
        if kind == "merge":
            frames = [_merged(frames)]
        elif kind == "organize":
            hidden |= {name for name, excluded in options.get("excludeByName", {}).items() if excluded}
            order |= options.get("indexByName", {})
            renamed |= {name: new for name, new in options.get("renameByName", {}).items() if new}
        else:
            raise ValueError(f"transformation {kind} is not known here")
    rows = [row for frame in frames for row in frame]
    original = {new: name for name, new in renamed.items()}
    for sort in panel.options.get("sortBy") or []:
        by, descending = original.get(sort["displayName"], sort["displayName"]), bool(sort.get("desc"))
        rows.sort(key=partial(_sort_key, by=by, descending=descending))
    present = list(dict.fromkeys(name for row in rows for name in row if name not in hidden))
    present.sort(key=lambda name: order.get(name, math.inf))
    fields = {name: panel.field(name, renamed.get(name, name), ref_id=name.removeprefix("Value #")) for name in present}
    return Table(
        names=tuple(renamed.get(name, name) for name in present),
        fields=tuple(fields[name] for name in present),
        rows=tuple(tuple(row.get(name) for name in present) for row in rows),
    )


def _frame(query: Query, answer: Sequence[Series], *, alone: bool) -> list[Row]:
    value = "Value" if alone else f"Value #{query.ref_id}"
    return [{**series.labels, value: series.last} for series in answer]


def _merged(frames: Sequence[Sequence[Row]]) -> list[Row]:
    """Rows that agree in all labels that both have, as one."""
    rows: list[Row] = []
    for frame in frames:
        for row in frame:
            partner = next((other for other in rows if _agree(row, other)), None)
            if partner is None:
                rows.append(dict(row))
            else:
                partner.update(row)
    return rows


def _agree(row: Row, other: Row) -> bool:
    common = row.keys() & other.keys()
    return bool(common) and all(row[name] == other[name] for name in common)


def _sort_key(row: Row, *, by: str, descending: bool) -> tuple[bool, float, str]:
    """Numbers, then words, and at the end those without a value."""
    cell = row.get(by)
    if isinstance(cell, str) or cell is None:
        return cell is None, math.inf, cell or ""
    return False, -cell if descending else cell, ""
