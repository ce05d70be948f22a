"""What the code of functions names: the contents of a closure's cells, and globals."""

from __future__ import annotations

import dis
from types import CellType, CodeType, FunctionType
from typing import Any

EMPTY = object()
"""Stands for the contents of a cell that has not been assigned yet."""


def contents(cell: CellType) -> Any:
    """A cell's contents, or `EMPTY`."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


def globals_named(function: FunctionType) -> dict[str, Any]:
    """The globals that a function's code loads, that of functions in it included. (`co_names` has attributes, too.)"""
    codes, names = [function.__code__], list[str]()
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        names += [each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"]
    return {name: function.__globals__[name] for name in names if name in function.__globals__}
