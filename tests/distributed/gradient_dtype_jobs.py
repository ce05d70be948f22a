"""What ranks run to accumulate gradients of a model in bfloat16 in float32."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import torch
from mesh_jobs import mesh_of, part
from shard_jobs import Blocks, by_sequence, every_block
from torch import Tensor

import penstock
from penstock.runtime.gradients.distribution import local_gradient
from penstock.runtime.gradients.sums import GradientSum
from scaffolding.low_precision import MICROBATCHES, Gradients, Net, batch, loss
from scaffolding.models import squared_error
from scaffolding.refusals import refusal_of


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
            name: parameter.grad for name, parameter in pipe.session.split.all_parameters() if not parameter.is_meta
        }


def in_turn(rank: int) -> list[Tensor]:
    """Gradients within `no_sync` and then averaged, against those of two steps that average."""
    found = []
    mesh = mesh_of((2, 1), ("dp", "pp"))
    options = {"microbatches": MICROBATCHES, "loss_fn": loss, "grad_dtype": torch.float32, "mesh": mesh}
    for waits in (True, False):
        with penstock.pipeline(Net(), part(batch()[:1], rank, 2), **options) as pipe:
            for step in range(2):
                x, y = part(batch(step), rank, 2)
                if waits and step == 0:
                    with pipe.no_sync():
                        pipe.step(x, target=y)
                else:
                    pipe.step(x, target=y)
            found.append(torch.cat([p.grad.flatten().float() for p in pipe.parameters() if p.grad is not None]))
    return found


def divided_by_sequence(rank: int) -> dict[str, float]:
    """How far gradients are from the float32 sum of what single microbatches give, if they are not equal."""
    mesh = mesh_of((2, 2), ("pp", "tp"))
    x, y = torch.randn(16, 8).bfloat16(), torch.randn(16, 8).bfloat16()
    found: list[dict[str, Tensor]] = []
    for dtype in (torch.float32, None):
        torch.manual_seed(0)
        model = Blocks(dropout=0.0).bfloat16()
        sums: dict[str, Tensor] = {}
        options = {"mesh": mesh, "parallelize": by_sequence(mesh["tp"]), "grad_dtype": dtype}
        count = MICROBATCHES if dtype else 1
        parts = [(x, y)] if dtype else list(zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True))
        with penstock.pipeline(
            model, parts[0][:1], loss_fn=squared_error, schedule="zb-h1", microbatches=count, **options
        ) as pipe:
            for rows, target in parts:
                pipe.step(rows, target=target, loss_scale=1 / len(parts))
                for name, parameter in pipe.named_parameters():
                    assert parameter.grad is not None
                    assert parameter.grad.dtype == (dtype or torch.bfloat16)
                    term = local_gradient(parameter)
                    assert term is not None
                    sums[name] = sums[name] + term.float() if name in sums else term.float()
                    parameter.grad = None
        found.append(sums)
    mine, expected = found
    assert mine.keys() == expected.keys()
    away = {name: float((mine[name] - other).abs().max() / other.abs().max()) for name, other in expected.items()}
    return {name: distance for name, distance in away.items() if distance}


def refusal(rank: int, case: str) -> str:
    mesh = mesh_of((2, 1), ("dp", "pp"))
    options: dict[str, Any] = {"mesh": mesh, "grad_dtype": torch.float32}
    if case == "sharded":
        options["parallelize"] = every_block(mesh["dp"])
    elif rank == 1:
        del options["grad_dtype"]
    model, x = Blocks().bfloat16(), torch.randn(8, 8).bfloat16()
    return refusal_of(penstock.pipeline, model, (x,), loss_fn=squared_error, **options)


class Bytes(NamedTuple):
    """What a process sums of gradients in a step, each sum by itself, and the gradients that it holds afterwards."""

    summed: list[int]
    held: int


def count_bytes(rank: int, options: dict[str, Any]) -> Bytes:
    """The bytes of a step of two replicas."""
    mesh = mesh_of((2, torch.distributed.get_world_size() // 2), ("dp", "pp"))
    x, y = part(batch(), mesh.get_local_rank("dp"), 2)
    summed: list[int] = []
    start = GradientSum.start

    def counted(self: GradientSum) -> None:
        start(self)
        summed.extend(buffer.nbytes for buffer in self._buffers)

    options = {"microbatches": MICROBATCHES, "loss_fn": loss, "mesh": mesh, "transport": "distributed"} | options
    with mock.patch.object(GradientSum, "start", counted), penstock.pipeline(Net(), (x,), **options) as pipe:
        pipe.step(x, target=y)
        held = sum(p.grad.nbytes for p in pipe.parameters() if p.grad is not None)
    return Bytes(sorted(summed), held)
