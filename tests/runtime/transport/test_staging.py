"""A device's tensors leave for the host, and come back, and only a thread waits. Each rule is broken on purpose."""

from __future__ import annotations

import pytest

from runtime.transport import staging_jobs as jobs
from scaffolding.ranks import Ranks
from scaffolding.stand_in import on_the_device


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        ("", "([tensor([0., 1., 2., 3., 4., 5.]), None], [tensor([ 0.,  2.,  4.,  6.,  8., 10.]), None])"),
        ("the thread waits for the copy", "([tensor([77., 77., 77., 77., 77., 77.]), None]"),
        ("a copy waits for computation", "a side stream reads what the default stream may not have computed yet"),
        ("computation waits for the copy", "[tensor([154., 154., 154., 154., 154., 154.]), None]"),
        ("memory is told of its other stream", "is used on 0 without record_stream"),
    ],
)
def test_a_broken_rule_is_seen(device_rank: Ranks, rule: str, found: str) -> None:
    (said,) = device_rank.run(on_the_device, jobs.there_and_back, rule)
    assert found in said


def test_sends_do_not_wait(device_rank: Ranks) -> None:
    device_rank.run(on_the_device, jobs.sends_do_not_wait)
