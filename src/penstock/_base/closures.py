"""Take functions apart into code and closure variables: a mask function of FlexAttention, say.

`pytree` opens a `Closure`, so these tensors are cut, sent and replayed as others are, and makes the function.
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
    """A function as `make(*contents)`. The makers of two functions from the same line of code are equal."""

    make: Callable[..., Any]
    contents: tuple[Any, ...]


@dataclass(frozen=True)
class _Maker:
    code: CodeType
    bare: FunctionType = field(compare=False)  # with empty cells, and without defaults

    def __call__(self, cells: Any, defaults: Any, keywords: Any) -> FunctionType:
        namespace, name = self.bare.__globals__, self.bare.__name__
        function = FunctionType(self.code, namespace, name, defaults, tuple(map(CellType, cells)))
        function.__kwdefaults__ = keywords
        return function


def replace_functions(value: Any, enclosing: frozenset[int] = frozenset()) -> Any:
    """Copy a nested value with a Closure in place of each function, except those that close over themselves (whose id
    is in `enclosing`), or over a variable without a value yet."""
    take_apart = partial(replace_functions, enclosing=enclosing | {id(value)})
    if type(value) is partial:
        return Closure(_make_partial, take_apart((value.func, value.args, value.keywords)))
    if type(value) is FunctionType:
        if id(value) in enclosing or any(contents(cell) is EMPTY for cell in value.__closure__ or ()):
            return value
        code, cells = value.__code__, value.__closure__ or ()
        bare = FunctionType(code, value.__globals__, value.__name__, None, tuple(CellType() for _ in cells))
        parts = [*map(contents, cells)], value.__defaults__, value.__kwdefaults__
        return Closure(_Maker(code, bare), take_apart(parts))
    if type(value) is dict:
        return {key: take_apart(item) for key, item in value.items()}
    return type(value)(map(take_apart, value)) if type(value) in (tuple, list) else value


def _make_partial(function: Any, args: Any, keywords: Any) -> Any:
    return partial(function, *args, **keywords)


def contents(cell: CellType) -> Any:
    """Return a cell's contents, or `EMPTY`."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY
