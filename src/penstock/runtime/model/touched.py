"""Detects changes to the model between two steps: a block's flag was switched, a hook was added to a module.

Blocks run their own Python in every step. After a change, features learn again what they learned from the first steps.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from itertools import chain, count, islice, repeat
from typing import Any

from torch import nn

_PARTS = ("_buffers", "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_NUMBERS = (int, float)


class Touched:
    """Attributes and hooks of some modules, from the end of one step to the beginning of the next.

    Each value of a flag counts once, so flags that alternate or change in every step soon stop counting. Numbers count
    only as zero or nonzero, and other objects only by their class.

    Attributes:
        changes: how often something new was found, or a step raised.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._held = [held for m in self._modules for held in (vars(m), *(vars(m).get(name, {}) for name in _PARTS))]
        self._seen: set[tuple[tuple[int, Any], Any]] = set()
        self.changes = 0
        self.settle()

    def settle(self) -> None:
        """Called at the end of a step."""
        self._latest = self._now()

    def look(self) -> int:
        """Called before a step. Returns `changes`, including those since the last step."""
        latest, self._latest = self._latest, self._now()
        (lengths, _, values), (before_lengths, _, before_values) = self._latest, latest
        if lengths != before_lengths or not all(map(operator.is_, values, before_values)):
            before, now = _by_place(*latest), _by_place(*self._latest)
            new = {
                (place, _kind(value))
                for place, value in now.items()
                if place[1] != "training" and _kind(value) != _kind(before.get(place, _MISSING))
            }
            self.changes += not new <= self._seen
            self._seen |= new
        return self.changes

    def restore(self, *, attributes: bool) -> None:
        """Called when a step has raised. `attributes`: whether to restore what `look` has found."""
        self.changes += 1
        lengths, *found = self._latest
        items = zip(*found, strict=True)
        for held, length in zip(self._held, lengths, strict=True) if attributes else ():
            before = dict(islice(items, length))
            held.clear()
            held.update(before)

    def _now(self) -> tuple[list[int], list[Any], list[Any]]:
        held = self._held
        return [*map(len, held)], [*chain.from_iterable(held)], [*chain.from_iterable(map(dict.values, held))]


class _Missing:
    pass


_MISSING = _Missing()


def _by_place(lengths: Iterable[int], keys: Iterable[Any], values: Iterable[Any]) -> dict[tuple[int, Any], Any]:
    holders = chain.from_iterable(map(repeat, count(), lengths))
    return dict(zip(zip(holders, keys, strict=True), values, strict=True))


def _kind(value: Any) -> Any:
    """The aspect of a value that may make code take another path."""
    if type(value) in _NUMBERS:
        return bool(value)
    return value if value is None or isinstance(value, (bool, str)) else type(value)
