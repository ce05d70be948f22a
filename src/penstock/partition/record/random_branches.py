"""Records a forward that skips modules at random (layer drop, stochastic depth) as one recording with branches.

With several decisions there are too many paths to record them all. So the path on which most runs is the base, and
others are recorded: one with all decisions inverted, and three on which every third is, those whose numbers have the
last ternary digit 0, 1 or 2. Each must be the base minus the nodes that it leaves out: these are the decision's region,
which becomes one node.

Fewer would not do. Layers one or two apart meet in all four ways on no less: U-Nets and layers that look at the one
before the last would be wrong. And if all layers are skipped, what replaces a layer's result may be that of the layer
before it, or what entered the first: that shows only where the layer before it runs, and one that reads it. If what
replaces it is older than a layer that was skipped too, if regions that read each other never differ, or if a decision
leaves nothing out, more paths are recorded: three for each further digit. Numbers that differ by s differ in the digit
of the largest power of 3 that divides s, so on one path a layer is inverted and neither of those s away from it is.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from penstock.partition.obstacles import Obstacle, describe_scope
from penstock.partition.recording import Branch, NodeInfo, Recording

Answers = tuple[bool, ...]


class MismatchError(Exception):
    """Two paths differ in more than what one leaves out. `number`: the decision's; None if unknown."""

    def __init__(self, reason: str, number: int | None = None) -> None:
        super().__init__(reason)
        self.number = number


def merge_branches(first: Recording, record: Callable[[Mapping[int, bool]], Recording]) -> Recording:
    """Merge the recordings of all paths that the forward may take at random.

    Args:
        first: the path on which every answer is False.
        record: records the path with these answers, False for questions without one.

    Raises PartitionError if the paths differ in more than what some leave out.
    """
    try:
        mergers = (_Merger(base, paths) for base, paths in _paths(first, record))
        for merger in mergers:
            if merger.is_certain:
                break
        return merger.merge()
    except MismatchError as error:
        ask = first.asks[error.number or 0]
        raise Obstacle(
            f"{describe_scope(ask.scope)} branches on a random number at {ask.source_line}, and its two paths differ "
            f"in more than the modules that one leaves out: {error}",
            ask.scope,
            "set the rate to 0 (models of transformers: layerdrop=0 in the configuration) or use eval mode",
        ) from None


@dataclass(frozen=True)
class _Path:
    """One recording, the answers that it got, and its calls up to the first question, to the second, and so on."""

    recording: Recording
    answers: Answers
    segments: Sequence[Sequence[fx.Node]]

    @classmethod
    def from_recording(cls, recording: Recording, answers: Answers) -> _Path:
        if len(recording.asks) != len(answers):
            raise MismatchError(
                f"how often it asks depends on the answers ({len(answers)} times, or {len(recording.asks)})"
            )
        limits = [ask.index for ask in recording.asks]
        segments: list[list[fx.Node]] = [[] for _ in range(len(limits) + 1)]
        position = 0
        for node, fact in recording.facts.items():
            while position < len(limits) and fact.index >= limits[position]:
                position += 1
            if fact.kind in ("object", "call", "unit"):
                segments[position].append(node)
        return cls(recording, answers, segments)


def _paths(first: Recording, record: Callable[[Mapping[int, bool]], Recording]) -> Iterator[tuple[_Path, list[_Path]]]:
    """Yield the base, and the other paths so far: after those that differ in the first digit, and after each more."""
    count, recorded = len(first.asks), dict[Answers, _Path]()

    def get_path(answers: Answers) -> _Path:
        if answers not in recorded:
            recorded[answers] = _Path.from_recording(record(dict(enumerate(answers))), answers)
        return recorded[answers]

    all_false = recorded[(False,) * count] = _Path.from_recording(first, (False,) * count)
    all_true = get_path((True,) * count)
    base = get_path(tuple(len(b) > len(a) for a, b in zip(all_false.segments[1:], all_true.segments[1:], strict=True)))
    get_path(tuple(not answer for answer in base.answers))
    for step in [3**digit for digit in range(count) if 3**digit < max(count, 2)]:
        for value in range(3):
            get_path(tuple(a != (number // step % 3 == value) for number, a in enumerate(base.answers)))
        yield base, [path for path in recorded.values() if path is not base]


class _Merger:
    """Compares the base with the other paths, and rewrites it with one node for each region.

    Attributes:
        regions: for each decision, the nodes of the base that run only on its side of it; `region_of` the inverse.
        fallback: for a node in a region that is used after it, what is used instead if the region did not run.
        is_certain: whether every decision leaves something out, and each fallback was seen where nothing between it
            and the region was left out, too.
    """

    def __init__(self, base: _Path, paths: Sequence[_Path]) -> None:
        self.path, self.base = base, base.recording
        self.regions: dict[int, tuple[fx.Node, ...]] = {}
        self.region_of: dict[fx.Node, int] = {}
        self.fallback: dict[fx.Node, fx.Node] = {}
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.facts: dict[fx.Node, NodeInfo] = {}
        self._compare(paths)

    # -- comparing --------------------------------------------------------------------------------------------------

    def _compare(self, paths: Sequence[_Path]) -> None:
        facts, comparisons = self.base.facts, []
        for path in paths:
            pairs = zip(self.path.answers, path.answers, strict=True)
            flipped = frozenset(number for number, (a, b) in enumerate(pairs) if a != b)
            comparisons.append((flipped, self._align(path, flipped)))
        unseen = set[fx.Node]()
        starts = {number: facts[nodes[0]].index for number, nodes in self.regions.items() if nodes}
        for flipped, values in comparisons:
            for expected, used in values:
                number, old, found = self.region_of.get(expected), self.fallback.get(expected), facts[used].index
                if number in flipped and (old is None or facts[old].index < found):
                    self.fallback[expected] = used  # for an earlier one the others were left out too
                    between = any(found < starts[other] < starts[number] for other in flipped & starts.keys())
                    (unseen.add if between else unseen.discard)(expected)
        reads = {
            (self.region_of[a], number)
            for number, nodes in self.regions.items()
            for node in nodes
            for a in node.all_input_nodes
            if self.region_of.get(a, number) != number
        }
        shown = all(any(a in flipped and b not in flipped for flipped, _ in comparisons) for a, b in reads)
        self.is_certain = shown and not unseen and len(starts) == len(self.base.asks)
        for flipped, values in comparisons:
            for expected, used in values:
                node = expected
                while (number := self.region_of.get(node)) in flipped:
                    if node not in self.fallback:
                        raise _unmatched_value(node, number)
                    node = self.fallback[node]
                if node is not used:
                    reason = f"{used.name!r} is used where {expected.name!r} was expected"
                    raise MismatchError(reason, self.region_of.get(expected))

    def _align(self, path: _Path, flipped: frozenset[int]) -> list[tuple[fx.Node, fx.Node]]:
        """Pair each value that a call of the base takes with the node of the base that corresponds to the value which
        the other path has in the same place."""
        base, other = self.base, path.recording
        base_inputs = {index: node for node, index in base.inputs.items()}
        counterparts = {node: base_inputs[index] for node, index in other.inputs.items()}
        pairs: list[tuple[fx.Node, fx.Node]] = []

        def add_pairs(base_value: Any, other_value: Any) -> None:
            pairs.extend((a, counterparts[b]) for a, b in _pair_arguments(base_value, other_value, base, other))

        for number, (nodes, others) in enumerate(zip(self.path.segments, path.segments, strict=True), start=-1):
            nodes = self._without_region(nodes, others, number if number in flipped else None)
            for base_node, other_node in zip(nodes, others, strict=True):
                _check_same_call(base_node, base.facts[base_node], other_node, other.facts[other_node], number)
                add_pairs((base_node.args, base_node.kwargs), (other_node.args, other_node.kwargs))
                counterparts[other_node] = base_node
        for base_ask, other_ask in zip(base.asks, other.asks, strict=True):
            if counterparts[other_ask.node] is not base_ask.node:
                raise MismatchError("the questions come in another order")
        add_pairs(*((r.outputs, r.result_leaves, r.result_structure) for r in (base, other)))
        return pairs

    def _without_region(
        self, base_nodes: Sequence[fx.Node], other_nodes: Sequence[fx.Node], number: int | None
    ) -> Sequence[fx.Node]:
        surplus = len(base_nodes) - len(other_nodes)
        if number is None:
            if surplus:
                raise MismatchError("it changes what runs after the next question")
            return base_nodes
        start = _find_region_start(base_nodes, other_nodes, surplus) if surplus >= 0 else None
        if start is None:
            raise MismatchError("both sides run something of their own", number)
        region = tuple(base_nodes[start : start + surplus])
        if self.regions.setdefault(number, region) != region:
            raise MismatchError("what it leaves out depends on other decisions", number)
        self.region_of.update(dict.fromkeys(region, number))
        return [*base_nodes[:start], *base_nodes[start + surplus :]]

    # -- merging ----------------------------------------------------------------------------------------------------

    def merge(self) -> Recording:
        base, numbers = self.base, dict[int, int]()  # numbers: index in the base -> index in the merged recording
        regions = {number: nodes for number, nodes in self.regions.items() if nodes}
        outputs = {number: self._outputs(number, nodes) for number, nodes in regions.items()}
        last_nodes = {nodes[-1]: number for number, nodes in regions.items()}
        for node, fact in base.facts.items():
            numbers[fact.index] = len(self.facts)
            if node in last_nodes:
                self._write_branch(last_nodes[node], outputs[last_nodes[node]])
            elif node not in self.region_of:
                self.new[node] = copy = self.graph.node_copy(node, self.new.__getitem__)
                self.facts[copy] = replace(fact, index=len(self.facts))
        for number, nodes in regions.items():
            numbers |= {base.facts[node].index: numbers[base.facts[nodes[-1]].index] for node in nodes}
            self._repeat_on_stages(self.new[base.asks[number].node])
        for fact in self.facts.values():
            fact.updates = [(numbers[index], meta) for index, meta in fact.updates]
        count, end = len(regions), len(self.facts)
        note = f"{count} branch{'es' * (count > 1)} by chance, such as layer drop: decided anew for each microbatch"
        return replace(
            base,
            graph=self.graph,
            facts=self.facts,
            inputs={self.new[node]: position for node, position in base.inputs.items()},
            outputs=tuple(self.new[node] for node in base.outputs),
            entered={name: tuple(numbers.get(index, end) for index in calls) for name, calls in base.entered.items()},
            notes=(*base.notes, note) if count else base.notes,
            asks=(),
        )

    def _outputs(self, number: int, region: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        """Return the values of a region that are used after it."""
        outside = {node for node in region if any(self.region_of.get(user) != number for user in node.users)}
        outputs = tuple(node for node in region if node in outside or node in self.base.outputs)
        for node in outputs:
            fallback = self.fallback.get(node)
            if fallback is None:
                raise _unmatched_value(node, number)
            meta, passed = self.base.facts[node].meta, self.base.facts[fallback].meta
            if meta is None or passed is None:
                raise MismatchError(f"{node.name!r}, which is used later, is not a tensor", number)
            if (meta.shape, meta.stride, meta.dtype) != (passed.shape, passed.stride, passed.dtype):
                raise MismatchError(f"{fallback.name!r} differs from {node.name!r} in shape, stride or dtype", number)
            if passed.requires_grad and not meta.requires_grad:
                raise MismatchError(f"{fallback.name!r} takes a gradient, but {node.name!r} does not", number)
        return outputs

    def _write_branch(self, number: int, outputs: tuple[fx.Node, ...]) -> None:
        base, nodes = self.base, self.regions[number]
        facts = {node: base.facts[node] for node in nodes}
        inputs = tuple(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in facts))
        units = tuple(dict.fromkeys(f.scope for f in facts.values() if f.kind == "unit"))
        indices = {fact.index for fact in facts.values()}
        branch = Branch(
            nodes,
            facts,
            inputs,
            outputs,
            self.path.answers[number],
            units,
            {name: n for name, calls in base.calls.items() if (n := sum(i in indices for i in calls))},
            base.asks[number].source_line,
        )
        arguments = (base.asks[number].node, *(self.fallback[n] for n in outputs), *inputs)
        name = f"branch_by_chance_{number}"
        node = self.graph.create_node("call_module", name, tuple(self.new[a] for a in arguments), {}, name)
        self.facts[node] = NodeInfo(
            index=len(self.facts),
            kind="unit" if units else "call",
            scope=next((u for u in units if u in base.blocks), units[0]) if units else facts[nodes[0]].scope,
            storages=frozenset(s for n in outputs for s in facts[n].storages),
            writes=frozenset(s for f in facts.values() for s in f.writes if s in base.memory),
            takes_gradient=any(f.takes_gradient for f in facts.values()),
            source_line=branch.source_line,
            work=sum(f.work for f in facts.values()),
            branch=branch,
        )
        for position, output in enumerate(outputs):
            self.new[output] = item = self.graph.call_function(operator.getitem, (node, position))
            self.facts[item] = replace(
                facts[output], index=len(self.facts), kind="call", draws=False, writes=frozenset(), work=0
            )

    def _repeat_on_stages(self, node: fx.Node) -> None:
        """Make a decision again in each stage that needs it, from the same stream."""
        fact = self.facts[node]
        if fact.kind == "call" and not fact.on_every_stage:
            fact.on_every_stage = True
            for argument in node.all_input_nodes:
                self._repeat_on_stages(argument)


def _unmatched_value(node: fx.Node, number: int | None) -> MismatchError:
    return MismatchError(f"only one of them makes {node.name!r}, which is used later", number)


def _find_region_start(nodes: Sequence[fx.Node], others: Sequence[fx.Node], surplus: int) -> int | None:
    """Return where in `nodes` the `surplus` ones that `others` lacks are: at the question, or after what follows it."""
    calls, other_calls = [(n.op, n.target) for n in nodes], [(n.op, n.target) for n in others]
    starts = (
        s for s in range(len(others) + 1) if calls[:s] == other_calls[:s] and calls[s + surplus :] == other_calls[s:]
    )
    return next(starts, None)


def _check_same_call(node: fx.Node, fact: NodeInfo, other: fx.Node, other_fact: NodeInfo, number: int) -> None:
    if (node.op, node.target, fact.kind, fact.scope) != (other.op, other.target, other_fact.kind, other_fact.scope):
        raise MismatchError(f"one path calls {other.name!r} where the other calls {node.name!r}", number)
    if (fact.draws, fact.modes, _layout(fact)) != (other_fact.draws, other_fact.modes, _layout(other_fact)):
        raise MismatchError(
            f"{node.name!r} has another shape, stride or dtype, draws otherwise, or runs under another mode", number
        )
    if other_fact.takes_gradient and not fact.takes_gradient:
        raise MismatchError(f"{node.name!r} takes a gradient only where something is left out", number)


def _layout(fact: NodeInfo) -> object:
    return fact.meta and (fact.meta.shape, fact.meta.stride, fact.meta.dtype)


def _pair_arguments(a: Any, b: Any, base: Recording, other: Recording) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the values at the same places of two structures. Raise MismatchError if anything else differs."""
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        if "get_attr" not in (a.op, b.op):
            yield a, b
        elif not _is_same_object(a, b, base, other):
            raise MismatchError(f"{b.name!r} is used where {a.name!r} was expected")
    elif isinstance(a, (tuple, list)) and type(a) is type(b) and len(a) == len(b):
        for x, y in zip(a, b, strict=True):
            yield from _pair_arguments(x, y, base, other)
    elif isinstance(a, dict) and isinstance(b, dict) and list(a) == list(b):
        yield from _pair_arguments(tuple(a.values()), tuple(b.values()), base, other)
    elif isinstance(a, slice) and isinstance(b, slice):
        x, y = ((v.start, v.stop, v.step) for v in (a, b))
        yield from _pair_arguments(x, y, base, other)
    elif type(a) is not type(b) or not (a is b or a == b):
        raise MismatchError(f"one path passes {reprlib.repr(b)} where the other passes {reprlib.repr(a)}")


def _is_same_object(base_node: fx.Node, other_node: fx.Node, base: Recording, other: Recording) -> bool:
    a, b = (recording.constants.get(str(node.target)) for node, recording in ((base_node, base), (other_node, other)))
    if a is None or b is None:
        return (base_node.op, base_node.target) == (other_node.op, other_node.target)
    return a is b or (type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b))
