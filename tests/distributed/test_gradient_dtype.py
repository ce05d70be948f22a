"""`gradient_dtype=torch.float32`: gradients of a model in bfloat16 are the float32 sums of their bfloat16 terms."""

from __future__ import annotations

import pytest
import torch
from gradient_dtype_jobs import Gradients, by_hand, in_a_pipeline

from scaffolding.ranks import Ranks

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v")
TIED = "embedding.weight"


def assert_sums(mine: Gradients, expected: Gradients, *, but: str = "") -> None:
    for name, grad in mine.items():
        other = expected[name]
        if other is None:
            assert grad is None, name
            continue
        assert grad is not None, name
        assert grad.dtype == torch.float32, name
        if name == but:
            assert (grad - other).abs().max() <= 1e-6 * other.abs().max(), name
        else:
            assert torch.equal(grad, other), name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradients_are_float32_sums_of_bfloat16_terms(schedule: str) -> None:
    expected = by_hand(steps=2)
    mine = in_a_pipeline(0, {"schedule": schedule, "ranks": 2}, steps=2)
    assert mine.keys() == expected.keys()
    assert_sums(mine, expected, but=TIED)


@pytest.mark.distributed
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_tied_weight_is_summed_over_ranks_in_float32(ranks2: Ranks, schedule: str) -> None:
    expected = by_hand(steps=2)
    found = ranks2.run(in_a_pipeline, {"schedule": schedule}, 2)
    for mine in found:
        assert_sums(mine, expected)
    assert {name for mine in found for name in mine} == expected.keys()
