"""Finds the functions, classes and files' globals that the code of a model's classes names, across a few files."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from penstock._base.closures import EMPTY, contents
from penstock.partition.state.library import is_library
from penstock.partition.values.objects import hides_tensors

CACHED = type(functools.cache(lambda: None))

FILES = 3
"""How many files names are followed across."""


def named_by(model: nn.Module) -> list[Any]:
    """Classes, functions (including those that `functools.cache` wraps) and, as dicts, the globals of files."""
    kinds = dict.fromkeys(base for module in model.modules() for base in type(module).__mro__)
    return _named(tuple(kinds))


@functools.lru_cache(maxsize=8)
def _named(kinds: tuple[type, ...]) -> list[Any]:
    """Cached: a model is recorded several times, and its code does not change."""
    return list(_walk(list(kinds)))


def _walk(kinds: list[Any]) -> Iterator[Any]:
    """Searches breadth first, so that everything is reached by its shortest path."""
    pending, seen = deque((kind, FILES) for kind in kinds), {id(kind) for kind in kinds}
    while pending:
        value, files = pending.popleft()
        yield value
        for item, crosses in _named_in(value):
            left = files - crosses
            if left > 0 and id(item) not in seen:
                seen.add(id(item))
                pending.append((item, left))


def _named_in(value: Any) -> Iterator[tuple[Any, bool]]:
    """What a class or function names, and whether it may be from another file."""
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        yield value.__func__, False
    elif isinstance(value, property):
        yield value.fget, False
    elif type(value) is CACHED:
        yield value.__wrapped__, False
    elif isinstance(value, type):
        if not _is_of_others(value.__module__):
            yield from ((item, False) for item in vars(value).values() if isinstance(item, _CODE))
    elif isinstance(value, FunctionType):
        yield from ((item, False) for item in _closure(value) if isinstance(item, _CODE))
        if not _is_of_others(value.__module__):
            yield value.__globals__, False
    elif type(value) is dict:
        yield from ((item, True) for item in list(value.values()) if isinstance(item, _CODE))


_CODE = (FunctionType, type, CACHED, staticmethod, classmethod, MethodType, property)


def _closure(function: FunctionType) -> Iterator[Any]:
    held = (contents(cell) for cell in function.__closure__ or ())
    return (value for value in held if value is not EMPTY)


def _is_of_others(module: str | None) -> bool:
    return not module or is_library(module)


class CachedFunctions:
    """The caching functions among those that a model's code names (see `named_by`). A table of positions with fake
    tensors must not stay: neither for the next plain forward, nor for another block, where it would look like a tensor
    passed behind the model's back. Entries are looked at only if there are new ones.
    """

    def __init__(self, named: Iterable[Any]) -> None:
        cached = [value for value in named if type(value) is CACHED]
        self._misses = {function: function.cache_info().misses for function in cached}

    def forget(self) -> None:
        """Empties those that have cached something new that contains a tensor."""
        for function, before in self._misses.items():
            now = function.cache_info().misses
            if now != before:
                if hides_tensors(function):
                    function.cache_clear()
                    now = 0
                self._misses[function] = now
