from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.report import summary, to_perfetto, write_perfetto
from penstock.schedule import Action, generate
from penstock.schedule.timeline import Span, Timeline
from penstock.simulate import simulate
from penstock.simulate.costs import LinkCost, StageCost


@pytest.fixture
def timeline() -> Timeline:
    return simulate(generate("gpipe", 2, 2), StageCost(0.002, 0.002, 0.002), LinkCost(0.001))


def test_summary(timeline: Timeline) -> None:
    assert summary(timeline).splitlines() == [
        "rank  busy (ms)  waiting (ms)  bubble",
        "   0     12.000         8.000   40.0%",
        "   1     12.000         3.000   40.0%",
        "makespan 20.000 ms, bubble 40.0%",
    ]


def test_ranks_that_took_turns_have_no_bubble(timeline: Timeline) -> None:
    turns = replace(timeline, in_turns=True)
    assert summary(turns).splitlines() == [
        "rank  busy (ms)  waiting (ms)",
        "   0     12.000         8.000",
        "   1     12.000         3.000",
        "makespan 20.000 ms, no bubble: the ranks took turns in one process; "
        "simulate these times to see how they would overlap",
    ]
    names = [e["args"]["name"] for e in to_perfetto(turns)["traceEvents"] if e["name"] == "process_name"]
    assert names == [f"rank {rank} (in turns with the others, in one process)" for rank in range(2)]


def test_summary_of_nothing() -> None:
    assert summary(Timeline.from_nanoseconds([[]])).splitlines()[-1] == "makespan 0.000 us, bubble 0.0%"


def test_perfetto_has_a_process_a_rank_and_a_slice_an_action(timeline: Timeline) -> None:
    events = to_perfetto(timeline)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"compute", "communication"}
    slices = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert [e["name"] for e in slices] == ["wait", "F0", "F1", "B0", "B1"]
    assert [(e["ts"], e["dur"]) for e in slices[:2]] == [
        (0.0, pytest.approx(3000)),
        (pytest.approx(3000), pytest.approx(2000)),
    ]
    assert slices[1]["args"] == {"action": "1F0", "stage": 1, "microbatch": 0}


def test_perfetto_shows_communication_apart() -> None:
    sent = Timeline.merge([[Span(0, Action.parse("0SEND_F0>2"), 1.0, 2.0)]])
    event = next(e for e in to_perfetto(sent)["traceEvents"] if e["ph"] == "X")
    assert (event["tid"], event["name"], event["args"]["action"]) == (1, "SEND_F0", "0SEND_F0>2")


def test_perfetto_shows_messages_that_travel_at_the_same_time_in_threads_of_their_own() -> None:
    times = {"0SEND_F0": (1.0, 3.0), "0F1": (1.0, 4.0), "0RECV_B0": (2.0, 5.0), "0SEND_F1": (3.0, 4.0)}
    row = [Span(0, Action.parse(text), *time) for text, time in times.items()]
    events = to_perfetto(Timeline.merge([row]))["traceEvents"]
    assert [e["tid"] for e in events if e["ph"] == "X"] == [1, 0, 2, 1]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"][1:] == ["communication", "communication 2"]


def test_the_file_is_the_trace_as_json(timeline: Timeline, tmp_path: Path) -> None:
    write_perfetto(timeline, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == to_perfetto(timeline)
