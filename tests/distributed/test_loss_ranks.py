"""Parameters of the loss train as in plain torch: wherever the last stage is, clipped, saved, and under replicas."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from mesh_jobs import mesh_of, part
from safetensors.torch import load_file
from torch import Tensor, nn

import penstock
from penstock import checkpoint
from scaffolding.by_hand import step_by_hand
from scaffolding.ranks import Ranks
from scaffolding.small import WIDTH, batch, mlp

pytestmark = pytest.mark.distributed


MICROBATCHES, STEPS = 4, 3


class Centers(nn.Module):
    """Cross entropy at a learned temperature, and the distance to learned centers; `seen` follows the outputs."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.centers = nn.Embedding(WIDTH, WIDTH, _weight=torch.linspace(-1, 1, WIDTH**2).view(WIDTH, WIDTH).clone())
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.lerp_(output.mean(0), 0.1)
        far = (output - self.centers(target)).square().mean()
        return F.cross_entropy(output * self.temperature.exp(), target) + 0.1 * far


def closure() -> Callable[[Tensor, Tensor], Tensor]:
    temperature = nn.Parameter(torch.tensor(0.5))
    return lambda output, target: F.cross_entropy(output * temperature.exp(), target)


class Trained(NamedTuple):
    losses: list[Tensor]
    norms: list[Tensor]
    state: dict[str, Tensor]


def data() -> tuple[Tensor, Tensor]:
    return batch(12)[0], torch.arange(12) % WIDTH


def setting(mesh: bool) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """This process's part of the batch, and what the pipeline is told of the mesh."""
    x, y = data()
    if not mesh:
        return x, y, {"microbatches": MICROBATCHES}
    grid = mesh_of((2, 2), ("dp", "pp"))
    x, y = part((x, y), grid.get_local_rank("dp"), 2)
    return x, y, {"mesh": grid, "microbatches": MICROBATCHES // 2}


def train(
    rank: int,
    make: Callable[[], Any],
    options: dict[str, Any],
    *,
    mesh: bool = False,
    steps: int = STEPS,
    folder: Path | None = None,
) -> Trained:
    """Trains; begins with what is saved in `folder`, or saves there at the end."""
    x, y, of_mesh = setting(mesh)
    losses, norms = [], []
    with penstock.pipeline(mlp(), (x,), loss_fn=make(), **of_mesh, **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        loaded = folder and checkpoint.load(folder, pipe, optimizer)
        for _ in range(steps):
            losses.append(pipe.step(x, target=y).loss)
            norms.append(pipe.clip_grad_norm_(0.5))
            optimizer.step()
            optimizer.zero_grad()
        if folder is not None and loaded is None:
            checkpoint.save(folder, pipe, optimizer)
            checkpoint.export_safetensors(folder / "model.safetensors", pipe)
        return Trained(losses, norms, {name: tensor.clone() for name, tensor in pipe.state_dict().items()})


def by_hand(steps: int = STEPS) -> Trained:
    """In plain torch, with a module as the loss."""
    model, loss, (x, y) = mlp(), Centers(), data()
    parameters = [*model.parameters(), *loss.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    losses, norms = [], []
    for _ in range(steps):
        losses.append(step_by_hand(model, (x,), y, loss, MICROBATCHES).total)
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.5, foreach=False))
        optimizer.step()
        optimizer.zero_grad()
    state = {**model.state_dict(), **{f"loss.{name}": tensor for name, tensor in loss.state_dict().items()}}
    return Trained(losses, norms, {name: tensor.clone() for name, tensor in state.items()})


def verify(rank: int, make: Callable[[], Any], mesh: bool) -> tuple[bool, str, list[str]]:
    x, y, options = setting(mesh)
    report = penstock.verify(mlp(), (x,), target=y, loss_fn=make(), **options)
    return report.ok, report.summary(), [row.name for row in report.rows if row.name.startswith("loss.")]


def parts_of_loss(rank: int, schedule: str, mesh: bool) -> tuple[list[dict[str, float]], float]:
    """The parts of the loss: those of a step, of evaluations, and of a step again, which has others than those."""

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
        more = {} if torch.is_grad_enabled() else {"right": (output.argmax(1) == target).float().mean()}
        return F.cross_entropy(output, target), {"mean": output.mean(), "count": 3, **more}

    x, y, options = setting(mesh)
    with penstock.pipeline(mlp(), (x,), loss_fn=loss, schedule=schedule, **options) as pipe:
        pipe.predict(x, outputs="all")
        results = [
            pipe.evaluate(x, target=y),
            pipe.step(x, target=y),
            pipe.evaluate(x, target=y),
            pipe.step(x, target=y),
        ]
        return [{k: float(v) for k, v in result.parts.items()} for result in results], float(results[0].loss)


def warnings_of_clipping(rank: int, by_torch: bool) -> list[str]:
    """Two pipelines share the model: the other's steps are nobody's clipping."""
    x, y = data()
    model = mlp()
    with (
        penstock.pipeline(model, (x,), loss_fn=F.cross_entropy, microbatches=2) as pipe,
        penstock.pipeline(model, (x,), loss_fn=F.cross_entropy, microbatches=2) as other,
    ):
        optimizer = torch.optim.AdamW(pipe.parameters())
        scaler = penstock.GradScaler(pipe, init_scale=8.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                for _ in range(2):
                    pipe.step(x, target=y, loss_scale=scaler.get_scale() / 2)
                scaler.unscale_(optimizer)
                if by_torch:
                    nn.utils.clip_grad_norm_(pipe.parameters(), 0.5)
                else:
                    pipe.clip_grad_norm_(0.5)
                scaler.step(optimizer)
                scaler.update()
                for keeps in (True, False):
                    pipe.step(x, target=y)
                    optimizer.zero_grad(set_to_none=not keeps)
                    other.step(x, target=y)
                    optimizer.step()
                    optimizer.zero_grad()
    assert all(one.filename == __file__ for one in caught)
    return [str(one.message) for one in caught]


def clipped_where_all_is_trained(rank: int) -> int:
    x, y = data()
    model = mlp()
    for parameter in [*model.parameters()][:-2]:
        parameter.requires_grad_(False)
    with penstock.pipeline(model, (x,), loss_fn=F.cross_entropy, microbatches=2) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipe.step(x, target=y)
            nn.utils.clip_grad_norm_(pipe.parameters(), 0.5)
            optimizer.step()
    return len(caught)


OWN = {"loss.temperature", "loss.centers.weight", "loss.seen"}


def same(every: list[Trained], expected: Trained, *, exactly: bool = True) -> None:
    held = {name: tensor for each in every for name, tensor in each.state.items()}
    assert held.keys() == expected.state.keys()
    pairs = [(held[name], tensor) for name, tensor in expected.state.items() if exactly or name != "loss.seen"]
    for each in every:
        pairs += [*zip(each.losses, expected.losses, strict=True), *zip(each.norms, expected.norms, strict=True)]
    for mine, other in pairs:
        if exactly:
            assert torch.equal(mine, other)
        else:
            torch.testing.assert_close(mine, other)


def test_in_several_processes_the_last_stages_rank_holds_them(ranks2: Ranks) -> None:
    every = ranks2.run(train, Centers, {})
    assert [OWN & each.state.keys() for each in every] == [set(), OWN]
    same(every, by_hand())


def test_replicas_average_their_gradients(ranks4: Ranks) -> None:
    same(ranks4.run(partial(train, mesh=True), Centers, {}), by_hand(), exactly=False)


def test_clipping_by_the_norm_of_one_rank_is_warned_of(ranks2: Ranks) -> None:
    assert ranks2.run(warnings_of_clipping, False) == [[], []]
    for (text,) in ranks2.run(warnings_of_clipping, True):
        assert "call pipe.clip_grad_norm_(max_norm) instead" in text
    assert ranks2.run(clipped_where_all_is_trained) == [0, 0]


def test_two_copies_of_the_last_stage_add_their_gradients(ranks2: Ranks) -> None:
    every = ranks2.run(train, closure, {"schedule": "dualpipe"})
    assert all("loss.temperature" in each.state for each in every)
    alone = train(0, closure, {"ranks": 1})
    for each in every:
        torch.testing.assert_close(each.state, {name: alone.state[name] for name in each.state})


def test_checkpoints_have_them_and_files_of_the_model_do_not(ranks2: Ranks, tmp_path: Path) -> None:
    ranks2.run(partial(train, steps=1, folder=tmp_path), Centers, {})
    after = train(0, Centers, {"ranks": 1}, steps=2, folder=tmp_path)
    expected = by_hand(3)
    assert all(torch.equal(after.state[name], tensor) for name, tensor in expected.state.items())
    mlp().load_state_dict(load_file(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(("make", "mesh", "own"), [(Centers, False, OWN), (closure, True, {"loss.temperature"})])
def test_verify_compares_them(ranks4: Ranks, make: Callable[[], Any], mesh: bool, own: set[str]) -> None:
    for ok, summary, names in ranks4.run(verify, make, mesh):
        assert ok, summary
        assert {*names} == own


@pytest.mark.parametrize(("schedule", "mesh"), [("dualpipe", False), ("1f1b", True)])
def test_parts_of_the_loss_are_on_every_rank(schedule: str, mesh: bool, ranks2: Ranks, ranks4: Ranks) -> None:
    x, y = data()
    output = mlp()(x).detach()
    trained = {"mean": float(output.mean()), "count": 3.0}
    evaluated = {**trained, "right": float((output.argmax(1) == y).float().mean())}
    for parts, _ in (ranks4 if mesh else ranks2).run(parts_of_loss, schedule, mesh):
        for mine, expected in zip(parts, [evaluated, trained] * 2, strict=True):
            assert mine == pytest.approx(expected)
