"""Hypothesis strategies and references shared by the tests of schedules and of their simulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from penstock.schedule import Action, Op, Overlap, Placement, Schedule, generate, names, schedule_specs, split_backward
from penstock.schedule.generators import ScheduleParams


@dataclass(frozen=True)
class Link:
    source: int
    target: int


NAMES = names()


@st.composite
def generated(draw: st.DrawFn, max_ranks: int = 8, max_microbatches: int = 32, name: str | None = None) -> Schedule:
    """A schedule from any generator, or the named one, with any numbers that it allows."""
    entry = draw(st.sampled_from([each for each in schedule_specs() if name in (None, each.name)]))
    numbers = ScheduleParams(
        draw(st.integers(1, max_ranks)),
        draw(st.integers(1, max_microbatches)),
        draw(st.integers(1, 4)),
    )
    while (rule := entry.violated_constraint(numbers)) is not None:
        fixed = entry.chunks if rule.argument == "stages_per_rank" else getattr(numbers, rule.argument) + 1
        numbers = replace(numbers, **{rule.argument: fixed})
    return generate(entry.name, numbers.ranks, numbers.microbatches, numbers.stages_per_rank)


@st.composite
def arbitrary(draw: st.DrawFn) -> Schedule:
    """A legal schedule that nobody would write: any placement, with each rank's actions in any order that works."""
    ranks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    rank_of = tuple(draw(st.permutations([*range(ranks), *draw(st.lists(st.integers(0, ranks - 1), max_size=3))])))
    ops = draw(st.sampled_from(["FB", "FIW"]))
    waiting = {Action(s, Op(op), k) for s in range(len(rank_of)) for op in ops for k in range(microbatches)}
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    needs = needs_by_hand(Schedule("all", Placement(1, (0,) * len(rank_of)), microbatches, [waiting]))
    done: set[Action] = set()
    while waiting:
        ready = [a for a in waiting if needs[a] <= done]
        action = draw(st.sampled_from(sorted(ready, key=str)))
        waiting.remove(action)
        done.add(action)
        rows[rank_of[action.stage]].append(action)
    return Schedule("arbitrary", Placement(ranks, rank_of), microbatches, rows)


def small_ones() -> st.SearchStrategy[Schedule]:
    """Schedules of all kinds on a few ranks: named ones, with and without split backwards, and arbitrary ones."""
    named = generated(max_ranks=5, max_microbatches=8)
    return st.one_of(arbitrary(), named, named.map(split_backward))


def needs_by_hand(schedule: Schedule) -> dict[Action, set[Action]]:
    """What each computation waits for, written independently, to check the library's rule against."""
    place = schedule.placement
    there = {action for row in schedule.rows for action in row if action.op.is_compute}

    def gradient(stage: int, number: int) -> set[Action]:
        return {Action(stage, op, number) for op in (Op.B, Op.I)} & there

    def needed(action: Action) -> set[Action]:
        stage, k = action.stage, action.microbatch or 0
        if action.op is Op.F:
            return set() if place.is_first(stage) else {Action(stage - 1, Op.F, k)}
        if action.op is Op.W:
            return {Action(stage, Op.I, k)}
        found = {Action(stage, Op.F, k)}
        above: set[Action] = set()
        while not above and not place.is_last(stage):
            stage += 1
            above = gradient(stage, k)
        return found | above

    return {action: needed(action) for action in there}


def with_overlaps(schedule: Schedule, chosen: Iterator[bool]) -> Schedule:
    """The schedule with some forwards overlapped with the backward of another microbatch that follows them."""
    rows = []
    for row in schedule.rows:
        items: list[Action | Overlap] = []
        for item in row.items():
            before = items[-1] if items else None
            backward = isinstance(item, Action) and item.op in (Op.B, Op.I)
            forward = isinstance(before, Action) and before.op is Op.F and before.microbatch != item.parts[0].microbatch
            if backward and forward and next(chosen):
                items[-1] = Overlap(before, item)
            else:
                items.append(item)
        rows.append(items)
    return schedule.with_rows(rows)


@st.composite
def skips(draw: st.DrawFn, stages: int, chain: bool = True) -> list[Link]:
    """Forward links between any ascending pairs of stages, with or without those between neighbors."""
    pairs = [(a, b) for a in range(stages) for b in range(a + 1, stages)]
    chosen = set(draw(st.lists(st.sampled_from(pairs), max_size=8))) if pairs else set()
    if chain:
        chosen |= {(s, s + 1) for s in range(stages - 1)}
    return [Link(*pair) for pair in sorted(chosen)]
