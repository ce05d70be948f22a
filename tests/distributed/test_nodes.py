"""Ranks on two machines give the bits of one device, though only those of one machine share memory.

test_cluster_examples.py has two machines for real: by torchrun, what an example prints of its losses is compared.
"""

from __future__ import annotations

import jobs
import pytest

from scaffolding.ranks import Ranks

pytestmark = pytest.mark.distributed


@pytest.mark.long  # between hosts: test_bad_network.py
def test_ranks_that_are_told_apart_give_the_bits_of_one_device(ranks4: Ranks) -> None:
    for rank, (neighbors, report) in enumerate(ranks4.run(jobs.on_two_machines)):
        assert neighbors == [rank ^ 1], "shared memory ends at the machine's edge"
        assert report[0], report[1]
