"""Whole steps, with what ranks do around their pipelines, and all steps of a run.

The source and licence of the traces are in benchmarks/fidelity/data/SOURCES.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from planted import even, recorded, timeline, twice

from penstock.plan.explain import Event, TraceData, explain, load_trace, steps_of_trace
from penstock.plan.explain.stragglers import describe, summarize_steps
from scaffolding.representatives import long_after

DATA = Path(__file__).parents[3] / "benchmarks/fidelity/data"
OPS = {"forward": "forward-compute", "backward": "backward-compute"}
SAME = {"forward-message": "forward-pp-comm", "backward-message": "backward-pp-comm"}


@pytest.mark.parametrize("name", long_after(1, "ST", "AR", "SE"))
def test_what_stragglers_cost_is_what_was_published(name: str) -> None:
    """The usual times are those of these six steps, not of all that the source had."""
    published = json.loads((DATA / "trace_published.json").read_text())[name]["steps"]
    run = steps_of_trace(load_trace([DATA / f"trace_{name}.csv.gz"]))
    for number, theirs in published.items():
        found = explain(run, step=int(number))
        ours = found.slowdowns
        assert ours is not None
        assert ours.step == pytest.approx(theirs["straggler_slowdown"], rel=0.02)
        for rank, value in theirs["slowdown_by_stage"].items():
            assert ours.by_rank[int(rank)] == pytest.approx(value, rel=0.02)
        for replica, value in theirs["slowdown_by_replica"].items():
            assert ours.by_replica[int(replica)] == pytest.approx(value, rel=0.02)
        for op, value in ours.by_op.items():
            assert value == pytest.approx(theirs["slowdown_by_op"][(OPS | SAME).get(op, op)], rel=0.02)
        assert found.whole_error <= 0.002


def with_optimizer(recording: TraceData, seconds: Callable[[int], float], name: str = "optimizer") -> TraceData:
    """After its last action each rank runs something else."""
    ends: dict[int, float] = {}
    for event in recording.events:
        ends[event.rank or 0] = max(ends.get(event.rank or 0, 0.0), event.end_seconds)
    more = [Event((0, r), name, end, end + seconds(r), None, 0, r, 0) for r, end in ends.items()]
    return replace(recording, events=(*recording.events, *more))


def test_what_the_pipeline_gains_the_step_may_not() -> None:
    """The last backward of rank 0 is slow, but rank 1's optimizer is what a step waits for."""

    def backward(stage: int, microbatch: int) -> float:
        return 8.0 if (stage, microbatch) == (0, 7) else 2.0

    measured = recorded(timeline(even, backward, ranks=2))
    plain, around = measured, with_optimizer(measured, lambda rank: 20.0 if rank == 1 else 1.0)
    (gain,) = explain(plain, what_ifs=["actions=usual"]).what_ifs
    assert gain.gain > 0.1
    found = explain(around, what_ifs=["actions=usual"])
    assert found.what_ifs[0].gain == pytest.approx(0.0, abs=0.001)
    assert found.whole_error < 0.001


def test_what_nobody_knows_of_stays_as_it_was() -> None:
    found = explain(with_optimizer(recorded(timeline(even, twice)), lambda rank: 1.0, "my-own-sum"))
    assert found.slowdowns is None
    assert any("'my-own-sum'" in note for note in found.run.notes)


def steps(slow: Callable[[int], int | None]) -> TraceData:
    """Five steps of two replicas, in each of which the forwards of a rank of the second are slow, or of none."""
    events: list[Event] = []
    for number in range(5):
        rank = slow(number)
        slow_one = timeline(lambda stage, k, rank=rank: 2.0 if stage == rank else 1.0, twice)  # type: ignore[misc]
        one = recorded(timeline(even, twice), slow_one)
        events += [replace(event, step=number) for event in one.events]
    return TraceData(tuple(events))


def test_a_steady_straggler_is_told_from_one_that_is_not() -> None:
    def said(slow: Callable[[int], int | None]) -> str:
        return "; ".join(describe(summarize_steps(steps_of_trace(steps(slow)))))

    assert "steady: rank 2 of replica 1 is the slowest in every step (2.0x)" in said(lambda number: 2)
    once = said(lambda number: 2 if number == 3 else None)
    assert "not steady: no rank is the slowest twice; rank 2 of replica 1 is in step 3 (2.0x)" in once
    assert "1 of 5 steps over 1.1 times the median, step 3 most (1." in once
    assert "rank" not in said(lambda number: None)
    assert "not steady: rank 2 of replica 1 is the slowest most often, in 3 of 5 steps" in said(
        lambda n: 1 if n < 2 else 2
    )


def test_what_ranks_without_actions_do_is_left_out_and_said() -> None:
    measured = with_optimizer(recorded(timeline(even, twice, ranks=2)), lambda rank: 2.0)
    stray = [Event((0, 7), "optimizer", 0.0, 900.0, None, 0, 7, 0)]
    found = explain(steps_of_trace(replace(measured, events=(*measured.events, *stray))))
    assert found.run.notes == ("left out 1 event of ranks that have no actions, such as rank 7",)
    assert (
        replace(found, run=explain(steps_of_trace(measured)).run).to_dict()
        == explain(steps_of_trace(measured)).to_dict()
    )
