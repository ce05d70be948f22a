"""What to do where a call takes a tensor that it was not given, or leaves one by another way than its result.

A unit is opened: what is in it is recorded call by call, Python runs as it is, and an attribute, a shared object or a
closure is only where Python finds the value. A call that has modules among its constants (the function of reversible
layers) becomes part of the module around it, which runs as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.partition import source
from penstock.partition._compat import storage_of
from penstock.partition.complete import shortened
from penstock.partition.observer import Observer
from penstock.partition.provenance import Call, Foreign
from penstock.partition.state import Loan
from penstock.partition.units import Regroup, Unit


class Sideways:
    """The rules of one recording."""

    def __init__(self, model: nn.Module, units: Mapping[int, Unit], loan: Loan, observer: Observer) -> None:
        self._model, self._observer, self._loan = model, observer, loan
        self._units = {unit.name: unit for unit in units.values()}
        self._held: dict[str, frozenset[int]] = {}

    def held_by(self, unit: Unit) -> frozenset[int]:
        """The memory of the parameters and buffers of a unit."""
        if unit.name not in self._held:
            self._held[unit.name] = _memory_of(unit.module)
        return self._held[unit.name]

    def check_call(self, call: Call) -> None:
        """Raises Regroup or PartitionError if a call that is no unit read what it was not given."""
        read = [f for f in self._observer.provenance.foreign.values() if f.reader is call]
        if not read:
            return
        names = {id(m): name for name, m in reversed(list(self._model.named_modules()))}
        held = {f.storage for f in read if f.held is not None}
        what = shortened([f.held for f in read if f.held is not None]) or "tensors that are no arguments of it"
        refusal = f"a call at {source.current_line()} uses {what} past its arguments, which a stage would not have"
        for module in reversed(self._observer.stack):
            name = names.get(id(module), "")
            if name and held <= _memory_of(module):
                raise Regroup(f"{refusal}. {name!r} would have to run as a whole", whole=[name])
        raise PartitionError(
            f"{refusal}, and no module but the model encloses it. Give the part of the model that makes this call a "
            "module of its own, with these layers in it: it runs as a whole then"
        )

    def check_units(self, known: Collection[int]) -> None:
        """Raises Regroup if a unit read what it was not given. `known`: the memory of what has a node."""
        read = [f for f in self._observer.provenance.foreign.values() if f.reader.unit]
        if not read:
            return
        opened = {f.reader.scope for f in read}
        opened |= {f.made.unit for f in read if f.made is not None and f.made.unit and f.storage not in known}
        raise Regroup("; ".join(dict.fromkeys(map(_refusal, read[:3]))), opened=opened)

    def open_maker(self, tensor: Tensor, refusal: str) -> None:
        """Raises Regroup if a unit made a tensor that has no node, and that a call outside of it uses."""
        made = self._observer.provenance.maker(tensor)
        if made is not None and made.unit in self._units:
            raise Regroup(f"{refusal}. It was made in {made}", opened=[made.unit])


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
