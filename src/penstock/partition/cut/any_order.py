"""A recording's calls in another order than the forward made them, with the same results to the bit.

Each call needs what it takes. Besides, these keep the order in which the forward has them, or bits could change:
- uses of memory that takes a gradient, since autograd adds the terms of a gradient in the opposite order;
- uses of memory that is written to;
- calls of one module, and draws from one stream, which are numbered.

Where a forward does what may depend on the order in another way (`why_fixed`), nothing changes places.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import fx, nn

from penstock.compat import has_global_forward_hooks
from penstock.errors import PartitionError
from penstock.partition.cut.balance import cut_positions
from penstock.partition.recording.recording import Recording
from penstock.partition.stages.split import HELD, CutRecording
from penstock.words import shortened

LIGHT = 0.01
"""A call outside the units that is less than this part of the whole work goes with what it needs, not with the unit
that ran before it."""

Edge = tuple[fx.Node, fx.Node]
"""Two calls of which the first must not run after the second."""


@dataclass(frozen=True, slots=True)
class Arranged:
    """A recording in another order, the index at which each stage but the first begins, and which of the groups of
    calls must not run after which others, by their position among the groups."""

    recording: Recording
    starts: tuple[int, ...]
    order: frozenset[tuple[int, int]]


def why_fixed(recording: Recording, model: nn.Module) -> str:
    """Why no call may change places; empty if calls may."""
    facts = recording.facts.values()
    reasons = {
        "it draws from Python's or numpy's generators": recording.is_foreign,
        "it keeps something from call to call": bool(recording.remembered or recording.leaves_traces or recording.left),
        "it branches at random": any(fact.branch is not None or fact.is_anywhere for fact in facts),
        "what a module writes or draws may depend on values": any(fact.depends_on_values for fact in facts),
        "it updates memory unseen by autograd": any(fact.unseen for fact in facts),
        "it changes autocast": any(fact.modes.autocast is not None for fact in facts),
        "modules in it have hooks": has_global_forward_hooks() or any(map(_has_hooks, model.modules())),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def arranged(recording: Recording, model: nn.Module, stage_of: Mapping[str, int]) -> Arranged:
    """The calls stage by stage, within a stage in the recorded order.

    Args:
        stage_of: the stage of each unit, by its name, and of all that follows it up to the next one.

    Raises:
        PartitionError: a call would run before one that it must not run before, or a stage has no unit here.
    """
    nodes = list(recording.facts)
    names, local, edges, group = _grouped(recording, model, stage_of)
    stage = {node: stage_of[names[group[node]]] for node in group}
    if wrong := next(((a, b) for a, b in edges if stage[a] > stage[b]), None):
        first, second = (names[group[node]] for node in wrong)
        raise PartitionError(f"{second!r} would run before {first!r}, which it has to follow for this batch")
    for node in reversed(nodes):  # those that any stage computes for itself: before the first that uses them
        if node in local:
            stage[node] = min((stage[user] for user in node.users), default=0)
    order = sorted(nodes, key=lambda node: (stage[node], recording.facts[node].index))
    counts = [sum(one < number for one in stage.values()) for number in range(1, max(stage_of.values()) + 1)]
    if len({0, *counts, len(nodes)}) < len(counts) + 2:
        raise PartitionError(f"some stage runs none of {shortened(list(stage_of))} for this batch")
    return Arranged(_in_order(recording, order), tuple(counts), _between(edges, group))


def order_between(recording: Recording, model: nn.Module, units: Iterable[str]) -> frozenset[tuple[int, int]]:
    """Which of these units, all of which run, must not run after which others, by their position. They are in the
    order of the recording, each with all that follows it up to the next one."""
    _, _, edges, group = _grouped(recording, model, units)
    return _between(edges, group)


def _grouped(
    recording: Recording, model: nn.Module, units: Iterable[str]
) -> tuple[list[str], set[fx.Node], list[Edge], dict[fx.Node, int]]:
    """The units that this recording has, in its order; what any stage makes for itself; what must not run after what;
    and the unit that each other call goes with."""
    names, starts = _begins(recording, model, units)
    whole = CutRecording(recording, model, (), ())
    nodes = list(recording.facts)
    local = {node for node in nodes if recording.facts[node].kind in (*HELD, "input", "object")} | whole.remade
    edges = [*_needs(nodes, local), *_kept(whole, local)]
    return names, local, edges, _groups(whole, local, starts, edges)


def _between(edges: Iterable[Edge], group: Mapping[fx.Node, int]) -> frozenset[tuple[int, int]]:
    pairs = {(group[a], group[b]) for a, b in edges}
    return frozenset(pair for pair in pairs if len({*pair}) > 1)


def _begins(recording: Recording, model: nn.Module, units: Iterable[str]) -> tuple[list[str], list[int]]:
    """The units that this recording has, in its order, and the first call of each."""
    found = []
    for name in units:
        try:
            found.append((cut_positions(recording, model, [name])[0], name))
        except PartitionError:  # it does not run for these inputs
            continue
    found.sort()
    return [name for _, name in found], [0, *(start for start, _ in found[1:])]


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _needs(nodes: Sequence[fx.Node], local: set[fx.Node]) -> Iterator[Edge]:
    """What each call takes. What any stage makes for itself is made of what others made."""
    made_of: dict[fx.Node, set[fx.Node]] = {}
    for node in nodes:
        sources = set[fx.Node]()
        for given in node.all_input_nodes:
            sources |= made_of[given] if given in local else {given}
        made_of[node] = sources
        if node not in local:
            yield from ((source, node) for source in sources)


def _kept(whole: CutRecording, local: set[fx.Node]) -> Iterator[Edge]:
    """The uses of one thing, one after another."""
    recording, facts = whole.recording, whole.facts
    by_index = list(facts)
    memory = {name: storage for storage, name in recording.memory.items()}
    sensitive = set(whole.written)
    sensitive |= {memory[name] for name, tensor in recording.held.items() if tensor.requires_grad and name in memory}
    sensitive = sensitive.union(*(fact.storages for fact in facts.values() if fact.takes_gradient))
    uses: dict[Hashable, list[fx.Node]] = {}
    for node, fact in facts.items():
        used = fact.storages.union(fact.writes, *(facts[given].storages for given in node.all_input_nodes))
        used |= {memory[name] for name in whole.held_by(node) if name in memory}
        things: list[Hashable] = [*(used & sensitive), *(("module", name) for name in fact.units)]
        if fact.draws:
            things.append(("stream", fact.stream))
        for thing in things:
            uses.setdefault(thing, []).append(node)
    for name, calls in recording.calls.items():
        uses["draws", name] = [by_index[index] for index in calls]
    for users in uses.values():
        yield from pairwise(node for node in users if node not in local)


def _groups(
    whole: CutRecording, local: set[fx.Node], starts: Sequence[int], edges: Iterable[Edge]
) -> dict[fx.Node, int]:
    """The unit that each call goes with: the one that runs it, or for light calls outside the units the last that they
    need. Calls that need none go with the first that needs them."""
    facts = whole.facts
    light = LIGHT * sum(fact.work for fact in facts.values())
    before: dict[fx.Node, list[fx.Node]] = {}
    after: dict[fx.Node, list[fx.Node]] = {}
    for a, b in edges:
        before.setdefault(b, []).append(a)
        after.setdefault(a, []).append(b)
    found: dict[fx.Node, int] = {}
    for node, fact in facts.items():
        if node in local:
            continue
        needed = [found[each] for each in before.get(node, ()) if each in found]
        if fact.kind == "unit" or fact.index in starts or fact.work > light:
            found[node] = bisect_right(starts, fact.index) - 1
        elif needed:
            found[node] = max(needed)
    for node, fact in reversed([*facts.items()]):
        if node not in local and node not in found:
            found[node] = min(
                (found[each] for each in after.get(node, ())), default=bisect_right(starts, fact.index) - 1
            )
    return found


def _in_order(recording: Recording, order: Sequence[fx.Node]) -> Recording:
    """The same recording with its nodes in this order."""
    place = {recording.facts[node].index: index for index, node in enumerate(order)}
    facts = {}
    for node in order:
        fact = recording.facts[node]
        updates = [(place[index], meta) for index, meta in fact.updates]
        facts[node] = replace(fact, index=place[fact.index], updates=updates)
    calls = {name: tuple(place[index] for index in each) for name, each in recording.calls.items()}
    return replace(recording, facts=facts, calls=calls)
