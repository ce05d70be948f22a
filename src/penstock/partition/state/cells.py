"""What the cells of a closure hold."""

from __future__ import annotations

from types import CellType
from typing import Any

EMPTY = object()
"""Stands for the contents of a cell that has not been assigned yet."""


def contents(cell: CellType) -> Any:
    """What a cell holds, or `EMPTY`."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY
