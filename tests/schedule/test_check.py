"""Trap 9: a validator that accepts repeated, missing or out-of-range microbatches, and deadlocks across ranks.

What it says, by example; test_mutations.py breaks legal schedules in each way.
"""

from __future__ import annotations

from penstock.schedule import (
    Action,
    Schedule,
    Violation,
    check,
    forward_only,
    generate,
    in_flight_by_stage,
    peak_activations,
    reduce_ties,
    summary,
)


def rows(schedule: Schedule) -> list[list[Action]]:
    return [list(row) for row in schedule.rows]


def kinds(schedule: Schedule) -> set[str]:
    return {violation.kind for violation in check(schedule)}


def parse(rank_of: str, microbatches: int, *texts: str) -> Schedule:
    lines = [f"rank {rank}: {text}" for rank, text in enumerate(texts)]
    return Schedule.parse("\n".join([f"test: {microbatches} microbatches, stages on ranks {rank_of}", *lines]))


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


def test_a_deadlock_names_the_cycle_and_a_rank_that_waits_for_it_is_no_part_of_it() -> None:
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


def test_reductions_in_different_orders_are_reported() -> None:
    schedule = reduce_ties(generate("gpipe", 2, 1, stages_per_rank=2), [[0, 1], [2, 3]])
    assert check(schedule) == []
    broken = rows(schedule)
    broken[0][-2:] = reversed(broken[0][-2:])
    assert kinds(schedule.with_rows(broken)) == {"reduction order"}
    assert kinds(schedule.with_rows([broken[0][:-1], broken[1]])) == {"unmatched"}


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
