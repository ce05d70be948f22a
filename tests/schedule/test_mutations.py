"""Legal schedules of each generator, and ones that nobody would write, are broken in each way: every break is reported.

And the other way round: what is not reported runs to its end, by the hand of an executor that is written once more,
with sends that are buffered and with sends that wait for their receive; what is reported as a deadlock does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import pytest
from executor import MESSAGES, is_complete, runs_to_the_end
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.schedule import (
    Action,
    Op,
    Schedule,
    add_communication,
    check,
    reduce_ties,
    split_backward,
)
from scaffolding.some_schedules import NAMES, arbitrary, generated, needs_by_hand

T = TypeVar("T")
Rows = list[list[Action]]
Break = Callable[[st.DataObject, Schedule, Rows], set[str]]
"""Breaks the rows in place. Returns the kinds of which one must be reported."""

BREAKS: list[Break] = []
OF_MESSAGES: list[Break] = []
"""Those that need a schedule with messages."""


def breaks(function: Break) -> Break:
    BREAKS.append(function)
    return function


def breaks_messages(function: Break) -> Break:
    OF_MESSAGES.append(function)
    return breaks(function)


# -- ways to break a schedule -----------------------------------------------------------------------------------------


def place(data: st.DataObject, rows: Rows, wanted: Callable[[Action], bool] = lambda _: True) -> tuple[int, int]:
    """Where an action is that is as wanted: rank and index."""
    return one_of(
        data, [(rank, index) for rank, row in enumerate(rows) for index, action in enumerate(row) if wanted(action)]
    )


def one_of(data: st.DataObject, choices: Sequence[T]) -> T:
    """One of those that there are, if any: a single rank has no other, a single microbatch neither."""
    assume(choices)
    return data.draw(st.sampled_from(choices))


def assume_several(schedule: Schedule) -> None:
    """Each stage has more than one microbatch: without its only one it would look frozen."""
    assume(all(len(schedule.numbers_on(stage)) > 1 for stage in range(schedule.stages)))


def swap(rows: Rows, one: tuple[int, int], two: tuple[int, int]) -> None:
    (r, i), (s, j) = one, two
    rows[r][i], rows[s][j] = rows[s][j], rows[r][i]


@breaks
def repeat(data: st.DataObject, schedule: Schedule, rows: Rows) -> set[str]:
    rank, index = place(data, rows)
    rows[rank].insert(data.draw(st.integers(0, len(rows[rank]))), rows[rank][index])
    return {"repeated"}


@breaks
def drop(data: st.DataObject, schedule: Schedule, rows: Rows) -> set[str]:
    assume_several(schedule)
    rank, index = place(data, rows)
    return {"missing"} if rows[rank].pop(index).op.is_compute else {"unmatched"}


@breaks
def put_before_what_it_waits_for(data: st.DataObject, schedule: Schedule, rows: Rows) -> set[str]:
    needs = needs_by_hand(schedule)
    local = [
        (rank, row.index(need), index)
        for rank, row in enumerate(rows)
        for index, action in enumerate(row)
        for need in needs.get(action, ())
        if need in row
    ]
    rank, before, after = one_of(data, sorted(local))
    if data.draw(st.booleans()):
        swap(rows, (rank, before), (rank, after))
    else:
        rows[rank].insert(before, rows[rank].pop(after))
    return {"order"}


@breaks
def move_to_another_rank(data: st.DataObject, schedule: Schedule, rows: Rows) -> set[str]:
    rank, index = place(data, rows)
    other = one_of(data, [r for r in range(schedule.ranks) if r != rank])
    rows[other].insert(data.draw(st.integers(0, len(rows[other]))), rows[rank].pop(index))
    return {"misplaced"}


@breaks
def number_out_of_range(data: st.DataObject, schedule: Schedule, rows: Rows) -> set[str]:
    rank, index = place(data, rows, lambda a: a.op is not Op.REDUCE_GRAD)
    action = rows[rank][index]
    others = set(range(schedule.microbatches + 1)) - set(schedule.numbers_on(action.stage))
    rows[rank][index] = replace(action, microbatch=data.draw(st.sampled_from(sorted(others))))
    return {"out of range"}


@breaks_messages
def swap_messages(data: st.DataObject, schedule: Schedule, rows: Rows) -> set[str]:
    """Two receives, or two sends, of one pair of ranks."""
    one = place(data, rows, lambda a: a.op in MESSAGES)
    first, owner = rows[one[0]][one[1]], schedule.placement.rank_of

    def beside(a: Action) -> bool:
        return a.op.is_send == first.op.is_send and a.peer is not None and owner[a.peer] == owner[first.peer or 0]

    twins = [(one[0], i) for i, a in enumerate(rows[one[0]]) if a != first and a.op in MESSAGES and beside(a)]
    swap(rows, one, one_of(data, twins))
    return {"message order", "order"}


@breaks_messages
def post_before_what_a_message_depends_on(data: st.DataObject, schedule: Schedule, rows: Rows) -> set[str]:
    """A forward's value goes out, and what is made of it comes back: the receive is posted before the forward."""
    made = {
        (rank, Action(stage, Op.F, k))
        for rank, row in enumerate(rows)
        for stage, k in {(a.stage, a.microbatch) for a in row if a.op is Op.SEND_F}
    }
    rank, forward = one_of(data, sorted(made, key=str))
    back = Action(forward.stage, Op.RECV_B, forward.microbatch)
    assume(back in rows[rank])
    rows[rank].remove(back)
    rows[rank].insert(data.draw(st.integers(0, rows[rank].index(forward))), back)
    return {"early receive", "message order"}


@breaks
def wait_for_each_other(data: st.DataObject, schedule: Schedule, rows: Rows) -> set[str]:
    """One rank takes microbatch i back before it sends j forward, and the next one wants j before it takes i back."""
    rank_of, pipelines = schedule.placement.rank_of, schedule.placement.pipeline_of
    cuts = [
        s for s in range(schedule.stages - 1)
        if rank_of[s] != rank_of[s + 1] and pipelines(s) == pipelines(s + 1)
    ]  # fmt: skip
    stage = one_of(data, cuts)
    numbers = schedule.numbers_on(stage)
    assume(len(numbers) > 1)
    i, j = sorted(data.draw(st.lists(st.sampled_from(numbers), min_size=2, max_size=2, unique=True)))
    here, there = rows[rank_of[stage]], rows[rank_of[stage + 1]]
    back = next(op for op in (Op.B, Op.I) if Action(stage, op, i) in here)
    move(here, Action(stage, Op.F, j), behind=Action(stage, back, i))
    back = next(op for op in (Op.B, Op.I) if Action(stage + 1, op, i) in there)
    move(there, Action(stage + 1, back, i), behind=Action(stage + 1, Op.F, j))
    return {"deadlock", "order"}


def move(row: list[Action], action: Action, behind: Action) -> None:
    if row.index(action) < row.index(behind):
        row.remove(action)
        row.insert(row.index(behind) + 1, action)


# -- every break is reported ------------------------------------------------------------------------------------------


def ties(schedule: Schedule) -> Schedule:
    """The first and the last stage of the model tied to each other, as embedding and projection often are."""
    last = schedule.placement.depth - 1
    return reduce_ties(schedule, [[0, last]] if last else [])


VARIANTS: dict[str, Callable[[Schedule], Schedule]] = {
    "as generated": lambda s: s,
    "split": split_backward,
    "with messages": add_communication,
    "with messages and ties": lambda s: ties(add_communication(split_backward(s))),
}


ANY = st.one_of(generated(4, 6), generated(4, 6), arbitrary())
"""On 1 to 4 ranks, with 1 to 6 microbatches, or what is nearest to them of what a generator allows."""


def kinds(schedule: Schedule) -> set[str]:
    found = check(schedule)
    for violation in found:
        assert f"rank {violation.rank} " in violation.text
        assert violation.action is None or str(violation.action) in violation.text
        assert violation.fatal == (violation.kind != "inexact")
    return {violation.kind for violation in found}


@pytest.mark.parametrize("broken", BREAKS, ids=lambda function: function.__name__)
@given(data=st.data())
def test_every_break_is_reported(broken: Break, data: st.DataObject) -> None:
    variants = [name for name in VARIANTS if "messages" in name or broken not in OF_MESSAGES]
    schedule = VARIANTS[data.draw(st.sampled_from(variants))](data.draw(ANY))
    rows = [list(row) for row in schedule.rows]
    expected = broken(data, schedule, rows)
    assert kinds(schedule.with_rows(rows)) & expected


@pytest.mark.parametrize("name", [*NAMES, "arbitrary"])
@settings(max_examples=6)
@given(data=st.data())
def test_what_is_not_broken_is_not_reported(name: str, data: st.DataObject) -> None:
    legal = data.draw(arbitrary() if name == "arbitrary" else generated(4, 6, name))
    for schedule in [variant(legal) for variant in VARIANTS.values()]:
        assert kinds(schedule) <= {"inexact"}
        assert is_complete(schedule)
        assert runs_to_the_end(schedule, buffered=True)
        assert runs_to_the_end(schedule, buffered=False)


@settings(max_examples=60)
@given(data=st.data())
def test_weight_gradients_out_of_order_are_reported(data: st.DataObject) -> None:
    schedule = split_backward(data.draw(generated(4, 6)))
    rows = [list(row) for row in schedule.rows]
    rank, index = place(data, rows, lambda a: a.op is Op.W)
    stage = rows[rank][index].stage
    later = [i for i, a in enumerate(rows[rank]) if a.op is Op.W and a.stage == stage and i > index]
    assume(later)
    # The later one, which its I precedes, stays where it is; the earlier one comes after it.
    rows[rank].insert(later[0], rows[rank].pop(index))
    found = check(schedule.with_rows(rows))
    assert [v for v in found if v.kind == "inexact" and v.rank == rank and v.action == rows[rank][later[0]]]
    assert not any(v.fatal for v in found)


# -- what is not reported runs ----------------------------------------------------------------------------------------


def shuffle_a_little(data: st.DataObject, rows: Rows) -> None:
    """Moves one action within its row: near, where much stays legal, or anywhere."""
    rank, index = place(data, rows)
    action = rows[rank].pop(index)
    near = st.integers(max(0, index - 2), min(len(rows[rank]), index + 2))
    rows[rank].insert(data.draw(st.one_of(near, st.integers(0, len(rows[rank])))), action)


@settings(max_examples=150)
@given(data=st.data())
def test_what_is_not_reported_runs_and_what_is_reported_does_not(data: st.DataObject) -> None:
    schedule = VARIANTS[data.draw(st.sampled_from(sorted(VARIANTS)))](data.draw(ANY))
    rows = [list(row) for row in schedule.rows]
    for _ in range(data.draw(st.integers(1, 3))):
        shuffle_a_little(data, rows)
    if data.draw(st.booleans()):
        data.draw(st.sampled_from(BREAKS))(data, schedule, rows)
    assume(all(a.stage < schedule.stages and (a.peer or 0) < schedule.stages for row in rows for a in row))
    broken = schedule.with_rows(rows)
    fatal = {violation.kind for violation in check(broken) if violation.fatal}
    runs = is_complete(broken) and runs_to_the_end(broken, buffered=True) and runs_to_the_end(broken, buffered=False)
    if not fatal:
        assert runs
    elif fatal <= {"order", "deadlock", "message order", "misplaced", "out of range", "repeated"}:
        assert not runs


def test_parameters_may_be_gathered_and_let_go_several_times_but_in_turns() -> None:
    def stage(row: str) -> Schedule:
        return Schedule.parse(f"x: 1 microbatch, stages on ranks 0\nrank 0: {row}")

    assert check(stage("0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0RESHARD")) == []
    (found,) = check(stage("0UNSHARD 0F0 0UNSHARD 0B0 0RESHARD"))
    assert str(found) == "repeated: rank 0 has 0UNSHARD twice in succession; 0RESHARD must come in between"
    (found,) = check(stage("0UNSHARD 0F0 0B0 0RESHARD 0RESHARD"))
    assert (found.rank, str(found.action), found.kind, found.fatal) == (0, "0RESHARD", "repeated", True)
    for row in ("0UNSHARD 0F0 0RESHARD 0B0", "0F0 0UNSHARD 0B0 0RESHARD"):
        (found,) = check(stage(row))
        assert str(found.action) in str(found)
        assert "while its parameters are not gathered; 0UNSHARD must come before" in str(found)
