"""One step of each of three published traces: what made it slow is named.

Their source and licence are in benchmarks/fidelity/data/SOURCES.md.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from penstock.plan.explain import Explanation, explain, load_trace
from penstock.plan.explain.breakdown import TimeCategory

DATA = Path(__file__).with_name("data")


@cache
def explained(name: str) -> Explanation:
    return explain(load_trace([DATA / f"trace_{name}.csv.gz"]))


def test_one_slow_worker_is_named() -> None:
    found = explained("AR")
    assert found.changes[0].text.startswith("rank 0 of replica 0 is slow (forwards 2.5x, backwards 2.3x")
    assert found.changes[0].gain == pytest.approx(0.50, abs=0.02)  # published: balanced is 0.50 of the step
    assert found.step.slowest.number == 0
    assert (len(found.step.replicas), found.step.slowest.schedule.name) == (4, "1f1b")


def test_unequal_sequences_are_named() -> None:
    found = explained("SE")
    assert found.changes[0].kind == "microbatches"
    assert "of replica 22 takes 1.81 times the mean" in found.changes[0].text
    causes = found.where.added_seconds
    assert max(causes, key=lambda reason: causes[reason]) is TimeCategory.MICROBATCHES


def test_a_slow_last_stage_is_named() -> None:
    found = explained("ST")
    (cut,) = [change for change in found.changes if change.kind == "cut"]
    assert cut.text.startswith("stage 3 takes 1.40 times the mean (rank 3)")
    assert max(found.stages, key=lambda stage: stage.seconds).stage == 3
    assert found.bubble is not None
    assert found.bubble.blocked_by_rank == 3


@pytest.mark.parametrize(("name", "most"), [("AR", 0.0005), ("SE", 0.001), ("ST", 0.001)])
def test_the_replay_is_as_good_as_it_says(name: str, most: float) -> None:
    found = explained(name)
    assert abs(found.replay_error) <= most
    assert found.error <= 2 * most
    assert found.step.seconds > found.step.pipeline_seconds
    assert "grads-reduce-scatter" in found.step.others
    assert not found.run.notes
