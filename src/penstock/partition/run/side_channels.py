"""What to do if a call takes a tensor that it was not given, or leaves one somewhere other than in its result.

A unit is opened: its contents are recorded call by call while Python runs as usual, so an attribute, a shared object or
a closure is merely where Python finds the value. A call with modules among its constants (the function behind
reversible layers) becomes part of the module around it, which runs as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.compat import FakeTensor, quiet, storage_of, unset_fake_temporarily
from penstock._base.errors import PartitionError
from penstock._base.trees import flatten, leaf_tensors, map_tensors
from penstock._base.words import shortened
from penstock.partition import source
from penstock.partition.source import Obstacle
from penstock.partition.state.assumptions import words_of_class
from penstock.partition.state.reach import Holder, Reach, in_context, is_below
from penstock.partition.state.remembered import EVERY, SCALARS, SMALL, Absent, Left, Remembered, carried
from penstock.partition.units.units import Grain, Learned, Unit
from penstock.partition.values.memory import extent
from penstock.partition.values.objects import hides_tensors, holds_tensors, tensors_in
from penstock.partition.watch.observer import Call, Foreign, Observer

Run = Callable[[Any, Any], Any]
Change = tuple[Holder, Any, Any]
"""A place, a key, and the new value there."""


class SideChannels:
    """These rules, applied to one recording.

    Attributes:
        remembered: what units leave for their own next call, by unit.
    """

    def __init__(self, model: nn.Module, units: Mapping[int, Unit], reach: Reach, observer: Observer) -> None:
        self._model, self._observer, self._reach = model, observer, reach
        self._swayed: dict[str, str] = {}  # units before which plain values that they may read were set -> their names
        self._writers: set[str] = set()  # units that write where others can read
        self._setters: dict[tuple[int, Any], str] = {}  # a place and a key -> the last unit to change what is there
        self._units = {unit.name: unit for unit in units.values()}
        self.remembered: dict[str, Remembered] = {}

    # -- calls ------------------------------------------------------------------------------------------------------

    def check_call(self, call: Call) -> None:
        """Raise Learned or PartitionError if a call that is not a unit read what it was not given."""
        read = [f for f in self._observer.foreign.values() if f.at.call is call]
        if not read:
            return
        names = {id(m): name for name, m in reversed(list(self._model.named_modules()))}
        held = {f.storage for f in read if f.held is not None}
        named = shortened([f.held for f in read if f.held is not None])
        what = f"tensors that are not among its arguments{f' ({named})' if named else ''}"
        refusal = f"a call at {source.current_line()} uses {what}; a stage would not have them"
        for module in reversed(self._observer.stack):
            name = names.get(id(module), "")
            if name and held <= {storage_of(t) for t in (*module.parameters(), *module.buffers())}:
                raise Learned(f"{refusal}. {name!r} would have to run as a whole", whole=[name])
        raise PartitionError(
            f"{refusal}, and no module but the model encloses it. Give the part of the model that makes this call a "
            "module of its own, with these layers in it: it runs as a whole then"
        )

    def check_units(self, known: Collection[int]) -> None:
        """Raise Learned if a unit read what it was not given. `known`: the memory of what has a node."""
        read = [f for f in self._observer.foreign.values() if f.at.call.is_unit]
        opened = {f.at.call.unit for f in read}
        opened |= {f.made.call.unit for f in read if f.made is not None and f.storage not in known} - {""}
        if self._swayed:
            opened |= {*self._swayed, *self._writers}
        if read:
            raise Learned("; ".join(dict.fromkeys(map(_refusal, read[:3]))), opened=opened)
        for name, places in self._swayed.items():
            raise Learned(
                f"the forward changes {places} before it runs {name!r}, but its stage would not see that change. "
                "Pass what it needs as an argument",
                opened=opened,
            )

    def run_unit(self, unit: Unit, args: Any, kwargs: Any, run: Run) -> Any:
        """Call `run(args, kwargs)` for a unit and return its result.

        Notes what it finds that others have set since the forward began, and what it leaves for its next call.
        """
        self._reach.cached.forget()  # a unit must not get other units' tensors from a cache
        try:
            places = self._reach.of(unit.name)
            now = [(place, place.copied()) for place in places]
            found = [(place, key, value) for place in places if place.is_changed() for key, value in place.changes()]
            if names := [place.name(key) for place, key, value in found if self._reads(unit, place, key, value)]:
                self._swayed[unit.name] = shortened(names)
            result = run(args, kwargs)
            every = ((p, then, k, v) for p, then in now if p.differs(then) for k, v in p.changes())
            changes = [(p, k, v) for p, then, k, v in every if k is None or k not in then or then[k] is not v]
            self._setters |= {(id(place), key): unit.name for place, key, _ in changes}
            if not all(self._reach.belongs_to(place, unit.name) for place, *_ in changes):
                self._writers.add(unit.name)
            if changes and unit.name not in self.remembered:
                self._look_for_state(unit, changes, args, kwargs, run)
            return result
        finally:
            self._reach.cached.forget()

    def _reads(self, unit: Unit, place: Holder, key: Any, value: Any) -> bool:
        """Whether something else than this unit has set a plain value that the unit's code may read, such as the height
        and width that Swin sets in its blocks: `blk.H, blk.W = H, W`."""
        if self._setters.get((id(place), key)) == unit.name:
            return False
        named = not place.attributes or any(key in words_of_class(type(m)) for m in unit.module.modules())
        return named and not holds_tensors(value)

    def _changes(self) -> Iterator[Change]:
        return ((place, key, value) for place in self._reach.changed() for key, value in place.changes())

    # -- state for the next call ------------------------------------------------------------------------------------

    def check_stateless(self) -> None:
        """Raise Obstacle if code outside of units changes an attribute by which its next call decides, or computes."""
        made, whole = self._observer, {id(m) for unit in self._units.values() for m in unit.module.modules()}
        attributes = carried({type(module) for module in self._model.modules() if id(module) not in whole})
        for place, key, value in self._changes():
            one = attributes.get(key) if place.attributes and (id(place), key) not in self._setters else None
            state = (made.maker(t) is not None and not made.is_steady(made.root(t)) for t in tensors_in(value))
            if one is not None and (any(state) or (one.counts and type(value) in (int, float))):
                raise Obstacle(
                    f"the forward changes {place.name(key)!r}, which it reads at {one.read_at}, and so behaves "
                    "differently the next time, which a recording cannot follow",
                    "",
                    otherwise="Take such state as an input of the model and return it with the result; count steps in "
                    "the training loop, and set there, between steps, what depends on the count (model.frozen = True)",
                )

    def _look_for_state(self, unit: Unit, changes: Sequence[Change], args: Any, kwargs: Any, run: Run) -> None:
        """Note what a unit that has just run leaves for its own next call: counters, and tensors that it then takes.

        Only a second run tells what it takes; it runs only if there is a tensor that it has made of its inputs.
        """
        counters = carried({type(module) for module in unit.module.modules()})
        counts = any(type(value) in (int, float) and key in counters for _, key, value in changes)
        made, kept = self._observer, set[int]()
        objects = [leaf for leaf in flatten((args, kwargs)).leaves if not isinstance(leaf, Tensor)]
        left = [t for *_, value in changes for t in tensors_in(value) if not made.is_steady(made.root(t))]
        mine = {made.root(t) for t in left if (m := made.maker(t)) is not None and m.call.unit == unit.name}
        if mine and not any(map(hides_tensors, objects)):
            made.forget_contents()
            with self._again(run, args, kwargs):
                kept = mine & made.looked_at  # what it overwrites first (scratch memory) is no state
        if counts or kept:
            names = shortened([place.name(key) for place, key, _ in changes])
            follows = frozenset(self._follows(args, kwargs, run, kept) if kept else ())
            self.remembered[unit.name] = Remembered(names, unit.name, follows)

    def _follows(self, args: Any, kwargs: Any, run: Run, kept: Collection[int]) -> Iterator[int]:
        """Yield the sizes, of tensors that a unit has just left and reads when it is called again, that grow if its
        arguments do along dimension 0 or 1."""

        def left() -> dict[Any, Tensor]:
            every = self._changes()
            return {(p, key, n): t for p, key, value in every for n, t in enumerate(tensors_in(value))}

        now = {entry: t.shape for entry, t in left().items() if self._observer.root(t) in kept}
        for dim in (0, 1):

            def longer(args: Any, kwargs: Any, dim: int = dim) -> None:
                size = next(tensors_in((args, kwargs))).shape[dim]
                run(*map_tensors(partial(_longer, dim=dim, size=size), (args, kwargs)))

            with self._again(longer, args, kwargs, anew=True):
                then = [(now[entry], t.shape) for entry, t in left().items() if entry in now]
            yield from (n for one, other in then for n, m in zip(one, other, strict=False) if n != m)

    @contextmanager
    def _again(self, run: Run, args: Any, kwargs: Any, *, anew: bool = False) -> Iterator[None]:
        """Call `run(args, kwargs)` once more on copies, within a context that undoes its effects. Ignore what it
        raises.

        Args:
            anew: run as if nothing had changed since the forward began; otherwise in the present state.
        """
        reach, observer = self._reach, self._observer
        now = [(place, place.copied()) for place in reach.changed()]
        now += [(place, place.before) for place in in_context()]
        try:
            with observer.trial():
                copies = map_tensors(_copy, (args, kwargs))
                if anew:
                    reach.restore()
                with suppress(Exception), observer.calling(Call(-1, given=observer.roots(tensors_in(copies)))), quiet():
                    run(*copies)
                yield
        finally:
            reach.restore()
            for place, entries in now:
                place.put(entries)

    # -- what is left for the loss ----------------------------------------------------------------------------------

    def left(self, has_node: Callable[[Tensor], bool], grain: Grain, real: Collection[str]) -> list[Left]:
        """Return what the forward left, while it is still there.

        Args:
            has_node: whether a tensor is recorded.
            real: the units that ran on made-up inputs: a number that one leaves in an attribute is meaningless.

        Raises Learned if units must be opened to carry what they left.
        """
        found, to_open = [], set[str]()
        for place, key, value in self._changes():
            made = {id(t): m.call.unit for t in tensors_in(value) if (m := self._observer.maker(t)) is not None}
            if not made and type(value) not in SCALARS:
                continue
            text, value = place.name(key), [*value] if key is None else value
            inside = place.module and not place.outside
            makers = {*made.values()} or {name for name in self._units if inside and is_below(place.text, name)}
            if not made and not makers.isdisjoint(real):
                value = Absent.at(text)
            wanted = [t for t in leaf_tensors(value) if id(t) in made and t.numel() <= SMALL]
            if EVERY in grain.shut or (text not in grain.carried and not any(t.requires_grad for t in wanted)):
                wanted = []
            to_open |= {made[id(t)] for t in wanted if not has_node(t)} & (self._units.keys() - grain.shut)
            small = tuple(filter(has_node, wanted))
            found.append(Left(place, key, value, frozenset(makers if all(makers) else ()), small))
        if to_open:
            texts = ", ".join(sorted(to_open)[:4])
            raise Learned(f"{texts} leave values that take a gradient for the loss", opened=to_open, needed=False)
        return found


def _refusal(read: Foreign) -> str:
    if read.held is not None:
        return (
            f"{read.at} uses {read.held!r}, which belongs to another module. Pass it as an argument, or register that "
            "module in this one"
        )
    made = "" if read.made is None else str(read.made)
    return (
        f"{read.at} uses a tensor of shape {read.shape} that was made in {made} and was not passed to it as an "
        "argument. Pass it as an argument and return it from where it is made"
    )


def _longer(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Return a tensor with one entry more along a dimension that has this size."""
    is_alike = tensor.shape[dim : dim + 1] == (size,)
    return torch.cat((tensor, tensor.narrow(dim, 0, 1)), dim) if is_alike else tensor


def _copy(tensor: Tensor) -> Tensor:
    """Copy a tensor with its strides, which determine what `contiguous`, `view` and the like do."""
    if not isinstance(tensor, FakeTensor):  # its values are known
        with unset_fake_temporarily():
            return tensor.clone()
    copy = tensor.clone()
    if copy.stride() == tensor.stride():
        return copy
    memory = tensor.new_empty(extent(tensor.size(), tensor.stride())).requires_grad_(tensor.requires_grad)
    return (memory.clone() if tensor.requires_grad else memory).as_strided(tensor.size(), tensor.stride())
