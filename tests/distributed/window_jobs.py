"""What the ranks of a mesh run where `fully_shard` stages are gathered within a window, and what they see."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from mesh_jobs import mesh_of, part
from shard_jobs import Block, Blocks, inputs, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import penstock
from penstock.schedule.timeline import Timeline
from scaffolding.models import squared_error


class Seen(NamedTuple):
    """Of the last step.

    Attributes:
        gathered: in each forward and backward of a block: its stage, and all stages whose parameters are in memory.
        left: the stages whose parameters are in memory after the step.
        timeline: of all ranks of this process's pipeline.
    """

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    evaluated: Tensor
    schedule: str
    gathered: list[tuple[int, frozenset[int]]]
    left: frozenset[int]
    timeline: Timeline | None
    share: dict[int, float]


class Gathered:
    """Shards stages, and looks at the memory of each one's whole parameters whenever a block runs.

    Args:
        half: blocks compute in bfloat16 and reduce in float32.
        compiled: blocks are compiled.
    """

    def __init__(self, mesh: DeviceMesh, *, half: bool, compiled: bool) -> None:
        dtype = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if half else {}
        self._shard = partial(fully_shard, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtype))
        self._compiled = compiled
        self._whole: dict[int, list[Tensor]] = {}
        self.seen: list[tuple[int, frozenset[int]]] = []

    def shard(self, stage: nn.Module) -> None:
        number = len(self._whole)
        self._whole[number] = []
        for module in list(stage.modules()):
            if isinstance(module, Block):
                self._shard(module)
                if self._compiled:
                    module.compile(backend="aot_eager")
                module.register_forward_hook(lambda module, _, output: self._look(number, module, output))
        self._shard(stage)

    def now(self) -> frozenset[int]:
        every = self._whole.items()
        return frozenset(n for n, held in every if any(t.untyped_storage().size() for t in held))

    def _look(self, number: int, module: nn.Module, output: Tensor) -> None:
        mine = self._whole[number]
        mine += [p for p in module.parameters() if not any(p is other for other in mine)]
        self.seen.append((number, self.now()))
        if output.requires_grad:
            output.register_hook(lambda _: self.seen.append((number, self.now())))


def train(rank: int, window: int | None, steps: int, rows: list[int], options: dict[str, Any]) -> Seen:
    """Some steps, in which replica i has `rows[i]` rows, then an evaluation."""
    mesh = mesh_of((2, 2), ("dp", "pp"))
    torch.manual_seed(0)
    model = Blocks(layers=options.pop("layers"), dropout=options.pop("dropout", 0.1))
    replica = mesh.get_local_rank("dp")
    x, y = part(inputs(), replica, 2)
    gathered = Gathered(mesh["dp"], half=options.pop("half", False), compiled=options.pop("compiled", False))
    options = {"loss": squared_error, "seed": 3, "mesh": mesh, "parallelize": gathered.shard, **options}
    with penstock.pipeline(model, (x,), unshard_window=window, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            gathered.seen.clear()
            result = pipe.step(x[: rows[replica]], target=y[: rows[replica]], timeline=True)
            losses.append(result.loss)
            gradients = {name: whole(p.grad) for name, p in pipe.named_parameters() if p.grad is not None}
            optimizer.step()
        seen, left = list(gathered.seen), gathered.now()
        return Seen(
            losses,
            gradients,
            pipe.evaluate(x, target=y).loss,
            str(pipe.schedule),
            seen,
            left,
            result.timeline,
            pipe.deferred_weight_grad_fraction,
        )
