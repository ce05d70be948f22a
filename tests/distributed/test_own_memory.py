"""Modules that write each result into memory of their own: what waits, is sent or is kept has other memory."""

from __future__ import annotations

import own_memory_jobs as jobs
import pytest
from torch import nn

from scaffolding.ranks import Ranks
from scaffolding.small import WIDTH

pytestmark = pytest.mark.distributed

KINDS = ["Views", "Out", "OwnGradient", "Graphed"]


@pytest.mark.parametrize(("kind", "transport"), [*zip(KINDS, ["auto", "distributed"] * 2, strict=True)])
def test_a_message_is_not_overwritten_before_it_has_left(ranks2: Ranks, kind: str, transport: str) -> None:
    options = {"microbatches": 8, "transport": transport}
    assert ranks2.run(jobs.same_as_by_hand, kind, options) == [[]] * 2


@pytest.mark.parametrize("kind", ["Turns", "Graphed"])
def test_nor_is_what_waits_for_w(kind: str) -> None:
    """`OwnGradient` raises: what its next forward overwrites is needed for a gradient."""
    assert jobs.same_as_by_hand(0, kind, {"microbatches": 8, "schedule": "zb-h1"}) == []
    chunks = {"stages_per_rank": 2, "cuts": None}
    assert jobs.same_as_by_hand(0, kind, {"microbatches": 8, "schedule": "zb-v", **chunks}) == []


@pytest.mark.parametrize(
    "last", [nn.Tanh(), nn.ReLU(inplace=True), nn.Sequential(nn.Unflatten(1, (3, 3)), nn.Flatten())]
)
def test_what_nothing_else_holds_is_sent_from_where_it_is(ranks2: Ranks, last: nn.Module) -> None:
    """Although backward holds what a tanh returns, and a view its base."""
    first = nn.Sequential(nn.Linear(WIDTH, WIDTH), last)
    assert ranks2.run(jobs.sent, first)[0] == 0
