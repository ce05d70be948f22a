"""Saves that go on beside the training, that fail, or that are cut off; what is refused, on every rank."""

from __future__ import annotations

import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from jobs import TASKS
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import penstock
from penstock import CheckpointError, checkpoint
from scaffolding.models import Case
from scaffolding.ranks import Ranks, RanksError
from scaffolding.refusals import refusal_of
from scaffolding.representatives import long_after

pytestmark = pytest.mark.distributed


class Holds:
    """Something to save that says whether it was loaded."""

    def __init__(self, value: Any = 0, fails: bool = False) -> None:
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

    with mock.patch.object(FileSystemWriter, "write_data", write_data):
        yield


class Container(torch.optim.SGD):
    """As torchtitan's `OptimizersContainer`: its own state is empty, and its state dict is flat."""

    def state_dict(self) -> dict[str, Any]:
        return {"param_groups.0.weight.lr": 0.1}


def refused_everywhere(rank: int, folder: Path) -> dict[str, tuple[str, bool]]:
    """What calls say here that are wrong, some of them on one rank alone, and whether anything was changed."""
    with training() as (task, pipe, optimizer):
        step(task, pipe, optimizer)
        path = checkpoint.save(folder, pipe, optimizer, stateful={"one": Holds(1)})
        step(task, pipe, optimizer)
        checkpoint.save(folder / "weights", pipe)
        (folder / "file").write_text("")
        parameters = list(pipe.parameters())
        groups = torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:]}])
        regrouped = torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}])
        checkpoint.save(folder / "groups", pipe, groups)
        foreign = torch.optim.AdamW([*parameters, torch.nn.Parameter(torch.ones(3))])
        fewer = torch.optim.AdamW(parameters[1:])
        averages = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}
        checkpoint.save(folder / "averages", pipe, {"adam": optimizer}, stateful={"ema": averages})
        flat = Holds({"average": torch.cat([p.detach().flatten() for p in parameters])})
        wrapped, held = Holds({"inner": optimizer.state_dict()}), Holds(7)
        said = {}

        def attempt(name: str, call: Callable[..., object], *args: Any, where: Path = folder, **options: Any) -> None:
            before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
            text = refusal_of(call, where, pipe, *args, **options)
            after = pipe.state_dict()
            same = all(torch.equal(after[name], tensor) for name, tensor in before.items())
            said[name] = text, same and held.value == 7 and pipe.step_count == 2

        def on(ranks: int, wrong: Any, right: Any) -> Any:
            return wrong if rank == ranks else right

        save, load = checkpoint.save, checkpoint.load
        attempt("keep", save, optimizer, keep=on(1, 0, 2))
        attempt("a foreign parameter", save, on(1, foreign, optimizer))
        attempt("more groups", save, on(1, groups, optimizer))
        attempt("no optimizer", save, on(1, None, optimizer))
        attempt("others cannot", save, optimizer, others={"one": Holds(fails=True)})
        attempt("no folder", save, optimizer, where=folder / "file")
        attempt("flat", save, stateful={"flat": flat})
        attempt("wrapped", save, stateful={"wrapped": wrapped})
        attempt("container", save, Container(parameters, lr=0.1))
        attempt("no such optimizer", save, [optimizer, "adam"])
        attempt("no such object", save, stateful={"decay": 0.9})
        attempt("not in others", load, optimizer, others={on(1, "two", "one"): held})
        attempt("another kind", load, on(1, torch.optim.SGD(parameters), optimizer), others={"one": held})
        attempt("another group", load, on(1, fewer, optimizer), others={"one": held})
        attempt("other groups", load, groups, others={"one": held})
        attempt("moved to another group", load, on(1, regrouped, groups), where=folder / "groups")
        attempt("a name", load, where=folder / "step-00000009")
        attempt("no state", load, optimizer, where=folder / "weights")
        attempt("several optimizers", load, optimizer, where=folder / "averages")
        for name, ema in (("no averages", {}), ("other averages", Holds({"lr": 0.1}))):
            attempt(name, load, {"adam": optimizer}, where=folder / "averages", stateful={"ema": ema})
        with training("convnet") as (_, other, _):
            said["another model"] = refusal_of(load, folder, other), True
        if rank == 0:
            os.truncate(path / "__1_0.distcp", 40)
        attempt("cut off", load, optimizer)
        if rank == 0:
            (path / "__1_0.distcp").unlink()
        attempt("a file that is gone", load, optimizer)
        assert load(folder / "nothing", pipe) is None
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


WRONG = {
    "keep": "ArgumentError: keep_last=0: expected an integer >= 1",
    "a foreign parameter": "optimizer: group 0 has a parameter of shape (3,) that is not one of the pipeline's",
    "more groups": "ArgumentError: optimizer: 1 groups of parameters on rank 0, but 2 groups of parameters on rank 1",
    "no optimizer": "ArgumentError: optimizer: 1 groups of parameters on rank 0, but no optimizer on rank 1",
    "others cannot": "CheckpointError: cannot save: KeyError: 'not there' (rank 0)",
    "no folder": "/file: FileExistsError: File exists (rank 0)",
    "flat": "stateful['flat']: its tensors differ between rank 0 and rank 1",
    "wrapped": "stateful['wrapped']: its tensors differ",
    "container": "optimizer: Container.state_dict() has other entries than a state for each parameter",
    "no such optimizer": "optimizer[1] is str: expected an optimizer, or in stateful=",
    "no such object": "stateful['decay'] is float: expected an optimizer, or in stateful= an object with state_dict",
    "not in others": "ArgumentError: stateful['two'] is not in ",
    "another kind": "has the state of AdamW, but the optimizer is SGD; make the same kind",
    "another group": "was in group 0 of the optimizer's groups, and is in none now",
    "other groups": "has 1 groups of parameters, but the optimizer 2",
    "moved to another group": "was in group 1 of the optimizer's groups, and is in group 0",
    "a name": "ArgumentError: there is no complete checkpoint ",
    "no state": "has no optimizer",
    "several optimizers": "which has optimizer['adam']; load it without",
    "no averages": "stateful['ema']: others['ema']/",
    "other averages": "stateful['ema']: others['ema']/",
    "another model": "was saved from another model: it lacks",
    "cut off": "is shorter than stated",
    "a file that is gone": "cannot be loaded: it lacks __1_0.distcp",
}


def test_what_is_wrong_is_refused_on_every_rank_and_changes_nothing(ranks2: Ranks, tmp_path: Path) -> None:
    every = ranks2.run(refused_everywhere, tmp_path)
    assert every[0].keys() == WRONG.keys()
    for name, part in WRONG.items():
        texts = {said[name][0] for said in every}
        assert len(texts) == 1, texts
        assert part in texts.pop(), name
        if name != "cut off":  # only reading could find it out
            assert all(said[name][1] for said in every), name


def test_trap_25_training_goes_on_while_a_copy_is_written(ranks2: Ranks, tmp_path: Path) -> None:
    for names, losses, again in ranks2.run(save_while_training, tmp_path):
        assert names == ["step-00000001", "step-00000003"]
        assert losses == again


def test_what_fails_in_the_background_is_told_on_every_rank(ranks2: Ranks, tmp_path: Path) -> None:
    every = ranks2.run(fail_in_the_background, tmp_path)
    assert every[0] == every[1]
    told = "CheckpointError: cannot write {}/step-{:08d}: OSError: No space left on device (rank 1)"
    assert every[0] == [told.format(tmp_path, n) for n in (2, 3, 4, 2)]


def test_a_second_job_is_refused_on_every_rank_until_the_first_has_ended(ranks2: Ranks, tmp_path: Path) -> None:
    with training(ranks=2) as (task, pipe, optimizer):
        for _ in range(2):
            step(task, pipe, optimizer)
            checkpoint.save(tmp_path, pipe, optimizer)
            first, second = ranks2.run(refused, tmp_path)
            assert first == second
            owner = f"process {os.getpid()} on {socket.gethostname()}, started at 20"
            assert first.startswith(f"ArgumentError: checkpoints in {tmp_path}: {owner}")
    assert ranks2.run(refused, tmp_path) == ["", ""]
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]


def test_a_full_disk_is_told_in_a_line_and_leaves_nothing(tmp_path: Path) -> None:
    """torch says "unexpected pos 704 vs 598" then."""
    with training(ranks=2) as (task, pipe, optimizer):
        step(task, pipe, optimizer)
        checkpoint.save(tmp_path, pipe, optimizer)
        step(task, pipe, optimizer)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (7000, limits[1]))
        try:
            with pytest.raises(CheckpointError) as told:  # noqa: PT012  (either may raise)
                checkpoint.save(tmp_path, pipe, optimizer, blocking=False)
                checkpoint.wait_for_save(pipe)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert str(told.value) == f"cannot write {tmp_path}/step-00000002: OSError: File too large (rank 0)"
        assert sorted(os.listdir(tmp_path)) == [".owner.json", "step-00000001"]
        step(task, pipe, optimizer)
        checkpoint.save(tmp_path, pipe, optimizer, blocking=False)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000003"


def test_a_kill_in_the_middle_leaves_the_last_good_one(ranks2: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksError, match="its process ended with -9"):
        ranks2.run(die_while_saving, tmp_path)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000001"
    assert ranks2.run(go_on, tmp_path) == [(1, (tmp_path / "loss").read_text())] * 2
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000002"
    assert not list(tmp_path.glob(".step*"))


@pytest.mark.parametrize(("name", "sharded"), long_after(1, ("mlp", True), ("tied_gpt", False)))
def test_a_mesh_writes_one_checkpoint_of_whole_tensors(ranks4: Ranks, tmp_path: Path, name: str, sharded: bool) -> None:
    every = ranks4.run(save_on_a_mesh, tmp_path, name, sharded)
    alone = load_alone(tmp_path, name)
    assert {name for part in every for name in part} == alone.keys()
    assert all(torch.equal(tensor, alone[name]) for part in every for name, tensor in part.items())
