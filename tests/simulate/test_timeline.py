from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from penstock._base.errors import ArgumentError
from penstock.schedule import Action, add_communication, generate
from penstock.schedule.timeline import Span, Timeline
from penstock.simulate import simulate
from penstock.simulate.costs import LinkCost, StageCost
from scaffolding.nanoseconds import from_nanoseconds

F0, B0, SEND = Action.parse("0F0"), Action.parse("0B0"), Action.parse("0SEND_F0")
BASE = 10**18  # a clock far from zero: seconds as floats would lose the nanoseconds


@pytest.fixture
def measured() -> Timeline:
    return from_nanoseconds(
        [
            [
                (F0, BASE + 5, BASE + 5, BASE + 25),
                (SEND, BASE + 25, BASE + 25, BASE + 26),
                (B0, BASE + 26, BASE + 66, BASE + 105),
            ],
            [(Action.parse("1F0"), BASE, BASE + 30, BASE + 40), (Action.parse("1B0"), BASE + 40, BASE + 40, BASE + 60)],
        ]
    )  # fmt: skip


def test_nanoseconds_become_seconds_from_the_earliest_begin(measured: Timeline) -> None:
    assert list(measured.spans(1)) == [
        Span(1, Action.parse("1F0"), 30e-9, 40e-9, 30e-9),
        Span(1, Action.parse("1B0"), 40e-9, 60e-9, 0.0),
    ]
    assert [str(span.action) for span in measured] == ["0F0", "0SEND_F0", "0B0", "1F0", "1B0"]
    assert len(measured) == 5


def test_figures(measured: Timeline) -> None:
    assert measured.makespan_seconds == 105e-9
    assert measured.span_seconds == pytest.approx(100e-9)  # rank 0: from 5 to 105; rank 1 only from 30 to 60
    assert measured.busy_seconds(0) == pytest.approx(59e-9)  # without the send
    assert measured.waited_seconds(0) == pytest.approx(40e-9)
    assert measured.bubble_rate == pytest.approx(1 - (59 + 30) / 200)
    for idle in (Timeline(()), from_nanoseconds([[], []])):
        assert (idle.makespan_seconds, idle.span_seconds, idle.bubble_rate) == (0, 0, 0)


def test_ranks_that_took_turns_have_no_bubble(measured: Timeline) -> None:
    turns = replace(measured, serialized=True)
    assert math.isnan(turns.bubble_rate)
    assert "took turns" in repr(turns)
    assert Timeline.from_dict(json.loads(json.dumps(turns.to_dict()))) == turns
    assert turns.busy_seconds(0) == measured.busy_seconds(0), "the durations hold"
    assert not from_nanoseconds([[]], in_turns=True).serialized, "one rank has nobody to take turns with"


def test_the_span_begins_with_the_first_forward() -> None:
    """Not with the message before it, for which a rank of a later stage waits."""
    row = [(Action.parse("1RECV_F0"), 0, 0, 70), (Action.parse("1F0"), 70, 75, 90), (Action.parse("1B0"), 90, 90, 100)]
    assert from_nanoseconds([row]).span_seconds == pytest.approx(25e-9)


def test_json_and_back_is_the_same(measured: Timeline) -> None:
    for timeline in (
        measured,
        simulate(add_communication(generate("1f1b", 3, 5)), StageCost(0.1, 0.2, 0.3), LinkCost(0.01)),
    ):
        assert Timeline.from_dict(json.loads(json.dumps(timeline.to_dict()))) == timeline
    assert Timeline.from_dict(measured.to_dict()) != Timeline(())


def test_what_is_no_timeline_is_refused() -> None:
    whole = {"actions": ["0F0"], "start_seconds": [0], "end_seconds": [1], "waited_seconds": [0]}
    assert len(Timeline.from_dict({"ranks": [whole]})) == 1
    for data in [{}, {"ranks": [{**whole, "end_seconds": []}]}, {"ranks": [{**whole, "actions": ["0F0", "0B0"]}]}]:
        with pytest.raises(ArgumentError, match=r"the timeline: ranks is missing|is no timeline"):
            Timeline.from_dict(data)
    for times in ((0, 5, 4), (5, 4, 6)):
        with pytest.raises(ArgumentError, match="0F0 waited"):
            from_nanoseconds([[(F0, *times)]])
    with pytest.raises(ArgumentError, match=r"^x\.json has 65,537 ranks; expected at most 65,536$"):
        Timeline.from_dict({"ranks": [None] * 65_537}, "x.json")
