"""What a unit returns besides its tensors' values: a recording takes that as given, and stages check it.

Calls between units are recorded with the numbers that they used, such as a count that a unit returns, the length of its
list, or (if they depend on values) the shapes of its tensors. So a stage compares what a unit returns with what was
recorded. A pattern consists only of tuples and plain values, so that it can appear in the stage's code.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import zip_longest
from numbers import Number
from typing import Any

import torch
from torch import Tensor, fx

from penstock._base.errors import PartitionError
from penstock._base.pytree import flatten
from penstock.partition.recording import NodeInfo, Pattern, PatternLeaf, walk
from penstock.partition.units import Lesson, Opening

ShapeRead = tuple[fx.Node, str, str]
"""A value whose shape was read between units, or determined the number of a call's results; the line that did so, and
its module."""

LITERALS = (bool, int, float, str, type(None))
VALUES = (Number, str, bytes, range, slice, enum.Enum, torch.Size, torch.dtype, torch.device)
"""Values of these types and their subclasses cannot appear in a stage's code, so their texts do."""


def make_pattern(result: Any, *, shapes: bool) -> Pattern:
    """Return what a result must look like in each call. `shapes`: include its tensors' shapes."""
    flat = flatten(result)
    return tuple((path, *_describe_leaf(leaf, shapes)) for path, leaf in zip(flat.paths, flat.leaves, strict=True))


def _describe_leaf(leaf: Any, shapes: bool) -> tuple[str, Any]:
    if isinstance(leaf, Tensor):
        return "tensor", tuple(leaf.shape) if shapes else None
    if type(leaf) in LITERALS:
        return "value", leaf
    return ("text", repr(leaf)) if isinstance(leaf, VALUES) else ("any", type(leaf).__name__)


def set_pattern(fact: NodeInfo, result: Any, opening: Opening) -> None:
    """Arrange to check a unit's result if it holds more than tensors, or may depend on values."""
    pattern = make_pattern(result, shapes=fact.depends_on_values)
    if fact.depends_on_values and _holds_values(pattern) and (opened := opening.around(fact.scope)):
        raise Lesson(keep_whole=opened)  # a module that stays whole has no such constants
    if fact.depends_on_values or _holds_values(pattern):
        fact.pattern = pattern


def drop_unread_shapes(
    facts: Mapping[fx.Node, NodeInfo], reads: Iterable[ShapeRead], sized: Collection[fx.Node]
) -> Collection[fx.Node]:
    """Drop checks of shapes that nothing depends on, which may differ between calls, when the forward has ended.

    Return the nodes whose shapes matter. Those of `sized` nodes follow from inputs alone, and have guards.
    """
    readers: dict[fx.Node, tuple[str, str]] = {}  # of each node whose shape was read, or that led to such a one
    for start, *reader in reads:
        for node in walk([start], lambda n: () if n in sized or n in readers else n.all_input_nodes):
            readers.setdefault(node, (reader[0], reader[1]))
    for node, fact in facts.items():
        if node in readers and fact.depends_on_values:
            fact.read_at = readers[node]
        elif fact.depends_on_values and fact.pattern is not None:
            fact.pattern = tuple((path, kind, None if kind == "tensor" else v) for path, kind, v in fact.pattern)
    return readers


def _holds_values(pattern: Pattern) -> bool:
    """Whether it contains anything but tensors."""
    return any(kind in ("value", "text") for _, kind, _ in pattern)


def check_returned(result: Any, unit: str, pattern: Sequence[PatternLeaf], read_at: tuple[str, str] = ("", "")) -> None:
    """Raise PartitionError if a unit returns something other than what was recorded.

    `read_at`: the line that reads a result's shape, and its module; empty if none does.
    """
    leaves = zip_longest(make_pattern(result, shapes=True), pattern)
    unequal = next((pair for pair in leaves if None in pair or not _fits(*pair)), None)
    if unequal is None:
        return
    line, scope = read_at
    reason = (
        "apart from the values of tensors, a block must return the same in every call as when it was recorded, "
        "since the calls that follow were recorded with that"
    )
    location = f" (as at {line}, in {f'module {scope!r}' if scope else 'the model itself'})" if line else ""
    remedy = (
        "Return numbers as tensors, and tensors of fixed shapes; or give what uses them a module of its own and name "
        "that in leaf_modules=[...], so that it runs as a whole"
    )
    if scope:
        remedy = f"Pass leaf_modules=[{scope!r}], so that it runs as a whole"
    difference = "returned {} where the recording has {}".format(*map(_describe, unequal))
    raise PartitionError(f"{unit!r} {difference}: {reason}{location}. {remedy}")


def _fits(actual: PatternLeaf, expected: PatternLeaf) -> bool:
    (path, actual_kind, got), (expected_path, kind, value) = actual, expected
    if path != expected_path or kind == "any" or actual_kind != kind:
        return path == expected_path and kind == "any" and actual_kind != "tensor"
    is_nan = got != got and value != value
    return (kind == "tensor" and value is None) or (type(got) is type(value) and (got == value or is_nan))


def _describe(leaf: PatternLeaf | None) -> str:
    if leaf is None:
        return "nothing more"
    path, kind, value = leaf
    tensor = "a tensor" if value is None else f"a tensor of shape {value}"
    text = {"tensor": tensor, "value": repr(value), "text": value, "any": f"an object of class {value}"}[kind]
    return f"{text} at {path}" if path else str(text)
