"""Keeps the state that a module's forward leaves for its own backward: in attributes, in lists, dicts and objects
there, or wherever else the recorded forward left something, such as a class attribute or a global dict.

A reversible block notes the state of the random generators, so that it draws the same numbers when it runs itself again
in backward. In plain training a microbatch's backward directly follows its forward; in a pipeline other forwards may
run between the two and overwrite what was noted. So whatever a forward sets is kept per microbatch, and restored for
its backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

from torch import nn

from penstock.errors import PartitionError
from penstock.partition.state.places import MISSING, Contents, Key, Place, Survey, Values, named_by_code, same_items
from penstock.partition.state.reach import Trace
from penstock.runtime.features.attributes import Attributes, Reading, holders
from penstock.runtime.features.context import StageContext
from penstock.runtime.features.feature import NOTHING, Context, Feature, Start, Watch
from penstock.schedule import Op


class ContainerCopies:
    """Copies of the containers that some modules and `traces` hold, and of the numbers in their attributes, for a layer
    that runs again within a backward.
    """

    def __init__(self, modules: Iterable[nn.Module], traces: Iterable[Trace] = ()) -> None:
        found = [(place, place.read()) for place in Survey(modules, traces).places.values()]
        self._contents = [(p, held) for p, held in found if isinstance(p, Contents) or type(held) in (int, float)]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Restores the copies temporarily. Anything added or removed in the meantime is discarded."""
        now = [place.read() for place, _ in self._contents]
        for place, contents in self._contents:
            place.write(contents)
        try:
            yield
        finally:
            for (place, _), contents in zip(self._contents, now, strict=True):
                place.write(contents)


@dataclass(frozen=True, slots=True)
class Snapshots:
    """The contents of the places before and after a microbatch's forward, and after it ran again if it did."""

    before: Values
    after: Values
    again: Values


class ForwardState(Feature):
    """The state that the modules of one stage hold between forward and backward.

    It learns which places a forward sets by comparing before and after, in every forward of the first step, and of the
    first one after the model changed or a step raised. Attributes that are first set later are noticed in any step;
    then everything is learned anew.

    Args:
        survey: finds the existing places.
        owners: the modules and objects whose attributes are looked at in every step.
        splits: the microbatches whose backward ends with W.
    """

    @classmethod
    def of(cls, stage: StageContext) -> ForwardState | None:
        """In training, also under `compile=`: wherever the compiler breaks its graph, Python runs each time."""
        if not stage.training:
            return None
        modules = stage.modules()
        return cls(partial(Survey, roots_of(modules), stage.stage.traces), modules, stage.microbatches(Op.W))

    def __init__(self, survey: Callable[[], Survey], owners: Iterable[Any] = (), splits: Iterable[int] = ()) -> None:
        self._survey = survey
        self._owners = tuple(owners)
        self.attributes = Attributes(())
        self._splits = frozenset(splits)
        self._places: dict[Key, Place] = {}
        self._learning = True
        self._changes = -1  # the count of changes at the last learning
        self._kept: dict[int, Snapshots] = {}
        self._ran: list[int] = []  # the microbatches of this step's forwards
        self._latest = -1  # the microbatch of the last one
        self._running = -1  # the microbatch of the present one
        self._noticing = Watch(self._read, self._notice)

    def begin_step(self, start: Start) -> None:
        """Drops anything left by a step that raised."""
        self._kept.clear()
        self._ran.clear()
        learned, self._learning = self._learning, start.changes != self._changes
        self._changes = start.changes
        if learned and not self._learning:
            found = chain.from_iterable(map(holders, self._owners))
            self.attributes = Attributes(found)  # as left by the forwards learned from

    def forward(self, microbatch: int, *, runs_again: bool) -> Context:
        """Wraps a forward: keeps what it sets."""
        if self._learning or self._places:
            return self._keeping(microbatch)
        self._running = microbatch
        return self._noticing

    @contextmanager
    def _keeping(self, microbatch: int) -> Iterator[None]:
        survey = self._survey() if self._learning else None
        reading = self.attributes.read()
        places = self._places if survey is None else survey.places
        before = {key: place.read() for key, place in places.items()}
        yield
        self._latest = microbatch
        if survey is not None:
            # A new list or object is covered by the place where it was put.
            found = [place for place in self._survey().places.values() if survey.has_owner_of(place)]
            changed = [place for place in found if not place.holds(before.get(place.key, MISSING))]
            self._add([place for place in changed if place.key not in self._places], before)
        elif late := self.attributes.set_since(reading, self._places):
            self._learn_anew(late, before)
        self._ran.append(microbatch)
        if self._places:
            before = {key: before.get(key, MISSING) for key in self._places}
            self._kept[microbatch] = Snapshots(before, self._now(), {})

    def _read(self) -> Reading:
        return self.attributes.read()

    def _notice(self, reading: Reading) -> None:
        """Ends a forward that began when no forward was known to set anything. `reading`: of the attributes, then."""
        microbatch = self._latest = self._running
        late = self.attributes.set_since(reading, self._places)
        if late:
            self._learn_anew(late, {})
        self._ran.append(microbatch)
        if late:
            self._kept[microbatch] = Snapshots({key: was for key, (_, was) in late.items()}, self._now(), {})

    def _learn_anew(self, late: Mapping[Key, tuple[Place, Any]], before: Values) -> None:
        """Adds places that a forward has set for the first time; learns for the rest of this step, and in the next."""
        before.update({key: was for key, (_, was) in late.items()})
        self._add([place for place, _ in late.values()], before)
        self._learning, self._changes = True, -1

    def _add(self, places: Iterable[Place], before: Values) -> None:
        """Adds places that a forward has set. Earlier forwards left them as this one found them."""
        new = {place.key: place for place in places}
        if new and not self._places:
            self._kept = {microbatch: Snapshots({}, {}, {}) for microbatch in self._ran}
        self._places.update(new)
        for kept in self._kept.values():
            for values in (kept.before, kept.after):
                values.update({key: before.get(key, MISSING) for key in new})

    def backward(self, microbatch: int) -> Context:
        """Wraps a backward: restores what its forward set."""
        return self._put_back(microbatch, ends=microbatch not in self._splits) if self._places else NOTHING

    def weights(self, microbatch: int) -> Context:
        """Wraps W, in which hooks on the gradients of parameters run: restores what the I part left."""
        return self._put_back(microbatch, ends=True) if self._places else NOTHING

    @contextmanager
    def again(self, microbatch: int) -> Iterator[None]:
        """Wraps the stage's forward when it runs again within a backward: restores what it found the first time."""
        kept = self._kept.get(microbatch)
        if kept is None:
            yield
            return
        self._put(kept.before)
        yield
        kept.again.update(self._now())

    @contextmanager
    def _put_back(self, microbatch: int, *, ends: bool) -> Iterator[None]:
        kept = self._kept.get(microbatch)
        if kept is None:
            yield
            return
        now, counts = self._now(), list[Place]()
        self._put(kept.after)
        try:
            yield
        finally:
            del self._kept[microbatch]
            left = self._now()
            for key, again in kept.again.items():
                if isinstance(self._places[key], Contents):
                    left[key] = _renamed(left[key], again, kept.after[key])
            counts += self._settle(microbatch, kept, now, left)
            if not ends:
                self._kept[microbatch] = Snapshots(kept.before, left, {})
        if counts:
            raise PartitionError(
                f"forwards and backwards both change {counts[0].text}, a number; with forwards of other microbatches "
                "in between they find another one than in plain training. Keep two numbers, one for each, or choose "
                "schedule='naive' or microbatches=1"
            )

    def _settle(self, microbatch: int, kept: Snapshots, now: Values, left: Values) -> Iterator[Place]:
        """Ends a backward. `now`: the contents before it; `left`: what it left. Yields numbers that it changed.

        Whatever backward took from a container or added to it is taken or added for later backwards too: a stack that
        forwards push to and backwards pop from ends up empty, and one that backwards leave alone does not change.
        """
        for key, value in now.items():
            place, before, after = self._places[key], kept.after[key], left[key]
            if isinstance(place, Contents):
                place.write(_amended(value, before, after))
                for other in self._kept.values():
                    for values in (other.before, other.after):
                        values[key] = _amended(values[key], before, after)
            elif microbatch != self._latest or place.same(after, before):
                if type(before) in (int, float) and type(after) in (int, float) and before != after:
                    yield place
                place.write(value)  # otherwise backward left what plain torch leaves

    def _now(self) -> Values:
        return {key: place.read() for key, place in self._places.items()}

    def _put(self, values: Values) -> None:
        for key, value in values.items():
            self._places[key].write(value)


def roots_of(modules: Iterable[nn.Module]) -> list[Any]:
    """These modules, and the global objects that their code names."""
    own = dict.fromkeys(modules)
    return [*own, *named_by_code(dict.fromkeys(base for module in own for base in type(module).__mro__))]


def _renamed(contents: Any, again: Any, first: Any) -> Any:
    """A container's contents, with what a forward's first run put there in place of what its second run did."""
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
    """A container's contents, with the changes that turn `before` into `after`."""
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
