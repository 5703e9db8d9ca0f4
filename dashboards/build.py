"""Writes the boards as JSON: `python -m dashboards.build [FOLDER]`, beside this file if no folder is given."""

from __future__ import annotations

import sys
from pathlib import Path

from dashboards.common import board_json
from dashboards.engine import engine_board
from dashboards.fleet import fleet_board
from dashboards.node import node_board


def build(folder: Path) -> None:
    """Write every board into a folder."""
    for name, board in (("engine", engine_board), ("node", node_board), ("fleet", fleet_board)):
        (folder / f"{name}.json").write_text(board_json(board()), encoding="utf-8")


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
