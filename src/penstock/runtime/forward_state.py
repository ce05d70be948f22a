"""What a module keeps from its forward for its own backward: in attributes, in a plain object there, in a list.

A reversible block notes the state of the random generators, to draw the same again when it runs itself again in
backward. In plain training the backward of a microbatch follows its forward; in a pipeline other forwards may come
between the two, and write over what was noted. So what a forward sets is kept for each microbatch, and put back for its
backward.
"""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from penstock.partition.state.library import OF_TORCH
from penstock.partition.state.reach import LARGEST

_MISSING = object()
_NOT_PLAIN = (nn.Module, Tensor, type, FunctionType, ModuleType)
_CONTAINERS = (list, deque, dict, OrderedDict)


Key = tuple[int, str]


@dataclass(frozen=True, eq=False, slots=True)
class Attribute:
    """One attribute of a module or of a plain object, whose `__dict__` is `holder`."""

    holder: dict[str, Any]
    name: str

    @property
    def key(self) -> Key:
        return id(self.holder), self.name

    def read(self) -> Any:
        return self.holder.get(self.name, _MISSING)

    def write(self, value: Any) -> None:
        if value is _MISSING:
            self.holder.pop(self.name, None)
        else:
            self.holder[self.name] = value

    def holds(self, value: Any) -> bool:
        return self.read() is value


@dataclass(frozen=True, eq=False, slots=True)
class Contents:
    """What a list, a deque or a dict contains."""

    container: Any

    @property
    def key(self) -> Key:
        return id(self.container), ""

    def read(self) -> Any:
        return self.container.copy()

    def write(self, value: Any) -> None:
        if self.holds(value):
            return
        self.container.clear()
        if isinstance(self.container, dict):
            self.container.update(value)
        else:
            self.container.extend(value)

    def holds(self, value: Any) -> bool:
        now = self.container
        if len(now) != len(value):
            return False
        if isinstance(now, dict):
            return list(now) == list(value) and all(map(operator.is_, now.values(), value.values()))
        return all(map(operator.is_, now, value))


Place = Attribute | Contents
Values = dict[Key, Any]


class Kept(NamedTuple):
    """What the places held before and after the forward of one microbatch."""

    before: Values
    after: Values


class ForwardState:
    """What the modules of one stage hold between forward and backward.

    Which places a forward sets is found out once: by comparing before and after it, until the first backward.

    Args:
        modules: whose forward the stage runs.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(dict.fromkeys(modules))
        self._places: dict[Key, Place] = {}
        self._learning = True
        self._kept: dict[int, Kept] = {}
        self._first: Values = {}  # before the first of those forwards that have no backward yet
        self._latest = -1  # the microbatch of the last forward

    def begin_step(self) -> None:
        """Drops what a step that raised may have left."""
        self._kept.clear()

    @contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        """Around a forward: keeps what it sets."""
        places = _places_in(self._modules) if self._learning else self._places
        before = {key: place.read() for key, place in places.items()}
        yield
        if self._learning:
            now = _places_in(self._modules)
            new = {k: p for k, p in now.items() if k not in self._places and not _held(p, before)}
            self._places.update(new)
        if not self._places:
            return
        before = {key: before[key] for key in self._places if key in before}
        self._first = {**before, **self._first} if self._kept else before
        self._kept[microbatch] = Kept(before, self._now())
        self._latest = microbatch

    @contextmanager
    def backward(self, microbatch: int) -> Iterator[None]:
        """Around a backward: what its forward has set is there meanwhile."""
        self._learning = False
        kept = self._kept.pop(microbatch, None)
        if kept is None:
            yield
            return
        now = self._now()
        self._put(kept.after)
        try:
            yield
        finally:
            undone = [
                key
                for key, value in kept.before.items()
                if isinstance(place := self._places[key], Contents) and place.holds(value)
            ]
            if microbatch != self._latest:  # else what backward left is what plain torch leaves
                self._put(now)
            if not self._kept:  # a backward takes away what its forward has added: so does each, and nothing is left
                self._put({key: self._first[key] for key in undone})

    def _now(self) -> Values:
        return {key: place.read() for key, place in self._places.items()}

    def _put(self, values: Values) -> None:
        for key, value in values.items():
            self._places[key].write(value)


def _held(place: Place, before: Values) -> bool:
    """Whether a place is as before. A container that was not there is known by the attribute that it is in."""
    if place.key not in before:
        return isinstance(place, Contents)
    return place.holds(before[place.key])


def _places_in(modules: Iterable[nn.Module]) -> dict[Key, Place]:
    """Attributes and containers of modules, and of the plain objects in them."""
    holders: dict[int, dict[str, Any]] = {}
    for module in modules:
        holders[id(module.__dict__)] = module.__dict__
        for name, value in module.__dict__.items():
            held = getattr(value, "__dict__", None)
            if name not in OF_TORCH and isinstance(held, dict) and not isinstance(value, _NOT_PLAIN):
                holders[id(held)] = held
    found: dict[Key, Place] = {}
    for holder in holders.values():
        for name, value in holder.items():
            if name in OF_TORCH:
                continue
            places: list[Place] = [Attribute(holder, name)]
            if type(value) in _CONTAINERS and len(value) <= LARGEST:
                places.append(Contents(value))
            found.update({place.key: place for place in places})
    return found
