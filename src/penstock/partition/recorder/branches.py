"""Records a forward that skips modules at random (layer drop, stochastic depth) as one recording with branches.

With several decisions there are too many paths to record them all. So the path on which most runs is the base, and
enough others are recorded to see any two decisions in all four combinations: two for each binary digit of a decision's
number, and one with all decisions inverted. Each must be the base minus the nodes that it leaves out: these are the
decision's region, which becomes one node.

Fewer would not do. What replaces a skipped layer's result shows only where the layer before it and the one that reads
it both run, whether these are one or s layers away. Numbers that differ by s differ in the digit of the largest power
of 2 that divides s, so on one path the layer is inverted and neither of the others is.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from penstock.partition.recording.recording import Branch, Fact, Recording
from penstock.partition.source import Obstacle

Answers = tuple[bool, ...]


class UnlikeError(Exception):
    """Two paths differ in more than what one leaves out. `number`: the decision's; None if unknown."""

    def __init__(self, reason: str, number: int | None = None) -> None:
        super().__init__(reason)
        self.number = number


def with_branches(first: Recording, record: Callable[[Mapping[int, bool]], Recording]) -> Recording:
    """Merge the recordings of all paths that the forward may take at random.

    Args:
        first: the path on which every answer is False.
        record: records the path with these answers, False for questions without one.

    Raises PartitionError if the paths differ in more than what some leave out.
    """
    try:
        return _Merger(*_paths(first, record)).merged()
    except UnlikeError as error:
        ask = first.asks[error.number or 0]
        where = f"module {ask.scope!r}" if ask.scope else "the model's own forward"
        raise Obstacle(
            f"{where} branches on a random number at {ask.source_line}, and its two ways differ in more than the "
            f"modules that one leaves out: {error}",
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
    def of(cls, recording: Recording, answers: Answers) -> _Path:
        if len(recording.asks) != len(answers):
            raise UnlikeError(
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


def _paths(first: Recording, record: Callable[[Mapping[int, bool]], Recording]) -> tuple[_Path, list[_Path]]:
    """Return the base, and as many other paths as needed."""
    count, known = len(first.asks), dict[Answers, _Path]()

    def path(answers: Answers) -> _Path:
        if answers not in known:
            known[answers] = _Path.of(record(dict(enumerate(answers))), answers)
        return known[answers]

    none = known[(False,) * count] = _Path.of(first, (False,) * count)
    every = path((True,) * count)
    base = path(tuple(len(b) > len(a) for a, b in zip(none.segments[1:], every.segments[1:], strict=True)))
    for digit in range((count - 1).bit_length()):
        for side in (0, 1):
            path(tuple(a != ((number >> digit & 1) == side) for number, a in enumerate(base.answers)))
    return base, [each for each in known.values() if each is not base]


class _Merger:
    """Compares the base with the other paths, and rewrites it with one node for each region.

    Attributes:
        regions: for each decision, the nodes of the base that run only on its side of it; `region_of` the inverse.
        instead: for a node in a region that is used after it, what is used instead if the region did not run.
    """

    def __init__(self, base: _Path, others: Sequence[_Path]) -> None:
        self.path, self.base = base, base.recording
        self.regions: dict[int, tuple[fx.Node, ...]] = {}
        self.region_of: dict[fx.Node, int] = {}
        self.instead: dict[fx.Node, fx.Node] = {}
        self.graph = fx.Graph()
        self.new: dict[fx.Node, fx.Node] = {}
        self.facts: dict[fx.Node, Fact] = {}
        self._compare(others)

    # -- comparing --------------------------------------------------------------------------------------------------

    def _compare(self, others: Sequence[_Path]) -> None:
        facts, found = self.base.facts, []
        for way in others:
            pairs = zip(self.path.answers, way.answers, strict=True)
            flipped = frozenset(number for number, (mine, theirs) in enumerate(pairs) if mine != theirs)
            found.append((flipped, self._aligned(way, flipped)))
        for flipped, values in found:
            for mine, theirs in values:
                known = self.instead.get(mine)
                if self.region_of.get(mine) in flipped and (known is None or facts[known].index < facts[theirs].index):
                    self.instead[mine] = theirs  # for an earlier one the others were left out too
        for flipped, values in found:
            for mine, theirs in values:
                node = mine
                while (number := self.region_of.get(node)) in flipped:
                    if node not in self.instead:
                        raise _made_once(node, number)
                    node = self.instead[node]
                if node is not theirs:
                    reason = f"{theirs.name!r} is used where {mine.name!r} was expected"
                    raise UnlikeError(reason, self.region_of.get(mine))

    def _aligned(self, way: _Path, flipped: frozenset[int]) -> list[tuple[fx.Node, fx.Node]]:
        """Pair each value that a call of the base takes with the node of the base that corresponds to the value which
        the other path has in the same place."""
        base, other = self.base, way.recording
        at = {index: node for node, index in base.inputs.items()}
        same = {node: at[index] for node, index in other.inputs.items()}
        pairs: list[tuple[fx.Node, fx.Node]] = []

        def pair(mine: Any, theirs: Any) -> None:
            pairs.extend((a, same[b]) for a, b in _arguments(mine, theirs, base, other))

        for number, (mine, theirs) in enumerate(zip(self.path.segments, way.segments, strict=True), start=-1):
            mine = self._without_region(mine, theirs, number if number in flipped else None)
            for one, two in zip(mine, theirs, strict=True):
                _check_alike(one, base.facts[one], two, other.facts[two], number)
                pair((one.args, one.kwargs), (two.args, two.kwargs))
                same[two] = one
        for mine_asked, asked in zip(base.asks, other.asks, strict=True):
            if same[asked.node] is not mine_asked.node:
                raise UnlikeError("the questions come in another order")
        pair(*((each.outputs, each.result_leaves, each.result_structure) for each in (base, other)))
        return pairs

    def _without_region(
        self, mine: Sequence[fx.Node], theirs: Sequence[fx.Node], number: int | None
    ) -> Sequence[fx.Node]:
        spare = len(mine) - len(theirs)
        if number is None:
            if spare:
                raise UnlikeError("it changes what runs after the next question")
            return mine
        start = _start_of_region(mine, theirs, spare) if spare >= 0 else None
        if start is None:
            raise UnlikeError("both sides run something of their own", number)
        region = tuple(mine[start : start + spare])
        if self.regions.setdefault(number, region) != region:
            raise UnlikeError("what it leaves out depends on other decisions", number)
        self.region_of.update(dict.fromkeys(region, number))
        return [*mine[:start], *mine[start + spare :]]

    # -- merging ----------------------------------------------------------------------------------------------------

    def merged(self) -> Recording:
        base, numbers = self.base, dict[int, int]()  # numbers: index in the base -> index in the merged recording
        regions = {number: nodes for number, nodes in self.regions.items() if nodes}
        outputs = {number: self._outputs(number, nodes) for number, nodes in regions.items()}
        lasts = {nodes[-1]: number for number, nodes in regions.items()}
        for node, fact in base.facts.items():
            numbers[fact.index] = len(self.facts)
            if node in lasts:
                self._write_branch(lasts[node], outputs[lasts[node]])
            elif node not in self.region_of:
                self.new[node] = copy = self.graph.node_copy(node, self.new.__getitem__)
                self.facts[copy] = replace(fact, index=len(self.facts))
        for number, nodes in regions.items():
            numbers |= {base.facts[node].index: numbers[base.facts[nodes[-1]].index] for node in nodes}
            self._make_anywhere(self.new[base.asks[number].node])
        for fact in self.facts.values():
            fact.updates = [(numbers[index], meta) for index, meta in fact.updates]
        count, end = len(regions), len(self.facts)
        note = f"{count} branch{'es' * (count > 1)} by chance, such as layer drop: decided anew for each microbatch"
        return replace(
            base,
            graph=self.graph,
            facts=self.facts,
            inputs={self.new[node]: place for node, place in base.inputs.items()},
            outputs=tuple(self.new[node] for node in base.outputs),
            entered={name: tuple(numbers.get(index, end) for index in calls) for name, calls in base.entered.items()},
            notes=(*base.notes, note) if count else base.notes,
            asks=(),
        )

    def _outputs(self, number: int, region: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        """Return the values of a region that are used after it."""
        outside = {node for node in region if any(self.region_of.get(user) != number for user in node.users)}
        found = tuple(node for node in region if node in outside or node in self.base.outputs)
        for node in found:
            instead = self.instead.get(node)
            if instead is None:
                raise _made_once(node, number)
            run, passed = self.base.facts[node].meta, self.base.facts[instead].meta
            if run is None or passed is None:
                raise UnlikeError(f"{node.name!r}, which is used later, is not a tensor", number)
            if (run.shape, run.stride, run.dtype) != (passed.shape, passed.stride, passed.dtype):
                raise UnlikeError(f"{instead.name!r} differs from {node.name!r} in shape, stride or dtype", number)
            if passed.requires_grad and not run.requires_grad:
                raise UnlikeError(f"{instead.name!r} takes a gradient, but {node.name!r} does not", number)
        return found

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
        arguments = (base.asks[number].node, *(self.instead[n] for n in outputs), *inputs)
        name = f"branch_by_chance_{number}"
        node = self.graph.create_node("call_module", name, tuple(self.new[a] for a in arguments), {}, name)
        self.facts[node] = Fact(
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
        for place, output in enumerate(outputs):
            self.new[output] = item = self.graph.call_function(operator.getitem, (node, place))
            self.facts[item] = replace(
                facts[output], index=len(self.facts), kind="call", draws=False, writes=frozenset(), work=0
            )

    def _make_anywhere(self, node: fx.Node) -> None:
        """Make a decision again in each stage that needs it, from the same stream."""
        fact = self.facts[node]
        if fact.kind == "call" and not fact.is_anywhere:
            fact.is_anywhere = True
            for argument in node.all_input_nodes:
                self._make_anywhere(argument)


def _made_once(node: fx.Node, number: int | None) -> UnlikeError:
    return UnlikeError(f"only one of them makes {node.name!r}, which is used later", number)


def _start_of_region(mine: Sequence[fx.Node], theirs: Sequence[fx.Node], spare: int) -> int | None:
    """Return where in `mine` the `spare` nodes that `theirs` lacks are: at the question, or after what follows it."""
    ours, others = [(n.op, n.target) for n in mine], [(n.op, n.target) for n in theirs]
    starts = (s for s in range(len(theirs) + 1) if ours[:s] == others[:s] and ours[s + spare :] == others[s:])
    return next(starts, None)


def _check_alike(mine: fx.Node, fact: Fact, theirs: fx.Node, other: Fact, number: int) -> None:
    one, two = (mine.op, mine.target, fact.kind, fact.scope), (theirs.op, theirs.target, other.kind, other.scope)
    if one != two:
        raise UnlikeError(f"one way calls {theirs.name!r} where the other calls {mine.name!r}", number)
    if (fact.draws, fact.modes, _layout(fact)) != (other.draws, other.modes, _layout(other)):
        raise UnlikeError(
            f"{mine.name!r} has another shape, stride or dtype, draws otherwise, or runs under another mode", number
        )
    if other.takes_gradient and not fact.takes_gradient:
        raise UnlikeError(f"{mine.name!r} takes a gradient only where something is left out", number)


def _layout(fact: Fact) -> object:
    return fact.meta and (fact.meta.shape, fact.meta.stride, fact.meta.dtype)


def _arguments(mine: Any, theirs: Any, base: Recording, other: Recording) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield the values at the same places of two structures. Raise UnlikeError if anything else differs."""
    if isinstance(mine, fx.Node) and isinstance(theirs, fx.Node):
        if "get_attr" not in (mine.op, theirs.op):
            yield mine, theirs
        elif not _is_same_object(mine, theirs, base, other):
            raise UnlikeError(f"{theirs.name!r} is used where {mine.name!r} was expected")
    elif isinstance(mine, (tuple, list)) and type(mine) is type(theirs) and len(mine) == len(theirs):
        for one, two in zip(mine, theirs, strict=True):
            yield from _arguments(one, two, base, other)
    elif isinstance(mine, dict) and isinstance(theirs, dict) and list(mine) == list(theirs):
        yield from _arguments(tuple(mine.values()), tuple(theirs.values()), base, other)
    elif isinstance(mine, slice) and isinstance(theirs, slice):
        one, two = ((each.start, each.stop, each.step) for each in (mine, theirs))
        yield from _arguments(one, two, base, other)
    elif type(mine) is not type(theirs) or not (mine is theirs or mine == theirs):
        raise UnlikeError(f"one way passes {reprlib.repr(theirs)} where the other passes {reprlib.repr(mine)}")


def _is_same_object(mine: fx.Node, theirs: fx.Node, base: Recording, other: Recording) -> bool:
    a, b = (each.constants.get(str(node.target)) for node, each in ((mine, base), (theirs, other)))
    if a is None or b is None:
        return (mine.op, mine.target) == (theirs.op, theirs.target)
    return a is b or (type(a) is type(b) and not isinstance(a, Tensor) and bool(a == b))
