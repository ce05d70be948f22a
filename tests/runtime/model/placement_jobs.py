"""A model built on the CPU that runs on another device: jobs for a rank that has the stand-in device."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock import checkpoint
from penstock._base.compat import FakeTensor
from scaffolding import models
from scaffolding.refusals import refusal_of
from scaffolding.stand_in import DEVICE

STEPS = 3


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)]
    return nn.Sequential(*layers)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 2


def _trained(devices: Any, steps: int = STEPS) -> tuple[penstock.Pipeline, list[float]]:
    model = normed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)  # made before the model moves
    x, y = batch()
    pipe = penstock.pipeline(model, (x,), ranks=2, microbatches=3, loss=F.cross_entropy, devices=devices)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(float(pipe.step(x, target=y).loss))
        optimizer.step()
    return pipe, losses


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k].cpu(), other[k].cpu()) for k in one)


def buffers(devices: Any) -> None:
    """What a model's own buffers, its state dict and its checkpoint say after some steps."""
    plain, expected = _trained(None)
    pipe, losses = _trained(devices)
    assert losses == expected
    assert float(plain.model[1].running_mean.abs().sum()) > 0
    assert any(tensor.device.type == DEVICE for tensor in pipe.model.buffers())
    for state in (pipe.model.state_dict(), pipe.state_dict()):
        assert _equal(state, plain.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(folder, pipe)
        fresh, _ = _trained(devices, 0)
        checkpoint.load(folder, fresh)
        assert _equal(fresh.model.state_dict(), plain.state_dict())
    again, _ = _trained(devices, 0)
    again.load_state_dict(plain.state_dict())
    x, y = batch()
    assert torch.equal(again.evaluate(x, target=y).loss.cpu(), plain.evaluate(x, target=y).loss)


class Looks(nn.Linear):
    """Notes the current device of each run."""

    seen: ClassVar[list[int | None]] = []

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):
            self.seen.append(current[-1])
        return super().forward(x)


current: list[int | None] = [None]


@contextmanager
def noting(index: int | None) -> Iterator[None]:
    current.append(index)
    yield
    current.pop()


def current_devices() -> None:
    """In a process that drives several ranks, each action runs with its own device as the current one."""
    model, x = nn.Sequential(Looks(6, 6), Looks(6, 6)), batch()[0]
    with mock.patch.object(torch.accelerator, "device_index", noting):
        for devices, expected in ((["cpu", f"{DEVICE}:0"], {None, 0}), (f"{DEVICE}:0", {0}), ("cpu", {None})):
            with penstock.pipeline(model, (x,), ranks=2, microbatches=2, loss=F.mse_loss, devices=devices) as pipe:
                Looks.seen.clear()
                pipe.step(x, target=torch.zeros(8, 6))
            assert set(Looks.seen) == expected, (devices, Looks.seen)


class Scaled(nn.Linear):
    """Multiplies by a buffer."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__(6, 6)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Sharing(nn.Module):
    """Two names for one parameter and one buffer, in blocks on different stages."""

    def __init__(self) -> None:
        super().__init__()
        scale = torch.full((6,), 2.0)
        self.first, self.last = Scaled(scale), Scaled(scale)
        self.last.weight = self.first.weight
        self.shift = nn.Parameter(torch.ones(6))  # the model's own

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.first(x) + self.shift))


def shared() -> None:
    """What was shared on the CPU is shared on the device, and a gradient that was there moves along."""
    torch.manual_seed(0)
    model, x = Sharing(), batch()[0]
    model.shift.grad, weight = torch.ones(6), model.first.weight
    weight = model.first.weight
    with penstock.pipeline(model, (x,), ranks=1, microbatches=2, loss=F.mse_loss, devices=DEVICE) as pipe:
        assert model.first.weight is model.last.weight is weight
        assert model.first.scale is model.last.scale
        assert model.shift.grad.device.type == weight.device.type == DEVICE
        pipe.step(x, target=torch.zeros(8, 6))
        assert float(model.shift.grad.cpu().sub(1).abs().sum()) > 0
        assert len(list(pipe.parameters())) == len(list(model.parameters()))


class Asks(nn.Module):
    """Asks its input where it is, in its own code: a constant is made there, autocast is on there."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.table = torch.linspace(0, 1, 6)  # neither parameter nor buffer

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            with torch.autocast(x.device.type, dtype=torch.bfloat16):
                x = layer(x)
            x = x.float() + torch.ones(6, device=x.device) * (x.device.type == DEVICE) + self.table.to(x.device)
        return x if mask.all() else x * mask[:, None]  # a guard


def recorded_for() -> None:
    """An example on the CPU records for the run's device."""
    torch.manual_seed(0)
    model = Asks()
    x, _ = batch()
    some, every = torch.arange(8) % 4 != 1, torch.ones(8, dtype=torch.bool)
    with penstock.pipeline(model, (x, every), ranks=2, microbatches=2, loss=F.mse_loss, devices=DEVICE) as pipe:
        assert f"type='{DEVICE}'" in pipe.stage_code
        assert "type='cpu'" not in pipe.stage_code
        for mask in (every, some, every):
            loss = pipe.step(x, mask, target=torch.zeros(8, 6)).loss
            there = model(x.to(DEVICE), mask.to(DEVICE))
            assert there.dtype == torch.float32
            assert torch.equal(loss.cpu(), F.mse_loss(there.cpu(), torch.zeros(8, 6))), (loss, there)


class Chooses(nn.Module):
    """A block that looks at the values: it runs once for real while the model is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.sum(1) > 0).nonzero().flatten()
        return self.other(x).index_add(0, chosen, self.one(x[chosen]))


def for_real() -> None:
    """Blocks that look at values, with other schedules."""
    x, _ = batch()
    for schedule in ("gpipe", "zb-h1", "dualpipe"):
        for devices in (None, DEVICE):
            torch.manual_seed(0)
            model = nn.Sequential(*(Chooses() for _ in range(4)))
            given = {"ranks": 2, "microbatches": 4, "schedule": schedule, "devices": devices}
            with penstock.pipeline(model, (x,), loss=F.mse_loss, **given) as pipe:
                pipe.step(x, target=torch.zeros(8, 6))
                found = {name: parameter.grad.cpu() for name, parameter in pipe.named_parameters()}
            if devices is None:
                expected = found
        assert _equal(found, expected), schedule


def by_example() -> None:
    """An example on a device takes the model there."""
    x, y = batch()
    model = normed()
    with penstock.pipeline(model, (x.to(DEVICE),), ranks=2, microbatches=2, loss=F.cross_entropy) as pipe:
        assert pipe.device.type == DEVICE
        assert {tensor.device.type for tensor in model.state_dict().values()} == {DEVICE}
        pipe.step(x, target=y)


def one_buffer_two_devices() -> str:
    """What is said of a parameter that one process would have to hold on two devices."""
    options: dict[str, Any] = {"microbatches": 2, "loss": F.mse_loss, "cuts": ["last"], "devices": ["cpu", DEVICE]}
    return refusal_of(penstock.pipeline, Sharing(), batch()[:1], ranks=2, **options)


def option(given: dict[str, Any]) -> None:
    """A tied GPT with dropout, by whatever a step can be asked for: the same bits as on the CPU."""
    found, losses = {}, {}
    for devices in (None, DEVICE):
        case = models.gpt(0.1)
        options: Any = {"loss": case.loss, "devices": devices, "seed": 3, "ranks": 2, "microbatches": 2, **given}
        with penstock.pipeline(case.model, case.args, case.kwargs, **options) as pipe:
            losses[devices] = [float(pipe.step(*case.args, **case.kwargs, target=case.target).loss) for _ in range(2)]
            found[devices] = {name: p.grad.cpu() for name, p in pipe.named_parameters()}
    assert losses[None] == losses[DEVICE]
    tied, there = found[None].pop("wte.weight"), found[DEVICE].pop("wte.weight")  # on both stages
    assert (tied - there).abs().max() <= 1e-6 * tied.abs().max()
    assert _equal(found[None], found[DEVICE])
