from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock._base.errors import ArgumentError, ScheduleError
from penstock.schedule import (
    Action,
    Op,
    Overlap,
    Placement,
    Schedule,
    add_communication,
    check,
    drop_backward,
    drop_communication,
    forward_only,
    generate,
    split_backward,
)
from penstock.schedule.communication import rank_pairs
from scaffolding.some_schedules import Link, arbitrary, generated, skips

one_pipeline = generated(max_ranks=6, max_microbatches=10).filter(lambda s: s.placement.pipelines == 1)
"""Nothing is sent between two copies of the model."""


def most_outstanding(schedule: Schedule) -> int:
    """The most receives of one link that are posted and not yet used."""
    most = 0
    for row in schedule.rows:
        posted: Counter[tuple[Op, int, int | None]] = Counter()
        for a in row:
            if a.op.is_receive:
                posted[a.op, a.stage, a.peer] += 1
                most = max(most, *posted.values())
            elif a.op in (Op.F, Op.B, Op.I):
                op = Op.RECV_F if a.op is Op.F else Op.RECV_B
                for link in [link for link, count in posted.items() if count and link[:2] == (op, a.stage)]:
                    posted[link] -= 1
    return most


def by_pair(schedule: Schedule) -> tuple[dict[tuple[int, int], list[Action]], dict[tuple[int, int], list[Action]]]:
    """For each ordered pair of ranks: the sends in order, and the other ends of the receives in order."""
    sends, receives = defaultdict(list), defaultdict(list)
    rank_of = schedule.placement.rank_of
    for rank, row in enumerate(schedule.rows):
        for a in row:
            if a.op.is_send and a.peer is not None:
                sends[rank, rank_of[a.peer]].append(a)
            elif a.op.is_receive and a.peer is not None:
                receives[rank_of[a.peer], rank].append(a.other_end)
    return sends, receives


def assert_sound(schedule: Schedule, lowered: Schedule) -> None:
    assert check(lowered) == [v for v in check(schedule) if not v.fatal]
    assert drop_communication(lowered) == schedule
    assert most_outstanding(lowered) <= 2
    sends, receives = by_pair(lowered)
    assert sends == receives
    assert Schedule.parse(str(lowered)) == lowered


@given(generated())
@settings(max_examples=30)
def test_every_generator_stays_legal(schedule: Schedule) -> None:
    assert_sound(schedule, add_communication(schedule))


@given(st.data(), one_pipeline, st.booleans())
@settings(max_examples=50)
def test_skip_connections_stay_legal(data: st.DataObject, schedule: Schedule, chain: bool) -> None:
    """And each link carries each microbatch once."""
    forward = data.draw(skips(schedule.stages, chain))
    if data.draw(st.booleans()):
        schedule = split_backward(schedule)
    chained = [Link(s, s - 1) for s in range(1, schedule.stages)]
    backward = data.draw(st.sampled_from([None, [Link(link.target, link.source) for link in forward]]))
    lowered = add_communication(schedule, forward, backward)
    assert_sound(schedule, lowered)
    up = chained if backward is None else backward
    links = [(Op.SEND_F, link) for link in forward] + [(Op.SEND_B, link) for link in up]
    rank_of = schedule.placement.rank_of
    assert Counter(a for row in lowered.rows for a in row if a.op.is_send) == Counter(
        Action(link.source, op, k, link.target)
        for op, link in links
        if rank_of[link.source] != rank_of[link.target]
        for k in range(schedule.microbatches)
    )


@given(st.data(), arbitrary())
@settings(max_examples=60)
def test_any_legal_schedule_stays_legal(data: st.DataObject, schedule: Schedule) -> None:
    forward = data.draw(skips(schedule.stages, data.draw(st.booleans())))
    assert_sound(schedule, add_communication(schedule, forward))


def test_one_f_one_b_in_full() -> None:
    assert [str(row) for row in add_communication(generate("1f1b", 2, 3)).rows] == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0B0 0RECV_B1 0F2 0SEND_F2 0RECV_B2 0B1 0B2",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1RECV_F2 1B1 1SEND_B1 1F2 1B2 1SEND_B2",
    ]


def test_a_receive_comes_one_action_ahead_but_behind_what_its_message_depends_on() -> None:
    assert [str(row) for row in add_communication(generate("gpipe", 2, 3)).rows] == [
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0RECV_B1 0B0 0RECV_B2 0B1 0B2",
        "1RECV_F0 1RECV_F1 1F0 1RECV_F2 1F1 1F2 1B0 1SEND_B0 1B1 1SEND_B1 1B2 1SEND_B2",
    ]
    rows = add_communication(generate("1f1b-v", 2, 2)).rows
    assert str(rows[0]).startswith("0F0 0SEND_F0 3RECV_F0")  # one action ahead, it would come before 0F0


def test_which_ranks_send_to_which() -> None:
    assert rank_pairs(add_communication(generate("1f1b", 3, 2))) == [(0, 1), (1, 0), (1, 2), (2, 1)]
    assert rank_pairs(add_communication(forward_only(generate("looped-bfs", 3, 2, 2)))) == [(0, 1), (1, 2), (2, 0)]
    assert rank_pairs(generate("1f1b", 3, 2)) == []
    on_one_rank = generate("gpipe", 1, 4, stages_per_rank=3)
    assert add_communication(on_one_rank) == on_one_rank


def test_a_send_waits_for_a_buffer_rather_than_for_ever() -> None:
    """Stage 3 needs stage 0's values only after all of stage 1's; the pair of ranks has two buffers for each link."""
    schedule = generate("gpipe", 2, 8, stages_per_rank=2)
    lowered = add_communication(schedule, [Link(0, 1), Link(0, 3)], [])
    assert_sound(schedule, lowered)
    row = [str(a) for a in lowered.rows[0]]
    assert row.index("0SEND_F7>3") > row.index("2F0")


def test_messages_travel_in_the_order_in_which_they_are_needed() -> None:
    schedule = Schedule.parse(
        "x: 2 microbatches, stages on ranks 0 1\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F1 1F0 1B0 1B1"
    )
    lowered = add_communication(schedule)
    assert [str(a) for a in lowered.rows[0] if a.op.is_send] == ["0SEND_F1", "0SEND_F0"]
    assert_sound(schedule, lowered)


@pytest.mark.parametrize(("without", "sent"), [([0], set()), ([1], {(2, 0)})])
def test_a_gradient_link_needs_a_backward_at_both_ends(without: list[int], sent: set[tuple[int, int]]) -> None:
    lowered = add_communication(drop_backward(generate("gpipe", 3, 2), without), backward=[Link(1, 0), Link(2, 0)])
    assert check(lowered) == []
    assert {(a.stage, a.peer) for row in lowered.rows for a in row if a.op is Op.SEND_B} == sent


def test_messages_of_an_overlap_go_before_and_behind_it() -> None:
    overlap = Overlap(Action(0, Op.F, 1), Action(3, Op.B, 0))
    rows = [
        [Action(0, Op.F, 0), Action(3, Op.F, 0), overlap, Action(3, Op.F, 1), Action(3, Op.B, 1), *_back(0)],
        [Action(1, Op.F, 0), Action(2, Op.F, 0), Action(1, Op.F, 1), Action(2, Op.F, 1), *_back(2), *_back(1)],
    ]
    lowered = add_communication(Schedule("overlap", Placement.v(2), 2, rows))
    assert check(lowered) == []
    assert "(0F1;3B0)OVERLAP_F_B 0SEND_F1 3RECV_F1 3SEND_B0" in str(lowered.rows[0])


def test_an_overlap_that_waits_for_its_own_message_is_refused() -> None:
    rows = [
        [Action(0, Op.F, 0), Overlap(Action(0, Op.F, 1), Action(0, Op.B, 0)), Action(0, Op.B, 1)],
        [Action(1, Op.F, 0), Action(1, Op.F, 1), *_back(1)],
    ]
    with pytest.raises(ScheduleError, match="write the two as separate actions"):
        add_communication(Schedule("x", Placement.loop(2), 2, rows))


def _back(stage: int) -> list[Action]:
    return [Action(stage, Op.B, k) for k in range(2)]


def test_wrong_links_and_schedules_are_refused() -> None:
    schedule = generate("gpipe", 3, 2)
    for link in [Link(1, 0), Link(1, 1), Link(0, 3), Link(-1, 0)]:
        with pytest.raises(ArgumentError, match="forward link"):
            add_communication(schedule, [link])
    with pytest.raises(ArgumentError, match="backward link from stage 0 to stage 1"):
        add_communication(schedule, backward=[Link(0, 1)])
    with pytest.raises(ScheduleError, match="has messages already"):
        add_communication(add_communication(schedule))
    with pytest.raises(ArgumentError, match="stage 1 to stage 2: these belong to two copies of the model"):
        add_communication(generate("chimera", 2, 2), [Link(1, 2)])
