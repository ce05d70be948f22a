"""Features that meet on one mesh, against plain torch on one device."""

from typing import Any

import combined_jobs
import pytest
import torch

from scaffolding.ranks import Ranks, RanksError
from scaffolding.representatives import long_after

pytestmark = pytest.mark.distributed

DP, TP = ((2, 2), ("dp", "pp")), ((2, 2), ("pp", "tp"))
CHANGING = [[8, 8], [8, 1], [2, 8]]
WAYS = long_after(1, ("every_block", DP[1]), ("by_plan", TP[1]))


def test_sharded_replicas_gather_in_one_order_whatever_their_rows(ranks4: Ranks) -> None:
    options = {"microbatches": 4, "schedule": "zb-v"}
    for rank in ranks4.run(combined_jobs.train, "every_block", *DP, CHANGING, options):
        assert rank.weights < 1e-6
        assert rank.losses < 1e-5


def test_sequence_parallelism_with_replicas(ranks4: Ranks) -> None:
    """A norm's gradient is a term on each process that shares the sequence, which is added up before it is averaged."""
    mesh = ((2, 1, 2), ("dp", "pp", "tp"))
    for rank in ranks4.run(combined_jobs.train, "by_sequence", *mesh, [[6, 6], [6, 6]], {"microbatches": 3}):
        assert rank.weights < 1e-6
        assert rank.losses < 1e-5


def test_sharded_stages_under_autocast(ranks4: Ranks) -> None:
    options = {"schedule": "zb-h1", "recompute": "always"}
    plain = ranks4.run(combined_jobs.autocast, "", {})
    sharded = ranks4.run(combined_jobs.autocast, "every_block", options)
    for one, other in zip(plain, sharded, strict=True):
        assert one.keys() == other.keys()
        for name, gradient in one.items():
            torch.testing.assert_close(other[name], gradient)


@pytest.mark.parametrize(("how", "names"), WAYS)
def test_the_unsplit_models_state_is_loaded_into_shards(ranks4: Ranks, how: str, names: Any) -> None:
    assert ranks4.run(combined_jobs.load, how, names) == [0.0] * 4


@pytest.mark.parametrize(("how", "names"), WAYS)
def test_verify_compares_shards_as_a_whole(ranks4: Ranks, how: str, names: Any) -> None:
    for ok, summary in ranks4.run(combined_jobs.verify, how, names):
        assert ok, summary


def test_deferred_batch_norm_has_the_first_replicas_statistics(ranks4: Ranks) -> None:
    for ok, summary in ranks4.run(combined_jobs.verify_deferred, 2):
        assert ok, summary


@pytest.mark.parametrize(
    ("what", "text"),
    long_after(
        1,
        ("freezes", "they differ in modes, requires_grad flags or autocast"),
        ("evaluates", "some train, others evaluate"),
    ),
)
def test_replicas_that_take_other_steps_are_told(ranks4: Ranks, what: str, text: str) -> None:
    with pytest.raises(RanksError, match=f"the replicas do not take the same step: {text}") as error:
        ranks4.run(combined_jobs.differing, what)
    assert "did not end" not in str(error.value)


@pytest.mark.parametrize(
    ("what", "text"),
    long_after(
        2,
        ("clip", "clip_grad_norm_: the last step was within no_sync()"),
        ("loss", "broadcast_loss=False, but the mesh has replicas"),
        ("scaler", "GradScaler: the last step was within no_sync()"),
    ),
)
def test_what_would_part_replicas_is_refused(ranks4: Ranks, what: str, text: str) -> None:
    assert all(text in said for said in ranks4.run(combined_jobs.refused, what))
