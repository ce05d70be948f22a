"""What a unit returns besides its tensors' values: a recording takes that as given, and stages check it.

Calls between units are recorded with the numbers that they used, such as a count that a unit returns, the length of its
list, or (if they depend on values) the shapes of its tensors. So a stage compares what a unit returns with what was
recorded. A pattern consists only of tuples and plain values, so that it can appear in the stage's code.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from numbers import Number
from typing import Any

import torch
from torch import Tensor, fx

from penstock._base.trees import LEAF, flatten
from penstock.errors import PartitionError
from penstock.partition.recording.facts import Fact, Pattern
from penstock.partition.units.units import Learned, Opening

CONTAINERS = ("items", "keys", "leaves")
LITERALS = (bool, int, float, str, type(None))
VALUES = (Number, str, bytes, range, slice, enum.Enum, torch.Size, torch.dtype, torch.device)
"""Values of these types and their subclasses cannot appear in a stage's code, so their texts do."""


def pattern_of(result: Any, *, shapes: bool) -> Pattern:
    """What a result must look like in each call. `shapes`: include its tensors' shapes."""
    kind = type(result)
    if isinstance(result, Tensor):
        return "tensor", tuple(result.shape) if shapes else None
    if kind in LITERALS:
        return "value", result
    if isinstance(result, VALUES):
        return "text", repr(result)
    if isinstance(result, (tuple, list)):
        return "items", tuple(pattern_of(item, shapes=shapes) for item in result)
    if isinstance(result, dict):
        return "keys", _keys(result), tuple(pattern_of(item, shapes=shapes) for item in result.values())
    flat = flatten(result)
    if flat.structure != LEAF:
        return "leaves", tuple(pattern_of(leaf, shapes=shapes) for leaf in flat.leaves)
    return ("any",)


def _keys(mapping: dict[Any, Any]) -> tuple[Any, ...] | str:
    """The keys of a mapping; their text if they cannot appear in a stage's code."""
    return tuple(mapping) if all(type(key) in LITERALS for key in mapping) else str(list(mapping))


class Returned:
    """What a recording's units return.

    Attributes:
        shapes_read: values whose shapes were read between units, or determined the number of a call's results, with the
            line that did so and its module.
    """

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self.shapes_read: list[tuple[fx.Node, str, str]] = []
        self._ran_for_real: list[Fact] = []

    def note(self, fact: Fact, result: Any) -> None:
        """Arranges to check a unit's result if it holds more than tensors, or may depend on values."""
        ran_for_real = fact.depends_on_values
        pattern = pattern_of(result, shapes=ran_for_real)
        if ran_for_real and _holds_values(pattern) and (around := self._opening.around(fact.scope)):
            raise Learned(stays=around)  # a module that stays whole has no such constants
        if ran_for_real:
            self._ran_for_real.append(fact)
        if ran_for_real or _holds_values(pattern):
            fact.returned = pattern

    def settle(self, facts: Mapping[fx.Node, Fact], sized: Collection[fx.Node]) -> Collection[fx.Node]:
        """Call this at the end. Drops checks of shapes that nothing depends on, which may differ between calls.

        Returns the nodes whose shapes matter. Those of `sized` nodes follow from inputs alone, and have guards.
        """
        readers = _readers(self.shapes_read, sized)
        nodes = {id(fact): node for node, fact in facts.items()}
        for fact in self._ran_for_real:
            reader = readers.get(nodes[id(fact)])
            if reader is not None:
                fact.read_at = reader
            elif fact.returned is not None:
                fact.returned = _without_shapes(fact.returned)
        return readers


def _holds_values(pattern: Pattern) -> bool:
    """Whether it contains anything but tensors."""
    if pattern[0] in CONTAINERS:
        return any(map(_holds_values, pattern[-1]))
    return pattern[0] in ("value", "text")


def _without_shapes(pattern: Pattern) -> Pattern:
    if pattern[0] in CONTAINERS:
        return *pattern[:-1], tuple(map(_without_shapes, pattern[-1]))
    return ("tensor", None) if pattern[0] == "tensor" else pattern


def _readers(reads: list[tuple[fx.Node, str, str]], sized: Collection[fx.Node]) -> dict[fx.Node, tuple[str, str]]:
    """For each node whose shape was read, and for all that it is computed from, the first line to read it, and its
    module.
    """
    found: dict[fx.Node, tuple[str, str]] = {}
    for read, line, scope in reads:
        stack = [read]
        while stack:
            node = stack.pop()
            if node not in found:
                found[node] = line, scope
                stack += [] if node in sized else node.all_input_nodes
    return found


def check_returned(result: Any, unit: str, pattern: Pattern, read_at: tuple[str, str] = ("", "")) -> None:
    """Raises PartitionError if a unit returns something other than what was recorded.

    `read_at`: the line that reads a result's shape, and its module; empty if none does.
    """
    if (difference := _difference(result, pattern)) is None:
        return
    got, expected = difference
    line, scope = read_at
    why = (
        "apart from the values of tensors, a block must return the same in every call as when it was recorded, "
        "since the calls that follow were recorded with that"
    )
    where = f" (as at {line}, in {f'module {scope!r}' if scope else 'the model itself'})" if line else ""
    remedy = (
        f"Pass leaves=[{scope!r}], so that it runs as a whole"
        if scope
        else "Return numbers as tensors, and tensors of fixed shapes; or give what uses them a module of its own and "
        "name that in leaves=[...], so that it runs as a whole"
    )
    raise PartitionError(f"{unit!r} returned {got} where the recording has {expected}: {why}{where}. {remedy}")


def _inside(value: Any, pattern: Pattern) -> list[Any] | None:
    """A container's contents; None if its kind or length differs from what was recorded."""
    kind = pattern[0]
    if kind == "items":
        items = list(value) if isinstance(value, (tuple, list)) else None
    elif kind == "keys":
        items = list(value.values()) if isinstance(value, dict) and _keys(value) == pattern[1] else None
    else:
        items = flatten(value).leaves
    return items if items is not None and len(items) == len(pattern[-1]) else None


def _difference(value: Any, pattern: Pattern) -> tuple[str, str] | None:
    """The first difference in a value, in words: what is there, and what was recorded; None if there is none."""
    kind = pattern[0]
    if kind in CONTAINERS:
        inside = _inside(value, pattern)
        if inside is None:
            return _text(value), {"items": f"{len(pattern[-1])} items", "keys": f"keys {pattern[1]}"}.get(
                kind, f"an object with {len(pattern[-1])} values in it"
            )
        return next(filter(None, map(_difference, inside, pattern[-1])), None)
    if kind == "tensor":
        if isinstance(value, Tensor) and (pattern[1] is None or value.shape == pattern[1]):
            return None
        return _text(value), "a tensor" if pattern[1] is None else f"a tensor of shape {pattern[1]}"
    if kind == "any":
        return (_text(value), "an object that is not a tensor") if isinstance(value, Tensor) else None
    expected = pattern[1]
    if kind == "text":
        same = isinstance(value, VALUES) and type(value) not in LITERALS and repr(value) == expected
        return None if same else (_text(value), expected)
    same = type(value) is type(expected) and bool(value == expected or (value != value and expected != expected))
    return None if same else (_text(value), repr(expected))  # NaN equals NaN here


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"{len(value)} items"
    if isinstance(value, dict):
        return f"keys {tuple(value)}"
    if isinstance(value, VALUES):
        return repr(value)
    return repr(value) if type(value) in LITERALS else f"a {type(value).__name__}"
