"""Trap 9: a validator that accepts repeated, missing or out-of-range microbatches, and deadlocks across ranks.

Legal schedules are broken in each way; every break must be reported.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schedule import (
    Action,
    Op,
    Schedule,
    Violation,
    add_communication,
    check,
    forward_only,
    generate,
    in_flight_by_stage,
    peak_activations,
    reduce_ties,
    split_backward,
    summary,
)
from scaffolding.some_schedules import arbitrary, generated

legal = st.one_of(
    generated(max_ranks=4, max_microbatches=6),
    generated(max_ranks=4, max_microbatches=6).map(split_backward),
    generated(max_ranks=4, max_microbatches=6).map(add_communication),
    generated(max_ranks=4, max_microbatches=6).map(lambda s: add_communication(split_backward(s))),
)


def several(schedule: Schedule) -> bool:
    """Whether each stage has more than one microbatch: without its only one it would look frozen."""
    return all(len(schedule.numbers_on(stage)) > 1 for stage in range(schedule.stages))


def rows(schedule: Schedule) -> list[list[Action]]:
    return [list(row) for row in schedule.rows]


def draw_place(data: st.DataObject, schedule: Schedule, among: set[Op] | None = None) -> tuple[int, int]:
    places = [
        (rank, index)
        for rank, row in enumerate(schedule.rows)
        for index, action in enumerate(row)
        if among is None or action.op in among
    ]
    return data.draw(st.sampled_from(places))


def kinds(schedule: Schedule, memory_limit: int | None = None) -> set[str]:
    found = check(schedule, memory_limit)
    for violation in found:
        assert f"rank {violation.rank} " in violation.text
        assert violation.action is None or str(violation.action) in violation.text
        assert violation.fatal == (violation.kind != "inexact")
    return {violation.kind for violation in found}


def parse(rank_of: str, microbatches: int, *texts: str) -> Schedule:
    lines = [f"rank {rank}: {text}" for rank, text in enumerate(texts)]
    return Schedule.parse("\n".join([f"test: {microbatches} microbatches, stages on ranks {rank_of}", *lines]))


@settings(max_examples=60)
@given(st.data(), legal)
def test_a_repeated_action_is_reported(data: st.DataObject, schedule: Schedule) -> None:
    broken = rows(schedule)
    rank, index = draw_place(data, schedule)
    broken[rank].insert(data.draw(st.integers(0, len(broken[rank]))), broken[rank][index])
    assert "repeated" in kinds(schedule.with_rows(broken))


@settings(max_examples=60)
@given(st.data(), legal.filter(several))
def test_a_missing_action_is_reported(data: st.DataObject, schedule: Schedule) -> None:
    broken = rows(schedule)
    rank, index = draw_place(data, schedule)
    removed = broken[rank].pop(index)
    found = [v for v in check(schedule.with_rows(broken)) if v.kind in ("missing", "unmatched")]
    assert found
    if removed.op.is_compute:
        assert removed in [v.action for v in found if v.kind == "missing"]
    else:
        assert removed.other_end in [v.action for v in found if v.kind == "unmatched"]


@settings(max_examples=60)
@given(st.data(), generated(max_ranks=4, max_microbatches=6).filter(lambda s: s.ranks > 1 and several(s)))
def test_a_missing_message_is_reported_even_if_both_ends_are_gone(data: st.DataObject, schedule: Schedule) -> None:
    lowered = add_communication(schedule)
    rank, index = draw_place(data, lowered, {Op.SEND_F, Op.SEND_B})
    gone = lowered.rows[rank][index]
    broken = [[a for a in row if a not in (gone, gone.other_end)] for row in lowered.rows]
    assert gone in [v.action for v in check(lowered.with_rows(broken)) if v.kind == "missing"]


@settings(max_examples=60)
@given(st.data(), legal)
def test_a_number_out_of_range_is_reported(data: st.DataObject, schedule: Schedule) -> None:
    broken = rows(schedule)
    rank, index = draw_place(data, schedule)
    a = broken[rank][index]
    changed = {
        "stage": Action(schedule.stages + (1 if a.peer else 0), a.op, a.microbatch, a.peer),
        "microbatch": Action(a.stage, a.op, schedule.numbers, a.peer),
        "peer": Action(a.stage, a.op, a.microbatch, schedule.stages if a.op.is_communication else None),
    }
    which = data.draw(st.sampled_from(["stage", "microbatch", *(["peer"] if a.op.is_communication else [])]))
    broken[rank][index] = changed[which]
    assert "out of range" in kinds(schedule.with_rows(broken))


@settings(max_examples=60)
@given(st.data(), legal.filter(lambda s: s.ranks > 1))
def test_an_action_on_another_rank_is_reported(data: st.DataObject, schedule: Schedule) -> None:
    broken = rows(schedule)
    rank, index = draw_place(data, schedule)
    other = data.draw(st.sampled_from([r for r in range(schedule.ranks) if r != rank]))
    broken[other].insert(data.draw(st.integers(0, len(broken[other]))), broken[rank].pop(index))
    assert "misplaced" in kinds(schedule.with_rows(broken))


@settings(max_examples=60)
@given(st.data(), legal)
def test_a_backward_before_its_forward_is_reported(data: st.DataObject, schedule: Schedule) -> None:
    broken = rows(schedule)
    rank, index = draw_place(data, schedule, {Op.B, Op.I})
    backward = broken[rank].pop(index)
    broken[rank].insert(broken[rank].index(Action(backward.stage, Op.F, backward.microbatch)), backward)
    assert "order" in kinds(schedule.with_rows(broken))


@settings(max_examples=60)
@given(st.data(), generated(max_ranks=4, max_microbatches=6).filter(lambda s: s.ranks > 1))
def test_a_message_on_the_wrong_side_of_its_action_is_reported(data: st.DataObject, schedule: Schedule) -> None:
    lowered = add_communication(schedule)
    broken = rows(lowered)
    rank, index = draw_place(data, lowered, {Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B})
    message = broken[rank].pop(index)
    broken[rank].insert(0 if message.op.is_send else len(broken[rank]), message)
    assert "order" in kinds(lowered.with_rows(broken))


@settings(max_examples=60)
@given(st.data(), generated(max_ranks=4, max_microbatches=6).filter(lambda s: s.ranks > 1 and several(s)))
def test_receives_in_another_order_than_sends_are_reported(data: st.DataObject, schedule: Schedule) -> None:
    lowered = add_communication(schedule)
    broken = rows(lowered)
    rank, index = draw_place(data, lowered, {Op.RECV_F, Op.RECV_B})
    first = broken[rank][index]
    second = next(
        a for a in broken[rank] if (a.op, a.stage, a.peer) == (first.op, first.stage, first.peer) and a != first
    )
    i, j = broken[rank].index(first), broken[rank].index(second)
    broken[rank][i], broken[rank][j] = second, first
    assert kinds(lowered.with_rows(broken)) & {"message order", "order"}


def test_both_a_whole_and_a_split_backward_are_reported() -> None:
    assert kinds(parse("0", 1, "0F0 0B0 0W0")) == {"repeated"}
    assert kinds(parse("0", 1, "0F0 0I0 0B0")) >= {"repeated"}


def test_an_input_gradient_without_weight_gradient_is_reported() -> None:
    assert [str(v) for v in check(parse("0", 1, "0F0 0I0"))] == [
        "missing: rank 0 has no 0W0; each microbatch goes through stage 0 once"
    ]


def test_a_message_inside_a_rank_is_reported() -> None:
    assert kinds(parse("0 0", 1, "0F0 0SEND_F0 1RECV_F0 1F0")) == {"misplaced"}


def test_many_violations_are_summed_up() -> None:
    order = generate("gpipe", 4, 8)
    found = check(order.with_rows(row[::-1] for row in order.rows))
    assert len(found) == 60
    first = "rank 0 has 0B7 before 0F7, which it waits for"
    assert summary(found, 1) == f"{first} (and 59 more)"
    assert summary(found) == f"{first}; {found[1].text}; {found[2].text} (and 57 more)"
    assert summary(found[:1]) == first
    assert summary([]) == ""
    harmless = Violation(0, None, "inexact", "other bits than on one device", fatal=False)
    assert summary([harmless, found[0]], 1) == f"{first} (and 1 more)"


def test_a_deadlock_across_ranks_names_the_cycle() -> None:
    found = check(parse("0 1", 2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    assert [v.kind for v in found] == ["deadlock"]
    assert found[0].text == (
        "with buffered sends, rank 0 waits at 0B0 for 1B0 of rank 1, which waits at 1F1 for 0F1 of rank 0"
    )


def test_a_rank_that_waits_for_a_deadlock_is_no_part_of_it() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2 and that for rank 1: the cure is not on rank 0."""
    found = check(parse("0 1 2", 2, "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1"))
    assert [(v.kind, v.rank) for v in found] == [("deadlock", 1)]
    assert found[0].text == (
        "with buffered sends, rank 1 waits at 1B0 for 2B0 of rank 2, which waits at 2F1 for 1F1 of rank 1"
    )


def test_trap_24_a_deadlock_of_unbuffered_sends_alone() -> None:
    """Both ranks send before they post: buffered sends carry on, gloo and NCCL do not."""
    lowered = parse(
        "0 1 1 0",
        2,
        "0F0 0SEND_F0 0F1 0SEND_F1 3RECV_F0 3F0 3RECV_F1 3F1",
        "1RECV_F0 1F0 2F0 2SEND_F0 1RECV_F1 1F1 2F1 2SEND_F1",
    )
    found = check(lowered)
    assert [v.kind for v in found] == ["deadlock"]
    assert found[0].text == (
        "with sends that wait for their receive, "
        "rank 0 waits at 0SEND_F1 for 1RECV_F1 of rank 1, which waits at 2SEND_F0 for 3RECV_F0 of rank 0"
    )


@settings(max_examples=60)
@given(st.data(), arbitrary())
def test_a_swap_that_is_not_reported_can_be_run(data: st.DataObject, schedule: Schedule) -> None:
    """Two neighbors in a row are swapped: either check objects, or the result is still a legal order."""
    broken = rows(schedule)
    rank, index = draw_place(data, schedule)
    if index + 1 < len(broken[rank]):
        broken[rank][index : index + 2] = reversed(broken[rank][index : index + 2])
    swapped = schedule.with_rows(broken)
    if not any(v.fatal for v in check(swapped)):
        assert not any(v.fatal for v in check(add_communication(swapped)))


def test_reductions_in_different_orders_are_reported() -> None:
    schedule = reduce_ties(generate("gpipe", 2, 1, chunks=2), [[0, 1], [2, 3]])
    assert check(schedule) == []
    broken = rows(schedule)
    broken[0][-2:] = reversed(broken[0][-2:])
    assert kinds(schedule.with_rows(broken)) == {"reduction order"}
    assert kinds(schedule.with_rows([broken[0][:-1], broken[1]])) == {"unmatched"}


def test_a_reduction_before_the_last_backward_is_reported() -> None:
    schedule = parse("0 1", 1, "0F0 0REDUCE_GRAD0 0B0", "1F0 1B0 1REDUCE_GRAD0")
    assert kinds(schedule) == {"order"}


def test_weight_gradients_out_of_order_are_reported_as_inexact_only() -> None:
    found = check(parse("0", 2, "0F0 0F1 0B1 0B0"))
    assert [(v.kind, v.fatal, v.action) for v in found] == [("inexact", False, Action(0, Op.B, 0))]
    assert check(parse("0", 2, "0F0 0F1 0I1 0I0 0W0 0W1")) == []


@given(generated(max_ranks=4, max_microbatches=6))
def test_the_memory_limit_is_the_peak(schedule: Schedule) -> None:
    peak = max(peak_activations(schedule))
    assert kinds(schedule, peak) <= {"inexact"}
    assert kinds(schedule, peak - 1) - {"inexact"} == {"memory"}


def test_activations_are_held_until_the_weight_gradient() -> None:
    assert peak_activations(parse("0", 2, "0F0 0I0 0F1 0W0 0I1 0W1")) == [2]
    assert peak_activations(parse("0", 2, "0F0 0I0 0W0 0F1 0I1 0W1")) == [1]
    assert peak_activations(parse("0", 3, "0F0 0F1 0F2")) == [1]
    assert peak_activations(parse("0 0", 1, "0F0 1F0 1B0 0B0")) == [2]


def test_microbatches_in_flight_on_each_stage() -> None:
    assert in_flight_by_stage(generate("1f1b", 4, 8)) == [4, 3, 2, 1]
    assert in_flight_by_stage(generate("gpipe", 2, 3, 2)) == [3, 3, 3, 3]
    assert in_flight_by_stage(forward_only(generate("gpipe", 2, 3))) == [1, 1]
    assert len(in_flight_by_stage(generate("chimera", 4, 8))) == 4
