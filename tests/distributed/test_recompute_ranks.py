"""Recomputation, offload and deferred batch norm in real processes; curves of losses at any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import recompute_jobs
import torch

from scaffolding.ranks import Ranks

pytestmark = pytest.mark.distributed

HERE = {"ranks": 1, "stages_per_rank": 4, "schedule": "gpipe"}
TWO = {"schedule": "interleaved-1f1b", "stages_per_rank": 2}
FOUR = {"schedule": "1f1b"}


def test_one_curve_of_losses_at_one_two_and_four_ranks(ranks2: Ranks, ranks4: Ranks) -> None:
    clip, recompute = 0.5, {0: "always", 1: 1, 2: "except_last"}
    options: dict[str, Any] = {"recompute": recompute, "offload": {3: True}, "deferred_batch_norm": True}
    losses, norms, held = recompute_jobs.curve(0, clip, {**HERE, **options})
    assert len(set(losses)) == recompute_jobs.STEPS
    assert losses[5] < losses[0]  # of the same batch
    assert max(norms) > clip
    for ranks, how in ((ranks2, TWO), (ranks4, FOUR)):
        parts = ranks.run(recompute_jobs.curve, clip, {**how, **options})
        assert all(part[:2] == (losses, norms) for part in parts)
        found = {name: tensor for part in parts for name, tensor in part[2].items()}
        assert found.keys() == held.keys()
        assert all(torch.equal(found[name], held[name]) for name in held)


def test_bits_of_one_device(ranks2: Ranks) -> None:
    """The weight that is used at both ends is summed over ranks, and close."""
    asked: dict[str, Any] = {"schedule": "zb-h1", "microbatches": 5, "exact": True, "transport": "distributed"}
    asked |= {"recompute": {0: 2, 1: "except_last"}, "offload": {1: True}, "deferred_batch_norm": True}
    for ok, summary in ranks2.run(recompute_jobs.verify_everything, asked):
        assert ok, summary
