"""What the ranks of a mesh run: pipelines with replicas, each of which has a part of the batch."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import jobs
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import penstock
from scaffolding.models import GPT, ConvNet, squared_error, token_error
from scaffolding.refusals import refusal_of


@cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Made once a process: torch never gives a mesh's groups back, and each has a thread that polls."""
    return DeviceMesh("cpu", torch.arange(dist.get_world_size()).view(shape), mesh_dim_names=names)


def part(tree: Any, replica: int, replicas: int) -> Any:
    """One replica's rows."""
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.chunk(replicas)[replica].clone(), tree)


class Verified(NamedTuple):
    ok: bool
    summary: str
    worst: float
    equal: list[str]
    replicas: int
    kinds: list[str]


def verify(rank: int, name: str, shape: tuple[int, int], options: dict[str, Any]) -> Verified:
    """Each replica's rows in a pipeline of its own, against all rows on one device."""
    mesh = mesh_of(shape, ("dp", "pp"))
    task = jobs.TASKS[name]()
    replica = mesh.get_local_rank("dp")
    args, kwargs, target = (part(tree, replica, shape[0]) for tree in (task.args, task.kwargs, task.target))
    report = penstock.verify(
        task.model, args, target=target, loss_fn=task.loss, kwargs=kwargs, exact=True, mesh=mesh, **options
    )
    worst = max((row.max_difference / row.max_reference for row in report.rows if row.max_reference), default=0.0)
    equal = [f"{row.kind} {row.name}" for row in report.rows if row.verdict == "equal"]
    return Verified(
        report.ok, report.summary(), worst, equal, report.replicas, sorted({row.kind for row in report.rows})
    )


class Trained(NamedTuple):
    losses: list[Tensor]
    norms: list[Tensor]
    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    global_batch: int


def train(
    rank: int,
    name: str,
    shape: tuple[int, int] | None,
    steps: int,
    options: dict[str, Any],
    accumulate: int = 1,
    set_to_none: bool = True,
) -> Trained:
    """Some steps of momentum with clipping. Without a shape: all ranks are one pipeline, which has the whole batch."""
    task = jobs.TASKS[name]()
    replica, replicas = 0, 1
    args, target = task.args, task.target
    if shape is not None:
        mesh = mesh_of(shape, ("dp", "pp"))
        options = {**options, "mesh": mesh}
        replica, replicas = mesh.get_local_rank("dp"), shape[0]
        torch.manual_seed(100 * replica)
        if replica:
            for parameter in task.model.parameters() if isinstance(task.model, nn.Module) else ():
                parameter.data.add_(1.0)  # only the first replica's values count
        args, target = part((args, target), replica, replicas)
    with penstock.pipeline(task.model, args, loss=task.loss, seed=0, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)
        losses, norms = [], []
        for _ in range(steps):
            optimizer.zero_grad(set_to_none)
            with pipe.no_sync():
                for _ in range(accumulate - 1):
                    pipe.step(*args, target=target)
            losses.append(pipe.step(*args, target=target).loss)
            norms.append(pipe.clip_grad_norm_(0.5))
            optimizer.step()
        return Trained(
            losses,
            norms,
            {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()},
            {name: buffer.clone() for name, buffer in pipe.named_buffers()},
            pipe.global_batch,
        )


def gradients(rank: int, plan: list[bool], name: str = "tied_gpt", freezes: bool = False) -> dict[str, Tensor]:
    """Steps of which some average over replicas and some do not; the gradients at the end.

    `freezes`: weights are frozen before the last step, and biases are not.
    """
    mesh = mesh_of((2, 2), ("dp", "pp"))
    task = jobs.TASKS[name]()
    args, target = part((task.args, task.target), mesh.get_local_rank("dp"), 2)
    with penstock.pipeline(task.model, args, loss=task.loss, microbatches=3, mesh=mesh) as pipe:
        for number, averages in enumerate(plan, 1):
            for each, parameter in pipe.model.named_parameters() if freezes and number == len(plan) else ():
                parameter.requires_grad_(not each.endswith("weight"))
            if averages:
                pipe.step(*args, target=target)
            else:
                with pipe.no_sync():
                    pipe.step(*args, target=target)
        return {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}


def masked(rank: int, shape: tuple[int, int]) -> tuple[Tensor, dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """Replicas whose targets count differently many tokens; the loss and gradients, and those of one device."""
    mesh = mesh_of(shape, ("dp", "pp"))
    task = jobs.tied_gpt()
    target = task.target.clone()
    target[: len(target) // 2, 1:] = -100
    replica = mesh.get_local_rank("dp")
    args, mine = part((task.args, target), replica, shape[0])
    reference = GPT()
    reference.load_state_dict(task.model.state_dict())  # type: ignore[union-attr]
    expected = token_error(reference(*task.args), target)
    expected.backward()  # type: ignore[no-untyped-call]
    options = {"loss": token_error, "microbatches": 2, "reduction": lambda t: (t != -100).sum()}
    with penstock.pipeline(task.model, args, mesh=mesh, **options) as pipe:
        loss = pipe.step(*args, target=mine).loss
        got = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    return loss, got, expected.detach(), {name: wanted[name] for name in got}


def other_rows(rank: int) -> str:
    mesh = mesh_of((2, 2), ("dp", "pp"))
    task = jobs.mlp()
    args = (task.args[0][: 8 + 2 * mesh.get_local_rank("dp")],)
    return refusal_of(penstock.pipeline, task.model, args, loss=task.loss, microbatches=2, mesh=mesh)


def batch_norm(rank: int) -> dict[str, Tensor]:
    """Buffers on each replica, whose rows differ."""
    mesh = mesh_of((2, 2), ("dp", "pp"))
    torch.manual_seed(mesh.get_local_rank("dp"))
    x, y = torch.randn(6, 3, 6, 6), torch.randn(6, 3)
    with penstock.pipeline(ConvNet(), (x,), loss=squared_error, microbatches=3, mesh=mesh) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
        return {name: buffer.clone() for name, buffer in pipe.named_buffers()}
