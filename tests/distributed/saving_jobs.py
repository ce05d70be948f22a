"""Saves in the background, and arguments that are wrong on one rank only, as the ranks of a pool run them."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jobs import TASKS
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import penstock
from penstock import checkpoint
from scaffolding.models import Case
from scaffolding.refusals import refusal_of


class Holds:
    """Something to save that says whether it was loaded."""

    def __init__(self, value: int = 0, fails: bool = False) -> None:
        self.value, self.fails = value, fails

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise KeyError("not there")
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@contextmanager
def training(name: str = "mlp", **options: Any) -> Iterator[tuple[Case, penstock.Pipeline, torch.optim.Optimizer]]:
    task = TASKS[name]()
    with penstock.pipeline(task.model, task.args, task.kwargs, loss=task.loss, microbatches=4, **options) as pipe:
        yield task, pipe, torch.optim.AdamW(pipe.parameters(), lr=1e-2)


def step(task: Case, pipe: penstock.Pipeline, optimizer: torch.optim.Optimizer) -> float:
    result = pipe.step(*task.args, target=task.target, **task.kwargs)
    optimizer.step()
    optimizer.zero_grad()
    return float(result.loss)


@contextmanager
def writing(act: Callable[[], None]) -> Iterator[None]:
    """Calls `act` before this process writes what it holds."""
    write = FileSystemWriter.write_data

    def write_data(*args: Any, **kwargs: Any) -> Any:
        act()
        return write(*args, **kwargs)

    FileSystemWriter.write_data = write_data  # type: ignore[method-assign]
    try:
        yield
    finally:
        FileSystemWriter.write_data = write  # type: ignore[method-assign]


def wrong_on_one_rank(rank: int, folder: Path) -> dict[str, tuple[str, bool]]:
    """What each call says here that has a wrong argument on one rank alone, and whether anything was changed."""
    with training() as (task, pipe, optimizer):
        step(task, pipe, optimizer)
        path = checkpoint.save(folder, pipe, optimizer, stateful={"one": Holds(1)})
        step(task, pipe, optimizer)
        parameters = list(pipe.parameters())
        groups = torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}])
        foreign = torch.optim.AdamW([*parameters, torch.nn.Parameter(torch.ones(3))])
        fewer = torch.optim.AdamW(parameters[1:])
        held = Holds(7)
        said = {}

        def attempt(name: str, call: Callable[..., object], *args: Any, **options: Any) -> None:
            before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
            text = refusal_of(call, folder, pipe, *args, **options)
            after = pipe.state_dict()
            same = all(torch.equal(after[name], tensor) for name, tensor in before.items())
            said[name] = text, same and held.value == 7 and pipe.step_count == 2

        def on(ranks: int, wrong: Any, right: Any) -> Any:
            return wrong if rank == ranks else right

        attempt("keep", checkpoint.save, optimizer, keep=on(1, 0, 2))
        attempt("a foreign parameter", checkpoint.save, on(1, foreign, optimizer))
        attempt("more groups", checkpoint.save, on(1, groups, optimizer))
        attempt("no optimizer", checkpoint.save, on(1, None, optimizer))
        attempt("others cannot", checkpoint.save, optimizer, others={"one": Holds(fails=True)})
        attempt("not in others", checkpoint.load, optimizer, others={on(1, "two", "one"): held})
        attempt("another kind", checkpoint.load, on(1, torch.optim.SGD(parameters), optimizer), others={"one": held})
        attempt("another group", checkpoint.load, on(1, fewer, optimizer), others={"one": held})
        attempt("other groups", checkpoint.load, groups, others={"one": held})
        attempt("a name", lambda folder, *args: checkpoint.load(folder / "step-00000009", *args))
        if rank == 0:
            os.truncate(path / "__1_0.distcp", 40)
        attempt("cut off", checkpoint.load, optimizer)
        if rank == 0:
            (path / "__1_0.distcp").unlink()
        attempt("a file that is gone", checkpoint.load, optimizer)
        step(task, pipe, optimizer)  # the pipeline is as good as before
        return said


def save_while_training(rank: int, folder: Path) -> tuple[list[str], list[float], list[float]]:
    """Two saves in the background: what is written to first waits until training has gone on.

    Returns what is in the folder while it waits, and once all is written; the losses after the first save, and those of
    the same steps from what it has written.
    """
    with training("dropout") as (task, pipe, optimizer):
        step(task, pipe, optimizer)
        goes_on = threading.Event()
        with writing(lambda: _wait(goes_on)):
            path = checkpoint.save(folder, pipe, optimizer, extra="first", blocking=False)
            losses = [step(task, pipe, optimizer) for _ in range(2)]
            meanwhile = checkpoint.latest(folder)
            goes_on.set()
            checkpoint.save(folder, pipe, optimizer, extra="second", blocking=False)
        assert path.exists(), "the second save waited for the first"
    assert checkpoint.latest(folder) == folder / "step-00000003", (
        "the pipeline waited for the second when it was closed"
    )
    assert meanwhile is None
    with training("dropout") as (task, pipe, optimizer):
        restored = checkpoint.load(path, pipe, optimizer)
        assert restored is not None
        assert restored.extra == "first"
        return sorted(os.listdir(folder)), losses, [step(task, pipe, optimizer) for _ in range(2)]


def _wait(event: threading.Event) -> None:
    assert event.wait(60)


def fail_in_the_background(rank: int, folder: Path) -> list[str]:
    """A disk that is full on rank 1: what `finish`, the next save and the end of the pipeline say."""
    said = []

    def fail() -> None:
        if rank == 1:
            raise OSError(28, "No space left on device")

    def close() -> None:
        with writing(fail), training() as (task, pipe, optimizer):
            step(task, pipe, optimizer)
            step(task, pipe, optimizer)
            checkpoint.save(folder, pipe, optimizer, blocking=False)

    with training() as (task, pipe, optimizer):
        step(task, pipe, optimizer)
        checkpoint.save(folder, pipe, optimizer)
        step(task, pipe, optimizer)
        for call in (checkpoint.wait_for_save, lambda pipe: checkpoint.save(folder, pipe, blocking=False)):
            with writing(fail):
                checkpoint.save(folder, pipe, optimizer, blocking=False)
                step(task, pipe, optimizer)
                said.append(refusal_of(call, pipe))
        with writing(fail):
            said.append(refusal_of(checkpoint.save, folder, pipe, optimizer))
        assert checkpoint.wait_for_save(pipe) is None
        assert not list(folder.glob(".step*")), "a save that failed leaves nothing"
    said.append(refusal_of(close))
    assert checkpoint.latest(folder) == folder / "step-00000001"
    return said


def die_while_saving(rank: int, folder: Path) -> None:
    """Rank 1 is killed once it has written a part of its second checkpoint."""
    with training() as (task, pipe, optimizer):
        step(task, pipe, optimizer)
        checkpoint.save(folder, pipe, optimizer, blocking=False)
        losses = [step(task, pipe, optimizer)]
        checkpoint.wait_for_save(pipe)
        if rank == 0:
            (folder / "loss").write_text(losses[0].hex())

        def fall() -> None:
            if rank == 1:
                (folder / ".step-00000002.new" / "__1_0.distcp").write_bytes(b"a part")
                os.kill(os.getpid(), signal.SIGKILL)

        with writing(fall):
            checkpoint.save(folder, pipe, optimizer, blocking=False)
            checkpoint.wait_for_save(pipe)


def refused(rank: int, folder: Path) -> str:
    """What a save says that another job refuses, and nothing if it does not; training goes on."""
    with training() as (task, pipe, optimizer):
        step(task, pipe, optimizer)
        said = refusal_of(checkpoint.save, folder, pipe, optimizer, blocking=False)
        step(task, pipe, optimizer)
    return said


def go_on(rank: int, folder: Path) -> tuple[int, str]:
    with training() as (task, pipe, optimizer):
        restored = checkpoint.load(folder, pipe, optimizer)
        assert restored is not None
        loss = step(task, pipe, optimizer)
        checkpoint.save(folder, pipe, optimizer)
        return restored.step, loss.hex()


def held(pipe: penstock.Pipeline) -> dict[str, Tensor]:
    return {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
        for name, tensor in pipe.state_dict().items()
    }


def train_in_groups(
    rank: int, folder: Path, steps: int, options: dict[str, Any], save_at: int | None
) -> tuple[list[str], list[int], dict[str, Tensor]]:
    """Groups by the parameters' names, noise from the process's own generators, and a scaler.

    Goes on from a checkpoint unless it saves one. Returns the losses, the sizes of this rank's groups, and what it
    holds.
    """
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    task = TASKS["dropout"]()
    with penstock.pipeline(task.model, task.args, loss=task.loss, microbatches=4, seed=0, **options) as pipe:
        first = [p for name, p in pipe.named_parameters() if name.startswith("0.")]
        biases = [p for name, p in pipe.named_parameters() if name.endswith("bias") and not name.startswith("0.")]
        weights = [p for name, p in pipe.named_parameters() if name.endswith("weight") and not name.startswith("0.")]
        groups = [
            {"params": first, "lr": 3e-3},
            {"params": weights, "weight_decay": 0.3},
            {"params": biases, "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [3e-3, 1e-2, 1e-2], total_steps=20)
        scaler = torch.amp.GradScaler("cpu", growth_interval=2)
        scaler.scale(torch.zeros(()))  # its tensors are made at its first use
        others = {"scheduler": scheduler, "scaler": scaler, "generators": checkpoint.RngState()}
        if save_at is None:
            for generator in (random.random, np.random.random, lambda: torch.rand(5)):
                generator()  # a program that starts in another way
            assert checkpoint.load(folder, pipe, optimizer, stateful=others) is not None
            assert scaler.get_scale() == 2.0**15
            assert [group["weight_decay"] for group in optimizer.param_groups] == [1e-2, 0.3, 0.0]
        losses = []
        while pipe.step_count < steps:
            noise = random.random() + np.random.random() + torch.rand(9)
            result = pipe.step(task.args[0] + noise, target=task.target)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(float(result.loss).hex())
            if pipe.step_count == save_at:
                scaler.update(2.0**15)
                checkpoint.save(folder, pipe, optimizer, stateful=others)
        return losses, [len(group["params"]) for group in optimizer.param_groups], held(pipe)


def save_on_a_mesh(rank: int, folder: Path, name: str, sharded: bool) -> dict[str, Tensor]:
    """Two replicas of two ranks each, which write one checkpoint and one file of the model; read back by all.

    `sharded`: each replica of a stage holds half of each parameter.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    options = {"parallelize": lambda stage: fully_shard(stage, mesh=mesh["dp"])} if sharded else {}
    with training(name, mesh=mesh, **options) as (task, pipe, optimizer):
        step(task, pipe, optimizer)
        before = held(pipe)
        checkpoint.save(folder, pipe, optimizer, blocking=False)
        checkpoint.export_safetensors(folder / "model.safetensors", pipe)
        step(task, pipe, optimizer)
        checkpoint.load(folder, pipe, optimizer)
        assert all(torch.equal(tensor, before[name]) for name, tensor in held(pipe).items())
        return before


def load_alone(folder: Path, name: str) -> dict[str, Tensor]:
    with training(name) as (_, pipe, optimizer):
        assert checkpoint.load(folder, pipe, optimizer) is not None
        loaded = held(pipe)
        checkpoint.import_safetensors(folder / "model.safetensors", pipe)
        assert all(torch.equal(tensor, loaded[name]) for name, tensor in pipe.state_dict().items())
        return loaded
