from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock._base.errors import ArgumentError
from penstock.schedule import (
    Op,
    Schedule,
    add_communication,
    check,
    drop_backward,
    drop_communication,
    forward_only,
    generate,
    merge_backward,
    peak_activations,
    reduce_replicas,
    reduce_ties,
    split_backward,
    truncate_microbatches,
)
from scaffolding.some_schedules import arbitrary, generated


def reductions(schedule: Schedule) -> list[list[str]]:
    return [[str(a) for a in row if a.op is Op.REDUCE_GRAD] for row in schedule.rows]


@given(generated(max_microbatches=8))
def test_splitting_and_merging_gives_the_schedule_back(schedule: Schedule) -> None:
    split = split_backward(schedule)
    assert not any(v.fatal for v in check(split))
    assert not any(a.op is Op.B for row in split.rows for a in row)
    if not any(a.op is Op.I for row in schedule.rows for a in row):
        assert merge_backward(split) == schedule


@given(st.one_of(generated(max_microbatches=12), arbitrary()), st.data())
def test_the_first_microbatches_of_a_schedule_are_a_schedule(schedule: Schedule, data: st.DataObject) -> None:
    count = data.draw(st.integers(schedule.placement.pipelines, schedule.microbatches))
    fewer = truncate_microbatches(schedule, count)
    assert fewer.microbatches == count
    assert not any(violation.fatal for violation in check(fewer))
    assert all(a <= b for a, b in zip(peak_activations(fewer), peak_activations(schedule), strict=True))
    if schedule.placement.pipelines == 1:
        kept = [[a for a in row if (a.microbatch or 0) < count] for row in schedule.rows]
        assert [list(row) for row in fewer.rows] == kept
    if count == schedule.microbatches:
        assert fewer == schedule


def test_each_pipeline_keeps_the_first_of_its_share() -> None:
    fewer = truncate_microbatches(generate("chimera", 2, 8), 4)
    assert {a.microbatch for row in fewer.rows for a in row if a.stage < 2} == {0, 1}
    assert {a.microbatch for row in fewer.rows for a in row if a.stage >= 2} == {2, 3}
    for count in (0, 1, 9):
        with pytest.raises(ArgumentError, match=f"microbatches={count}: .*'chimera' has 8, of which at least 2"):
            truncate_microbatches(generate("chimera", 2, 8), count)


def test_an_overlap_stays_one_only_while_both_its_parts_stay() -> None:
    text = "x: 2 microbatches, stages on ranks 0\nrank 0: 0F0 (0F1;0B0)OVERLAP_F_B 0B1"
    schedule = Schedule.parse(text)
    assert drop_communication(schedule) == schedule
    assert str(reduce_ties(schedule, []).rows[0]) == "0F0 (0F1;0B0)OVERLAP_F_B 0B1"
    assert str(split_backward(schedule).rows[0]) == "0F0 0F1 0I0 0W0 0I1 0W1"
    assert str(forward_only(schedule).rows[0]) == "0F0 0F1"


@given(arbitrary())
def test_forwards_alone_keep_their_order(schedule: Schedule) -> None:
    forwards = forward_only(schedule)
    assert check(forwards) == []
    assert [list(row) for row in forwards.rows] == [[a for a in row if a.op is Op.F] for row in schedule.rows]


@given(st.data(), generated(max_ranks=5, max_microbatches=6), st.booleans())
def test_frozen_stages_lose_their_backward_and_its_messages(
    data: st.DataObject, schedule: Schedule, lower_first: bool
) -> None:
    frozen = range(data.draw(st.integers(0, schedule.stages)))
    if lower_first:
        dropped = drop_backward(add_communication(schedule), frozen)
    else:
        dropped = add_communication(drop_backward(schedule, frozen))
    assert not any(v.fatal for v in check(dropped))
    for row in dropped.rows:
        for a in row:
            if a.op.is_backward or a.op in (Op.SEND_B, Op.RECV_B):
                assert a.stage not in frozen
                assert a.peer not in frozen
    assert sum(a.op is Op.F for row in dropped.rows for a in row) == sum(
        len(schedule.numbers_on(stage)) for stage in range(schedule.stages)
    )


CHUNKS = generate("gpipe", 2, 1, stages_per_rank=2)
LAST_ONLY = drop_backward(generate("gpipe", 3, 1), [0, 1])


@pytest.mark.parametrize(
    ("schedule", "groups", "rows"),
    [
        (
            split_backward(generate("1f1b", 2, 2)),
            [[0, 1]],
            ["0F0 0F1 0I0 0W0 0I1 0W1 0REDUCE_GRAD0", "1F0 1I0 1W0 1F1 1I1 1W1 1REDUCE_GRAD0"],
        ),
        (  # group 0 is ready last on rank 1 (chunk 1 goes back before chunk 0), and still starts first
            CHUNKS,
            [[0, 1], [2, 3], [1, 2]],
            [
                "0F0 2F0 2B0 0B0 0REDUCE_GRAD0 2REDUCE_GRAD1 2REDUCE_GRAD2",
                "1F0 3F0 3B0 1B0 1REDUCE_GRAD0 3REDUCE_GRAD1 1REDUCE_GRAD2",
            ],
        ),
        (  # a rank reduces a group once, on its lowest stage; a group on one rank is not reduced
            CHUNKS,
            [[3, 0, 2, 1], [0, 2], [0, 3]],
            ["0F0 2F0 2B0 0B0 0REDUCE_GRAD0 0REDUCE_GRAD2", "1F0 3F0 3B0 1B0 1REDUCE_GRAD0 3REDUCE_GRAD2"],
        ),
        (  # stage 0 is frozen, and its rank reduces group 1 no sooner than group 0, as the other rank does
            drop_backward(CHUNKS, [0]),
            [[2, 3], [0, 1]],
            ["0F0 2F0 2B0 2REDUCE_GRAD0 0REDUCE_GRAD1", "1F0 3F0 3B0 3REDUCE_GRAD0 1B0 1REDUCE_GRAD1"],
        ),
        (LAST_ONLY, [[0, 1], [0, 2]], ["0F0 0REDUCE_GRAD1", "1F0", "2F0 2B0 2REDUCE_GRAD1"]),
        (forward_only(LAST_ONLY), [[0, 2]], ["0F0", "1F0", "2F0"]),
    ],
)
def test_ties_are_reduced_after_the_last_backward_in_order_of_the_groups_on_every_rank(
    schedule: Schedule, groups: list[list[int]], rows: list[str]
) -> None:
    reduced = reduce_ties(schedule, groups)
    assert [str(row) for row in reduced.rows] == rows
    assert check(reduced) == []
    with pytest.raises(ArgumentError, match=rf"tie group 0 names stage 9; the stages are 0\.\.{schedule.stages - 1}"):
        reduce_ties(schedule, [[0, 9]])


@given(st.data(), generated(max_ranks=4, max_microbatches=4), st.booleans())
def test_any_groups_keep_a_schedule_legal(data: st.DataObject, schedule: Schedule, lower_first: bool) -> None:
    stages = st.integers(0, schedule.stages - 1)
    groups = data.draw(st.lists(st.lists(stages, min_size=2, max_size=4, unique=True), max_size=4)) if (
        schedule.stages > 3
    ) else []  # fmt: skip
    if lower_first:
        done = reduce_ties(add_communication(schedule), groups)
    else:
        done = add_communication(reduce_ties(schedule, groups))
    assert not any(v.fatal for v in check(done))
    for row in done.rows:
        order = [a.microbatch for a in row if a.op is Op.REDUCE_GRAD]
        assert order == sorted(order, key=lambda g: g or 0)


@st.composite
def weights_in_any_order(draw: st.DrawFn) -> Schedule:
    """Each rank's weight gradients at the end: which stage has the last one then depends on how many there are."""
    schedule = split_backward(generate("gpipe", draw(st.integers(1, 2)), draw(st.integers(2, 4)), stages_per_rank=2))
    rows = []
    for row in schedule.rows:
        weights = draw(st.permutations([action for action in row if action.op is Op.W]))
        rows.append([*(action for action in row if action.op is not Op.W), *weights])
    return schedule.with_rows(rows)


@given(st.one_of(weights_in_any_order(), generated(max_ranks=4, max_microbatches=6)), st.data())
def test_replicas_reduce_in_one_order_though_one_has_fewer_microbatches(
    schedule: Schedule, data: st.DataObject
) -> None:
    """Each collective meets the one that another replica starts at the same turn, whatever stage that is of."""
    stages = set(range(schedule.stages)) - data.draw(st.sets(st.integers(0, schedule.stages - 1), max_size=1))
    fewer = truncate_microbatches(schedule, data.draw(st.integers(schedule.placement.pipelines, schedule.microbatches)))
    done = reduce_replicas(fewer, stages, like=schedule)
    assert reductions(done) == reductions(reduce_replicas(schedule, stages))
    for row in done.rows:
        reduced: set[int] = set()
        for action in row:
            assert action.stage not in reduced or action.op not in (Op.B, Op.W), "its last gradient comes before"
            if action.op is Op.REDUCE_GRAD:
                reduced.add(action.stage)
