"""The split backward in real processes, over both transports."""

from __future__ import annotations

import jobs
import pytest

from distributed.ranks import Ranks
from penstock.schedule import generate, split_backward

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("transport", ["auto", "distributed"])
def test_bits_of_one_device(ranks2: Ranks, transport: str) -> None:
    """With tied weights, which are summed after the last W, and with W's that come late."""
    for name in ("tied_gpt_with_dropout", "skips", "in_place"):
        for schedule in (generate("zb-h1", 2, 4), generate("zb-v", 2, 4), split_backward(generate("gpipe", 2, 3))):
            for ok, summary, _ in ranks2.run(jobs.verify, name, {"schedule": schedule, "transport": transport}):
                assert ok, summary
