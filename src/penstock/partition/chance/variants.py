"""Compares, node by node, the paths that a forward may take at random: what runs only on one side, and what follows.

With several decisions there are too many paths to record them all. So the path on which most runs is the base, and
enough others are recorded to see any two decisions in all four combinations: two for each binary digit of a decision's
number, and one with all decisions inverted. Each must be the base minus the nodes that it leaves out.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from penstock.partition.recording.facts import Fact
from penstock.partition.recording.recording import Recording


class UnlikeError(Exception):
    """Two paths differ in more than what one leaves out. `number`: the decision's; None if unknown."""

    def __init__(self, reason: str, number: int | None = None) -> None:
        super().__init__(reason)
        self.number = number


@dataclass(frozen=True)
class Variant:
    """One recording, the answers that it got, and its calls up to the first question, to the second, and so on."""

    recording: Recording
    answers: tuple[bool, ...]
    segments: Sequence[Sequence[fx.Node]]

    @classmethod
    def of(cls, recording: Recording, answers: Sequence[bool]) -> Variant:
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
        return cls(recording, tuple(answers), segments)


@dataclass
class Found:
    """What comparing paths has found so far.

    Attributes:
        regions: for each decision, the nodes of the base that run only on its side of it.
        instead: for a node in a region that is used after it, what is used instead if the region did not run.
    """

    base: Variant
    regions: dict[int, tuple[fx.Node, ...]] = field(default_factory=dict)
    instead: dict[fx.Node, fx.Node] = field(default_factory=dict)
    region_of: dict[fx.Node, int] = field(default_factory=dict)

    def learn(self, ways: Sequence[Variant]) -> None:
        """Compares the base with the other paths. Raises UnlikeError."""
        equations = [self._align(way) for way in ways]
        facts = self.base.recording.facts
        for way, pairs in zip(ways, equations, strict=True):
            flipped = self._flipped(way)
            for mine, theirs in pairs:
                if self.region_of.get(mine) in flipped:
                    known = self.instead.get(mine)
                    if known is None or facts[known].index < facts[theirs].index:  # the others were left out too
                        self.instead[mine] = theirs
        for way, pairs in zip(ways, equations, strict=True):
            flipped = self._flipped(way)
            for mine, theirs in pairs:
                if self._resolve(mine, flipped) is not theirs:
                    reason = f"{theirs.name!r} is used where {mine.name!r} was expected"
                    raise UnlikeError(reason, self.region_of.get(mine))

    def _resolve(self, node: fx.Node, flipped: frozenset[int]) -> fx.Node:
        while (number := self.region_of.get(node)) in flipped:
            if node not in self.instead:
                raise UnlikeError(f"only one of them makes {node.name!r}, which is used later", number)
            node = self.instead[node]
        return node

    def _flipped(self, way: Variant) -> frozenset[int]:
        pairs = zip(self.base.answers, way.answers, strict=True)
        return frozenset(number for number, (mine, theirs) in enumerate(pairs) if mine != theirs)

    def _align(self, way: Variant) -> list[tuple[fx.Node, fx.Node]]:
        """Pairs each value that a call of the base takes with the node of the base that corresponds to the value which
        the other path has in the same place."""
        flipped = self._flipped(way)
        base, other = self.base.recording, way.recording
        at = {index: node for node, index in base.inputs.items()}
        same = {node: at[index] for node, index in other.inputs.items()}
        pairs: list[tuple[fx.Node, fx.Node]] = []
        for number, (mine, theirs) in enumerate(zip(self.base.segments, way.segments, strict=True), start=-1):
            mine = self._without_region(mine, theirs, number if number in flipped else None)
            for one, two in zip(mine, theirs, strict=True):
                _check_alike(one, base.facts[one], two, other.facts[two], number)
                pairs += (
                    (a, same[b]) for a, b in _arguments((one.args, one.kwargs), (two.args, two.kwargs), base, other)
                )
                same[two] = one
        for mine_asked, asked in zip(base.asks, other.asks, strict=True):
            if same[asked.node] is not mine_asked.node:
                raise UnlikeError("the questions come in another order")
        pairs += ((a, same[b]) for a, b in _arguments(_results(base), _results(other), base, other))
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


def explore(first: Recording, record: Callable[[Mapping[int, bool]], Recording]) -> Found:
    """Records as many paths as needed, and compares them.

    Args:
        first: the path on which every answer is False.
        record: records the path with these answers, False for questions without one.

    Raises UnlikeError.
    """
    count = len(first.asks)

    def way(answers: Sequence[bool]) -> Variant:
        return Variant.of(record(dict(enumerate(answers))), answers)

    none, every = Variant.of(first, [False] * count), way([True] * count)
    richer = [len(b) > len(a) for a, b in zip(none.segments[1:], every.segments[1:], strict=True)]
    base = next((w for w in (none, every) if list(w.answers) == richer), None) or way(richer)
    known = {w.answers: w for w in (none, every, base)}
    others = [w for w in known.values() if w is not base]
    for digit in range((count - 1).bit_length()):
        for side in (0, 1):
            answers = tuple(a != ((number >> digit & 1) == side) for number, a in enumerate(richer))
            if answers not in known:
                known[answers] = way(answers)
                others.append(known[answers])
    found = Found(base)
    found.learn(others)
    return found


def _start_of_region(mine: Sequence[fx.Node], theirs: Sequence[fx.Node], spare: int) -> int | None:
    """Where in `mine` the `spare` nodes that `theirs` lacks are: at the question, or after what follows it."""
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


def _results(recording: Recording) -> tuple[Any, ...]:
    return recording.outputs, recording.result_leaves, recording.result_structure


def _arguments(mine: Any, theirs: Any, base: Recording, other: Recording) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The values at the same places of two structures. Raises UnlikeError if anything else differs."""
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
