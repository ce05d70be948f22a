from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock._base.errors import ScheduleError
from penstock.schedule import Action, Op, Overlap
from penstock.schedule.action import parse_item

COMPUTE = [Op.F, Op.B, Op.I, Op.W]
MESSAGES = [Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B]

actions = st.one_of(
    st.builds(Action, st.integers(0, 99), st.sampled_from(COMPUTE), st.integers(0, 999)),
    st.builds(Action, st.integers(1, 99), st.sampled_from(MESSAGES), st.integers(0, 999), st.none()),
    st.builds(Action, st.integers(0, 49), st.sampled_from(MESSAGES), st.integers(0, 999), st.integers(50, 99)),
    st.builds(Action, st.integers(0, 99), st.sampled_from([Op.UNSHARD, Op.RESHARD])),
    st.builds(Action, st.integers(0, 99), st.just(Op.REDUCE_GRAD), st.one_of(st.none(), st.integers(0, 9))),
)


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("0F1", Action(0, Op.F, 1)),
        ("2I0", Action(2, Op.I, 0)),
        ("2W0", Action(2, Op.W, 0)),
        ("1SEND_F0", Action(1, Op.SEND_F, 0, 2)),
        ("1RECV_F0", Action(1, Op.RECV_F, 0, 0)),
        ("1SEND_B0", Action(1, Op.SEND_B, 0, 0)),
        ("1RECV_B0", Action(1, Op.RECV_B, 0, 2)),
        ("0SEND_F1>3", Action(0, Op.SEND_F, 1, 3)),
        ("3RECV_F1<0", Action(3, Op.RECV_F, 1, 0)),
        ("0UNSHARD", Action(0, Op.UNSHARD)),
        ("0REDUCE_GRAD", Action(0, Op.REDUCE_GRAD)),
        ("0REDUCE_GRAD1", Action(0, Op.REDUCE_GRAD, 1)),
    ],
)
def test_text_is_pytorchs(text: str, action: Action) -> None:
    assert str(action) == text
    assert Action.parse(text) == action


@given(actions)
def test_text_and_back_is_the_same(action: Action) -> None:
    assert Action.parse(str(action)) == action
    assert hash(Action.parse(str(action))) == hash(action)


def test_a_left_out_peer_is_the_neighbor_and_numbers_count_from_0() -> None:
    assert Action(1, Op.SEND_F, 0) == Action.parse("1SEND_F0>2") == Action.parse("1SEND_F0")
    for stage, microbatch in [(-1, 0), (0, -1)]:
        with pytest.raises(ScheduleError, match="counted from 0"):
            Action(stage, Op.F, microbatch)


@given(actions.filter(lambda a: a.op.is_communication))
def test_the_other_end_of_the_other_end_is_the_action(action: Action) -> None:
    other = action.other_end
    assert other.other_end == action
    assert (other.stage, other.peer) == (action.peer, action.stage)
    assert other.op.is_send != action.op.is_send


@pytest.mark.parametrize(
    "text", ["", "F1", "0F", "0X1", "0F1>2", "0SEND_F1<3", "3RECV_F1>0", "0RECV_F0", "2SEND_F0>2", "0F-1", "0F1 0F2"]
)
def test_what_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError):
        Action.parse(text)


def test_overlap_text_and_back() -> None:
    overlap = parse_item("(0F7;7B3)OVERLAP_F_B")
    assert overlap == Overlap(Action(0, Op.F, 7), Action(7, Op.B, 3))
    assert str(overlap) == "(0F7;7B3)OVERLAP_F_B"
    with pytest.raises(ScheduleError, match="a forward and then a backward"):
        parse_item("(7B3;0F7)OVERLAP_F_B")
