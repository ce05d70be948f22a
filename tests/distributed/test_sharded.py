"""Stages sharded by torch's own FSDP2 and tensor parallelism, against replicas and against one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import shard_jobs
import torch
from mesh_jobs import mesh_of, part
from shard_jobs import Blocks, Seen, by_plan, by_sequence, every_block, whole
from torch import Tensor, nn

import penstock
from penstock.schedule import (
    Action,
    Op,
    Schedule,
    check,
    generate,
    merge_last_backward,
    schedule_specs,
    split_backward,
)
from scaffolding.everything import everything_goes
from scaffolding.models import squared_error
from scaffolding.ranks import Ranks, RanksError
from scaffolding.refusals import refusal_of
from scaffolding.representatives import long_after

pytestmark = pytest.mark.distributed

DP = ((2, 2), ("dp", "pp"))
TP = ((2, 2), ("pp", "tp"))


def close(one: Tensor, other: Tensor, tolerance: float = 1e-6) -> bool:
    return float((one - other).abs().max()) <= tolerance * float(other.abs().max())


def together(seen: list[Seen], field: str) -> dict[str, Tensor]:
    return {name: value for rank in seen for name, value in getattr(rank, field).items()}


def run(ranks: Ranks, mesh: Any, how: str, steps: int = 1, **options: Any) -> list[Seen]:
    return ranks.run(shard_jobs.train, *mesh, how, steps, {"microbatches": 3, **options})


def test_a_loss_may_update_a_view_in_place_under_fsdp(ranks4: Ranks) -> None:
    """Torch's hook on the output would be lost, and, where nothing else calls it (a single stage), all gradients."""
    for sharded, plain in zip(
        ranks4.run(shard_jobs.view_updated, True), ranks4.run(shard_jobs.view_updated, False), strict=True
    ):
        assert all(got is not None and close(got, plain[name]) for name, got in sharded.items())


def test_fsdp_trains_as_replicas_do(ranks4: Ranks) -> None:
    plain, sharded = (run(ranks4, DP, how, steps=3) for how in ("", "every_block"))
    assert [rank.sharded for rank in (*plain, *sharded)] == [False] * 4 + [True] * 4
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


def test_weight_gradients_add_up_in_the_dtype_of_the_reduction(ranks4: Ranks) -> None:
    """What W adds meets in `.grad` what the next W or the last backward adds, before FSDP takes the sum away."""
    options = {"dropout": 0.0, "microbatches": 6}
    merged, split = (run(ranks4, DP, "half_precision", schedule=name, **options) for name in ("1f1b", "zb-h1"))
    assert max(max(each.share.values(), default=0.0) for each in split) > 0.5
    plain = run(ranks4, DP, "", **options)
    assert not torch.equal(split[0].losses[0], plain[0].losses[0]), "in half precision"
    whole, expected = together(plain, "gradients"), together(merged, "gradients")
    for name, gradient in together(split, "gradients").items():
        assert torch.equal(gradient, expected[name]), name
        assert gradient.dtype is torch.float32
        assert close(gradient, whole[name], 0.1), name


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


# -- features that meet on one mesh, against plain torch on one device ------------------------------------------------


FUNCTIONS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (every_block, by_plan, by_sequence)}


def model() -> Blocks:
    torch.manual_seed(0)
    return Blocks(dropout=0.0)


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 8, generator=generator)


def setting(how: str, shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[dict[str, Any], int, int]:
    """The arguments for a mesh, and which replica of how many this is."""
    mesh = mesh_of(shape, names)
    options: dict[str, Any] = {"mesh": mesh, "loss": squared_error}
    if how:
        options["parallelize"] = FUNCTIONS[how](mesh["dp" if how == "every_block" else "tp"])
    return options, mesh.get_local_rank("dp") if "dp" in names else 0, shape[0] if "dp" in names else 1


class Differs(NamedTuple):
    """From plain torch on one device: by how much of the largest entry, of all weights; and of all losses."""

    weights: float
    losses: float


@everything_goes
def train(
    rank: int, how: str, shape: tuple[int, ...], names: tuple[str, ...], sizes: list[list[int]], options: dict[str, Any]
) -> Differs:
    """Steps of momentum on batches of which each replica has its own number of rows."""
    made, replica, replicas = setting(how, shape, names)
    alone, net = model(), model()
    reference = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)
    example = batch(sizes[0][replica])[0]
    differences = []
    with penstock.pipeline(net, (example,), **made, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)
        for step, rows in enumerate(sizes):
            x, y = batch(sum(rows[:replicas]), step)
            reference.zero_grad()
            expected = squared_error(alone(x), y)
            expected.backward()  # type: ignore[no-untyped-call]
            reference.step()
            mine = [tensor.split(rows[:replicas])[replica].clone() for tensor in (x, y)]
            optimizer.zero_grad()
            loss = pipe.step(mine[0], target=mine[1]).loss
            optimizer.step()
            differences.append(float((loss - expected).abs()))
        wanted = dict(alone.named_parameters())
        got = {name: whole(p.detach()) for name, p in pipe.named_parameters()}
    return Differs(max(relative(value, wanted[name]) for name, value in got.items()), max(differences))


def relative(mine: Tensor, other: Tensor) -> float:
    return float((mine - other).abs().max() / other.abs().max())


def autocast(rank: int, how: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients of a step in half precision."""
    made, replica, replicas = setting(how, (2, 2), ("dp", "pp"))
    x, y = part(batch(12), replica, replicas)
    with penstock.pipeline(model(), (x,), microbatches=3, **made, **options) as pipe:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pipe.step(x, target=y)
        return {name: whole(p.grad) for name, p in pipe.named_parameters() if p.grad is not None}


def load(rank: int, how: str, names: tuple[str, str]) -> float:
    """How far weights are from those of an unsplit model's state that was loaded."""
    made, replica, replicas = setting(how, (2, 2), names)
    x, _ = part(batch(12), replica, replicas)
    other = model()
    nn.init.normal_(other.blocks[0].up.weight)  # type: ignore[union-attr, arg-type]
    state = other.state_dict()
    with penstock.pipeline(model(), (x,), microbatches=3, **made) as pipe:
        own = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        pipe.load_state_dict(state)
        loaded = max(float((whole(p.detach()) - state[name]).abs().max()) for name, p in pipe.named_parameters())
        pipe.load_state_dict(own, strict=False)
        assert all(torch.equal(whole(p.detach()), whole(own[name])) for name, p in pipe.named_parameters())
        return loaded


def verify(rank: int, how: str, names: tuple[str, str]) -> tuple[bool, str]:
    made, replica, replicas = setting(how, (2, 2), names)
    x, y = part(batch(12), replica, replicas)
    torch.manual_seed(0)
    report = penstock.verify(Blocks(dropout=0.1), (x,), target=y, microbatches=3, **made)
    return report.ok, report.summary()


def differing(rank: int, what: str) -> None:
    """One replica does something else than the other."""
    made, replica, replicas = setting("", (2, 2), ("dp", "pp"))
    x, y = part(batch(12), replica, replicas)
    with penstock.pipeline(model(), (x,), microbatches=3, reduction="sum", **made) as pipe:
        pipe.step(x, target=y)
        if replica:
            match what:
                case "evaluates":
                    pipe.evaluate(x, target=y)
                case "freezes":
                    pipe.model.get_parameter("blocks.0.up.weight").requires_grad_(False)
        for _ in range(2):
            pipe.step(x, target=y)


def refused(rank: int) -> list[str]:
    """The texts with which uses that would part replicas are refused, on every rank."""
    made, replica, replicas = setting("", (2, 2), ("dp", "pp"))
    x, y = part(batch(12), replica, replicas)
    said = [refusal_of(penstock.pipeline, model(), (x,), microbatches=3, broadcast_loss=False, **made)]
    with penstock.pipeline(model(), (x,), microbatches=3, **made) as pipe:
        scaler = penstock.GradScaler(pipe, init_scale=2.0)
        with pipe.no_sync():
            pipe.step(x, target=y, loss_scale=2.0)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        return [*said, refusal_of(pipe.clip_grad_norm_, 1.0), refusal_of(scaler.step, optimizer)]


CHANGING = [[8, 8], [8, 1], [2, 8]]
WAYS = long_after(1, ("every_block", DP[1]), ("by_plan", TP[1]))


def last_is_not_last() -> Schedule:
    """A schedule in which stages end in another order where the second microbatch is missing."""
    order = split_backward(generate("gpipe", 2, 2, stages_per_rank=2))
    weights = "0W0 2W0 2W1 0W1", "1W0 3W0 3W1 1W1"
    rows = [
        [*(a for a in row if a.op is not Op.W), *map(Action.parse, last.split())]
        for row, last in zip(order.rows, weights, strict=True)
    ]
    return Schedule("last is not last", order.placement, 2, rows)


@pytest.mark.parametrize(
    ("how", "sizes", "options"),
    [
        ("every_block", CHANGING, {"microbatches": 4, "schedule": "zb-v"}),
        ("", [[2, 2], [2, 1]], {"schedule": last_is_not_last()}),
    ],
)
def test_replicas_gather_and_average_in_one_order_whatever_their_rows(
    ranks4: Ranks, how: str, sizes: list[list[int]], options: dict[str, Any]
) -> None:
    for rank in ranks4.run(train, how, *DP, sizes, options):
        assert rank.weights < 1e-6
        assert rank.losses < 1e-5


def test_sequence_parallelism_with_replicas(ranks4: Ranks) -> None:
    """A norm's gradient is a term on each process that shares the sequence, which is added up before it is averaged."""
    mesh = ((2, 1, 2), ("dp", "pp", "tp"))
    for rank in ranks4.run(train, "by_sequence", *mesh, [[6, 6], [6, 6]], {"microbatches": 3}):
        assert rank.weights < 1e-6
        assert rank.losses < 1e-5


def test_sharded_stages_under_autocast(ranks4: Ranks) -> None:
    options = {"schedule": "zb-h1", "recompute": "always"}
    plain = ranks4.run(autocast, "", {})
    sharded = ranks4.run(autocast, "every_block", options)
    for one, other in zip(plain, sharded, strict=True):
        assert one.keys() == other.keys()
        for name, gradient in one.items():
            torch.testing.assert_close(other[name], gradient)


@pytest.mark.parametrize(("how", "names"), WAYS)
def test_the_unsplit_models_state_is_loaded_into_shards(ranks4: Ranks, how: str, names: Any) -> None:
    assert ranks4.run(load, how, names) == [0.0] * 4


@pytest.mark.parametrize(("how", "names"), WAYS)
def test_verify_compares_shards_as_a_whole(ranks4: Ranks, how: str, names: Any) -> None:
    for ok, summary in ranks4.run(verify, how, names):
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
        ranks4.run(differing, what)
    assert "did not end" not in str(error.value)


def test_what_would_part_replicas_is_refused(ranks4: Ranks) -> None:
    texts = [
        "broadcast_loss=False, but the mesh has replicas",
        "clip_grad_norm_: the last step was within no_sync()",
        "GradScaler: the last step was within no_sync()",
    ]
    for said in ranks4.run(refused):
        assert [text for text, words in zip(texts, said, strict=True) if text not in words] == []
