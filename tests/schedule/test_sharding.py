"""When sharded stages are gathered and freed: properties over all generators, and rows by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock._base.errors import ArgumentError
from penstock._base.stages import StageMeta
from penstock.schedule import (
    Action,
    Op,
    Schedule,
    add_communication,
    add_sharding,
    check,
    drop_communication,
    from_csv,
    generate,
    to_csv,
    truncate_microbatches,
)
from penstock.schedule.lowering import GatherPlan, lower_evaluation, lower_training
from penstock.schedule.sharding import SHARDING
from scaffolding.some_schedules import arbitrary, generated


def stages_of(schedule: Schedule) -> set[int]:
    return set(range(schedule.stages))


def chunks_of(schedule: Schedule) -> int:
    return max(map(len, schedule.placement.by_rank))


def at_once(schedule: Schedule) -> int:
    """The most stages that an item of any row needs."""
    return max(len({part.stage for part in item.parts}) for row in schedule.rows for item in row.items())


def gathered_at(row: list[Action]) -> Iterator[tuple[Action, frozenset[int]]]:
    """Each action, with the stages that are gathered while it runs, including those still under way."""
    held: set[int] = set()
    for action in row:
        if action.op is Op.RESHARD:
            held.remove(action.stage)
        yield action, frozenset(held)
        if action.op is Op.UNSHARD:
            assert action.stage not in held
            held.add(action.stage)


@st.composite
def windowed(draw: st.DrawFn) -> tuple[Schedule, int]:
    schedule = draw(st.one_of(generated(max_ranks=4, max_microbatches=8), arbitrary()))
    return schedule, draw(st.integers(at_once(schedule), chunks_of(schedule) + 1))


@example((generate("gpipe", 2, 6, 2), 1), True)  # a rank that sends late frees nevertheless
@given(windowed(), st.booleans())
def test_what_runs_is_gathered_and_never_more_than_the_window(given: tuple[Schedule, int], messages: bool) -> None:
    schedule, window = given
    plain = add_communication(schedule) if messages else schedule
    done = add_sharding(plain, stages_of(schedule), window)
    assert [v for v in check(done) if v.fatal] == []
    for row, before in zip(done.rows, plain.rows, strict=True):
        assert [item for item in row.items() if item.parts[0].op not in SHARDING] == list(before.items())
        held: frozenset[int] = frozenset()
        for action, held in gathered_at(list(row)):
            assert not action.op.is_compute or action.stage in held
            assert len(held | ({action.stage} if action.op is Op.UNSHARD else set())) <= window
        assert held == frozenset(), "all are freed in the end"
        gathers, releases = ([a.stage for a in row if a.op is op] for op in SHARDING)
        assert sorted(gathers) == sorted(releases)


@given(windowed(), st.booleans())
def test_placing_them_again_changes_nothing(given: tuple[Schedule, int], messages: bool) -> None:
    schedule, window = given
    once = add_sharding(add_communication(schedule) if messages else schedule, stages_of(schedule), window)
    assert add_sharding(once, stages_of(schedule), window) == once
    back = add_sharding(once, stages_of(schedule))
    assert back == add_sharding(add_communication(schedule) if messages else schedule, stages_of(schedule))


@pytest.mark.parametrize(
    ("schedule", "chunks", "window", "row"),
    [
        (
            "gpipe",
            3,
            1,
            "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1RESHARD 2UNSHARD 2F0 2B0 2RESHARD 1UNSHARD 1B0 1RESHARD 0UNSHARD 0B0 "
            "0RESHARD",
        ),
        (
            "gpipe",
            3,
            2,
            "0UNSHARD 1UNSHARD 0F0 0RESHARD 2UNSHARD 1F0 2F0 2B0 2RESHARD 0UNSHARD 1B0 1RESHARD 0B0 0RESHARD",
        ),
        ("gpipe", 3, 3, "0UNSHARD 0F0 1UNSHARD 1F0 2UNSHARD 2F0 2B0 2RESHARD 1B0 1RESHARD 0B0 0RESHARD"),
    ],
)
def test_rows_by_hand(schedule: str, chunks: int, window: int, row: str) -> None:
    order = generate(schedule, 1, 1, chunks)
    assert str(add_sharding(order, stages_of(order), window).rows[0]) == row


@pytest.mark.parametrize(("name", "chunks"), [("interleaved-1f1b", 3), ("dualpipe-v", 2)])
def test_torchs_file_of_a_windowed_schedule_goes_both_ways(name: str, chunks: int) -> None:
    order = generate(name, 2, 8, chunks)
    done = add_sharding(order, stages_of(order), 2)
    read = from_csv(to_csv(done, "compute_comms"), name)  # with its messages
    for row, other in zip(done.rows, read.rows, strict=True):
        assert [a for a in other if a.op in SHARDING or a.op.is_compute] == [*row]
    assert not any(violation.fatal for violation in check(read))


def test_a_window_too_narrow_is_refused() -> None:
    order = generate("dualpipe-v", 2, 8)
    with pytest.raises(ArgumentError, match="unshard_window=0: expected an integer >= 1"):
        add_sharding(order, {0}, 0)
    with pytest.raises(ArgumentError, match=r"unshard_window=1: rank \d has \(.*\)OVERLAP_F_B, which needs 2"):
        add_sharding(order, stages_of(order), 1)
    assert check(add_sharding(order, stages_of(order), 2)) == []


def collectives(schedule: Schedule) -> list[list[str]]:
    """What each rank does together with its replicas, in order: gathers, and reductions within the last backward."""
    rows = []
    for row in schedule.rows:
        last = {a.stage: i for i, a in enumerate(row) if a.op is Op.B}
        rows.append(
            [
                str(action) if action.op is Op.UNSHARD else f"{action.stage} reduces"
                for i, action in enumerate(row)
                if action.op in (Op.UNSHARD, Op.REDUCE_GRAD) or last.get(action.stage) == i
            ]
        )
    return rows


@given(st.data())
def test_replicas_with_fewer_microbatches_gather_and_reduce_in_the_same_order(data: st.DataObject) -> None:
    schedule = data.draw(generated(max_ranks=4, max_microbatches=8).filter(lambda s: s.placement.pipelines == 1))
    metas = [StageMeta(index, (), ()) for index in range(schedule.stages)]
    window = data.draw(st.integers(at_once(schedule), chunks_of(schedule)))
    sharded = GatherPlan(stages_of(schedule), window)
    fewer = truncate_microbatches(schedule, data.draw(st.integers(1, schedule.microbatches)))
    full, less = (lower_training(order, [metas], (), sharded, schedule) for order in (schedule, fewer))
    assert collectives(less) == collectives(full)
    assert drop_communication(less).microbatches == fewer.microbatches
    evaluated, little = (lower_evaluation(order, [metas], sharded, schedule) for order in (schedule, fewer))
    assert collectives(little) == collectives(evaluated)
