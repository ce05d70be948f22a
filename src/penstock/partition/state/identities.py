"""Checks many lists and dicts at once: whether any of them holds a different object from before.

A recording asks before and after each unit whether anything that the forward can reach has changed. Usually nothing
has, so that answer must be cheap: no Python runs per entry.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

Plain = list[Any] | deque[Any] | dict[Any, Any]


class Identities:
    """The entries of some containers, in order, at the time when this was made."""

    def __init__(self, containers: Sequence[Plain]) -> None:
        self._containers, self._lengths = containers, [*map(len, containers)]
        self._named: list[Plain] = []
        self._entries: list[Iterable[Any]] = []
        for each in containers:
            (self._named if _has_names(each) else self._entries).append(each)
            if isinstance(each, dict):
                self._entries.append(each.values())
        self._names = [*chain.from_iterable(self._named)]
        self._before = [*chain.from_iterable(self._entries)]

    def differ(self) -> bool:
        """Whether any container has a different length or a different object in it.

        A key that is equal but not the same object counts as different too, unless it is text.
        """
        if [*map(len, self._containers)] != self._lengths or [*chain.from_iterable(self._named)] != self._names:
            return True
        return not all(map(operator.is_, chain.from_iterable(self._entries), self._before))


def _has_names(container: Plain) -> bool:
    """Whether all keys are text, which is compared by value, and quickly."""
    return isinstance(container, dict) and all(type(key) is str for key in container)
