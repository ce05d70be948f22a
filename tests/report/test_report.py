from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.report import to_perfetto, write_perfetto
from penstock.schedule import Action, forward_only, generate
from penstock.schedule.timeline import Span, Timeline
from penstock.simulate import simulate
from penstock.simulate.costs import LinkCost, StageCost
from scaffolding.nanoseconds import merged


@pytest.fixture
def timeline() -> Timeline:
    return simulate(generate("gpipe", 2, 2), StageCost(0.002, 0.002, 0.002), LinkCost(0.001))


def test_perfetto_has_a_process_a_rank_and_a_slice_an_action(timeline: Timeline) -> None:
    events = to_perfetto(timeline)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"compute", "communication"}
    slices = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert [e["name"] for e in slices] == [
        "wait",
        "forward of microbatch 0, stage 1",
        "forward of microbatch 1, stage 1",
        "backward of microbatch 0, stage 1",
        "backward of microbatch 1, stage 1",
    ]
    assert [(e["ts"], e["dur"]) for e in slices[:2]] == [
        (0.0, pytest.approx(3000)),
        (pytest.approx(3000), pytest.approx(2000)),
    ]
    assert slices[1]["args"] == {"action": "1F0", "stage": 1, "microbatch": 0}
    turns = to_perfetto(replace(timeline, serialized=True))["traceEvents"]
    assert [e["args"]["name"] for e in turns if e["name"] == "process_name"] == [
        f"rank {rank} (in turns with the others, in one process)" for rank in range(2)
    ]


def test_perfetto_shows_messages_that_travel_at_the_same_time_in_threads_of_their_own() -> None:
    times = {"0SEND_F0>2": (1.0, 3.0), "0F1": (1.0, 4.0), "0RECV_B0": (2.0, 5.0), "0SEND_F1": (3.0, 4.0)}
    row = [Span(0, Action.parse(text), *time) for text, time in times.items()]
    events = to_perfetto(merged([row]))["traceEvents"]
    assert [e["tid"] for e in events if e["ph"] == "X"] == [1, 0, 2, 1]
    first = next(e for e in events if e["ph"] == "X")
    assert first["args"]["action"] == "0SEND_F0>2"
    assert first["name"] == "send activations of microbatch 0, stage 0 to stage 2"
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"][1:] == ["communication", "communication 2"]


def arrows(timeline: Timeline) -> list[tuple[str, str, str]]:
    """What each arrow carries, and the actions whose slices its two ends lie in, in time and in their threads."""
    events = to_perfetto(timeline)["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]

    def at(end: dict[str, Any]) -> str:
        (found,) = (
            e["args"]["action"]
            for e in slices
            if (e["pid"], e["tid"]) == (end["pid"], end["tid"]) and e["ts"] < end["ts"] < e["ts"] + e["dur"]
        )
        return str(found)

    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert all(starts[key]["ts"] < ends[key]["ts"] for key in starts)
    return [(starts[key]["name"], at(starts[key]), at(ends[key])) for key in starts]


def test_arrows_lead_from_what_made_a_message_to_what_used_it(timeline: Timeline) -> None:
    assert sorted(arrows(timeline)) == [
        ("activations", "0F0", "1F0"),
        ("activations", "0F1", "1F1"),
        ("gradients", "1B0", "0B0"),
        ("gradients", "1B1", "0B1"),
    ]
    split = simulate(generate("zb-v", 2, 1), StageCost(1, 1, 1))  # stages 1 and 2 lie on one rank
    assert sorted(arrows(split)) == [
        ("activations", "0F0", "1F0"),
        ("activations", "2F0", "3F0"),
        ("gradients", "1I0", "0I0"),
        ("gradients", "3I0", "2I0"),
    ]
    assert not [e for e in to_perfetto(replace(timeline, serialized=True))["traceEvents"] if e["ph"] in "sf"]


def counter(events: list[dict[str, Any]], rank: int) -> dict[str, list[tuple[float, float]]]:
    found: dict[str, list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "C" and e["pid"] == rank:
            (size,) = e["args"].values()
            found.setdefault(e["name"], []).append((e["ts"] / 1e6, size))
    return found


def test_counters_show_what_is_held_and_memory_where_it_is_known(tmp_path: Path) -> None:
    made = simulate(generate("1f1b", 2, 3), StageCost(1, 1, 1))
    curves = [{"activations": [(0.0, 0.0), (0.001, 5e6)], "parameters": [(0.0, 7e6)]}, None]
    for memory in ((), curves):
        trace = to_perfetto(made, memory=memory)
        held = {"microbatches held": [(0, 0), (1, 1), (4, 1), (7, 1), (10, 0)]}
        assert counter(trace["traceEvents"], 1) == held
        write_perfetto(made, tmp_path / "trace.json", memory=memory)
        assert json.loads((tmp_path / "trace.json").read_text()) == trace
    assert counter(trace["traceEvents"], 0) == {
        "activations (bytes)": [(0.0, 0.0), (pytest.approx(0.001), 5e6)],
        "parameters (bytes)": [(0.0, 7e6)],
    }
    assert max(held for _, held in counter(to_perfetto(made)["traceEvents"], 0)["microbatches held"]) == 2
    forward = simulate(forward_only(generate("1f1b", 2, 3)), StageCost(1, 1, 1))
    assert counter(to_perfetto(forward)["traceEvents"], 0)["microbatches held"][-1] == (3, 0)
