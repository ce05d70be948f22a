"""The contents of a closure's cells."""

from __future__ import annotations

from types import CellType
from typing import Any

EMPTY = object()
"""Stands for the contents of a cell that has not been assigned yet."""


def contents(cell: CellType) -> Any:
    """A cell's contents, or `EMPTY`."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY
