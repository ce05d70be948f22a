from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock._base.errors import ScheduleError
from penstock.schedule import Dependencies, Schedule, add_communication, drop_backward, generate, linearize
from scaffolding.some_schedules import arbitrary, generated


def parse(rank_of: str, *rows: str) -> Schedule:
    lines = [f"rank {rank}: {row}" for rank, row in enumerate(rows)]
    return Schedule.parse("\n".join([f"test: 1 microbatch, stages on ranks {rank_of}", *lines]))


def test_a_gradient_comes_from_the_next_stage_that_has_a_backward() -> None:
    dependencies = Dependencies(drop_backward(generate("gpipe", 4, 1), [1, 2]))
    texts = [str(action) for action in dependencies.actions]
    assert {texts[need] for need in dependencies.before(texts.index("0B0"))} == {"0F0", "3B0"}


@settings(max_examples=50)
@given(st.one_of(generated(max_microbatches=12), arbitrary()))
def test_linear_order_respects_rows_and_dependencies(schedule: Schedule) -> None:
    lowered = add_communication(schedule)
    order = linearize(lowered)
    assert order == linearize(lowered)
    rows = [[action for owner, action in order if owner == rank] for rank in range(lowered.ranks)]
    assert rows == [list(row) for row in lowered.rows]
    place = {action: index for index, (_, action) in enumerate(order)}
    dependencies = Dependencies(lowered)
    for node, action in enumerate(dependencies.actions):
        assert all(place[dependencies.actions[need]] < place[action] for need in dependencies.before(node))


def test_a_deadlock_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0 waits at 0B0 for 1B0 of rank 1, which waits at 1F1 for 0F1"):
        linearize(Schedule.parse("x: 2 microbatches, stages on ranks 0 1\nrank 0: 0F0 0B0 0F1\nrank 1: 1F0 1F1 1B0"))


def test_a_missing_action_is_named() -> None:
    with pytest.raises(ScheduleError, match="rank 1 waits at 1F0 for 0F0, which no rank has"):
        linearize(parse("0 1", "", "1F0"))
    with pytest.raises(ScheduleError, match="rank 0 waits at 0I0 for 1B0, which no rank has"):
        linearize(parse("0 1", "0F0 0I0 0W0", "1F0 1W0"))
    with pytest.raises(ScheduleError, match="rank 1 waits at 1F0 for 0SEND_F0, which no rank has"):
        linearize(parse("0 1", "0F0", "1RECV_F0 1F0"))


def test_of_an_action_that_occurs_twice_the_first_is_waited_for() -> None:
    schedule = parse("0 1", "0F0 0F0 0B0", "1F0 1B0 1B0")
    dependencies = Dependencies(schedule)
    assert [dependencies.before(node) for node in range(6)] == [[], [], [0, 4], [0], [3], [3]]
