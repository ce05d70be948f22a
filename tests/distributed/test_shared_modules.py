"""Two pipelines over the same modules, each with its own optimizer, as for a GAN."""

from __future__ import annotations

import gan_jobs as jobs
import pytest

from scaffolding.ranks import Ranks

pytestmark = pytest.mark.distributed


def test_a_generator_and_a_discriminator_train_as_in_plain_torch(ranks2: Ranks) -> None:
    assert ranks2.run(jobs.differing) == [[], []]


def test_modules_that_two_pipelines_share_are_to_be_on_the_same_ranks(ranks2: Ranks) -> None:
    for said in ranks2.run(jobs.refused):
        assert "'critic.0.weight' is to be on rank 0, but an earlier pipeline" in said
        assert "pass both pipelines cuts=" in said
