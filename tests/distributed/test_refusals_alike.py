"""What every rank refuses, every rank says by itself: one that is ahead does not end those that are about to."""

from __future__ import annotations

import pytest

from distributed import refusal_jobs
from scaffolding.ranks import Ranks
from scaffolding.representatives import long_after

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("case", long_after(1, *(case for case in refusal_jobs.CASES if case != "one rank")))
def test_every_rank_raises_its_own_refusal(ranks2: Ranks, case: str) -> None:
    first, *others = ranks2.run(refusal_jobs.refused, case)
    assert first[0].startswith(("ArgumentError", "PartitionError"))
    assert all(said.split(" for stage ")[0] == first[0].split(" for stage ")[0] for said, _ in others)


def test_what_one_rank_refuses_ends_the_others_with_its_words(ranks2: Ranks) -> None:
    (own, _), (other, seconds) = ranks2.run(refusal_jobs.refused, "one rank")
    assert own == "ArgumentError: no values for 0"
    assert other == f"RankFailedError: rank 1 stops: rank 0 failed outside of a step: {own}"
    assert seconds < 10
