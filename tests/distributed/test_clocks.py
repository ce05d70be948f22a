"""Timelines of ranks on several hosts are on one clock."""

from __future__ import annotations

import jobs
import pytest

from scaffolding.ranks import Ranks

pytestmark = pytest.mark.distributed

AHEAD_SECONDS = 5000
MAX_WRONG_SECONDS = 5.0
"""Half of the shortest of several round trips, on a machine that may be busy."""


def test_a_rank_whose_clock_is_ahead_is_in_its_place(ranks2: Ranks) -> None:
    told = ranks2.run(jobs.timed_on_another_host, AHEAD_SECONDS)
    assert told[0] == told[1]
    times = told[0]
    for microbatch in range(2):
        for before, after in (("0F", "1F"), ("1F", "1B"), ("1B", "0B")):
            (_, ended), (started, _) = times[f"{before}{microbatch}"], times[f"{after}{microbatch}"]
            assert -MAX_WRONG_SECONDS < started - ended < AHEAD_SECONDS / 2
