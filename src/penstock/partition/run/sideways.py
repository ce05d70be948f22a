"""What to do if a call takes a tensor that it was not given, or leaves one somewhere other than in its result.

A unit is opened: its contents are recorded call by call while Python runs as usual, so an attribute, a shared object or
a closure is merely where Python finds the value. A call with modules among its constants (the function behind
reversible layers) becomes part of the module around it, which runs as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.compat import storage_of
from penstock.errors import PartitionError
from penstock.partition import source
from penstock.partition.run.real import on_other_values
from penstock.partition.run.replay import Operators, operators
from penstock.partition.state.provenance import Call, Foreign
from penstock.partition.state.reach import Holder, Reach
from penstock.partition.state.remembered import Remembered
from penstock.partition.units.units import Regroup, Unit
from penstock.partition.values.objects import hides_tensors, tensors_in
from penstock.partition.watch.observer import Observer
from penstock.trees import flatten, map_tensors
from penstock.words import shortened

Run = Callable[[Any, Any], Any]


class Sideways:
    """These rules, applied to one recording."""

    def __init__(
        self, model: nn.Module, units: Mapping[int, Unit], reach: Reach, observer: Observer, *, once: bool = False
    ) -> None:
        self._model, self._observer, self._reach = model, observer, reach
        self._once = once
        self._swayed: dict[str, str] = {}
        self._writers: set[str] = set()
        self._looked_at: frozenset[int] = frozenset()  # by the unit that was last tried again
        self._units = {unit.name: unit for unit in units.values()}
        self._held: dict[str, frozenset[int]] = {}
        self.remembered: dict[str, Remembered] = {}  # by unit
        self.own: set[str] = set()  # places that units changed while they ran, and units that may have

    def held_by(self, unit: Unit) -> frozenset[int]:
        """The memory of the parameters and buffers of a unit."""
        if unit.name not in self._held:
            self._held[unit.name] = _memory_of(unit.module)
        return self._held[unit.name]

    def check_call(self, call: Call) -> None:
        """Raises Regroup or PartitionError if a call that is not a unit read what it was not given."""
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
                raise Regroup(f"{refusal}. {name!r} would have to run as a whole", whole=[name])
        raise PartitionError(
            f"{refusal}, and no module but the model encloses it. Give the part of the model that makes this call a "
            "module of its own, with these layers in it: it runs as a whole then"
        )

    def run_unit(self, unit: Unit, args: Any, kwargs: Any, run: Callable[[Any, Any], tuple[Any, bool]]) -> Any:
        """Calls `run(args, kwargs)` for a unit and returns its result; `run` also says whether fake tensors sufficed.

        Notes whether anything that changed since the forward began makes the unit behave differently.
        """
        self._reach.cached.forget()  # a unit must not get other units' tensors from a cache
        try:
            return self._run_unit(unit, args, kwargs, run)
        finally:
            self._reach.cached.forget()

    def _run_unit(self, unit: Unit, args: Any, kwargs: Any, run: Callable[[Any, Any], tuple[Any, bool]]) -> Any:
        if self._once:
            return run(args, kwargs)[0]
        objects = [leaf for leaf in flatten((args, kwargs)).leaves if not isinstance(leaf, Tensor)]
        if any(map(hides_tensors, objects)):  # a second run could change them
            self.own.add(unit.name)
            return run(args, kwargs)[0]
        changed = self._reach.changed()
        now = {id(place): place.copied() for place in changed}
        before = self._operators(run, args, kwargs, from_start=True) if changed else None
        with self._observer.logging() as log:
            result, on_fakes = run(args, kwargs)
        updates = result[2] & self.held_by(unit)
        written = [p for p in self._reach.changed() if p.differs(now.get(id(p), p.before))]
        self.own |= {place.text for place in written}
        own = [p for p in written if not self._reach.belongs_to(p, unit.name)]
        if not on_fakes:
            _refuse_numbers(unit, own)
        if written and unit.name not in self.remembered and self._remembers(unit, args, kwargs, run, log, updates):
            follows = self._follows(args, kwargs, run)
            self.remembered[unit.name] = Remembered(_names(written), frozenset((unit.name,)), follows=follows)
        if changed and before != log:
            self._swayed[unit.name] = _names(changed)
        if own:
            self._writers.add(unit.name)
            if on_fakes and self._operators(run, args, kwargs, from_start=False) != log:
                self._swayed.setdefault(unit.name, _names(own))
        return result

    def _operators(
        self, run: Callable[[Any, Any], Any], args: Any, kwargs: Any, *, from_start: bool, **options: Any
    ) -> Operators | None:
        return operators(run, args, kwargs, self._reach, self._observer, from_start=from_start, **options)

    def _remembers(
        self, unit: Unit, args: Any, kwargs: Any, run: Run, first: Operators, updates: frozenset[int]
    ) -> bool:
        """Whether a unit that has just run these operators will find what it left when it is called again.

        Something that it makes only once, such as a table of positions, does not count: the third run then equals the
        second.
        """
        provenance, stale = self._observer.provenance, []

        def takes(foreign: Foreign) -> None:
            made = foreign.made
            if made is not None and made.unit == unit.name and not provenance.is_steady(foreign.storage):
                stale.append(foreign)

        writes: set[int] = set()

        def noting(args: Any, kwargs: Any) -> None:
            writes.update(run(args, kwargs)[0][2])

        provenance.forget_contents()
        second = self._operators(noting, args, kwargs, from_start=False, takes=takes)
        self._looked_at = frozenset(provenance.looked_at)
        if second is None or stale or writes & self.held_by(unit) - updates:
            return True
        if second == first:
            return False
        runs = iter((on_other_values(run), run))

        def following(args: Any, kwargs: Any) -> None:
            next(runs)(args, kwargs)

        return self._operators(following, args, kwargs, from_start=False, times=2) != second

    def _follows(self, args: Any, kwargs: Any, run: Run) -> frozenset[int]:
        """The sizes, of tensors that a unit has just left and reads when it is called again, that grow if its arguments
        do along dimension 0 or 1. What it overwrites first (scratch memory) is no state."""
        root = self._observer.provenance.root

        def left() -> dict[Any, tuple[int, torch.Size]]:
            changed = [(place, key, value) for place in self._reach.changed() for key, value in place.changes()]
            every = (((p, key, n), t) for p, key, value in changed for n, t in enumerate(tensors_in(value)))
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
            self._operators(running, args, kwargs, from_start=True)
            return shapes

        looked_at = self._looked_at
        now = {entry: shape for entry, (memory, shape) in left().items() if memory in looked_at}
        every = [(entry, shape) for dim in (0, 1) for entry, (_, shape) in grown(dim).items()]
        pairs = [(now[entry], other) for entry, other in every if entry in now]
        return frozenset(n for one, other in pairs for n, m in zip(one, other, strict=False) if n != m)

    def check_units(self, known: Collection[int]) -> None:
        """Raises Regroup if a unit read what it was not given. `known`: the memory of what has a node."""
        read = [f for f in self._observer.provenance.foreign.values() if f.reader.unit]
        if not read:
            for name, places in self._swayed.items():
                raise Regroup(
                    f"{name!r} behaves differently once the forward has changed {places}, but its stage would not see "
                    "that change. Pass what it needs as an argument",
                    opened={*self._swayed, *self._writers},
                )
            return
        opened = {f.reader.scope for f in read} | set(self._swayed) | (self._writers if self._swayed else set())
        opened |= {f.made.unit for f in read if f.made is not None and f.made.unit and f.storage not in known}
        raise Regroup("; ".join(dict.fromkeys(map(_refusal, read[:3]))), opened=opened)

    def open_maker(self, tensor: Tensor, refusal: str) -> None:
        """Raises Regroup if a unit made a tensor that has no node and is used by a call outside it."""
        made = self._observer.provenance.maker(tensor)
        if made is not None and made.unit in self._units:
            raise Regroup(f"{refusal}. It was made in {made}", opened=[made.unit])


def _names(places: Collection[Holder]) -> str:
    """The names of the changed entries."""
    return shortened([p.name(key) for p in places for key, _ in p.changes()] or [p.text for p in places])


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


def _refuse_numbers(unit: Unit, places: Collection[Holder]) -> None:
    """Raises PartitionError if a unit that ran on made-up inputs left numbers that it computed from them."""
    for place in places:
        for key, value in place.changes():
            if _holds_numbers(value):
                raise PartitionError(
                    f"{unit.name!r} leaves a number in {place.name(key)}, computed from the values of its inputs: "
                    "blocks on other stages would not see it. Return it as a tensor, or name a module that encloses "
                    "all that use it in leaves=[...]"
                )


def _holds_numbers(value: Any) -> bool:
    if isinstance(value, (list, tuple, set)):
        return any(map(_holds_numbers, value))
    if isinstance(value, dict):
        return any(map(_holds_numbers, value.values()))
    return isinstance(value, (bool, int, float, complex)) or type(value).__module__ == "numpy"


def _memory_of(module: nn.Module) -> frozenset[int]:
    return frozenset(storage_of(t) for t in (*module.parameters(), *module.buffers()))
