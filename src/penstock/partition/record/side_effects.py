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

from penstock._base.compat import FakeTensor, quiet, storage_id, unset_fake_temporarily
from penstock._base.errors import PartitionError
from penstock._base.formatting import list_names
from penstock._base.memory import extent
from penstock._base.pytree import flatten, leaf_tensors, map_tensors
from penstock.partition.names import canonical_names, enclosing, is_below
from penstock.partition.nested import hides_tensors, holds_tensors, tensors_in
from penstock.partition.obstacles import Obstacle
from penstock.partition.record.operator_effects import Call, ForeignRead, Observer
from penstock.partition.state.block_state import Remembered, find_read_before_set
from penstock.partition.state.loss_values import ALL_UNITS, MAX_CARRIED, SCALARS, Absent, Left
from penstock.partition.state.reachable import Holder, Reach, holders_in_context
from penstock.partition.state.settings import names_in_code
from penstock.partition.units import Lesson, Unit, UnitSpec, has_forward
from penstock.partition.user_code import current_line

Run = Callable[[Any, Any], Any]
Change = tuple[Holder, Any, Any]
"""A place, a key, and the new value there."""


class SideEffects:
    """These rules, applied to one recording.

    Attributes:
        remembered: what units leave for their own next call, by unit.
    """

    def __init__(self, model: nn.Module, units: Mapping[int, Unit], reach: Reach, observer: Observer) -> None:
        self._model, self._observer, self._reach = model, observer, reach
        self._names = canonical_names(model)
        self._preset: dict[str, str] = {}  # units before which plain values that they may read were set -> their names
        self._preset_by: set[str] = set()  # units that set them
        self._setters: dict[tuple[int, Any], str] = {}  # a place and a key -> the last unit to change what is there
        self._units = {unit.name: unit for unit in units.values()}
        self.remembered: dict[str, Remembered] = {}

    # -- calls ------------------------------------------------------------------------------------------------------

    def check_call(self, call: Call) -> None:
        """Raise Lesson or PartitionError if a call that is not a unit read what it was not given."""
        reads = [f for f in self._observer.foreign.values() if f.reader.call is call]
        if not reads:
            return
        held_storages = {f.storage for f in reads if f.held is not None}
        names_text = list_names([f.held for f in reads if f.held is not None])
        subject = f"tensors that are not among its arguments{f' ({names_text})' if names_text else ''}"
        refusal = f"a call at {current_line()} uses {subject}; a stage would not have them"
        for module in reversed(self._observer.stack):
            name = self._names.get(id(module), "")
            if name and held_storages <= {storage_id(t) for t in (*module.parameters(), *module.buffers())}:
                raise Lesson(f"{refusal}. {name!r} would have to run as a whole", run_whole=[name])
        raise PartitionError(
            f"{refusal}, and no module but the model encloses it. Give the part of the model that makes this call a "
            "module of its own, with these layers in it: it runs as a whole then"
        )

    def check_units(self, seen: Collection[int]) -> None:
        """Raise Lesson if a unit read what it was not given. `seen`: the memory of what has a node."""
        reads = [f for f in self._observer.foreign.values() if f.reader.call.is_unit]
        to_open = {f.reader.call.unit for f in reads}
        to_open |= {f.origin.call.unit for f in reads if f.origin is not None and f.storage not in seen} - {""}
        if self._preset:
            to_open |= {*self._preset, *self._preset_by}
        if reads:
            raise Lesson("; ".join(dict.fromkeys(map(_refusal, reads[:3]))), opened=to_open)
        for name, names in self._preset.items():
            raise Lesson(
                f"the forward changes {names} before it runs {name!r}, but its stage would not see that change. "
                "Pass what it needs as an argument",
                opened=to_open,
            )

    def run_unit(self, unit: Unit, args: Any, kwargs: Any, run: Run) -> Any:
        """Call `run(args, kwargs)` for a unit and return its result.

        Notes what it finds that others have set since the forward began, and what it leaves for its next call.
        """
        self._reach.cached.forget()  # a unit must not get other units' tensors from a cache
        try:
            holders = self._reach.holders_in(unit.name)
            snapshots = [(h, h.copied()) for h in holders]
            preset = [(h, key, value) for h in holders if h.is_changed() for key, value in h.changes()]
            if read := [(h, key) for h, key, value in preset if self._reads(unit, h, key, value)]:
                self._preset[unit.name] = list_names([h.name(key) for h, key in read])
                self._preset_by |= {self._setters[id(h), key] for h, key in read if (id(h), key) in self._setters}
            result = run(args, kwargs)
            changed = ((p, old, k, v) for p, old in snapshots if p.differs(old) for k, v in p.changes())
            changes = [(p, k, v) for p, old, k, v in changed if k is None or k not in old or old[k] is not v]
            self._setters |= {(id(h), key): unit.name for h, key, _ in changes}
            if changes and unit.name not in self.remembered:
                self._look_for_state(unit, changes, args, kwargs, run)
            return result
        finally:
            self._reach.cached.forget()

    def _reads(self, unit: Unit, holder: Holder, key: Any, value: Any) -> bool:
        """Whether something else than this unit has set a plain value that the unit's code may read, such as the height
        and width that Swin sets in its blocks: `blk.H, blk.W = H, W`."""
        if self._setters.get((id(holder), key)) == unit.name:
            return False
        is_named = not holder.attributes or any(key in names_in_code(type(m)) for m in unit.module.modules())
        return is_named and not holds_tensors(value)

    def _changes(self) -> Iterator[Change]:
        return ((holder, key, value) for holder in self._reach.changed() for key, value in holder.changes())

    # -- state for the next call ------------------------------------------------------------------------------------

    def check_stateless(self) -> None:
        """Raise Obstacle if code outside of units changes an attribute by which its next call decides, or computes."""
        observer, in_units = self._observer, {id(m) for unit in self._units.values() for m in unit.module.modules()}
        attributes = find_read_before_set({type(m) for m in self._model.modules() if id(m) not in in_units})
        for holder, key, value in self._changes():
            if not holder.attributes or key not in attributes or (id(holder), key) in self._setters:
                continue
            counts, read_at = attributes[key]
            is_state = (
                observer.maker(t) is not None and not observer.is_steady(observer.root(t)) for t in tensors_in(value)
            )
            if any(is_state) or (counts and type(value) in (int, float)):
                raise Obstacle(
                    f"the forward changes {holder.name(key)!r}, which it reads at {read_at}, and so behaves "
                    "differently the next time, which a recording cannot follow",
                    "",
                    alternative="Take such state as an input of the model and return it with the result; count steps "
                    "in the training loop, and set there, between steps, what depends on it (model.frozen = True)",
                )

    def _look_for_state(self, unit: Unit, changes: Sequence[Change], args: Any, kwargs: Any, run: Run) -> None:
        """Note what a unit that has just run leaves for its own next call: counters, and tensors that it then takes.

        Only a second run tells what it takes; it runs only if there is a tensor that it has made of its inputs.
        """
        counters = find_read_before_set({type(module) for module in unit.module.modules()})
        counts = any(type(value) in (int, float) and key in counters for _, key, value in changes)
        observer, reused = self._observer, set[int]()
        objects = [leaf for leaf in flatten((args, kwargs)).leaves if not isinstance(leaf, Tensor)]
        tensors = [t for *_, value in changes for t in tensors_in(value) if not observer.is_steady(observer.root(t))]
        roots = {observer.root(t) for t in tensors if (m := observer.maker(t)) is not None and m.call.unit == unit.name}
        if roots and not any(map(hides_tensors, objects)):
            observer.forget_contents()
            with self._rerun(run, args, kwargs):
                reused = roots & observer.contents_read  # what it overwrites first (scratch memory) is no state
        if counts or reused:
            names = list_names([holder.name(key) for holder, key, _ in changes])
            following_sizes = frozenset(self._following_sizes(args, kwargs, run, reused) if reused else ())
            self.remembered[unit.name] = Remembered(names, unit.name, following_sizes)

    def _following_sizes(self, args: Any, kwargs: Any, run: Run, reused: Collection[int]) -> Iterator[int]:
        """Yield the sizes, of tensors that a unit has just left and reads when it is called again, that grow if its
        arguments do along dimension 0 or 1."""

        def current_tensors() -> dict[Any, Tensor]:
            changes = self._changes()
            return {(p, key, n): t for p, key, value in changes for n, t in enumerate(tensors_in(value))}

        shapes = {entry: t.shape for entry, t in current_tensors().items() if self._observer.root(t) in reused}
        for dim in (0, 1):

            def run_longer(args: Any, kwargs: Any, dim: int = dim) -> None:
                size = next(tensors_in((args, kwargs))).shape[dim]
                run(*map_tensors(partial(_extend, dim=dim, size=size), (args, kwargs)))

            with self._rerun(run_longer, args, kwargs, from_start=True):
                shape_pairs = [(shapes[entry], t.shape) for entry, t in current_tensors().items() if entry in shapes]
            yield from (n for old, new in shape_pairs for n, m in zip(old, new, strict=False) if n != m)

    @contextmanager
    def _rerun(self, run: Run, args: Any, kwargs: Any, *, from_start: bool = False) -> Iterator[None]:
        """Call `run(args, kwargs)` once more on copies, within a context that undoes its effects. Ignore what it
        raises.

        Args:
            from_start: run as if nothing had changed since the forward began; otherwise in the present state.
        """
        reach, observer = self._reach, self._observer
        snapshots = [(holder, holder.copied()) for holder in reach.changed()]
        snapshots += [(holder, holder.before) for holder in holders_in_context()]
        try:
            with observer.trial():
                copies = map_tensors(_copy, (args, kwargs))
                if from_start:
                    reach.restore()
                with (
                    suppress(Exception),
                    observer.calling(Call(-1, inputs=observer.roots(tensors_in(copies)))),
                    quiet(),
                ):
                    run(*copies)
                yield
        finally:
            reach.restore()
            for holder, entries in snapshots:
                holder.put(entries)

    # -- what is left for the loss ----------------------------------------------------------------------------------

    def collect_left(self, has_node: Callable[[Tensor], bool], spec: UnitSpec, real: Collection[str]) -> list[Left]:
        """Return what the forward left, while it is still there.

        Args:
            has_node: whether a tensor is recorded.
            real: the units that ran on made-up inputs: a number that one leaves in an attribute is meaningless.

        Raises Lesson if units must be opened to carry what they left.
        """
        entries, to_open, inner = [], set[str](), set[str]()
        for holder, key, value in self._changes():
            made = {id(t): m for t in tensors_in(value) if (m := self._observer.maker(t)) is not None}
            if not made and type(value) not in SCALARS:
                continue
            text, value = holder.name(key), [*value] if key is None else value
            is_inside = holder.module and not holder.outside
            makers = {m.call.unit for m in made.values()} or {
                name for name in self._units if is_inside and is_below(holder.text, name)
            }
            if not made and not makers.isdisjoint(real):
                value = Absent.at(text)
            to_carry = [t for t in leaf_tensors(value) if id(t) in made and t.numel() <= MAX_CARRIED]
            is_wanted = text in spec.for_loss or any(t.requires_grad for t in to_carry)
            if ALL_UNITS in spec.stay_whole or not is_wanted:
                to_carry = []
            leaking = [made[id(t)] for t in to_carry if not has_node(t)]
            for maker in (m for m in leaking if m.call.unit in self._units.keys() - spec.stay_whole):
                unit, module = maker.call.unit, "" if maker.call.unit in real else self._names.get(id(maker.module), "")
                inner |= {n for n in enclosing(module) if is_below(n, unit) and is_below(holder.text, n)}
                to_open.add(unit)
            small = tuple(filter(has_node, to_carry))
            entries.append(Left(holder, key, value, frozenset(makers if all(makers) else ()), small))
        if to_open:
            refusal = f"{', '.join(sorted(to_open)[:4])} leave values that take a gradient for the loss"
            inner = {name for name in inner - to_open if has_forward(self._model.get_submodule(name))}
            raise Lesson(refusal, opened=to_open, needed=False, likely=inner)  # these would be next
        return entries


def _refusal(read: ForeignRead) -> str:
    if read.held is not None:
        return (
            f"{read.reader} uses {read.held!r}, which belongs to another module. Pass it as an argument, or register "
            "that module in this one"
        )
    origin = "" if read.origin is None else str(read.origin)
    return (
        f"{read.reader} uses a tensor of shape {read.shape} that was made in {origin} and was not passed to it as an "
        "argument. Pass it as an argument and return it from where it is made"
    )


def _extend(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Return a tensor with one entry more along a dimension that has this size."""
    has_size = tensor.shape[dim : dim + 1] == (size,)
    return torch.cat((tensor, tensor.narrow(dim, 0, 1)), dim) if has_size else tensor


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
