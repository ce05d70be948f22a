"""Events on a device, recorded as the host goes on: by them the watchdog sees where it is, and a timeline is timed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runtime.execute import progress_jobs as jobs
from runtime.execute.clock_jobs import timed_steps
from scaffolding.ranks import Ranks
from scaffolding.stand_in import on_the_device

ANCHORS = 3
"""The waits at the end of a step: one for its work, and two more, for an idle device, that compare the two clocks."""


@pytest.mark.parametrize("job", [jobs.hangs, jobs.used_again, jobs.failed, jobs.which_devices])
def test_where_the_device_is(device_rank: Ranks, job: Callable[[], None]) -> None:
    device_rank.run(on_the_device, job)


def test_a_step_records_an_event_where_a_position_ends(device_rank: Ranks) -> None:
    """And at its beginning and end, for what comes before and for its last sends."""
    (counted,) = device_rank.run(on_the_device, jobs.events_of_a_step)
    assert counted == {"beyond": 3, "made": 0, "asked": 0}


def test_a_timed_step_records_three_events_an_action_and_waits_at_its_end(device_rank: Ranks) -> None:
    """Two ranks of one process each have a clock, and so each wait."""
    (taken,) = device_rank.run(on_the_device, timed_steps)
    actions = taken["actions"]["all"]
    used = {"record": 3 * actions + 2 * ANCHORS, "elapsed_time": 3 * actions, "event": 2 * ANCHORS}
    assert taken["plain"] == {}
    assert taken["first"] == {"Event": 3 * actions + 2 * ANCHORS, **used}
    assert taken["second"] == used
