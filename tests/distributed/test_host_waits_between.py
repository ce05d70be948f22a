"""Between processes, too, the host waits for no device in a steady step: the loss travels once it is there."""

from __future__ import annotations

from typing import Any

import host_wait_jobs as jobs
import pytest

from scaffolding.ranks import Ranks
from scaffolding.representatives import long_after
from scaffolding.stand_in_streams import APART

pytestmark = pytest.mark.distributed

SHORT = [("zb-h1", "")]
LONG = [("dualpipe", "read"), ("zb-v", "hang"), ("interleaved-1f1b", "hang")]
"""zb-v has the loss on the first rank, and dualpipe on both."""


def _of_the_host(steps: list[jobs.Steps]) -> list[dict[str, int]]:
    return [{what: count for what, count in one.waits.items() if not what.endswith(APART)} for one in steps]


@pytest.mark.parametrize(("schedule", "also"), long_after(len(SHORT), *SHORT, *LONG))
def test_a_steady_step_waits_for_nothing(own_pair: Ranks, schedule: str, also: str) -> None:
    """Nor does it if the device hangs, or if one rank alone reads the loss. The losses are those of one device."""
    given = {"schedule": schedule}
    steps = own_pair.run(jobs.waits, (1, 2), given, also)
    assert _of_the_host(steps) == [{}] * 2
    expected: Any = jobs.trained("cpu", {**given, "ranks": 2}, "").losses
    if schedule == "dualpipe":  # two ranks' gradients are added in another order
        expected = pytest.approx(expected, rel=1e-6)
    assert steps[0].losses == expected
    assert steps[1].losses == steps[0].losses


def test_clipping_takes_one_wait(own_pair: Ranks) -> None:
    assert _of_the_host(own_pair.run(jobs.waits, (1, 2), {}, "clip")) == [{"to host": 1}] * 2


@pytest.mark.long
@pytest.mark.parametrize(
    "given", [{"schedule": "zb-h1", "autocast": True}, {"recompute": 1}, {"offload": True}], ids=str
)
def test_nor_do_these(own_pair: Ranks, given: dict[str, Any]) -> None:
    assert _of_the_host(own_pair.run(jobs.waits, (1, 2), given, "hang")) == [{}] * 2


@pytest.mark.long
@pytest.mark.parametrize("shape", [(2, 2), (1, 4)])
def test_four_ranks(own_four: Ranks, shape: tuple[int, int]) -> None:
    steps = own_four.run(jobs.waits, shape, {}, "hang")
    assert _of_the_host(steps) == [{}] * 4
    assert len({tuple(one.losses) for one in steps}) == 1
