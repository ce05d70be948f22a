"""What to do if a call takes a tensor that it was not given, or leaves one somewhere other than in its result.

A unit is opened: its contents are recorded call by call while Python runs as usual, so an attribute, a shared object or
a closure is merely where Python finds the value. A call with modules among its constants (the function behind
reversible layers) becomes part of the module around it, which runs as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.compat import FakeTensor, quiet, storage_of, unset_fake_temporarily
from penstock._base.trees import flatten, map_tensors
from penstock._base.words import shortened
from penstock.errors import PartitionError
from penstock.partition import source
from penstock.partition.state.assumptions import words_of_class
from penstock.partition.state.carried_over import carried
from penstock.partition.state.provenance import Call, Foreign
from penstock.partition.state.reach import Holder, Reach, in_context
from penstock.partition.state.remembered import Remembered
from penstock.partition.units.units import Learned, Unit
from penstock.partition.values.memory import extent
from penstock.partition.values.objects import hides_tensors, holds_tensors, tensors_in
from penstock.partition.watch.observer import Observer

Run = Callable[[Any, Any], Any]


class SideChannels:
    """These rules, applied to one recording."""

    def __init__(self, model: nn.Module, units: Mapping[int, Unit], reach: Reach, observer: Observer) -> None:
        self._model, self._observer, self._reach = model, observer, reach
        self._swayed: dict[str, str] = {}
        self._writers: set[str] = set()
        self._setters: dict[tuple[int, Any], str] = {}  # a place and a key -> the last unit to change what is there
        self._units = {unit.name: unit for unit in units.values()}
        self._held: dict[str, frozenset[int]] = {}
        self.remembered: dict[str, Remembered] = {}  # by unit

    def held_by(self, unit: Unit) -> frozenset[int]:
        """The memory of the parameters and buffers of a unit."""
        if unit.name not in self._held:
            self._held[unit.name] = _memory_of(unit.module)
        return self._held[unit.name]

    def check_call(self, call: Call) -> None:
        """Raises Learned or PartitionError if a call that is not a unit read what it was not given."""
        read = [f for f in self._observer.provenance.foreign.values() if f.reader is call]
        if not read:
            return
        names = {id(m): name for name, m in reversed(list(self._model.named_modules()))}
        held = {f.storage for f in read if f.held is not None}
        named = shortened([f.held for f in read if f.held is not None])
        what = f"tensors that are not among its arguments{f' ({named})' if named else ''}"
        refusal = f"a call at {source.current_line()} uses {what}; a stage would not have them"
        for module in reversed(self._observer.stack):
            name = names.get(id(module), "")
            if name and held <= _memory_of(module):
                raise Learned(f"{refusal}. {name!r} would have to run as a whole", whole=[name])
        raise PartitionError(
            f"{refusal}, and no module but the model encloses it. Give the part of the model that makes this call a "
            "module of its own, with these layers in it: it runs as a whole then"
        )

    def run_unit(self, unit: Unit, args: Any, kwargs: Any, run: Run) -> Any:
        """Calls `run(args, kwargs)` for a unit and returns its result.

        Notes what it finds that others have set since the forward began, and what it leaves for its next call.
        """
        self._reach.cached.forget()  # a unit must not get other units' tensors from a cache
        try:
            return self._run_unit(unit, args, kwargs, run)
        finally:
            self._reach.cached.forget()

    def _run_unit(self, unit: Unit, args: Any, kwargs: Any, run: Run) -> Any:
        places = self._reach.of(unit.name)
        now = [(place, place.copied()) for place in places]
        found = [(place, key, value) for place in places if place.is_changed() for key, value in place.changes()]
        if names := [place.name(key) for place, key, value in found if self._reads(unit, place, key, value)]:
            self._swayed[unit.name] = shortened(names)
        result = run(args, kwargs)
        changes = [(p, k, v) for p, then in now if p.differs(then) for k, v in p.changes() if _differs(then, k, v)]
        self._setters |= {(id(place), key): unit.name for place, key, _ in changes}
        if not all(self._reach.belongs_to(place, unit.name) for place, *_ in changes):
            self._writers.add(unit.name)
        if changes and unit.name not in self.remembered:
            self._look_for_state(unit, changes, args, kwargs, run)
        return result

    def _reads(self, unit: Unit, place: Holder, key: Any, value: Any) -> bool:
        """Whether something else than this unit has set a plain value that the unit's code may read, such as the height
        and width that Swin sets in its blocks: `blk.H, blk.W = H, W`."""
        if self._setters.get((id(place), key)) == unit.name:
            return False
        named = not place.attributes or any(key in words_of_class(type(m)) for m in unit.module.modules())
        return named and not holds_tensors(value)

    def _changes(self) -> Iterator[tuple[Holder, Any, Any]]:
        return ((place, key, value) for place in self._reach.changed() for key, value in place.changes())

    def set_outside(self) -> Iterator[tuple[Holder, Any, Any]]:
        """What the forward has changed outside of units: the place, the key, and the new value."""
        return (each for each in self._changes() if (id(each[0]), each[1]) not in self._setters)

    def _look_for_state(
        self, unit: Unit, changes: Sequence[tuple[Holder, Any, Any]], args: Any, kwargs: Any, run: Run
    ) -> None:
        """Notes what a unit that has just run leaves for its own next call: counters, and tensors that it then takes.

        Only a second run tells what it takes; it runs only if there is a tensor that it has made of its inputs.
        """
        counters = carried({type(module) for module in unit.module.modules()})
        counts = any(type(value) in (int, float) and key in counters for _, key, value in changes)
        made, kept = self._observer.provenance, set[int]()
        objects = [leaf for leaf in flatten((args, kwargs)).leaves if not isinstance(leaf, Tensor)]
        left = [t for *_, value in changes for t in tensors_in(value) if not made.is_steady(made.root(t))]
        mine = {made.root(t) for t in left if (m := made.maker(t)) is not None and m.unit == unit.name}
        if mine and not any(map(hides_tensors, objects)):
            made.forget_contents()
            self._again(run, args, kwargs)
            kept = mine & made.looked_at  # what it overwrites first (scratch memory) is no state
        if counts or kept:
            names = shortened([place.name(key) for place, key, _ in changes])
            follows = self._follows(args, kwargs, run, kept) if kept else frozenset[int]()
            self.remembered[unit.name] = Remembered(names, unit.name, follows)

    def _follows(self, args: Any, kwargs: Any, run: Run, kept: Collection[int]) -> frozenset[int]:
        """The sizes, of tensors that a unit has just left and reads when it is called again, that grow if its arguments
        do along dimension 0 or 1."""
        root = self._observer.provenance.root

        def left() -> dict[Any, tuple[int, torch.Size]]:
            every = (((p, key, n), t) for p, key, value in self._changes() for n, t in enumerate(tensors_in(value)))
            return {entry: (root(t), t.shape) for entry, t in every}

        def grown(dim: int) -> dict[Any, tuple[int, torch.Size]]:
            def running(args: Any, kwargs: Any) -> None:
                size = next(tensors_in((args, kwargs))).shape[dim]

                def longer(t: Tensor) -> Tensor:
                    same = t.dim() > dim and t.shape[dim] == size
                    return torch.cat((t, t.narrow(dim, 0, 1)), dim) if same else t

                run(*map_tensors(longer, (args, kwargs)))
                shapes.update(left())

            shapes: dict[Any, tuple[int, torch.Size]] = {}
            self._again(running, args, kwargs, from_start=True)
            return shapes

        now = {entry: shape for entry, (memory, shape) in left().items() if memory in kept}
        every = [(entry, shape) for dim in (0, 1) for entry, (_, shape) in grown(dim).items()]
        pairs = [(now[entry], other) for entry, other in every if entry in now]
        return frozenset(n for one, other in pairs for n, m in zip(one, other, strict=False) if n != m)

    def _again(self, run: Run, args: Any, kwargs: Any, *, from_start: bool = False) -> None:
        """Calls `run(args, kwargs)` on copies, and undoes its effects. Does not mind if it raises.

        Args:
            from_start: run as if nothing had changed since the forward began; otherwise in the present state.
        """
        reach, observer = self._reach, self._observer
        now, context = [(place, place.copied()) for place in reach.changed()], in_context()
        depth, called, work = len(observer.stack), len(observer.calls), observer.work
        copies = map_tensors(_copy, (args, kwargs))
        returned, kept = len(observer.returned), len(observer.kept)
        observer.take()
        if from_start:
            reach.restore()
        call = Call(-1, "", True, observer.provenance.roots(tensors_in(copies)))
        try:
            with suppress(Exception), observer.provenance.calling(call), quiet():
                run(*copies)
        finally:
            reach.restore()
            for place, entries in (*now, *((place, place.before) for place in context)):
                place.put(entries)
            del observer.stack[depth:], observer.calls[called:]
            for key in list(observer.returned)[returned:]:
                del observer.returned[key]
            observer.take(keep=False)
            del observer.kept[kept:]  # what is updated in place in this run ends with it
            observer.work = work
            observer.provenance.forget(call)

    def check_units(self, known: Collection[int]) -> None:
        """Raises Learned if a unit read what it was not given. `known`: the memory of what has a node."""
        read = [f for f in self._observer.provenance.foreign.values() if f.reader.unit]
        if not read:
            for name, places in self._swayed.items():
                raise Learned(
                    f"the forward changes {places} before it runs {name!r}, but its stage would not see that change. "
                    "Pass what it needs as an argument",
                    opened={*self._swayed, *self._writers},
                )
            return
        opened = {f.reader.scope for f in read} | set(self._swayed) | (self._writers if self._swayed else set())
        opened |= {f.made.unit for f in read if f.made is not None and f.made.unit and f.storage not in known}
        raise Learned("; ".join(dict.fromkeys(map(_refusal, read[:3]))), opened=opened)

    def open_maker(self, tensor: Tensor, refusal: str) -> None:
        """Raises Learned if a unit made a tensor that has no node and is used by a call outside it."""
        made = self._observer.provenance.maker(tensor)
        if made is not None and made.unit in self._units:
            raise Learned(f"{refusal}. It was made in {made}", opened=[made.unit])


def _differs(before: Any, key: Any, value: Any) -> bool:
    """Whether an entry is another object than in a copy of the entries."""
    return key is None or key not in before or before[key] is not value


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


def _memory_of(module: nn.Module) -> frozenset[int]:
    return frozenset(storage_of(t) for t in (*module.parameters(), *module.buffers()))


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides, which determine what `contiguous`, `view` and the like do."""
    if not isinstance(tensor, FakeTensor):  # its values are known
        with unset_fake_temporarily():
            return tensor.clone()
    copy = tensor.clone()
    if copy.stride() == tensor.stride():
        return copy
    memory = tensor.new_empty(extent(tensor.size(), tensor.stride())).requires_grad_(tensor.requires_grad)
    return (memory.clone() if tensor.requires_grad else memory).as_strided(tensor.size(), tensor.stride())
