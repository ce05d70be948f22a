"""Names of places for cuts, and their positions in a recording. A name:

    layer          the first call of this module
    layer:2        its second call
    cut#1          the first `penstock.cut()`, or `pipe_split()` of torch, in the model's own forward
    block.relu#2   the second call of `relu` in the own forward of `block`

A layer that a list or sequence holds twice, as `0` and `2`, is called the first time as `0` and the second time as `2`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from torch import fx, nn

from penstock._base.errors import PartitionError
from penstock._base.marks import cut
from penstock.partition.given_model import Chain
from penstock.partition.names import canonical_names, is_below, named_module, resolve, unwrapped
from penstock.partition.recording import Recording

_LATER = re.compile(r"(.+)([:#])([1-9]\d*)")


class CallSite(NamedTuple):
    """A call: of a module, by its canonical name, or of a function in that module's own forward; and which one."""

    module: str
    function: str
    number: int

    @property
    def path(self) -> str:
        """Its name as if it were a module, which says what must be opened around it."""
        return f"{self.module}.{self.function}".strip(".")


def find_call(model: nn.Module, name: str) -> CallSite:
    """Return what a cut of this name stands for. Raise PartitionError if the model has no such module."""
    match = _LATER.fullmatch(name) if named_module(model, name) is None else None
    path, sign, number = match.groups() if match else (name, ":", "1")
    owner, _, function = path.rpartition(".") if sign == "#" else (path, "", "")
    real_name, module = resolve(model, owner, "cuts") if owner else ("", model)
    offset = 0 if function else _slots(model, real_name).index(real_name)
    return CallSite(canonical_names(model)[id(module)], function, int(number) + offset)


def module_at(model: nn.Module, name: str) -> nn.Module:
    """Return the module that a cut of this name is a call of, or in."""
    return model.get_submodule(find_call(model, name).module)


def is_mark(name: str) -> bool:
    """Whether a cut of this name is a mark (`penstock.cut()`)."""
    return name.rpartition("#")[0].rpartition(".")[2] == cut.__name__


def named_calls(recording: Recording, model: nn.Module) -> Iterator[tuple[fx.Node, str]]:
    """Yield the calls of a recording, each with its name as a cut."""
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


def find_position(recording: Recording, model: nn.Module, name: str) -> int:
    """Return the index of the node that a cut of this name stands for. Raise PartitionError if it gives no stage."""
    site = find_call(model, name)
    facts = recording.facts
    unit = next((f.scope for f in facts.values() if f.kind == "unit" and site.path.startswith(f"{f.scope}.")), None)
    if unit:
        raise PartitionError(f"cuts: {name!r} is inside {unit!r}, which runs as a whole. Cut at {unit!r} instead")
    if site.function:
        path = f"{unwrapped(site.path)}#{site.number}"
        indices = (facts[node].index for node, call_name in named_calls(recording, model) if call_name == path)
    else:
        entered = (0, *recording.entered.get(site.module, ())[1:])[site.number - 1 : site.number]
        indices = (
            fact.index
            for fact in facts.values()
            if fact.kind in ("call", "unit") and entered and fact.index >= entered[0]
            if any(is_below(scope, site.module) for scope in (fact.scope, *fact.units))
        )
    if (position := next(indices, None)) is not None:
        return position
    remedy = "Name a call that it makes" if site.function else "Name a module that the forward calls"
    raise PartitionError(f"cuts: {name!r} never runs for these inputs. {remedy}")


def _slots(model: nn.Module, name: str) -> list[str]:
    """Return the names under which the list or sequence around a module holds it, in order; else just its name."""
    parent_name, dot, _ = name.rpartition(".")
    parent, module = model.get_submodule(parent_name), model.get_submodule(name)
    if not isinstance(parent, (Chain, nn.Sequential, nn.ModuleList)):
        return [name]
    return [f"{parent_name}{dot}{key}" for key, child in parent._modules.items() if child is module]


def cut_positions(recording: Recording, model: nn.Module, cuts: Sequence[str]) -> list[int]:
    """Return the index of the first node of each stage from stage 1 on. Raise PartitionError for names that give no
    stage."""
    positions = [find_position(recording, model, cut) for cut in cuts]
    for (before, start), (after, end) in pairwise(zip(cuts, positions, strict=True)):
        if start >= end:
            first, second = (after, before) if start > end else (before, after)
            reason = f"{first!r} runs before {second!r}" if start > end else "both begin at the same call"
            raise PartitionError(
                f"cuts: {before!r} comes before {after!r} in the list, but {reason}. Name each stage's first "
                f"module once, in the order in which the model runs them"
            )
    return positions
