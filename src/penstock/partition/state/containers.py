"""Lists, deques, dicts and sets: which of them can be watched, and how to restore their contents."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache
from typing import Any

_KINDS = (list, deque, dict, OrderedDict, defaultdict, Counter, set)
_BASES = (list, dict, set)
_HARMLESS = {"__doc__", "__init__", "__new__", "__repr__"}
"""The methods that a subclass may override nevertheless."""


def is_container(value: Any) -> bool:
    """Whether a value is a list, a deque, a dict or a set.

    A subclass counts too, unless it overrides a method of its base: then even copying it may have side effects.
    """
    return _is_kind(type(value))  # type: ignore[arg-type]  # mypy: a class of Any has no hash


@cache
def _is_kind(kind: Any) -> bool:
    if kind in _KINDS:
        return True
    base = next((each for each in kind.__mro__ if each in _BASES), None)
    if base is None:
        return False
    methods = vars(base).keys() - _HARMLESS
    return all(methods.isdisjoint(vars(each)) for each in kind.__mro__[: kind.__mro__.index(base)])


def refill(container: Any, contents: Any) -> None:
    """Gives a container the contents of a copy of it, in the same order."""
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(contents)
    else:
        container.update(contents)
