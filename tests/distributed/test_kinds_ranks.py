"""Real ranks with batches of which some microbatches take another branch of the forward than others.

Only the first stage's rank has the input, so it tells the others which way each microbatch goes.
"""

from __future__ import annotations

import kinds_jobs
import pytest

from penstock.schedule import generate
from scaffolding.ranks import Ranks
from scaffolding.representatives import long_after

pytestmark = pytest.mark.distributed

MICROBATCHES = 6

SHORT = [("1f1b", 2, 1, False, True), ("zb-v", 2, 2, True, False)]
LONG = [
    ("interleaved-1f1b", 4, 2, False, True),
    ("chimera", 4, 1, True, False),
]


@pytest.mark.parametrize(("schedule", "p", "chunks", "rules", "tied"), long_after(len(SHORT), *SHORT, *LONG))
def test_each_microbatch_goes_its_way(
    schedule: str, p: int, chunks: int, rules: bool, tied: bool, request: pytest.FixtureRequest
) -> None:
    """Over shared memory, and over gloo under NCCL's rules."""
    ranks: Ranks = request.getfixturevalue(f"ranks{p}")
    order, transport = generate(schedule, p, MICROBATCHES, chunks), "distributed" if rules else "auto"
    assert ranks.run(kinds_jobs.train, order, transport, rules, tied) == [[]] * p


def test_replicas_have_microbatches_of_other_kinds_than_each_other(ranks4: Ranks) -> None:
    assert ranks4.run(kinds_jobs.replicas, "zb-h1") == [[]] * 4
