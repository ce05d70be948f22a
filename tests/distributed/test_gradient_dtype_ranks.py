"""`grad_dtype=torch.float32` on real ranks: ties and replicas are summed in float32, to the bit."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from mesh_jobs import mesh_of, part
from torch import Tensor

import penstock
from penstock.network.fabric.traffic import from_model
from penstock.runtime.gradients.sums import GradientBuffer
from scaffolding.low_precision import MICROBATCHES, TIED, Gradients, Net, assert_sums, batch, by_hand, loss
from scaffolding.ranks import Ranks
from scaffolding.refusals import refusal_of

pytestmark = pytest.mark.distributed


def train(rank: int, options: dict[str, Any], replicas: int = 1) -> Gradients:
    """The gradients that this process holds after two steps without an optimizer."""
    options = {"microbatches": MICROBATCHES, "loss_fn": loss, "grad_dtype": torch.float32} | options
    replica = 0
    if replicas > 1:
        options["mesh"] = mesh_of((replicas, torch.distributed.get_world_size() // replicas), ("dp", "pp"))
        replica = options["mesh"].get_local_rank("dp")
    with penstock.pipeline(Net(), part(batch()[:1], replica, replicas), **options) as pipe:
        for step in range(2):
            x, y = part(batch(step), replica, replicas)
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
