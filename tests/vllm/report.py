"""Tables of both sides, and whether everything agreed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_AGREES = {True: "agrees", False: "DIFFERS"}


class Report:
    """Prints one table at a time and remembers whether a row of any differed."""

    def __init__(self) -> None:
        self.differing = 0

    def table(self, title: str, heads: Sequence[str], rows: Sequence[tuple[bool, Sequence[object]]]) -> None:
        """Print rows of (whether they agree, cells)."""
        lines = [[*heads, "verdict"], *([*map(str, cells), _AGREES[agrees]] for agrees, cells in rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        sys.stdout.write(f"\n{title}\n\n")
        for line in lines:
            sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() + "\n")
        sys.stdout.flush()
        self.differing += sum(not agrees for agrees, _ in rows)

    def compare(self, title: str, rows: Sequence[tuple[str, object, object, bool]]) -> None:
        """Print rows of (quantity, what the engine says, what the exporter says, whether they agree)."""
        self.table(title, ("quantity", "engine", "exporter"), [(agrees, cells) for *cells, agrees in rows])

    def explain(self, problems: Sequence[str]) -> None:
        """Print what exactly differed in rows that count it."""
        sys.stdout.writelines(f"  ! {problem}\n" for problem in problems)
