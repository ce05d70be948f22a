"""Finds forwards that carry something over from one call to the next in the parts that are recorded call by call.

Inside a unit the model's own code runs in every microbatch and keeps its state as usual. Between units a recording
replaces that code, and would forever see what was in an attribute or a shared object when it was made. So if such a
place has changed, the forward is recorded again from the new state, and the two recordings are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, fx

from penstock.partition.state.provenance import Provenance
from penstock.partition.state.reach import Holder, Reach, is_below
from penstock.partition.values.objects import tensors_in

Entry = tuple[Holder, Any]
"""A place and a key in it."""

IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))


def carried_over(reach: Reach, provenance: Provenance, units: Collection[str], own: Collection[str]) -> list[str]:
    """The names of the places that the forward changed outside the units, in a way that the next one may see.

    Places of units count too (`self.block.it += 1`), except `own`, which they changed themselves.

    Restores places that hold only constants that every forward makes alike, such as a table of positions and the
    numbers beside it.
    """
    found = []
    for place in _outside(reach, units, own):
        changes = [(key, value) for key, value in place.changes() if key != "training"]
        constant = [key for key, value in changes if _is_constant(value, provenance)]
        if constant:
            _put_back(place, {key for key, value in changes if key in constant or isinstance(value, IMMUTABLE)})
        found += [place.name(key) for key, _ in place.changes() if key != "training"]
    return found


def numbers(reach: Reach, units: Collection[str], own: Collection[str]) -> dict[Entry, Any]:
    """The numbers in places that the forward has changed outside the units."""
    found: dict[Entry, Any] = {}
    for place in _outside(reach, units, own):
        entries = enumerate(place.entries) if isinstance(place.entries, list) else place.changes()
        found |= {(place, key): value for key, value in entries if type(value) in (int, float)}
    return found


def _outside(reach: Reach, units: Collection[str], own: Collection[str]) -> list[Holder]:
    def is_within(place: Holder, names: Collection[str]) -> bool:
        return any(is_below(place.text, name) for name in names)

    return [place for place in reach.changed() if not (is_within(place, units) and is_within(place, own))]


def same(one: fx.Graph, other: fx.Graph, constants: tuple[Mapping[str, Any], Mapping[str, Any]]) -> bool:
    """Whether two recordings make the same calls with the same constants."""
    if [_text(node) for node in one.nodes] != [_text(node) for node in other.nodes]:
        return False
    mine, others = constants
    return mine.keys() == others.keys() and all(_alike(mine[name], others[name]) for name in mine)


def _text(node: fx.Node) -> tuple[str, str, str, str, str]:
    return node.op, node.name, str(node.target), repr(node.args), repr(node.kwargs)


def _alike(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, Tensor) and type(one) is type(other))


def _is_constant(value: Any, provenance: Provenance) -> bool:
    tensors = list(tensors_in(value))
    return bool(tensors) and all(provenance.is_fixed(tensor) for tensor in tensors)


def _put_back(place: Holder, keys: Collection[Any]) -> None:
    if None in keys:
        place.put(place.before)
        return
    for key in keys:
        if key in place.before:
            place.entries[key] = place.before[key]
        else:
            del place.entries[key]
