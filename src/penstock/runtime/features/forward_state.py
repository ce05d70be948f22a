"""What a module keeps from its forward for its own backward: in attributes, or in lists, dicts and objects there; or
wherever else the recorded forward has left something, as in an attribute of a class or in a global dict.

A reversible block notes the state of the random generators, so that it draws the same numbers when it runs itself again
in backward. In plain training a microbatch's backward follows directly on its forward; in a pipeline other forwards may
come between the two and overwrite what was noted. So whatever a forward sets is kept for each microbatch, and put back
for its backward.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from penstock.partition.state.containers import is_container, refill
from penstock.partition.state.library import OF_TORCH
from penstock.partition.state.reach import DEPTH, LARGEST, Trace, is_of_others
from penstock.runtime.features.context import StageContext
from penstock.runtime.features.feature import Feature, Start

_MISSING = object()
_NOT_PLAIN = (nn.Module, Tensor, type, FunctionType, ModuleType)

Key = tuple[int, str]


@dataclass(frozen=True, eq=False, slots=True)
class Attribute:
    """One attribute of a module, a class or a plain object, whose `__dict__` is `holder`."""

    holder: MutableMapping[str, Any]
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
        if not self.holds(value):
            refill(self.container, value)

    def holds(self, value: Any) -> bool:
        return _same(self.container, value)


Place = Attribute | Contents
Values = dict[Key, Any]


class ContainerCopies:
    """What the containers of some modules, and of `traces`, contain now, and which numbers their attributes hold, for a
    layer that is run again within a backward."""

    def __init__(self, modules: Iterable[nn.Module], traces: Iterable[Trace] = ()) -> None:
        found = [(place, place.read()) for place in _Survey(modules, traces).places.values()]
        self._contents = [(p, held) for p, held in found if isinstance(p, Contents) or type(held) in (int, float)]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts that back for a while. What is added or removed in the meantime is forgotten."""
        now = [place.read() for place, _ in self._contents]
        for place, contents in self._contents:
            place.write(contents)
        try:
            yield
        finally:
            for (place, _), contents in zip(self._contents, now, strict=True):
                place.write(contents)


@dataclass(frozen=True, slots=True)
class Kept:
    """What the places held before and after the forward of a microbatch, and after it was run again, if it was."""

    before: Values
    after: Values
    again: Values


class ForwardState(Feature):
    """What the modules of one stage hold between forward and backward.

    Which places a forward sets is learned by comparing before and after, in every forward before the first backward.

    Args:
        modules: whose forward the stage runs.
        traces: other places in which forwards leave something.
    """

    @classmethod
    def of(cls, stage: StageContext) -> ForwardState | None:
        """In training, of stages whose Python runs each time."""
        if not stage.training or stage.binding.compile is not None:
            return None
        return cls((module for each in stage.stages for module in each.module.modules()), stage.stage.traces)

    def __init__(self, modules: Iterable[nn.Module], traces: Iterable[Trace] = ()) -> None:
        self._modules = list(dict.fromkeys(modules))
        self._traces = tuple(traces)
        self._places: dict[Key, Place] = {}
        self._learning = True
        self._kept: dict[int, Kept] = {}
        self._latest = -1  # the microbatch of the last forward

    def begin_step(self, start: Start) -> None:
        """Drops anything left by a step that raised."""
        self._kept.clear()

    @contextmanager
    def forward(self, microbatch: int, *, runs_again: bool) -> Iterator[None]:
        """Around a forward: keeps what it sets."""
        survey = _Survey(self._modules, self._traces) if self._learning else None
        places = self._places if survey is None else survey.places
        before = {key: place.read() for key, place in places.items()}
        yield
        if survey is not None:
            # A list or an object that was not there before is known by the place that it has been put in.
            found = [
                place for place in _Survey(self._modules, self._traces).places.values() if survey.has_owner_of(place)
            ]
            changed = [place for place in found if not place.holds(before.get(place.key, _MISSING))]
            new = {place.key: place for place in changed if place.key not in self._places}
            self._places.update(new)
            for kept in self._kept.values():  # earlier forwards left these places as this one found them
                for values in (kept.before, kept.after):
                    values.update({key: before.get(key, _MISSING) for key in new})
        if self._places:
            before = {key: before.get(key, _MISSING) for key in self._places}
            self._kept[microbatch] = Kept(before, self._now(), {})
            self._latest = microbatch

    @contextmanager
    def backward(self, microbatch: int) -> Iterator[None]:
        """Around a backward: puts back what its forward has set."""
        self._learning = False
        kept = self._kept.get(microbatch)
        if kept is None:
            yield
            return
        now = self._now()
        self._put(kept.after)
        try:
            yield
        finally:
            del self._kept[microbatch]
            self._settle(microbatch, kept, now)

    @contextmanager
    def again(self, microbatch: int) -> Iterator[None]:
        """Around the stage's forward when it is run again within a backward: puts back what it found the first time."""
        kept = self._kept.get(microbatch)
        if kept is None:
            yield
            return
        self._put(kept.before)
        yield
        kept.again.update(self._now())

    def _settle(self, microbatch: int, kept: Kept, now: Values) -> None:
        """Ends a backward. `now` is what was there before it.

        What backward took from a container, or added to it, is taken or added for later backwards too: a stack that
        forwards push on and backwards pop from ends up empty, and one that backward leaves alone stays as it is.
        """
        left = self._now()
        for key, value in now.items():
            place = self._places[key]
            if isinstance(place, Attribute):
                if microbatch != self._latest or left[key] is kept.after[key]:
                    place.write(value)  # else what backward left is what plain torch leaves
                continue
            before, after = kept.after[key], left[key]
            if key in kept.again:
                after = _renamed(after, kept.again[key], before)
            place.write(_amended(value, before, after))
            for other in self._kept.values():
                for values in (other.before, other.after):
                    values[key] = _amended(values[key], before, after)

    def _now(self) -> Values:
        return {key: place.read() for key, place in self._places.items()}

    def _put(self, values: Values) -> None:
        for key, value in values.items():
            self._places[key].write(value)


def _renamed(contents: Any, again: Any, first: Any) -> Any:
    """A container's contents, with what the first run of a forward put there in place of what the second run did."""
    renamed = contents.copy()
    renamed.clear()
    if isinstance(contents, dict):
        keys = dict(zip(again, first, strict=False))
        values = {id(value): other for value, other in zip(again.values(), first.values(), strict=False)}
        renamed.update({keys.get(key, key): values.get(id(value), value) for key, value in contents.items()})
    else:
        values = {id(value): other for value, other in zip(again, first, strict=False)}
        renamed.extend(values.get(id(value), value) for value in contents)
    return renamed


def _amended(contents: Any, before: Any, after: Any) -> Any:
    """A container's contents, changed in the same way as `before` was changed to give `after`."""
    if _same(before, after):
        return contents
    if _same(contents, before):
        return after
    amended = contents.copy()
    if isinstance(contents, dict):
        for key in before:
            if key not in after and amended.get(key, _MISSING) is before[key]:
                del amended[key]
        amended.update({key: value for key, value in after.items() if before.get(key, _MISSING) is not value})
        return amended
    gone, new = Counter(map(id, before)), []
    for value in after:
        if gone[id(value)]:
            gone[id(value)] -= 1
        else:
            new.append(value)
    amended.clear()
    for value in contents:
        if gone[id(value)]:
            gone[id(value)] -= 1
        else:
            amended.append(value)
    amended.extend(new)
    return amended


def _same(one: Any, other: Any) -> bool:
    """Whether two containers hold the same objects in the same order."""
    if len(one) != len(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(operator.is_, one.values(), other.values()))
    return all(map(operator.is_, one, other))


class _Survey:
    """All places that a forward may set: attributes of modules, what containers and plain objects there hold, and
    `traces`."""

    def __init__(self, modules: Iterable[nn.Module], traces: Iterable[Trace] = ()) -> None:
        self.places: dict[Key, Place] = {}
        self._owners: dict[int, Any] = {}  # kept alive, or their ids could be given again
        level: list[Any] = list(modules)
        for depth in range(DEPTH):
            inside = [held for value in level for held in self._open(value)]
            level = [value for value in inside if _can_be_opened(value, is_attribute=depth == 0)]
        for trace in traces:
            self._owners[id(trace.holder)] = trace.holder
            self._add(Contents(trace.holder) if trace.key is None else Attribute(trace.holder, trace.key))

    def _open(self, value: Any) -> list[Any]:
        """Adds a value's places, and returns what is in them."""
        inside: list[Any] = []
        if isinstance(value, tuple):
            inside += value
        elif is_container(value) and self._is_new(value):
            self._add(Contents(value))
            inside += value.values() if isinstance(value, dict) else value
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and self._is_new(attributes):
            for name, held in attributes.items():
                if name not in OF_TORCH:
                    self._add(Attribute(attributes, name))
                    inside.append(held)
        return inside

    def _is_new(self, owner: Any) -> bool:
        if id(owner) in self._owners:
            return False
        self._owners[id(owner)] = owner
        return True

    def _add(self, place: Place) -> None:
        self.places[place.key] = place

    def has_owner_of(self, place: Place) -> bool:
        """Whether the container or object that a place is in was there."""
        return place.key[0] in self._owners


def _can_be_opened(value: Any, *, is_attribute: bool) -> bool:
    """Whether to look into a value. Objects of libraries are looked into only as attributes of a module."""
    if isinstance(value, tuple) or is_container(value):
        return len(value) <= LARGEST and not isinstance(value, set)
    if isinstance(value, _NOT_PLAIN) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    return is_attribute or not is_of_others(type(value).__module__)
