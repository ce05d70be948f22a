"""Decides, for a recording and the positions of its cuts, what each stage runs, receives and returns.

Values that are cheap to compute from the model's inputs alone (masks, position ids) are computed on each stage that
uses them. Everything else is computed once, and sent by its producer or by the last stage that updated it in place.
"""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx, nn

from penstock._base.errors import PartitionError
from penstock._base.stages import MODEL_INPUT, Input, Output, TensorMeta
from penstock.partition.recording import NodeInfo, Recording, walk
from penstock.partition.state.block_state import refuse_apart

HELD = ("parameter", "buffer", "constant")


@dataclass(frozen=True)
class StagePlan:
    """One stage: the nodes to receive, those to run, in order, those to return, and the metas."""

    received: tuple[fx.Node, ...]
    run: tuple[fx.Node, ...]
    returned: tuple[fx.Node, ...]
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]


class CutRecording:
    """The stages of a recording that is cut at the modules `cuts`, which begin at the nodes `starts`.

    Raises PartitionError if a cut would separate an in-place update from another view of the same memory, or if a stage
    would have nothing to run.
    """

    def __init__(self, recording: Recording, model: nn.Module, cuts: Sequence[str], starts: Sequence[int]) -> None:
        self.recording, self.model, self.cuts, self.starts = recording, model, cuts, list(starts)
        self.count = len(starts) + 1
        self.facts = recording.facts
        self.writers = [fact for fact in self.facts.values() if fact.writes]
        self.written = {storage for fact in self.writers for storage in fact.writes}

    @cached_property
    def plans(self) -> tuple[StagePlan, ...]:
        """The stages. Raises PartitionError as described for the class."""
        for stage in range(self.count if self.count > 1 else 0):
            if not self.local_calls[stage]:
                raise PartitionError(
                    f"cuts: stage {stage} ({self._extent(stage)}) would run nothing of its own, only what any stage "
                    "can compute for itself. Move or remove a cut"
                )
        received, run = zip(*(self._needs(stage) for stage in range(self.count)), strict=True)
        received[0].update(n for r in received for n in r if self.facts[n].kind == "input")
        self._check_held(received, run)
        self._check_views()
        for entry in self.recording.remembered:
            units = [{unit for node in nodes for unit in self.facts[node].units} for nodes in run]
            refuse_apart(entry, {stage for stage, called in enumerate(units) if entry.unit in called})
        needed_later: list[set[fx.Node]] = [set() for _ in range(self.count)]
        for stage in range(1, self.count):
            for node in received[stage]:
                needed_later[self.source(node, stage)].add(node)
        plans = []
        for stage in range(self.count):
            arriving, nodes = self._ordered(received[stage]), self._ordered(run[stage])
            returned = self._ordered(needed_later[stage]) if stage < self.count - 1 else list(self.recording.outputs)
            inputs = tuple(self._input(n, stage, nodes) for n in arriving)
            outputs = tuple(Output(n.name, self._meta(n, self._end(stage))) for n in returned)
            plans.append(StagePlan(tuple(arriving), tuple(nodes), tuple(returned), inputs, outputs))
        return tuple(plans)

    def find_stage(self, index: int) -> int:
        return bisect_right(self.starts, index)

    def work(self) -> tuple[int, ...]:
        """Return each stage's work; see `count_work`."""
        totals = [0] * self.count
        for fact in self.facts.values():
            totals[self.find_stage(fact.index)] += fact.work
        return tuple(totals)

    def draw_offsets(self) -> tuple[dict[str, int], ...]:
        """Return, for each stage, how often each drawing module is called on the stages before it."""
        calls = self.recording.calls.items()
        return tuple({name: bisect_left(numbers, start) for name, numbers in calls} for start in (0, *self.starts))

    def crosses_twice(self) -> bool:
        """Whether two values that are the same tensor when a branch is skipped cross the same cut.

        They arrive as two tensors, so the gradients of each one's uses are summed separately before they meet. The
        unsplit model adds all of them into one sum, in another order.
        """
        origin: dict[fx.Node, fx.Node] = {}  # of each value, the one that it equals if no branch runs
        for node in self.facts:
            producer = node.args[0] if node.target is operator.getitem else None
            origin[node] = node
            if isinstance(producer, fx.Node) and self.facts[producer].branch is not None:
                passed: Any = producer.args[1:]
                origin[node] = origin[passed[node.args[1]]]
        for plan in self.plans:
            pairs = zip(plan.received, plan.inputs, strict=True)
            arriving = [origin[node] for node, value in pairs if value.meta.requires_grad]
            if len({*arriving}) < len(arriving):
                return True
        return False

    def last_has(self, units: Collection[str]) -> bool:
        """Whether all of these units (at least one) run on the last stage, each for the last time."""
        ends = {u: self.find_stage(f.index) for f in self.facts.values() if f.kind == "unit" for u in f.units}
        return bool(units) and all(ends.get(unit) == self.count - 1 for unit in units)

    def source(self, node: fx.Node, consumer: int) -> int:
        """Return the stage from which `consumer` takes a value: the last earlier one to update it, or else its
        producer."""
        fact = self.facts[node]
        if fact.kind == "input" and consumer == 0:
            return MODEL_INPUT
        stages = [0 if fact.kind == "input" else self.find_stage(fact.index)]
        for writer in self.writers:
            if writer.writes & fact.storages and writer.index > fact.index:
                stages.append(self.find_stage(writer.index))
        return max(s for s in stages if s < consumer)

    # -- which stage runs what --------------------------------------------------------------------------------------

    @cached_property
    def live(self) -> set[fx.Node]:
        """Nodes that the result needs, or that do something besides returning a value.

        Drawing random numbers does not count: each call draws from its own stream.
        """
        acting = [n for n, f in self.facts.items() if f.kind == "unit" or f.writes]
        return walk([*acting, *self.recording.outputs])

    @cached_property
    def repeatable(self) -> set[fx.Node]:
        """Calls that any stage can repeat for itself: without parameters, randomness, gradients or updates."""
        nodes: set[fx.Node] = set()
        for node, fact in self.facts.items():
            if fact.on_every_stage or (
                self._is_plain(fact) and all(self._is_repeatable(argument, nodes) for argument in node.all_input_nodes)
            ):
                nodes.add(node)
        return nodes

    def _is_plain(self, fact: NodeInfo) -> bool:
        acts = fact.branch or fact.draws or fact.writes or fact.takes_gradient or fact.storages & self.written
        return fact.kind == "call" and not acts

    def _is_repeatable(self, node: fx.Node, nodes: set[fx.Node]) -> bool:
        fact = self.facts[node]
        return node in nodes or (fact.kind in ("input", "buffer", "constant") and not fact.storages & self.written)

    @cached_property
    def local_calls(self) -> list[list[fx.Node]]:
        """For each stage, the calls that only it makes."""
        calls: list[list[fx.Node]] = [[] for _ in range(self.count)]
        for node, fact in self.facts.items():
            if fact.kind in ("call", "unit") and node in self.live and node not in self.repeatable:
                calls[self.find_stage(fact.index)].append(node)
        return calls

    def _extent(self, stage: int) -> str:
        begin = f"from {self.cuts[stage - 1]!r}" if stage else "from the beginning"
        return begin + (f" to {self.cuts[stage]!r}" if stage < len(self.cuts) else " to the end")

    def _needs(self, stage: int) -> tuple[set[fx.Node], set[fx.Node]]:
        """Return what a stage receives and what it runs."""

        def is_local(node: fx.Node) -> bool:
            fact = self.facts[node]
            on_every_stage = fact.kind in (*HELD, "object") or node in self.repeatable
            return on_every_stage or (fact.kind != "input" and self.find_stage(fact.index) == stage)

        results = self.recording.outputs if stage == self.count - 1 else ()
        nodes = walk([*self.local_calls[stage], *results], lambda n: n.all_input_nodes if is_local(n) else ())
        run = {*filter(is_local, nodes)}
        return nodes - run, run

    def _ordered(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=lambda n: self.facts[n].index)

    # -- metas ------------------------------------------------------------------------------------------------------

    def _input(self, node: fx.Node, stage: int, run: Iterable[fx.Node]) -> Input:
        begin = self.starts[stage - 1] if stage else 0
        mutated = any(self.facts[n].writes & self.facts[node].storages for n in run)
        return Input(node.name, self.source(node, stage), self._meta(node, begin), mutated)

    def _meta(self, node: fx.Node, position: int) -> TensorMeta:
        """Return a value's meta before the node at `position`: an in-place update may have made it require a
        gradient."""
        fact = self.facts[node]
        assert fact.meta is not None, f"{node.name} is not a tensor"
        later_metas = [meta for index, meta in fact.updates if index < position]
        return later_metas[-1] if later_metas else fact.meta

    def _end(self, stage: int) -> int:
        return self.starts[stage] if stage < len(self.starts) else len(self.facts)

    # -- what a cut must not separate -------------------------------------------------------------------------------

    def _check_held(self, received: Sequence[set[fx.Node]], run: Sequence[set[fx.Node]]) -> None:
        """Refuse cuts that put something which the model holds and the forward updates, such as a buffer, on several
        stages."""
        names = dict(self.recording.memory)
        names.update({s: str(n.target) for n, f in self.facts.items() if f.kind == "constant" for s in f.storages})
        stages: dict[int, set[int]] = {}
        storage_by_name = {name: storage for storage, name in self.recording.memory.items()}
        for stage in range(self.count):
            touched = {s for node in received[stage] | run[stage] for s in self.facts[node].storages}
            touched |= {storage_by_name[name] for node in run[stage] for name in self.held_by(node)}
            for storage in touched:
                stages.setdefault(storage, set()).add(stage)
        for storage in names:
            if len(stages.get(storage, ())) < 2:
                continue
            tensor = self.recording.held.get(names[storage])
            if tensor is not None and tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                raise PartitionError(
                    f"{names[storage]!r} is a buffer that requires a gradient, and is used on stages "
                    f"{sorted(stages[storage])}: its gradients would not be added up. Register it as an nn.Parameter, "
                    "or move the cut so that all its uses are on one stage"
                )
            if storage in self.written:
                writer = next(f for f in self.facts.values() if storage in f.writes)
                raise PartitionError(
                    f"{names[storage]!r} is updated in place by {self.describe(writer)} but used on stages "
                    f"{sorted(stages[storage])}: copies on several stages would differ. Update it next to where it is "
                    "used, or move the cut so that all its uses are on one stage"
                )

    @cached_property
    def updated(self) -> set[str]:
        """Canonical names of the parameters and buffers that the forward updates in place."""
        return {name for storage, name in self.recording.memory.items() if storage in self.written}

    def depends_on_values(self, node: fx.Node) -> bool:
        """Whether a call may write to more than it was seen to."""
        fact = self.facts[node]
        inner_facts = () if fact.branch is None else fact.branch.facts.values()
        return fact.depends_on_values or any(inner_fact.depends_on_values for inner_fact in inner_facts)

    def overwrites_input(self, node: fx.Node) -> bool:
        """Whether this call or a later one updates an input of the call in place."""
        input_storages = {storage for argument in node.all_input_nodes for storage in self.facts[argument].storages}
        return any(writer.writes & input_storages for writer in self.writers if writer.index >= self.facts[node].index)

    def held_by(self, node: fx.Node) -> list[str]:
        """Canonical names of the parameters and buffers that a node uses."""
        fact = self.facts[node]
        if fact.kind in ("parameter", "buffer"):
            return [str(node.target)]
        modules = [self.model.get_submodule(name) for name in fact.units]
        return [self._canonical[id(t)] for module in modules for t in (*module.parameters(), *module.buffers())]

    @cached_property
    def _canonical(self) -> dict[int, str]:
        return {id(tensor): name for name, tensor in self.recording.held.items()}

    def _check_views(self) -> None:
        """Refuse cuts between views of memory that is updated in place: an update must reach every later use of it."""
        ordinary = dict.fromkeys(s for writer in self.writers for s in writer.writes if s not in self.recording.memory)
        views: dict[int, list[fx.Node]] = {storage: [] for storage in ordinary}
        for node, fact in self.facts.items():
            if fact.kind != "constant":
                for storage in fact.storages & views.keys():
                    views[storage].append(node)
        for writer, fact in self.facts.items():
            for storage in fact.writes & views.keys():
                for view in views[storage]:
                    self._check_view(writer, view, storage, self.find_stage(fact.index))

    def _check_view(self, writer: fx.Node, view: fx.Node, storage: int, stage: int) -> None:
        index = self.facts[writer].index
        used_later = view in self.recording.outputs or any(
            self.facts[user].index > index and user in self.live for user in view.users
        )
        if self.facts[view].index >= index or not used_later:
            return
        roots = {self._root(a, storage, stage) for a in writer.all_input_nodes if storage in self.facts[a].storages}
        if roots != {self._root(view, storage, stage)}:
            raise PartitionError(
                f"{self.describe(self.facts[writer])} updates in place memory that {view.name!r} shares, but a cut "
                f"separates the two, so that {view.name!r} would keep the old values. Move the cut, or make the "
                "update out of place"
            )

    def _root(self, node: fx.Node, storage: int, stage: int) -> fx.Node:
        """Return the value through which memory came to a stage, traced back through the views made there."""
        fact = self.facts[node]
        if fact.kind == "input" or (self.find_stage(fact.index) != stage and fact.kind != "object"):
            return node
        for argument in node.all_input_nodes:
            if storage in self.facts[argument].storages:
                return self._root(argument, storage, stage)
        return node

    def describe(self, fact: NodeInfo) -> str:
        return f"block {fact.scope!r}" if fact.kind == "unit" else f"the call at {fact.source_line}"
