"""What the ranks of a mesh run where stages are sharded: by `fully_shard` along "dp", by a plan along "tp"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jobs
import torch
from mesh_jobs import mesh_of, part
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import penstock
from scaffolding.models import GPT, squared_error, token_error

Function = Callable[[nn.Module], nn.Module | None]


class Block(nn.Module):
    """Two linear layers and a norm, with dropout in between."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))
        return y


class Blocks(nn.Module):
    """Repeated blocks, with parameters of the model itself before and behind them."""

    def __init__(self, layers: int = 4, width: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(width))
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.bias
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def every_block(mesh: DeviceMesh) -> Function:
    """As for any model: a unit a block, and the rest of the stage."""

    def parallelize(stage: nn.Module) -> None:
        for module in list(stage.modules()):
            if isinstance(module, (Block, nn.TransformerEncoderLayer)):
                fully_shard(module, mesh=mesh)
        fully_shard(stage, mesh=mesh)

    return parallelize


def whole_stage(mesh: DeviceMesh) -> Function:
    return lambda stage: fully_shard(stage, mesh=mesh)


def half_precision(mesh: DeviceMesh) -> Function:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return lambda stage: fully_shard(stage, mesh=mesh, mp_policy=policy)


def by_plan(mesh: DeviceMesh) -> Function:
    """Each block's two layers, by columns and by rows; all else whole on every rank."""

    def parallelize(stage: nn.Module) -> None:
        for module in list(stage.modules()):
            if isinstance(module, Block):
                parallelize_module(module, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    return parallelize


def by_sequence(mesh: DeviceMesh) -> Function:
    """As `by_plan`; between them the activations are divided by rows, too, which a stage's ends do not see."""
    whole, rows = Replicate(), Shard(0)
    plans = (
        {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=rows),
            "down": RowwiseParallel(output_layouts=rows),
        },
        PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(rows,), use_local_output=True),
        PrepareModuleOutput(output_layouts=(rows,), desired_output_layouts=(whole,)),
    )

    def parallelize(stage: nn.Module) -> None:
        for module in list(stage.modules()):
            if isinstance(module, Block):
                for plan in plans:
                    parallelize_module(module, mesh, plan)

    return parallelize


class Seen(NamedTuple):
    losses: list[Tensor]
    norms: list[Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    evaluated: Tensor
    rows: list[str]
    sharded: bool
    share: dict[int, float]


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(12, 8, generator=generator), torch.randn(12, 8, generator=generator)


def train(
    rank: int, shape: tuple[int, ...], names: tuple[str, ...], how: str, steps: int, options: dict[str, Any]
) -> Seen:
    """Some steps; whole gradients of the last one, and whole weights."""
    mesh = mesh_of(shape, names)
    torch.manual_seed(0)
    model = Blocks(layers=options.pop("layers", 4), dropout=options.pop("dropout", 0.1))
    accumulate = options.pop("accumulate", 1)
    x, y = inputs()
    if "dp" in names:
        x, y = part((x, y), mesh.get_local_rank("dp"), mesh.size(names.index("dp")))
    function = None
    if how:
        axis = "dp" if how in ("every_block", "whole_stage", "half_precision") else "tp"
        makers = {f.__name__: f for f in (every_block, whole_stage, half_precision, by_plan, by_sequence)}
        function = makers[how](mesh[axis])
    with penstock.pipeline(model, (x,), loss=squared_error, seed=3, mesh=mesh, parallelize=function, **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        losses, norms = [], []
        for _ in range(steps):
            optimizer.zero_grad()
            with pipe.no_sync():
                for _ in range(accumulate - 1):
                    pipe.step(x, target=y)
            losses.append(pipe.step(x, target=y).loss)
            norms.append(pipe.clip_grad_norm_(0.1))
            gradients = {name: whole(p.grad) for name, p in pipe.named_parameters() if p.grad is not None}
            optimizer.step()
        named = dict(pipe.named_parameters())
        return Seen(
            losses,
            norms,
            gradients,
            {name: whole(p.detach()) for name, p in named.items()},
            pipe.evaluate(x, target=y).loss,
            [str(a) for a in pipe.schedule.rows[mesh.get_local_rank("pp")]],
            any(isinstance(p, DTensor) for p in named.values()),
            pipe.deferred_weight_grad_fraction,
        )


def whole(tensor: Tensor) -> Tensor:
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.clone()


class Sliced(nn.Module):
    """Its output is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks(dropout=0.0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.blocks(x)
        return y[:, :5]


def loss_in_place(output: Tensor, target: Tensor) -> Tensor:
    return squared_error(output.mul_(2.0), target)


def view_updated(rank: int, shards: bool) -> dict[str, Tensor | None]:
    """Gradients of a model of one stage whose loss updates a view in place."""
    mesh = mesh_of((4, 1), ("dp", "pp"))
    torch.manual_seed(0)
    x, y = part(inputs(), mesh.get_local_rank("dp"), 4)
    function = whole_stage(mesh["dp"]) if shards else None
    with penstock.pipeline(Sliced(), (x,), loss=loss_in_place, microbatches=3, mesh=mesh, parallelize=function) as pipe:
        pipe.step(x, target=y[:, :5])
        return {name: None if p.grad is None else whole(p.grad) for name, p in pipe.named_parameters()}


def replicate_children(mesh: DeviceMesh) -> Function:
    def parallelize(stage: nn.Module) -> None:
        for child in stage.children():
            replicate_with_fsdp(child, mesh=mesh)

    return parallelize


def by_columns(mesh: DeviceMesh) -> Function:
    """The stage's output is a distributed tensor."""

    def parallelize(stage: nn.Module) -> None:
        plan = {name: ColwiseParallel(use_local_output=False) for name, _ in stage.named_children()}
        parallelize_module(stage, mesh, plan)

    return parallelize


def refused(rank: int, case: str) -> str:
    """The text with which a use is refused."""
    mesh = mesh_of((2, 2), ("dp", "pp"))
    torch.manual_seed(0)
    (x, y), loss = inputs(), squared_error
    model: nn.Module = Blocks()
    options: dict[str, Any] = {"parallelize": whole_stage(mesh["dp"])}
    match case:
        case "tied":
            task = jobs.tied_gpt()
            model, (x,), y, loss = GPT(), task.args, task.target, token_error
        case "copies":
            options["schedule"] = "chimera"
        case "narrow window":
            options |= {"schedule": "dualpipe-v", "microbatches": 4, "unshard_window": 1}
        case "nothing to gather":
            options |= {"unshard_window": 1, "parallelize": lambda stage: None}
        case "another module":
            options["parallelize"] = nn.Sequential
        case "a part of the mesh":
            mesh = mesh_of((2, 2, 1), ("dp_replicate", "dp_shard", "pp"))
            options["parallelize"] = whole_stage(mesh["dp_shard"])
        case "replicated by FSDP":
            options["parallelize"] = replicate_children(mesh["dp"])
        case "sharded before":
            model = fully_shard(model, mesh=mesh["dp"])
        case "no names":
            options["parallelize"] = whole_stage(DeviceMesh("cpu", torch.arange(4)))
        case "distributed output":
            mesh = mesh_of((2, 2), ("pp", "tp"))
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            options["parallelize"] = by_columns(mesh["tp"])
    try:
        with penstock.pipeline(model, (x,), loss=loss, mesh=mesh, **{"microbatches": 2, **options}) as pipe:
            pipe.step(x, target=y)
    except penstock.PenstockError as error:
        if case == "distributed output":
            raise  # the other ranks end with it, and answer nothing
        return f"{type(error).__name__}: {error}"
    return ""
