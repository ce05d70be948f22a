"""The split backward in real processes, over both transports."""

from __future__ import annotations

import jobs
import pytest

from penstock.schedule import Schedule, generate, split_backward
from scaffolding.ranks import Ranks
from scaffolding.representatives import representatives

pytestmark = pytest.mark.distributed


SCHEDULES = [generate("zb-h1", 2, 4), generate("zb-v", 2, 4), split_backward(generate("gpipe", 2, 3))]


@pytest.mark.parametrize(
    ("name", "schedule", "transport"),
    representatives(3, ["tied_gpt_with_dropout", "skips", "in_place"], SCHEDULES, ["auto", "distributed"]),
    ids=lambda value: getattr(value, "name", value),
)
def test_bits_of_one_device(ranks2: Ranks, name: str, schedule: Schedule, transport: str) -> None:
    """With tied weights, which are summed after the last W, and with W's that come late."""
    for ok, summary, _ in ranks2.run(jobs.verify, name, {"schedule": schedule, "transport": transport}):
        assert ok, summary
