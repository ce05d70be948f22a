"""A timeline on a device: events that are made once, and read once, at the end of the step."""

from __future__ import annotations

from runtime.execute.clock_jobs import timed_steps
from scaffolding.ranks import Ranks
from scaffolding.stand_in import on_the_device

ANCHORS = 3
"""The waits at the end of a step: one for its work, and two more, for an idle device, that compare the two clocks."""


def test_a_timed_step_records_three_events_an_action_and_waits_at_its_end(device_rank: Ranks) -> None:
    """Two ranks of one process each have a clock, and so each wait."""
    (taken,) = device_rank.run(on_the_device, timed_steps)
    actions = taken["actions"]["all"]
    used = {"record": 3 * actions + 2 * ANCHORS, "elapsed_time": 3 * actions, "event": 2 * ANCHORS}
    assert taken["plain"] == {}
    assert taken["first"] == {"Event": 3 * actions + 2 * ANCHORS, **used}
    assert taken["second"] == used
