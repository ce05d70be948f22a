"""Take functions apart into code and closure variables: a mask function of FlexAttention, say.

`trees` opens a `Closure`, so these tensors are cut, sent and replayed as others are, and makes the function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import CellType, CodeType, FunctionType
from typing import Any

EMPTY = object()
"""Stands for the contents of a cell that has not been assigned yet."""


@dataclass(frozen=True)
class Closure:
    """What `make(*contents)` makes a function of. The makers of two functions from the same line of code are equal."""

    make: Callable[..., Any]
    contents: tuple[Any, ...]


@dataclass(frozen=True)
class _Maker:
    code: CodeType
    bare: FunctionType = field(compare=False)  # with empty cells, and without defaults

    def __call__(self, cells: Any, defaults: Any, keywords: Any) -> FunctionType:
        names, name = self.bare.__globals__, self.bare.__name__
        made = FunctionType(self.code, names, name, defaults, tuple(map(CellType, cells)))
        made.__kwdefaults__ = keywords
        return made


def apart(value: Any, above: frozenset[int] = frozenset()) -> Any:
    """Copy a nested value with a Closure in place of each function but those that close over themselves (`above`:
    where), or over a variable without a value yet."""
    inner = partial(apart, above=above | {id(value)})
    if type(value) is partial:
        return Closure(_partial, inner((value.func, value.args, value.keywords)))
    if type(value) is FunctionType:
        if id(value) in above or any(contents(cell) is EMPTY for cell in value.__closure__ or ()):
            return value
        code, cells = value.__code__, value.__closure__ or ()
        bare = FunctionType(code, value.__globals__, value.__name__, None, tuple(CellType() for _ in cells))
        held = [*map(contents, cells)], value.__defaults__, value.__kwdefaults__
        return Closure(_Maker(code, bare), inner(held))
    if type(value) is dict:
        return {key: inner(item) for key, item in value.items()}
    return type(value)(map(inner, value)) if type(value) in (tuple, list) else value


def _partial(function: Any, args: Any, keywords: Any) -> Any:
    return partial(function, *args, **keywords)


def contents(cell: CellType) -> Any:
    """Return a cell's contents, or `EMPTY`."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY
