"""The watchdog sees where a device is, by events that are recorded as the host goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runtime.execute import progress_jobs as jobs
from scaffolding.ranks import Ranks
from scaffolding.stand_in import on_the_device


@pytest.mark.parametrize("job", [jobs.hangs, jobs.used_again, jobs.failed, jobs.which_devices])
def test_where_the_device_is(device_rank: Ranks, job: Callable[[], None]) -> None:
    device_rank.run(on_the_device, job)


def test_a_step_records_an_event_where_a_position_ends(device_rank: Ranks) -> None:
    """And at its beginning and end, for what comes before and for its last sends."""
    (counted,) = device_rank.run(on_the_device, jobs.events_of_a_step)
    assert counted == {"beyond": 3, "made": 0, "asked": 0}
