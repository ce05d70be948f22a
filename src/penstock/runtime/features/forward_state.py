"""What a module keeps from its forward for its own backward: in attributes, or in lists, dicts and objects there; or
wherever else the recorded forward has left something, as in an attribute of a class or in a global dict.

A reversible block notes the state of the random generators, so that it draws the same numbers when it runs itself again
in backward. In plain training a microbatch's backward follows directly on its forward; in a pipeline other forwards may
come between the two and overwrite what was noted. So whatever a forward sets is kept for each microbatch, and put back
for its backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.partition.state.places import MISSING, Contents, Key, Place, Survey, named_by_code, same_items
from penstock.partition.state.reach import Trace
from penstock.runtime.features.context import StageContext
from penstock.runtime.features.feature import Feature, Start

Values = dict[Key, Any]


class ContainerCopies:
    """What the containers of some modules, and of `traces`, contain now, and which numbers their attributes hold, for a
    layer that is run again within a backward."""

    def __init__(self, modules: Iterable[nn.Module], traces: Iterable[Trace] = ()) -> None:
        found = [(place, place.read()) for place in Survey(modules, traces).places.values()]
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
        own = dict.fromkeys(modules)
        kinds = dict.fromkeys(base for module in own for base in type(module).__mro__)
        self._roots = [*own, *named_by_code(kinds)]
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
        survey = Survey(self._roots, self._traces) if self._learning else None
        places = self._places if survey is None else survey.places
        before = {key: place.read() for key, place in places.items()}
        yield
        if survey is not None:
            # A list or an object that was not there before is known by the place that it has been put in.
            found = [place for place in Survey(self._roots, self._traces).places.values() if survey.has_owner_of(place)]
            changed = [place for place in found if not place.holds(before.get(place.key, MISSING))]
            new = {place.key: place for place in changed if place.key not in self._places}
            self._places.update(new)
            for kept in self._kept.values():  # earlier forwards left these places as this one found them
                for values in (kept.before, kept.after):
                    values.update({key: before.get(key, MISSING) for key in new})
        if self._places:
            before = {key: before.get(key, MISSING) for key in self._places}
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
            if not isinstance(place, Contents):
                if microbatch != self._latest or place.same(left[key], kept.after[key]):
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
    if isinstance(contents, set):
        return renamed
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
    if same_items(before, after):
        return contents
    if same_items(contents, before):
        return after
    amended = contents.copy()
    if isinstance(contents, set):
        amended -= before - after
        amended |= after - before
        return amended
    if isinstance(contents, dict):
        for key in before:
            if key not in after and amended.get(key, MISSING) is before[key]:
                del amended[key]
        amended.update({key: value for key, value in after.items() if before.get(key, MISSING) is not value})
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
