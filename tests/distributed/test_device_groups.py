"""A model built on the CPU where the user's groups, like NCCL's, take none of the CPU's tensors."""

from __future__ import annotations

import device_group_jobs as jobs
import pytest

from scaffolding.ranks import Ranks, RanksError
from scaffolding.stand_in import DEVICE

pytestmark = pytest.mark.distributed

SECONDS = 60.0


def test_replicas_start_equal_over_their_devices(own_pair: Ranks) -> None:
    assert own_pair.run(jobs.run, (2, 1), DEVICE, 0, seconds=SECONDS) == [["broadcast"]] * 2


def test_a_pipeline_trains_over_its_devices(own_pair: Ranks) -> None:
    assert own_pair.run(jobs.run, (1, 2), DEVICE, 3, seconds=SECONDS) == [["irecv", "isend"]] * 2


@pytest.mark.long  # by the stand-in, without which the others would show nothing
def test_a_tensor_on_the_cpu_is_refused(own_pair: Ranks) -> None:
    with pytest.raises(RanksError, match="no backend for a tensor on cpu in a group for standin"):
        own_pair.run(jobs.run, (2, 1), "cpu", 0, seconds=SECONDS)
