"""What the ranks run for a cell: two steps of training, against plain torch with the whole batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from mesh_jobs import mesh_of, part
from shard_jobs import Blocks, by_plan, every_block, whole
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import penstock
from penstock._base.gradients import gradient_dtype
from scaffolding.everything import everything_goes
from scaffolding.models import squared_error
from support.features import BY_NAME, FAMILIES, Cell

RATE = 0.05
TOLERANCE = 1e-6


class Seen(NamedTuple):
    """What became of a cell on one rank: empty if all is as it must be, else what is wrong; or a refusal.

    `waits`: the largest share of a stage's parameters that wait for W.
    """

    wrong: str = ""
    refused: str = ""
    waits: float = 0.0


def run(rank: int, cells: list[Cell], layers: int) -> list[Seen]:
    """All of these cells, one after the other, with a model of so many layers."""
    shapes = ({"dp": 2, "pp": 2}, {"pp": 2, "tp": 2}, {"dp": 2, "pp": 1, "tp": 2})
    meshes = {frozenset(shape): mesh_of(tuple(shape.values()), tuple(shape)) for shape in shapes}
    return [_run(cell, layers, meshes) for cell in cells]


@everything_goes
def _run(cell: Cell, layers: int, meshes: Mapping[frozenset[str], DeviceMesh]) -> Seen:
    torch._dynamo.reset()
    family = next(family for family in FAMILIES if family.name == cell[0])
    asked = [BY_NAME[name] for name in cell[1:]]
    axes = {feature.axis for feature in asked}
    mesh = meshes[frozenset({"pp"} | (axes - {""} or {"dp"}))]
    names = mesh.mesh_dim_names or ()
    torch.manual_seed(0)
    model = Blocks(layers=layers, dropout=0.0)
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    expected = _by_hand(model, layers, x, y)
    if "dp" in names:
        x, y = part((x, y), mesh.get_local_rank("dp"), 2)
    functions = {"every_block": lambda: every_block(mesh["dp"]), "by_plan": lambda: by_plan(mesh["tp"])}
    shards = [functions[feature.shards]() for feature in asked if feature.shards]

    def parallelize(stage: torch.nn.Module) -> None:
        for shard in reversed(shards):  # tensor parallelism first, as torch wants it
            shard(stage)

    options: dict[str, Any] = {key: value for feature in asked for key, value in feature.options.items()}
    options |= {"mesh": mesh, "parallelize": parallelize if shards else None, "loss": squared_error}
    try:
        with penstock.pipeline(model, (x,), schedule=family.make(mesh["pp"].size()), **options) as pipe:
            wrong = _train(pipe, x, y, expected, options.get("grad_dtype"))
            return Seen(wrong, waits=max(pipe.deferred_weight_grad_fraction.values(), default=0.0))
    except penstock.ArgumentError as error:
        return Seen(refused=str(error))


def _train(
    pipe: penstock.Pipeline, x: Tensor, y: Tensor, expected: list[dict[str, Tensor]], asked: torch.dtype | None
) -> str:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=RATE)
    for step, wanted in enumerate(expected):
        optimizer.zero_grad()
        pipe.step(x, target=y)
        for name, parameter in pipe.named_parameters():
            if parameter.grad is None:
                return f"step {step}: {name} has no gradient"
            if parameter.grad.dtype != gradient_dtype(parameter, asked):
                return f"step {step}: the gradient of {name} is in {parameter.grad.dtype}"
            difference = float((whole(parameter.grad) - wanted[name]).abs().max())
            if difference > 10 * TOLERANCE * float(wanted[name].abs().max()):
                return f"step {step}: the gradient of {name} is off by {difference}"
        optimizer.step()
    return ""


def _by_hand(model: torch.nn.Module, layers: int, x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    """The gradients of two steps of a copy of the model."""
    alone = Blocks(layers=layers, dropout=0.0)
    alone.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(alone.parameters(), lr=RATE)
    seen = []
    for _ in range(2):
        optimizer.zero_grad()
        squared_error(alone(x), y).backward()  # type: ignore[no-untyped-call]
        seen.append({name: p.grad.clone() for name, p in alone.named_parameters() if p.grad is not None})
        optimizer.step()
    return seen
