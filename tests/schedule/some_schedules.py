"""Hypothesis strategies that the schedule tests share."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from penstock.schedule import Action, Op, Placement, Schedule, generate, generators, names
from penstock.schedule.generators import Numbers


@dataclass(frozen=True)
class Link:
    source: int
    target: int


NAMES = names()


@st.composite
def generated(draw: st.DrawFn, max_ranks: int = 8, max_microbatches: int = 32) -> Schedule:
    """Any generator with any numbers that it allows."""
    entry = draw(st.sampled_from(generators()))
    numbers = Numbers(
        draw(st.integers(1, max_ranks)),
        draw(st.integers(1, max_microbatches)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
    )
    while (rule := entry.broken(numbers)) is not None:
        default = {"chunks": entry.chunks, "slices": entry.slices}
        fixed = default.get(rule.argument, getattr(numbers, rule.argument) + 1)
        numbers = replace(numbers, **{rule.argument: fixed})
    return generate(entry.name, numbers.ranks, numbers.microbatches, numbers.chunks, numbers.slices)


@st.composite
def arbitrary(draw: st.DrawFn) -> Schedule:
    """A legal schedule that nobody would write: any placement, each rank's actions in any order that works."""
    ranks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rank_of = tuple(draw(st.permutations([*range(ranks), *draw(st.lists(st.integers(0, ranks - 1), max_size=3))])))
    ops = draw(st.sampled_from(["FB", "FIW"]))
    waiting = {Action(s, Op(op), k) for s in range(len(rank_of)) for op in ops for k in range(microbatches)}
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    back = Op(ops[1])
    done: set[Action] = set()
    while waiting:
        ready = [a for a in waiting if _needs(a, back, len(rank_of)) <= done]
        action = draw(st.sampled_from(sorted(ready, key=str)))
        waiting.remove(action)
        done.add(action)
        rows[rank_of[action.stage]].append(action)
    return Schedule("arbitrary", Placement(ranks, rank_of), microbatches, rows)


def _needs(a: Action, back: Op, stages: int) -> set[Action]:
    """The dependencies, written a second time and by hand, to hold the library's against."""
    if a.op is Op.F:
        return {Action(a.stage - 1, Op.F, a.microbatch)} if a.stage else set()
    if a.op is Op.W:
        return {Action(a.stage, Op.I, a.microbatch)}
    above = {Action(a.stage + 1, back, a.microbatch)} if a.stage + 1 < stages else set()
    return {Action(a.stage, Op.F, a.microbatch)} | above


@st.composite
def skips(draw: st.DrawFn, stages: int, chain: bool = True) -> list[Link]:
    """Forward links: any pairs of stages, ascending, with or without those of the chain."""
    pairs = [(a, b) for a in range(stages) for b in range(a + 1, stages)]
    chosen = set(draw(st.lists(st.sampled_from(pairs), max_size=8))) if pairs else set()
    if chain:
        chosen |= {(s, s + 1) for s in range(stages - 1)}
    return [Link(*pair) for pair in sorted(chosen)]
