"""Finds what a forward's code names: helpers, methods of inner modules, globals, closures, defaults.

A recording of the forward takes the values found there as given, wherever they are read: in a function that it calls,
in a method of a block other than its forward, in a property. Nothing is run to find them; the names in the code are
followed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from inspect import getattr_static
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import nn

from penstock.partition.state.closure_cells import EMPTY, contents
from penstock.partition.state.library import OF_TORCH, is_library, package_of
from penstock.partition.state.reach import PLAIN_OBJECTS

FUNCTIONS = 200
"""The most functions to follow from one module's forward."""

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Names:
    """Some names, and the namespace (or closure cells) in which their values are found."""

    path: Path
    holder: Mapping[str, Any]
    names: frozenset[str]

    def values(self) -> Iterator[tuple[Path, Any]]:
        for name in sorted(self.names & self.holder.keys()):  # an instance attribute may later hide the class's
            value = _content(self.holder[name])
            if value is not EMPTY and _counts(value):
                yield (*self.path, name), value

    def functions(self) -> Iterator[tuple[str, FunctionType]]:
        return (
            (name, function)
            for name in sorted(self.names & self.holder.keys())
            for function in _functions(_content(self.holder[name]))
        )


class Followed(NamedTuple):
    """A function still to be read. `owner`: the module whose method it is."""

    path: Path
    owner: nn.Module | None
    function: FunctionType


def names_of(module: nn.Module) -> list[Names]:
    """What a module's forward names, directly or through other functions, beyond the module's own attributes."""
    found: dict[Path, Names] = {}
    seen: set[tuple[int, int]] = set()
    pending = [Followed((name,), None, f) for name, value in vars(module).items() for f in _functions(value)]
    pending += [Followed(("",), module, f) for f in _functions(getattr_static(type(module), "forward", None))]
    while pending and len(seen) < FUNCTIONS:
        path, owner, function = pending.pop()
        key = id(function), id(owner)
        if key in seen or is_library(function.__module__):
            continue
        seen.add(key)
        label = f"{function.__module__}.{function.__qualname__}:{function.__code__.co_firstlineno}"
        for entry in _of_function((*path, label), function):
            found.setdefault(entry.path, entry)
            pending += [Followed(path, None, f) for _, f in entry.functions()]
        words = words_of(function.__code__) | texts_of(function.__code__)
        for inner, part in () if owner is None else (((), owner), *_inside(owner, words)):
            where = (*path, *inner)
            for entry in _of_module((*where, label), part, words):
                found.setdefault(entry.path, entry)
                named = [] if entry.holder is vars(part) else entry.functions()
                pending += [Followed(where, part, f) for name, f in named if name != "forward" or part is owner]
    return [entry for entry in found.values() if entry.names]


class Defaults(Mapping[str, Any]):
    """A function's default arguments as they are now: by position, or by name for those that only have one."""

    def __init__(self, function: FunctionType) -> None:
        self._function = function

    def _now(self) -> Mapping[str, Any]:
        by_position = {str(i): value for i, value in enumerate(self._function.__defaults__ or ())}
        return by_position | (self._function.__kwdefaults__ or {})

    def __getitem__(self, name: str) -> Any:
        return self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


def _of_function(path: Path, function: FunctionType) -> Iterator[Names]:
    """A function's globals, what it names in those that are modules, classes or functions, its closure and defaults;
    nothing from installed packages.
    """
    if _is_installed(function.__module__):
        return
    words = words_of(function.__code__) | texts_of(function.__code__)
    defaults = Defaults(function)
    closure = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    named = words & function.__globals__.keys()
    yield Names((*path, "globals"), function.__globals__, named)
    yield Names((*path, "closure"), closure, frozenset(closure))
    yield Names((*path, "defaults"), defaults, frozenset(defaults))
    for name in sorted(named):
        for label, space in _spaces(function.__globals__[name]).items():
            yield Names((*path, name, label), space, words)


def _spaces(value: Any) -> Mapping[str, Mapping[str, Any]]:
    """The namespaces of a module, of a class and its bases, or of a function, unless they are a library's; by name."""
    if isinstance(value, ModuleType):
        return {} if is_library(value.__name__) else {"": vars(value)}
    owners = value.__mro__ if isinstance(value, type) else [value] if isinstance(value, FunctionType) else []
    return {owner.__qualname__: vars(owner) for owner in owners if not is_library(owner.__module__)}


def _of_module(path: Path, module: nn.Module, words: frozenset[str]) -> Iterator[Names]:
    """What names refer to in a module and in its classes."""
    yield Names((*path, "attributes"), vars(module), words - OF_TORCH)
    for cls in type(module).__mro__:
        if not is_library(cls.__module__):
            names = words.union(["__getattr__"]) & vars(cls).keys()
            yield Names((*path, cls.__qualname__), vars(cls), frozenset(names))


def _functions(*values: Any) -> Iterator[FunctionType]:
    for value in values:
        if isinstance(value, property):
            yield from _functions(value.fget)
        elif isinstance(value, (staticmethod, classmethod, MethodType)):
            yield from _functions(value.__func__)
        elif isinstance(value, functools.partial):
            yield from _functions(value.func)
        elif isinstance(value, FunctionType):
            yield value
            yield from _functions(getattr(value, "__wrapped__", None))
        elif callable(getattr_static(value, "cache_clear", None)):
            yield from _functions(getattr(value, "__wrapped__", None))


def _counts(value: Any) -> bool:
    """Whether a value may be a setting. Modules and classes are not, nor a library's objects except containers."""
    if isinstance(value, (ModuleType, type, nn.Module, property, staticmethod, classmethod)):
        return False
    if isinstance(value, FunctionType):
        return not _is_installed(value.__module__)
    package = package_of(type(value).__module__)
    return package in PLAIN_OBJECTS or package in ("builtins", "enum", "functools", "numpy") or not is_library(package)


@functools.cache
def _is_installed(name: str | None) -> bool:
    """Whether a module belongs to an installed package, whose settings do not change during a run."""
    file = getattr(sys.modules.get(name or ""), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _content(value: Any) -> Any:
    """The value itself; for a closure's cell, its contents."""
    return contents(value) if isinstance(value, CellType) else value


@functools.cache
def words_of(code: CodeType) -> frozenset[str]:
    """The names of globals and attributes in a function's code."""
    inner = [words_of(c) for c in code.co_consts if isinstance(c, CodeType)]
    return frozenset(code.co_names).union(*inner)


@functools.cache
def texts_of(code: CodeType) -> frozenset[str]:
    """The texts in a function's code that may be names, as in `getattr(block, "skip", False)`."""
    inner = [texts_of(c) for c in code.co_consts if isinstance(c, CodeType)]
    return frozenset(c for c in code.co_consts if isinstance(c, str) and c.isidentifier()).union(*inner)


def _inside(module: nn.Module, words: Collection[str]) -> Iterator[tuple[Path, nn.Module]]:
    """The inner modules that code with these words may reach from a module, such as `self.transformer.h[0]`."""
    pending: list[tuple[Path, nn.Module]] = [((name,), child) for name, child in module.named_children()]
    while pending:
        path, part = pending.pop(0)
        yield path, part
        only_holds = isinstance(part, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        inner = part.named_children()
        pending += [((*path, name), child) for name, child in inner if only_holds or name in words]
