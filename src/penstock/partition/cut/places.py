"""What the name of a cut stands for.

    layer          the first call of this module
    layer:2        its second call
    cut#1          the first `penstock.cut()`, or `pipe_split()` of torch, in the model's own forward
    block.relu#2   the second call of `relu` in the own forward of `block`

A layer that a list or sequence holds twice, as `0` and `2`, is called the first time as `0` and the second time as `2`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from torch import fx, nn

from penstock._base.errors import PartitionError
from penstock._base.marks import cut
from penstock.partition.recording.recording import Recording
from penstock.partition.units.chain import Chain, unwrapped
from penstock.partition.units.units import canonical_names, real_name, resolve

_LATER = re.compile(r"(.+)([:#])([1-9]\d*)")


class Place(NamedTuple):
    """A call: of a module, by its canonical name, or of a function in that module's own forward; and which one."""

    module: str
    function: str
    number: int

    @property
    def path(self) -> str:
        """Its name as if it were a module, which says what must be opened around it."""
        return f"{self.module}.{self.function}".strip(".")


def place_of(model: nn.Module, name: str) -> Place:
    """What a cut of this name stands for. Raises PartitionError if the model has no such module."""
    later = _LATER.fullmatch(name) if name not in dict(model.named_modules(remove_duplicate=False)) else None
    path, sign, number = later.groups() if later else (name, ":", "1")
    owner, _, function = path.rpartition(".") if sign == "#" else (path, "", "")
    module = resolve(model, owner, "cuts") if owner else model
    earlier = 0 if function else _slots(model, real_name(model, path)).index(real_name(model, path))
    return Place(canonical_names(model)[id(module)], function, int(number) + earlier)


def module_at(model: nn.Module, name: str) -> nn.Module:
    """The module that a cut of this name is a call of, or in."""
    return model.get_submodule(place_of(model, name).module)


def is_mark(name: str) -> bool:
    """Whether a cut of this name is a mark (`penstock.cut()`)."""
    return name.rpartition("#")[0].rpartition(".")[2] == cut.__name__


def named_calls(recording: Recording, model: nn.Module) -> Iterator[tuple[fx.Node, str]]:
    """The calls of a recording, each with its name as a cut."""
    counts: Counter[str] = Counter()
    for node, fact in recording.facts.items():
        counts.update(fact.units)
        if fact.kind == "unit":
            number, slots = counts[fact.scope], _slots(model, fact.scope)
            yield node, unwrapped(slots[number - 1] if number <= len(slots) else f"{fact.scope}:{number}")
        elif fact.kind == "call":
            function = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "call")
            path = f"{unwrapped(fact.scope)}.{function}#".lstrip(".")
            counts[path] += 1
            yield node, f"{path}{counts[path]}"


def position_of(recording: Recording, model: nn.Module, name: str) -> int:
    """The index of the node that a cut of this name stands for. Raises PartitionError if it gives no stage."""
    place = place_of(model, name)
    facts = recording.facts
    whole = next((f.scope for f in facts.values() if f.kind == "unit" and place.path.startswith(f"{f.scope}.")), None)
    if whole:
        raise PartitionError(f"cuts: {name!r} is inside {whole!r}, which runs as a whole. Cut at {whole!r} instead")
    if place.function:
        path = f"{unwrapped(place.path)}#{place.number}"
        found = (facts[node].index for node, own in named_calls(recording, model) if own == path)
    else:
        entered = (0, *recording.entered.get(place.module, ())[1:])[place.number - 1 : place.number]
        found = (
            fact.index
            for fact in facts.values()
            if fact.kind in ("call", "unit") and entered and fact.index >= entered[0]
            if any(f"{scope}.".startswith(f"{place.module}.") for scope in (fact.scope, *fact.units))
        )
    if (position := next(found, None)) is not None:
        return position
    remedy = "Name a call that it makes" if place.function else "Name a module that the forward calls"
    raise PartitionError(f"cuts: {name!r} never runs for these inputs. {remedy}")


def _slots(model: nn.Module, name: str) -> list[str]:
    """The names under which the list or sequence around a module holds it, in order; else just its name."""
    holder, dot, _ = name.rpartition(".")
    parent, module = model.get_submodule(holder), model.get_submodule(name)
    if not isinstance(parent, (Chain, nn.Sequential, nn.ModuleList)):
        return [name]
    return [f"{holder}{dot}{key}" for key, child in parent._modules.items() if child is module]
