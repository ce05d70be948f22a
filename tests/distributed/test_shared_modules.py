"""Two pipelines over the same modules, each with its own optimizer, as for a GAN."""

from __future__ import annotations

import gan_jobs as jobs
import pytest

from scaffolding.ranks import Ranks
from scaffolding.representatives import long_after

pytestmark = pytest.mark.distributed


JUDGED = ("judged", "generator.2 generator.4 critic.0", "interleaved-1f1b")


@pytest.mark.parametrize(("first", "cut", "schedule"), long_after(1, ("judging", "generator.2", "zb-h1"), JUDGED))
def test_a_generator_and_a_discriminator_train_as_in_plain_torch(
    ranks2: Ranks, first: str, cut: str, schedule: str
) -> None:
    """The second pipeline is cut by itself so that each rank runs what it has."""
    for wrong, cuts in ranks2.run(jobs.differing, first, cut, schedule):
        assert not wrong
        assert len(cuts) == len(cut.split())
        assert cuts[-1] == cut.split()[-1]


@pytest.mark.parametrize(
    ("first", "second", "remedy"),
    [
        ("generator.2", "critic.0", "pass cuts=['generator.2'], so that each rank runs what it has"),
        ("critic.2", None, "make this pipeline first, or pass both cuts="),  # it runs the critic twice
    ],
)
def test_modules_that_two_pipelines_share_are_to_be_on_the_same_ranks(
    ranks2: Ranks, first: str, second: str | None, remedy: str
) -> None:
    for said in ranks2.run(jobs.refused, first, second):
        assert "which an earlier pipeline over the same modules holds on another rank; " in said
        assert remedy in said


@pytest.mark.parametrize("closed", [False, True])
def test_a_pipeline_that_would_take_what_an_earlier_one_runs_is_refused_when_it_is_made(
    ranks2: Ranks, closed: bool
) -> None:
    """The earlier one runs the critic's first layer on both ranks, and this one on the second alone."""
    refusal = "an earlier pipeline over the same modules still runs it; make this pipeline first"
    said = ranks2.run(jobs.taking, closed)
    assert [refusal in one for one in said] == [not closed] * 2, said
