from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock._base.errors import ArgumentError, ScheduleError
from penstock.schedule import Action, Op, Overlap, Placement, Row, Schedule
from scaffolding.some_schedules import arbitrary, generated

OVERLAP = Overlap(Action(0, Op.F, 1), Action(0, Op.B, 0))


def test_loops_start_over_at_rank_0_and_a_v_goes_there_and_back() -> None:
    loop, v = Placement.loop(3, chunks=2), Placement.v(3)
    assert (loop.rank_of, v.rank_of) == ((0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0))
    assert (loop.stages, loop.stages_on(1), v.stages_on(0)) == (6, (1, 4), (0, 5))
    assert v.by_rank == ((0, 5), (1, 4), (2, 3))


def test_copies_of_the_model_share_the_microbatches_out() -> None:
    placement = Placement.bidirectional(2)
    assert [placement.microbatches_of(stage, 5) for stage in range(4)] == [range(2), range(2), range(2, 5), range(2, 5)]


@pytest.mark.parametrize(("ranks", "rank_of"), [(2, (0, 0)), (2, (0, 1, 2)), (1, (0, -1)), (0, ())])
def test_a_placement_that_leaves_ranks_out_is_refused(ranks: int, rank_of: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="must own a stage"):
        Placement(ranks, rank_of)


def test_a_row_is_a_sequence_of_its_actions() -> None:
    actions = [Action(0, Op.F, 0), Action(0, Op.SEND_F, 0, 3), Action(0, Op.REDUCE_GRAD), Action(0, Op.B, 0)]
    row = Row(actions)
    assert list(row) == actions
    assert row[-1] == actions[-1]
    assert row[1:3] == actions[1:3]
    with pytest.raises(IndexError):
        row[4]


def test_an_overlap_in_a_row_is_its_parts_in_order() -> None:
    items = [Action(0, Op.F, 0), OVERLAP, Action(0, Op.B, 1), OVERLAP]
    row = Row(items)
    assert len(row) == 6
    assert row[1:3] == list(OVERLAP.parts)
    assert list(row.items()) == items
    assert Row(row.items()) == row
    assert row != Row(row)  # the same actions, one after the other
    assert Row.parse(str(row)) == row


@given(st.one_of(generated(), arbitrary()))
def test_text_and_back_is_the_same_and_so_is_a_pickle(schedule: Schedule) -> None:
    for other in (Schedule.parse(str(schedule)), pickle.loads(pickle.dumps(schedule))):
        assert other == schedule
        assert hash(other) == hash(schedule)
    assert schedule != Schedule("other", schedule.placement, schedule.microbatches, schedule.rows)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "rank 0: 0F0",
        "x: 1 microbatch, stages on ranks 0\nrank 1: 0F0",
        "x: 1 microbatch, stages on ranks 0\nrank 0: 0F0 nonsense",
        "x: 1 microbatch, stages on ranks 0 1\nrank 0: 0F0",
        "x: 0 microbatches, stages on ranks 0\nrank 0:",
        "x: 1 microbatch, stages on ranks 1\nrank 0: 0F0",
    ],
)
def test_what_is_no_schedule_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError):
        Schedule.parse(text)


ROW = Row.parse("0F0 0B0")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"rows": ["0F0 0B0"]}, r"row '0F0 0B0': expected actions; Row.parse reads a row from text"),
        ({"rows": [["0F0", "0B0"]]}, r"action '0F0': expected an Action, .*; Row.parse reads a row from text"),
        (
            {"rows": "rank 0: 0F0 0B0"},
            "rows='rank .*': expected one row .*; Schedule.parse reads a schedule",
        ),
        ({"rows": None}, "rows=None: expected one row of actions for each rank"),
        ({"rows": [None]}, "row None: expected actions"),
        ({"rows": list(ROW)}, r"row Action\(stage=0.*: expected actions"),
        ({"rows": [[Action(0, "F", 0)]]}, r"action Action\(stage=0, op='F'.*: expected an Action"),
        ({"rows": [[(0, "F", 0)]]}, r"action \(0, 'F', 0\): expected an Action, as in Action\(0, Op.F, 0\)"),
        ({"rows": [[Action(0, Op.F, 1 << 40)]]}, "action .*1099511627776.*: expected an Action"),
        ({"placement": 1}, r"placement=1: expected a Placement, as in Placement.loop\(4\)"),
        ({"microbatches": "1"}, "microbatches='1': expected an integer >= 1"),
        ({"microbatches": 1.0}, "microbatches=1.0: expected an integer >= 1"),
        ({"microbatches": 0}, "microbatches=0: expected an integer >= 1"),
        ({"name": None}, "name=None: a schedule's name is one line of text"),
        ({"name": "x\ny"}, "one line"),
        ({"rows": [[], []]}, "2 rows for 1 ranks"),
    ],
)
def test_what_a_schedule_is_not_made_of_is_said(wrong: dict[str, Any], says: str) -> None:
    right: dict[str, Any] = {"name": "x", "placement": Placement.loop(1), "microbatches": 1, "rows": [ROW]}
    assert Schedule(**right).microbatches == 1
    with pytest.raises(ArgumentError, match=says):
        Schedule(**{**right, **wrong})


@pytest.mark.parametrize(
    ("modules", "without"),
    [
        ("penstock.schedule, penstock.simulate, penstock.report", "torch"),
        ("penstock.schedule, penstock.simulate.costs, penstock._base.stages", "numpy"),
    ],
)
def test_the_pure_core_never_loads_torch_and_schedules_the_standard_library_only(modules: str, without: str) -> None:
    code = f"import sys, {modules}; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert without not in ran.stdout.split()
