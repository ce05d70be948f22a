"""Records a forward that skips modules at random (layer drop, stochastic depth) as one recording with branches."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import fx

from penstock.partition.chance.variants import Found, UnlikeError, explore
from penstock.partition.obstacle import Obstacle
from penstock.partition.recording.facts import Branch, Fact
from penstock.partition.recording.recording import Recording


def with_branches(first: Recording, record: Callable[[Mapping[int, bool]], Recording]) -> Recording:
    """One recording of all paths that the forward may take at random.

    Args:
        first: the path on which every answer is False.
        record: records the path with these answers, False for questions without one.

    Raises PartitionError if the paths differ in more than what some leave out.
    """
    try:
        found = explore(first, record)
        return _Merger(found).merged()
    except UnlikeError as error:
        ask = first.asks[error.number or 0]
        where = f"module {ask.scope!r}" if ask.scope else "the model's own forward"
        raise Obstacle(
            f"{where} branches on a random number at {ask.source_line}, and its two ways differ in more than the "
            f"modules that one leaves out: {error}",
            ask.scope,
            "set the rate to 0 (models of transformers: layerdrop=0 in the configuration) or use eval mode",
        ) from None


class _Merger:
    """Rewrites the base path with one node for each region."""

    def __init__(self, found: Found) -> None:
        self.found, self.base = found, found.base.recording
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.facts: dict[fx.Node, Fact] = {}
        self.numbers: dict[int, int] = {}  # index in the base -> index in the merged recording
        self.members: dict[fx.Node | None, int] = {node: k for k, nodes in found.regions.items() for node in nodes}
        self.lasts = {nodes[-1]: k for k, nodes in found.regions.items() if nodes}
        self.users = _users(self.base)

    def merged(self) -> Recording:
        base = self.base
        outputs = {k: self._outputs(k) for k in self.found.regions}
        for node, fact in base.facts.items():
            self.numbers[fact.index] = len(self.facts)  # for nodes in a region: where the region will be
            if node in self.lasts:
                self._write_branch(self.lasts[node], outputs[self.lasts[node]])
            elif node not in self.members:
                self.new[node] = copy = self.graph.node_copy(node, self.new.__getitem__)
                self.facts[copy] = replace(fact, index=len(self.facts))
        for k, nodes in self.found.regions.items():
            for node in nodes:
                self.numbers[base.facts[node].index] = self.numbers[base.facts[nodes[-1]].index]
            if nodes:
                self._make_anywhere(self.new[base.asks[k].node])
        for fact in self.facts.values():
            fact.updates = [(self.numbers[index], meta) for index, meta in fact.updates]
        count = len(self.lasts)
        note = f"{count} branch{'es' * (count > 1)} by chance, such as layer drop: decided anew for each microbatch"
        return replace(
            base,
            graph=self.graph,
            facts=self.facts,
            inputs={self.new[node]: place for node, place in base.inputs.items()},
            outputs=tuple(self.new[node] for node in base.outputs),
            entered={name: self._renumbered(calls) for name, calls in base.entered.items()},
            notes=(*base.notes, note) if count else base.notes,
            asks=(),
        )

    def _renumbered(self, calls: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self.numbers.get(index, len(self.facts)) for index in calls)

    def _outputs(self, number: int) -> tuple[fx.Node, ...]:
        """The values of a region that are used after it."""
        region = self.found.regions[number]
        outputs = tuple(n for n in region if any(self.members.get(user) != number for user in self.users[n]))
        for node in outputs:
            instead = self.found.instead.get(node)
            if instead is None:
                raise UnlikeError(f"only one of them makes {node.name!r}, which is used later", number)
            run, passed = self.base.facts[node].meta, self.base.facts[instead].meta
            if run is None or passed is None:
                raise UnlikeError(f"{node.name!r}, which is used later, is not a tensor", number)
            if (run.shape, run.stride, run.dtype) != (passed.shape, passed.stride, passed.dtype):
                raise UnlikeError(f"{instead.name!r} differs from {node.name!r} in shape, stride or dtype", number)
            if passed.requires_grad and not run.requires_grad:
                raise UnlikeError(f"{instead.name!r} takes a gradient, but {node.name!r} does not", number)
        return outputs

    def _write_branch(self, number: int, outputs: tuple[fx.Node, ...]) -> None:
        base, nodes = self.base, self.found.regions[number]
        facts = {node: base.facts[node] for node in nodes}
        inputs = tuple(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in facts))
        units = tuple(dict.fromkeys(f.scope for f in facts.values() if f.kind == "unit"))
        indices = {fact.index for fact in facts.values()}
        branch = Branch(
            nodes,
            facts,
            inputs,
            outputs,
            self.found.base.answers[number],
            units,
            {name: n for name, calls in base.calls.items() if (n := sum(i in indices for i in calls))},
            base.asks[number].source_line,
        )
        first = facts[nodes[0]]
        arguments = (base.asks[number].node, *(self.found.instead[n] for n in outputs), *inputs)
        name = f"branch_by_chance_{number}"
        node = self.graph.create_node("call_module", name, tuple(self.new[a] for a in arguments), {}, name)
        self.facts[node] = Fact(
            index=len(self.facts),
            kind="unit" if units else "call",
            scope=next((u for u in units if u in base.blocks), units[0]) if units else first.scope,
            storages=frozenset(s for n in outputs for s in facts[n].storages),
            writes=frozenset(s for f in facts.values() for s in f.writes if s in base.memory),
            takes_gradient=any(f.takes_gradient for f in facts.values()),
            source_line=branch.source_line,
            work=sum(f.work for f in facts.values()),
            branch=branch,
        )
        for place, output in enumerate(outputs):
            self.new[output] = item = self.graph.call_function(operator.getitem, (node, place))
            self.facts[item] = replace(
                facts[output],
                index=len(self.facts),
                kind="call",
                draws=False,
                writes=frozenset(),
                work=0,
            )

    def _make_anywhere(self, node: fx.Node) -> None:
        """Each stage that needs a decision makes it again, from the same stream."""
        fact = self.facts[node]
        if fact.kind == "call" and not fact.is_anywhere:
            fact.is_anywhere = True
            for argument in node.all_input_nodes:
                self._make_anywhere(argument)


def _users(recording: Recording) -> dict[fx.Node, list[fx.Node | None]]:
    users: dict[fx.Node, list[fx.Node | None]] = {node: list(node.users) for node in recording.facts}
    for node in recording.outputs:
        users[node].append(None)
    return users
