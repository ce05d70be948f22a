"""What is planted in a real run is named: by the runtime's own timeline, read as a user would."""

from __future__ import annotations

import json
from pathlib import Path

import explain_jobs
import pytest

from penstock.explain import Explanation, explain, read_run
from scaffolding.ranks import Ranks

pytestmark = pytest.mark.distributed

SECONDS = 0.004
"""What a block's forward takes: far more than the runtime does around it."""


def explained(ranks: Ranks, folder: Path, *planted: object) -> Explanation:
    timelines = ranks.run(explain_jobs.traced, *planted)[0]
    (folder / "timeline.json").write_text(json.dumps(timelines))
    return explain(read_run([folder]))


def test_a_rank_with_slow_forwards_is_named(ranks3: Ranks, tmp_path: Path) -> None:
    found = explained(ranks3, tmp_path, [SECONDS] * 3, ["1", "2"], 1, 3 * SECONDS)
    first = found.changes[0]
    assert first.text.startswith("rank 1 is slow (forwards ")
    assert "backwards" not in first.text
    assert first.gain > 0.1
    assert len(found.run.steps) == 2
    assert found.step.slowest.schedule.name == "1f1b"


@pytest.mark.long
def test_a_heavy_stage_is_named(ranks3: Ranks, tmp_path: Path) -> None:
    found = explained(ranks3, tmp_path, [SECONDS] * 5, ["1", "4"])
    assert found.changes[0].text.startswith("stage 1 takes 1.")
    assert found.changes[0].gain > 0.1
    assert found.bubble is not None
    assert found.bubble.culprit_rank == 1
