"""Real ranks with batches of which some microbatches take another branch of the forward than others.

Only the first stage's rank has the input, so it tells the others which way each microbatch goes.
"""

from __future__ import annotations

import kinds_jobs
import pytest

from penstock.schedule import generate, generator, generators
from penstock.schedule.generators import Numbers
from scaffolding.ranks import Ranks

pytestmark = pytest.mark.distributed

MICROBATCHES = 6

CASES = [
    (g.name, p, chunks, rules)
    for g in generators()
    for p in (2, 3, 4)
    for chunks in (1, 2)
    for rules in (False, True)
    if g.slices == 1 and generator(g.name).broken(Numbers(p, MICROBATCHES, chunks)) is None
]
SHORT = [("1f1b", 2, 1, False), ("zb-v", 3, 2, True)]


@pytest.mark.parametrize(
    ("schedule", "p", "chunks", "rules"),
    [pytest.param(*case, marks=() if case in SHORT else pytest.mark.long) for case in CASES],
)
def test_each_microbatch_goes_its_way(
    schedule: str, p: int, chunks: int, rules: bool, request: pytest.FixtureRequest
) -> None:
    """Over shared memory, and over gloo under NCCL's rules."""
    ranks: Ranks = request.getfixturevalue(f"ranks{p}")
    order, transport = generate(schedule, p, MICROBATCHES, chunks), "distributed" if rules else "auto"
    for tied in (False, True):
        assert ranks.run(kinds_jobs.train, order, transport, rules, tied) == [[]] * p, tied


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zb-h1", marks=pytest.mark.long)])
def test_replicas_have_microbatches_of_other_kinds_than_each_other(schedule: str, ranks4: Ranks) -> None:
    assert ranks4.run(kinds_jobs.replicas, schedule) == [[]] * 4
