"""What the ranks of a pool run: module-level functions, and the small models that they build alike."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock._base.process import Process
from penstock.distributed import host_clock
from penstock.runtime.execute import clock
from penstock.runtime.execute.transport_choice import TransportChoice
from penstock.testing.transport_scripts import scripts_for
from scaffolding import models
from scaffolding.models import GPT, Case, squared_error
from scaffolding.refusals import refusal_of
from scaffolding.sleeping import SleepingBlock

ROWS = 12


def mlp() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(5) for m in (nn.Linear(9, 9), nn.Tanh())))
    return Case(model, (torch.randn(ROWS, 9),), {}, torch.randn(ROWS, 9), squared_error)


def dropout() -> Case:
    task = mlp()
    assert isinstance(task.model, nn.Sequential)
    return task._replace(model=nn.Sequential(*task.model[:4], nn.Dropout(0.3), *task.model[4:]))


def convnet() -> Case:
    return models.convnet(ROWS)


def tied_gpt(dropout: float = 0.0) -> Case:
    return models.gpt(dropout, ROWS)


class Deep(nn.Module):
    """Dropout between layers, a weight at both ends, and a mask that every stage uses: for many stages, and quick."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(9, 9) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        mask = x > -1
        for layer in self.layers:
            x = F.dropout(layer(x).tanh(), 0.2, self.training) * mask
        return F.linear(x, self.layers[0].weight)


def deep_with_dropout() -> Case:
    torch.manual_seed(0)
    return Case(Deep(), (torch.randn(ROWS, 9),), {}, torch.randn(ROWS, 9), squared_error)


def a_rank_without_parameters() -> Case:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9)]
    return Case(layers, (torch.randn(ROWS, 9),), {}, torch.randn(ROWS, 9), squared_error)


def frozen_first_stage() -> Case:
    task = mlp()
    assert isinstance(task.model, nn.Sequential)
    task.model[:4].requires_grad_(False)
    return task


TASKS: dict[str, Callable[[], Case]] = {
    **{f.__name__: f for f in (mlp, dropout, convnet, tied_gpt, deep_with_dropout, a_rank_without_parameters)},
    "tied_gpt_with_dropout": partial(tied_gpt, 0.2),
    "skips": partial(models.skips, ROWS),
    "in_place": partial(models.in_place, ROWS),
    "frozen_first_stage": frozen_first_stage,
}


def verify(rank: int, name: str, options: dict[str, Any]) -> tuple[bool, str, list[str]]:
    """Whether all is equal, in words, and the kinds of what was compared."""
    task = TASKS[name]()
    report = penstock.verify(
        task.model, task.args, target=task.target, loss_fn=task.loss, kwargs=task.kwargs, exact=True, **options
    )
    return report.ok, report.summary(), sorted({row.kind for row in report.rows})


def verify_zoo(rank: int, asked: list[tuple[str, dict[str, Any]]], options: dict[str, Any]) -> list[tuple[bool, str]]:
    """The same for each of many models of the zoo, with options of its own besides those of all."""
    from zoo import ZOO

    found = []
    for name, own in asked:
        model, args, kwargs, target, loss = ZOO[name].case()
        report = penstock.verify(model, args, target=target, loss_fn=loss, kwargs=kwargs, exact=True, **options, **own)
        found.append((report.ok, report.summary()))
    return found


class Trained(NamedTuple):
    """What one process saw. Tensors by name."""

    weights: dict[str, Tensor]
    buffers: dict[str, Tensor]
    losses: list[Tensor]
    evaluated: list[Tensor]
    needs: tuple[bool, bool]


def train(name: str, steps: int, **options: Any) -> Trained:
    """Some steps of momentum, an evaluation after each; inputs and targets only where they are needed."""
    task = TASKS[name]()
    with penstock.pipeline(task.model, task.args, task.kwargs, loss=task.loss, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9)
        args, kwargs = (task.args, task.kwargs) if pipe.needs_inputs else ((), {})
        target = task.target if pipe.needs_targets else None
        losses, evaluated = [], []
        for _ in range(steps):
            optimizer.zero_grad()
            losses.append(pipe.step(*args, target=target, **kwargs).loss)
            optimizer.step()
            evaluated.append(pipe.evaluate(*args, target=target, **kwargs).loss)
        return Trained(
            {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()},
            {name: buffer.clone() for name, buffer in pipe.named_buffers()},
            losses,
            evaluated,
            (pipe.needs_inputs, pipe.needs_targets),
        )


def train_here(rank: int, name: str, steps: int, options: dict[str, Any]) -> Trained:
    return train(name, steps, **options)


def look(rank: int, name: str, options: dict[str, Any]) -> dict[str, Any]:
    """What a step gives back, and what is where, on one rank."""
    task = TASKS[name]()
    with penstock.pipeline(task.model, task.args, task.kwargs, loss=task.loss, **options) as pipe:
        for _ in range(2):  # the second step goes over the transport that the first one set up
            result = pipe.step(*task.args, target=task.target, outputs=True, timeline=True, **task.kwargs)
        seen: dict[str, Any] = {
            "losses": result.losses,
            "held": [name for name, _ in pipe.named_parameters()],
            "devices": {name: p.device.type for name, p in pipe.model.named_parameters()},
            "meta buffers": [name for name, b in pipe.model.named_buffers() if b.is_meta],
            "timeline": result.timeline,
            "schedule": pipe.schedule,
            "transport": type(pipe.session.engine.transports[rank]).__name__,
        }
        for attribute in ("loss", "outputs"):
            try:
                seen[attribute] = getattr(result, attribute)
            except penstock.ArgumentError as error:
                seen[attribute] = str(error)
        return seen


def read_on_one_rank(rank: int, reader: int) -> list[float]:
    """Reads losses on one rank only, some of them long after, and goes on."""
    task = mlp()
    read, results = [], []
    with penstock.pipeline(task.model, task.args, loss=task.loss, microbatches=3) as pipe:
        for step in range(6):
            results.append(pipe.step(*task.args, target=task.target))
            if rank == reader and step % 2:
                read.append(float(results[-1].loss))
                read.append(float(results[step // 2].loss))
        dist.barrier()
        return read


def wrong_calls(rank: int, ranks: int) -> dict[str, str]:
    """Arguments that every rank gets wrong alike."""
    task = mlp()
    said = {}
    from torch.distributed.device_mesh import init_device_mesh

    def attempt(name: str, **options: Any) -> None:
        said[name] = refusal_of(penstock.pipeline, task.model, task.args, loss=task.loss, **options)

    attempt("ranks", ranks=ranks + 1)
    attempt("transport", transport="pigeon")
    attempt("context", mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("cp", "pp")))
    attempt("unknown axis", mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("x", "pp")))
    attempt("no axis", mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp")))
    attempt("devices", devices=["cpu"] * (ranks + 1))
    return said


def two_pipelines_side_by_side(rank: int) -> Trained:
    """Four ranks as a mesh of 2 x 2: each row trains a pipeline of its own."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    return train("tied_gpt", 3, mesh=mesh["pp"], microbatches=3)


def pruned_tied_weights(rank: int) -> list[str]:
    """A tied matrix that is another one on each rank, before the first step."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([-0.0, 3.0 + rank]))
    with penstock.pipeline(model, (torch.ones(4, 2),), loss=squared_error, microbatches=2) as pipe:
        return [value.hex() for value in dict(pipe.named_parameters())["0.weight"].flatten().tolist()]


def from_meta(rank: int, seed: int) -> dict[str, Tensor]:
    """The weights of a model that was built on the meta device."""
    with torch.device("meta"):
        model = GPT()
    task = tied_gpt()
    with penstock.pipeline(model, task.args, loss=task.loss, microbatches=3, seed=seed) as pipe:
        pipe.step(*task.args, target=task.target)
        return {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}


SCRIPTS = [script.__name__ for script in scripts_for(collectives=True)]
"""What the conformance checks run."""


def conform(rank: int, choice: TransportChoice) -> tuple[str, list[str]]:
    """The conformance checks, on the transport that a pipeline would take."""
    from penstock.distributed.world import World
    from penstock.runtime.execute.engine import Engine
    from penstock.testing import check_transport

    engine = Engine(World(2, rank, (0, 1)), [torch.device("cpu")] * 2, 0, choice)
    assert engine.control.groups is not None
    engine.control.groups.make((0, 1))  # as for a parameter that both hold
    checked = check_transport({rank: engine.transports[rank]})
    kind = type(engine.transports.pop(rank)).__name__  # the checks have closed it
    engine.close()
    return kind, checked


def memory(rank: int) -> list[bool]:
    """Which of the model's own parameters are still in memory once it is split."""
    task = mlp()
    assert isinstance(task.model, nn.Module)
    before = [weakref.ref(parameter) for parameter in task.model.parameters()]
    with penstock.pipeline(task.model, task.args, loss=task.loss, microbatches=3):
        gc.collect()
        return [ref() is not None for ref in before]


def end_early(rank: int, transport: TransportChoice, share_loss: bool) -> int:
    """The last ranks are done, and close, long before the first has taken its last gradients."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    model = nn.Sequential(SleepingBlock(0.025), nn.Linear(4, 4), nn.Linear(4, 4))
    options = {"loss": squared_error, "microbatches": 4, "transport": transport, "broadcast_loss": share_loss}
    with penstock.pipeline(model, (x,), leaf_modules=["0"], **options) as pipe:
        for _ in range(3):
            pipe.step(x, target=y)
        return pipe.step_count


def timed_on_another_host(rank: int, ahead_seconds: int) -> dict[str, list[float]]:
    """When each action started and ended, where the clock of the last rank's host is ahead of the others'."""
    here = rank == dist.get_world_size() - 1
    ahead = ahead_seconds * 10**9 if here else 0

    def now_ns() -> int:
        return time.perf_counter_ns() + ahead

    with (
        mock.patch.object(host_clock, "now_ns", now_ns),
        mock.patch.object(clock, "now_ns", now_ns),
        mock.patch.object(host_clock, "clock_name", return_value="another" if here else "one"),
    ):
        task = mlp()
        with penstock.pipeline(task.model, task.args, loss_fn=task.loss, microbatches=2) as pipe:
            while here and not pipe.session.control.watchdog.offset.nanoseconds:
                time.sleep(0.01)
            for _ in range(2):
                result = pipe.step(*task.args, target=task.target, timeline=True)
    assert result.timeline is not None
    return {str(span.action): [span.start_seconds, span.end_seconds] for span in result.timeline}


def on_two_machines(rank: int) -> tuple[list[int], tuple[bool, str, list[str]]]:
    """Which ranks this one reaches through shared memory, and what `verify` finds, where each two ranks take themselves
    for those of one machine."""
    machine = f"{Process.here().machine} {rank // 2}"
    with mock.patch.object(Process, "here", lambda here=Process.here: replace(here(), machine=machine)):
        task = mlp()
        with penstock.pipeline(task.model, task.args, loss=task.loss, microbatches=2) as pipe:
            (transport,) = pipe.session.engine.transports.values()
            neighbors = sorted(transport._neighbors.ranks)  # type: ignore[attr-defined]
        return neighbors, verify(rank, "deep_with_dropout", {"microbatches": 4})
