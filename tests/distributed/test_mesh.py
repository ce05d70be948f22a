"""Data parallelism: pipelines side by side on one mesh, against one device that has the whole batch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import mesh_jobs
import pytest
import torch
from mesh_jobs import mesh_of, part
from torch import Tensor

import penstock
from penstock.network.fabric.traffic import from_model
from penstock.runtime.gradients.sums import GradientBuffer
from penstock.schedule import generate, reduce_replicas
from scaffolding.low_precision import MICROBATCHES, TIED, Gradients, Net, assert_sums, batch, by_hand, loss
from scaffolding.ranks import Ranks
from scaffolding.refusals import refusal_of
from scaffolding.representatives import long_after

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-6


def close(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) <= TOLERANCE * float(other.abs().max())


@pytest.mark.parametrize(
    ("name", "schedule", "more"),
    long_after(
        *(3, ("deep_with_dropout", "zb-v", {}), ("frozen_first_stage", "zb-h1", {})),
        *(("convnet", "1f1b", {"deferred_batch_norm": True}), ("tied_gpt_with_dropout", "interleaved-1f1b", {})),
        ("deep_with_dropout", "dualpipe-v", {}),
    ),
)
def test_two_pipelines_of_two_give_what_one_device_gives(
    ranks4: Ranks, name: str, schedule: str, more: dict[str, Any]
) -> None:
    """Of batch norms whose statistics are deferred, the first replica's count."""
    seen = ranks4.run(mesh_jobs.verify, name, (2, 2), {"schedule": schedule, "microbatches": 6, **more})
    assert len({each.summary for each in seen}) == 1, "each process has the same report"
    assert seen[0].ok, seen[0].summary
    assert seen[0].replicas == 2
    assert {"gradient", "loss", "output"} <= set(seen[0].kinds)
    assert "loss loss" in seen[0].equal, "the loss of the whole batch, to the bit"


def test_training_is_that_of_one_pipeline_with_the_whole_batch(ranks4: Ranks) -> None:
    name = "deep_with_dropout"
    whole = ranks4.run(mesh_jobs.train, name, None, 3, {"microbatches": 4})
    for shape, microbatches in (((2, 2), 2), ((4, 1), 1)):
        parts = ranks4.run(mesh_jobs.train, name, shape, 3, {"microbatches": microbatches})
        weights = {name: value for rank in whole for name, value in rank.weights.items()}
        for rank in parts:
            assert rank.global_batch == whole[0].global_batch == 12
            assert torch.equal(rank.losses[0], whole[0].losses[0]), "the same masks, to the bit"
            assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(rank.losses, whole[0].losses, strict=True))
            assert all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(rank.norms, whole[0].norms, strict=True))
            assert all(torch.allclose(value, weights[name], atol=1e-6) for name, value in rank.weights.items())
    seen: dict[str, Tensor] = {}
    for rank in parts:
        for name, value in rank.weights.items():
            assert torch.equal(seen.setdefault(name, value), value), "replicas stay equal to the bit"


def test_clipped_training_has_the_same_bits_at_any_depth(ranks4: Ranks, ranks2: Ranks) -> None:
    deep = ranks4.run(mesh_jobs.train, "mlp", (2, 2), 4, {"microbatches": 3})
    flat = ranks2.run(mesh_jobs.train, "mlp", (2, 1), 4, {"microbatches": 3})
    weights = {name: value for rank in deep for name, value in rank.weights.items()}
    assert all(torch.equal(value, weights[name]) for name, value in flat[0].weights.items())
    assert all(torch.equal(a, b) for a, b in zip(deep[0].losses, flat[0].losses, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(deep[0].norms, flat[0].norms, strict=True))


def test_gradients_that_are_zeroed_in_place_accumulate_as_those_that_are_dropped(ranks4: Ranks) -> None:
    given: Any = ("mlp", (2, 2), 2, {"microbatches": 3, "schedule": "zb-h1"}, 2)
    for one, other in zip(*(ranks4.run(mesh_jobs.train, *given, drops) for drops in (True, False)), strict=True):
        assert all(close(value, other.weights[name]) for name, value in one.weights.items())


def test_gradients_accumulate_over_steps_with_and_without_averages(ranks4: Ranks) -> None:
    plan = [True, False, False, True, True]
    once, own, often = (ranks4.run(mesh_jobs.gradients, steps) for steps in ([True], [False], plan))
    for rank, one in enumerate(once):
        mine, others = own[rank], own[(rank + 2) % 4]
        for name, mean in one.items():
            assert close(often[rank][name], len(plan) * mean)
            assert not close(mine[name], others[name]), "without an average, the replica's own"
            assert close((mine[name] + others[name]) / 2, mean)


def test_what_is_frozen_before_the_average_is_averaged_all_the_same(ranks4: Ranks) -> None:
    once = ranks4.run(mesh_jobs.gradients, [True], "mlp")
    for one, found in zip(once, ranks4.run(mesh_jobs.gradients, [False, True], "mlp", True), strict=True):
        assert found.keys() == one.keys()
        for name, grad in found.items():
            assert close(grad, (1 if name.endswith("weight") else 2) * one[name]), name


def test_trap_21_replicas_whose_targets_count_differently(ranks4: Ranks) -> None:
    for mean, got, expected, wanted in ranks4.run(mesh_jobs.masked, (2, 2)):
        assert torch.allclose(mean, expected, rtol=1e-6)
        for name, grad in got.items():
            torch.testing.assert_close(grad, wanted[name])


def test_buffers_are_the_first_replicas_as_in_ddp(ranks4: Ranks) -> None:
    seen = ranks4.run(mesh_jobs.batch_norm)
    assert any("running_mean" in name for rank in seen for name in rank)
    for rank in range(2):
        assert seen[rank].keys() == seen[rank + 2].keys()
        assert all(torch.equal(value, seen[rank + 2][name]) for name, value in seen[rank].items())


def test_replicas_with_batches_of_other_sizes_are_refused(ranks4: Ranks) -> None:
    for said in ranks4.run(mesh_jobs.other_rows):
        assert "the example has [8, 8, 10, 10] rows on the processes 0..3" in said


def test_a_stage_is_reduced_as_soon_as_its_last_backward_is_done() -> None:
    row = [str(a) for a in reduce_replicas(generate("interleaved-1f1b", 2, 4), {*range(4)}).rows[0]]
    assert row.index("2B3") < row.index("2REDUCE_GRAD") < row.index("0B3"), "while the other stage still has work"
    assert row[-1] == "0REDUCE_GRAD"


# -- gradients in float32: ties and replicas are summed there, to the bit ---------------------------------------------


def train(rank: int, options: dict[str, Any], replicas: int = 1, waits: bool = False) -> Gradients:
    """The gradients that this process holds after two steps without an optimizer; `waits`: the first in `no_sync`."""
    options = {"microbatches": MICROBATCHES, "loss_fn": loss, "grad_dtype": torch.float32} | options
    replica = 0
    if replicas > 1:
        options["mesh"] = mesh_of((replicas, torch.distributed.get_world_size() // replicas), ("dp", "pp"))
        replica = options["mesh"].get_local_rank("dp")
    with penstock.pipeline(Net(), part(batch()[:1], replica, replicas), **options) as pipe:
        for step in range(2):
            x, y = part(batch(step), replica, replicas)
            with pipe.no_sync() if waits and step == 0 else nullcontext():
                pipe.step(x, target=y)
        return {
            name: parameter.grad
            for name, parameter in pipe.session.model_parts.all_parameters()
            if not parameter.is_meta
        }


class Bytes(NamedTuple):
    """What a process sums of gradients in a step, each sum by itself, and the gradients that it holds afterwards."""

    summed: list[int]
    held: int


def count_bytes(rank: int, options: dict[str, Any]) -> Bytes:
    """The bytes of a step of two replicas."""
    mesh = mesh_of((2, torch.distributed.get_world_size() // 2), ("dp", "pp"))
    x, y = part(batch(), mesh.get_local_rank("dp"), 2)
    summed: list[int] = []
    fill = GradientBuffer.fill

    def counted(self: GradientBuffer) -> Tensor:
        memory = fill(self)
        summed.append(memory.nbytes)
        return memory

    options = {"microbatches": MICROBATCHES, "loss_fn": loss, "mesh": mesh, "transport": "distributed"} | options
    with mock.patch.object(GradientBuffer, "fill", counted), penstock.pipeline(Net(), (x,), **options) as pipe:
        pipe.step(x, target=y)
        held = sum(p.grad.nbytes for p in pipe.parameters() if p.grad is not None)
    return Bytes(sorted(summed), held)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_tied_weight_is_summed_over_ranks_in_float32(ranks2: Ranks, schedule: str) -> None:
    expected = by_hand(steps=2)
    found = ranks2.run(train, {"schedule": schedule})
    for mine in found:
        # In a V, one rank adds the terms of the first and the last stage, as they come.
        assert_sums(mine, expected, reordered=TIED if schedule == "zb-v" else "")
    assert {name for mine in found for name in mine} == expected.keys()


def test_replicas_are_averaged_in_float32(ranks4: Ranks) -> None:
    expected = by_hand(steps=2, replicas=2)
    for mine in ranks4.run(train, {"schedule": "zb-h1"}, 2):
        assert_sums(mine, expected)
    for mine in ranks4.run(train, {"schedule": "zb-h1"}, 2, True):  # it adds the same terms in another order
        for name, grad in mine.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
def test_a_run_sums_and_holds_as_many_bytes_as_predicted(ranks4: Ranks, dtype: torch.dtype | None) -> None:
    options: dict[str, Any] = {"schedule": "1f1b", "microbatches": MICROBATCHES, "grad_dtype": dtype}
    rows = batch()[0].chunk(2)[0]
    seen = penstock.inspect(Net(), (rows,), stages=2, **options)
    sent = from_model(Net(), (rows.chunk(MICROBATCHES)[0],), hosts=4, ranks=2, traffic="pipeline", **options)
    for host, mine in enumerate(ranks4.run(count_bytes, options)):
        summed = [each.bytes for each in sent.transfers if "gradients" in each.name and host in each.ranks]
        assert mine.summed == sorted(summed)
        assert mine.held == seen.stages[host % 2].gradient_bytes


def one_without(rank: int) -> str:
    """What is said where one process alone asks for float32."""
    options = {"mesh": mesh_of((2, 1), ("dp", "pp")), "grad_dtype": None if rank else torch.float32}
    return refusal_of(penstock.pipeline, Net(), batch()[:1], loss_fn=loss, **options)


def test_every_process_asks_for_the_same(ranks2: Ranks) -> None:
    words = "grad_dtype= is ['torch.float32', 'None'] on the processes 0..1; every process must pass the same"
    assert all(words in said for said in ranks2.run(one_without))
