"""Stages sharded by torch's own FSDP2 and tensor parallelism, against replicas and against one device."""

from __future__ import annotations

from typing import Any

import pytest
import shard_jobs
import torch
from shard_jobs import Seen
from torch import Tensor

from penstock.schedule import Op, check, generate, merge_last_backward, schedule_specs
from scaffolding.ranks import Ranks, RanksError
from scaffolding.representatives import long_after

pytestmark = pytest.mark.distributed

DP = ((2, 2), ("dp", "pp"))
TP = ((2, 2), ("pp", "tp"))


def close(one: Tensor, other: Tensor, tolerance: float = 1e-6) -> bool:
    return float((one - other).abs().max()) <= tolerance * float(other.abs().max())


def together(seen: list[Seen], field: str) -> dict[str, Tensor]:
    return {name: value for rank in seen for name, value in getattr(rank, field).items()}


SEEN: dict[str, list[Seen]] = {}
"""What several tests look at, by what was asked for."""


def run(ranks: Ranks, mesh: Any, how: str, steps: int = 1, **options: Any) -> list[Seen]:
    asked = str((mesh, how, steps, sorted(options.items())))
    if asked not in SEEN:
        SEEN[asked] = ranks.run(shard_jobs.train, *mesh, how, steps, {"microbatches": 3, **options})
    return SEEN[asked]


def test_a_loss_may_update_a_view_in_place_under_fsdp(ranks4: Ranks) -> None:
    """Torch's hook on the output would be lost, and, where nothing else calls it (a single stage), all gradients."""
    for sharded, plain in zip(
        ranks4.run(shard_jobs.view_updated, True), ranks4.run(shard_jobs.view_updated, False), strict=True
    ):
        assert all(got is not None and close(got, plain[name]) for name, got in sharded.items())


def test_fsdp_trains_as_replicas_do(ranks4: Ranks) -> None:
    plain, sharded = (run(ranks4, DP, how, steps=3) for how in ("", "every_block"))
    for one, other in zip(plain, sharded, strict=True):
        assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(one.losses, other.losses, strict=True))
        assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(one.norms, other.norms, strict=True))
        assert torch.allclose(one.evaluated, other.evaluated, rtol=1e-5)
    expected = together(plain, "weights")
    for name, weight in together(sharded, "weights").items():
        torch.testing.assert_close(weight, expected[name])


def test_fsdp_accumulates_over_steps_without_sync(ranks4: Ranks) -> None:
    plain, sharded = (run(ranks4, DP, how, accumulate=3) for how in ("", "every_block"))
    expected = together(plain, "gradients")
    for name, gradient in together(sharded, "gradients").items():
        assert close(gradient, expected[name], 1e-5), name


def test_a_split_backward_still_puts_weights_off_under_fsdp(ranks4: Ranks) -> None:
    sharded = run(ranks4, DP, "every_block", schedule="zb-h1", microbatches=6)
    assert all(share > 0.5 for rank in sharded for share in rank.share.values())
    row = sharded[0].rows
    assert row[0] == "0UNSHARD"
    assert row[-2:] == ["0REDUCE_GRAD", "0RESHARD"] or row[-1] == "0RESHARD"
    assert "0B5" in row, "the last backward is whole"
    assert "0I4" in row
    assert row.index("0W4") < row.index("0B5"), "all weight gradients are there before it"


def test_a_rank_holds_its_share_of_its_stage_between_steps(ranks4: Ranks) -> None:
    for mine, stage, whole in ranks4.run(shard_jobs.memory):
        assert stage < whole
        assert mine <= stage / 2 + 8


def test_weight_gradients_add_up_in_the_dtype_of_the_reduction(ranks4: Ranks) -> None:
    """What W adds meets in `.grad` what the next W or the last backward adds, before FSDP takes the sum away."""
    options = {"dropout": 0.0, "microbatches": 6}
    merged, split = (run(ranks4, DP, "half_precision", schedule=name, **options) for name in ("1f1b", "zb-h1"))
    assert max(max(each.share.values(), default=0.0) for each in split) > 0.5
    expected = together(merged, "gradients")
    for name, gradient in together(split, "gradients").items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize(("schedule", "how"), long_after(1, ("zb-h1", "by_sequence"), ("1f1b", "by_plan")))
def test_tensor_parallel_layers(ranks4: Ranks, schedule: str, how: str) -> None:
    dropout = 0.1 if how == "by_plan" else 0.0  # on activations that are divided, masks would be others
    plain = run(ranks4, ((4,), ("pp",)), "", steps=2, dropout=dropout)
    split = run(ranks4, TP, how, steps=2, schedule=schedule, dropout=dropout)
    assert all(rank.sharded for rank in split)
    for rank in split:
        torch.testing.assert_close(rank.losses, plain[0].losses)
        torch.testing.assert_close(rank.norms, plain[0].norms)
        torch.testing.assert_close(rank.evaluated, plain[0].evaluated)
    expected = together(plain, "weights")
    for name, weight in together(split, "weights").items():
        torch.testing.assert_close(weight, expected[name])
    for rank in (0, 2):
        one, other = split[rank].weights, split[rank + 1].weights
        assert all(torch.equal(value, other[name]) for name, value in one.items()), "equal on both shares"


@pytest.mark.parametrize(
    ("case", "text"),
    long_after(
        5,
        ("tied", "which stages [0, 1] share; leave it whole"),
        ("a part of the mesh", "the batch is divided along 'dp_replicate' as well"),
        ("nothing to gather", "unshard_window=1: parallelize= applied fully_shard to no stage; leave"),
        ("no names", "over a mesh without mesh_dim_names"),
        ("sharded before", "model: fully_shard or replicate was applied before the pipeline was made (FSDPBlocks)"),
        ("copies", "works on one copy of each stage"),
        ("another module", "parallelize returned a Sequential for stage"),
        ("narrow window", "OVERLAP_F_B, which needs 2 stages at once; pass at least 2"),
        ("replicated by FSDP", "parallelize applied torch's replicate to stage 0 (module"),
    ),
)
def test_what_would_be_wrong_is_refused(ranks4: Ranks, case: str, text: str) -> None:
    assert any(text in said for said in ranks4.run(shard_jobs.refused, case))


def test_a_distributed_tensor_cannot_leave_a_stage(ranks4: Ranks) -> None:
    with pytest.raises(RanksError, match=r"leaves stage 0 as a DTensor, of which each process holds a\s+part"):
        ranks4.run(shard_jobs.refused, "distributed output")


@pytest.mark.parametrize("schedule", [g.name for g in schedule_specs()])
def test_the_last_backward_is_whole_in_every_schedule(schedule: str) -> None:
    order = generate(schedule, 4, 8)
    changed = merge_last_backward(order, set(range(order.stages)))
    assert [v for v in check(changed) if v.fatal] == []
    for row in changed.rows:
        for stage in {action.stage for action in row}:
            backwards = [a for a in row if a.stage == stage and a.op.is_backward]
            if backwards:
                assert backwards[-1].op is Op.B
