"""`grad_dtype=torch.float32` on real ranks: ties and replicas are summed in float32, to the bit."""

from __future__ import annotations

from typing import Any

import gradient_dtype_jobs as jobs
import pytest
import torch

import penstock
from penstock.network.fabric.traffic import from_model
from scaffolding.low_precision import MICROBATCHES, TIED, Net, assert_sums, batch, by_hand
from scaffolding.ranks import Ranks

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_tied_weight_is_summed_over_ranks_in_float32(ranks2: Ranks, schedule: str) -> None:
    expected = by_hand(steps=2)
    found = ranks2.run(jobs.train, {"schedule": schedule})
    for mine in found:
        # In a V, one rank adds the terms of the first and the last stage, as they come.
        assert_sums(mine, expected, reordered=TIED if schedule == "zb-v" else "")
    assert {name for mine in found for name in mine} == expected.keys()


def test_replicas_are_averaged_in_float32(ranks4: Ranks) -> None:
    expected = by_hand(steps=2, replicas=2)
    for mine in ranks4.run(jobs.train, {"schedule": "zb-h1"}, 2):
        assert_sums(mine, expected)


def test_steps_that_do_not_average_leave_float32(ranks2: Ranks) -> None:
    for late, at_once in ranks2.run(jobs.in_turn):
        assert (late - at_once).abs().max() <= 1e-6 * at_once.abs().max()


def test_activations_divided_by_a_plan(ranks4: Ranks) -> None:
    """Each rank has a part of the gradient of what is whole; alone, microbatches have these summed in bfloat16."""
    for away in ranks4.run(jobs.divided_by_sequence):
        assert len(away) == 4
        assert all("norm" in name and distance < 2**-7 for name, distance in away.items())


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_a_run_sums_and_holds_as_many_bytes_as_predicted(ranks4: Ranks, dtype: torch.dtype | None) -> None:
    options: dict[str, Any] = {"schedule": "1f1b", "microbatches": MICROBATCHES, "grad_dtype": dtype}
    rows = batch()[0].chunk(2)[0]
    seen = penstock.inspect(Net(), (rows,), stages=2, **options)
    sent = from_model(Net(), (rows.chunk(MICROBATCHES)[0],), hosts=4, ranks=2, traffic="pipeline", **options)
    for host, mine in enumerate(ranks4.run(jobs.count_bytes, options)):
        summed = [each.bytes for each in sent.transfers if "gradients" in each.name and host in each.ranks]
        assert mine.summed == sorted(summed)
        assert mine.held == seen.stages[host % 2].gradient_bytes


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("sharded", "fully_shard has sharded 'bias', which is in torch.bfloat16, and adds up its gradient itself"),
        ("one", "grad_dtype= is ['torch.float32', 'None'] on the processes 0..1; every process must pass the same"),
    ],
)
def test_what_is_refused(ranks2: Ranks, case: str, text: str) -> None:
    assert all(text in said for said in ranks2.run(jobs.refusal, case))
