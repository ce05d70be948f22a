"""The places where code keeps state from one call to the next: attributes and slots, what containers and arrays hold,
variables of closures, context variables.

A survey finds those that some objects reach. Two readings of a place show whether a call in between changed it, and
writing a reading back restores the place.
"""

from __future__ import annotations

import dis
import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from penstock.partition.state.closure_cells import EMPTY, contents
from penstock.partition.state.containers import is_container, refill
from penstock.partition.state.library import OF_TORCH, is_library, package_of
from penstock.partition.state.reach import DEPTH, LARGEST, LARGEST_ARRAY, Trace, is_array, is_of_others, slots_of
from penstock.partition.values.objects import CONSTANTS

MISSING = object()
"""Returned when an empty place is read."""

DEEPEST = 12
"""How deep to look into containers; objects are looked into only down to `DEPTH`."""

MOST = 20_000
"""The most owners of places to look for below `DEPTH`."""

CALLS = 3
"""How many functions and classes deep, starting from a method, to follow the names of global objects."""

Key = tuple[int, str]

Values = dict[Key, Any]
"""What places hold."""


class Place(ABC):
    """One place. `key` identifies it while its owner lives."""

    key: Key

    @abstractmethod
    def read(self) -> Any:
        """The present contents, as a value that later changes of the place do not affect."""

    @abstractmethod
    def write(self, value: Any) -> None:
        """Restores what was read."""

    def same(self, one: Any, other: Any) -> bool:
        """Whether two readings are alike."""
        return one is other

    def holds(self, value: Any) -> bool:
        """Whether the place is still as it was when `value` was read."""
        return self.same(self.read(), value)

    @property
    def text(self) -> str:
        """Where a user finds it."""
        return repr(self.key[1])


@dataclass(frozen=True, eq=False, slots=True)
class Attribute(Place):
    """One attribute of a module, a class or a plain object, whose `__dict__` is `holder`."""

    holder: MutableMapping[str, Any]
    name: str

    @property
    def key(self) -> Key:  # type: ignore[override]
        return id(self.holder), self.name

    def read(self) -> Any:
        return self.holder.get(self.name, MISSING)

    def write(self, value: Any) -> None:
        if value is MISSING:
            self.holder.pop(self.name, None)
        else:
            self.holder[self.name] = value


@dataclass(frozen=True, eq=False, slots=True)
class Slot(Place):
    """One of the `__slots__` of an object."""

    owner: Any
    name: str

    @property
    def key(self) -> Key:  # type: ignore[override]
        return id(self.owner), self.name

    def read(self) -> Any:
        return getattr(self.owner, self.name, MISSING)

    def write(self, value: Any) -> None:
        if self.read() is value:
            return
        if value is MISSING:
            object.__delattr__(self.owner, self.name)
        else:
            object.__setattr__(self.owner, self.name, value)


@dataclass(frozen=True, eq=False, slots=True)
class Cell(Place):
    """A variable of a closure."""

    cell: CellType
    name: str

    @property
    def key(self) -> Key:  # type: ignore[override]
        return id(self.cell), self.name

    def read(self) -> Any:
        return contents(self.cell)

    def write(self, value: Any) -> None:
        if value is EMPTY:
            del self.cell.cell_contents
        else:
            self.cell.cell_contents = value


@dataclass(frozen=True, eq=False, slots=True)
class Variable(Place):
    """A context variable."""

    variable: ContextVar[Any]

    @property
    def key(self) -> Key:  # type: ignore[override]
        return id(self.variable), self.variable.name

    def read(self) -> Any:
        return self.variable.get(MISSING)

    def write(self, value: Any) -> None:
        if value is not MISSING:  # it cannot be unset, but then nothing has read it
            self.variable.set(value)


@dataclass(frozen=True, eq=False, slots=True)
class Array(Place):
    """The values of a numpy array or a bytearray."""

    array: Any
    name: str

    @property
    def key(self) -> Key:  # type: ignore[override]
        return id(self.array), self.name

    def read(self) -> Any:
        return self.array.copy()

    def write(self, value: Any) -> None:
        if isinstance(self.array, bytearray):
            self.array[:] = value
        elif self.array.flags.writeable:
            self.array[...] = value

    def same(self, one: Any, other: Any) -> bool:
        if isinstance(one, bytearray):
            return bool(one == other)
        return other is not MISSING and bool(one.tobytes() == other.tobytes())


@dataclass(frozen=True, eq=False, slots=True)
class Contents(Place):
    """What a list, a deque, a dict or a set contains."""

    container: Any
    name: str = ""

    @property
    def key(self) -> Key:  # type: ignore[override]
        return id(self.container), self.name

    def read(self) -> Any:
        return self.container.copy()

    def write(self, value: Any) -> None:
        if not self.holds(value):
            refill(self.container, value)

    def same(self, one: Any, other: Any) -> bool:
        return other is not MISSING and same_items(one, other)

    def holds(self, value: Any) -> bool:
        return self.same(self.container, value)


def same_items(one: Any, other: Any) -> bool:
    """Whether two containers hold the same objects in the same order."""
    if len(one) != len(other):
        return False
    if isinstance(one, set):
        return {*map(id, one)} == {*map(id, other)}
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(operator.is_, one.values(), other.values()))
    return all(map(operator.is_, one, other))


class Survey:
    """All places that some objects reach: their attributes, the contents of containers and plain objects, and `traces`.

    Args:
        roots: modules, functions, objects. Modules found in them are not opened.

    Attributes:
        tensors: the tensors found there, by where they are, including the parameters and buffers of modules.
        attributes: the `__dict__` of each module and object found.
    """

    def __init__(self, roots: Iterable[Any], traces: Iterable[Trace] = ()) -> None:
        self.places: dict[Key, Place] = {}
        self.tensors: dict[int, tuple[str, Tensor]] = {}
        self.attributes: list[dict[str, Any]] = []
        self._owners: dict[int, Any] = {}  # kept alive so that their ids are not reused
        level = [("", value) for value in roots if isinstance(value, nn.Module) or self._can_be_opened(value, 1)]
        for depth in range(DEEPEST):
            inside = [held for name, value in level for held in self._open(name, value)]
            level = [(name, value) for name, value in inside if self._can_be_opened(value, depth)]
            if not level:
                break
        for trace in traces:
            self._owners[id(trace.holder)] = trace.holder
            self._add(Contents(trace.holder) if trace.key is None else Attribute(trace.holder, trace.key))

    def has_owner_of(self, place: Place) -> bool:
        """Whether the container or object that a place belongs to was found."""
        return place.key[0] in self._owners

    def _can_be_opened(self, value: Any, depth: int) -> bool:
        """Whether to look into a value.

        Objects of libraries only if they are attributes of a root. Penstock's own objects, which recorded code names,
        are not the model's.
        """
        kind = type(value)
        if kind in CONSTANTS or isinstance(value, (type, ModuleType)):
            return False
        if depth >= DEPTH and len(self._owners) > MOST:
            return False
        if isinstance(value, tuple) or is_container(value):
            return len(value) <= LARGEST
        if isinstance(value, (ContextVar, bytearray)) or kind.__name__ == "ndarray":
            return True
        if depth >= DEPTH or isinstance(value, nn.Module):
            return False
        if isinstance(value, FunctionType):
            return not is_of_others(value.__module__)
        if isinstance(value, (Tensor, MethodType, partial, threading.local)):
            return True
        if (depth > 0 and is_of_others(kind.__module__)) or package_of(kind.__module__) == "penstock":
            return False
        return isinstance(getattr(value, "__dict__", None), dict) or bool(slots_of(kind))

    def _open(self, name: str, value: Any) -> list[tuple[str, Any]]:
        """Adds a value's places, and returns what is in them, with names."""
        inside: list[tuple[str, Any]] = []
        if isinstance(value, tuple):
            inside += [(name, item) for item in tuple.__iter__(value)]
        elif is_container(value) and self._is_new(value):
            self._add(Contents(value, name))
            inside += [(name, item) for item in list(value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, ContextVar) and self._is_new(value):
            self._add(Variable(value))
            inside.append((value.name, value.get(None)))
        elif isinstance(value, MethodType):
            inside += [(name, value.__self__), (name, value.__func__)]
        elif isinstance(value, partial):
            inside += [(name, part) for part in (value.func, *value.args, *value.keywords.values())]
        elif isinstance(value, FunctionType) and self._is_new(value):
            for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=False):
                if self._is_new(cell):
                    self._add(Cell(cell, variable))
                    inside.append((variable, contents(cell)))
        elif _is_array(value):
            if self._is_new(value):
                self._add(Array(value, name))
        elif isinstance(value, Tensor):
            self.tensors.setdefault(id(value), (name, value))
        elif isinstance(value, nn.Module):
            for held in (value._parameters, value._buffers):
                inside += list(held.items())
        inside += self._open_slots(value)
        return inside + self._open_attributes(value)

    def _open_slots(self, value: Any) -> Iterator[tuple[str, Any]]:
        kind = type(value)
        names = () if kind in CONSTANTS or is_of_others(kind.__module__) else slots_of(kind)
        if names and self._is_new(value):
            for slot in names:
                self._add(Slot(value, slot))
                yield slot, getattr(value, slot, None)

    def _open_attributes(self, value: Any) -> list[tuple[str, Any]]:
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict) or isinstance(value, type) or not self._is_new(attributes):
            return []
        self.attributes.append(attributes)
        found = [(name, held) for name, held in attributes.items() if name not in OF_TORCH]
        for name, _ in found:
            self._add(Attribute(attributes, name))
        return found

    def _is_new(self, owner: Any) -> bool:
        if id(owner) in self._owners:
            return False
        self._owners[id(owner)] = owner
        return True

    def _add(self, place: Place) -> None:
        self.places[place.key] = place


def _is_array(value: Any) -> bool:
    if isinstance(value, bytearray):
        return len(value) <= LARGEST_ARRAY
    return is_array(value) and not value.dtype.hasobject


def named_by_code(roots: Iterable[Any]) -> list[Any]:
    """The global objects that the code of classes and functions names, directly or through others."""
    found: dict[int, Any] = {}
    level = [*roots]
    seen = {id(value) for value in level}
    for _ in range(1 + CALLS):
        named = [value for each in level for value in _named_in(each)]
        level = []
        for value in named:
            if id(value) not in seen and type(value) not in CONSTANTS and not isinstance(value, ModuleType):
                seen.add(id(value))
                level += [value] if isinstance(value, (type, FunctionType)) else []
                if not isinstance(value, (type, nn.Module)):
                    found[id(value)] = value
    return list(found.values())


def _named_in(value: Any) -> Iterator[Any]:
    if isinstance(value, type):
        if not is_library(value.__module__):
            for item in vars(value).values():
                item = getattr(item, "__func__", getattr(item, "fget", item))
                if isinstance(item, FunctionType):
                    yield from _named_in(item)
    elif isinstance(value, FunctionType) and not is_library(value.__module__):
        known = value.__globals__
        yield from (known[name] for name in _names_in(value.__code__) if name in known)


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def stored_globals(roots: Iterable[Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The global variables that the code of classes and functions sets, directly or through functions that it names."""
    level = [*roots]
    for value in [*level, *named_by_code(level)]:
        functions = [value] if isinstance(value, FunctionType) else []
        if isinstance(value, type):
            functions = [held for held in vars(value).values() if isinstance(held, FunctionType)]
        for function in functions:
            for step in dis.get_instructions(function.__code__):
                if step.opname == "STORE_GLOBAL":
                    yield function.__globals__, str(step.argval)
