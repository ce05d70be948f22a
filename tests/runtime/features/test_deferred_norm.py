"""Batch norm that commits its running statistics once a step, as one forward of the whole batch would."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import ArgumentError, pipeline
from scaffolding.everything import everything
from scaffolding.models import Forward, squared_error
from scaffolding.proofs import proven
from scaffolding.small import WIDTH, batch, mlp

ROWS = 11


def normed(**options: Any) -> nn.Sequential:
    """What enters the norm does not depend on how the batch is cut, so that the whole batch shows what is expected."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, **options), nn.Linear(WIDTH, WIDTH), nn.Tanh())


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int = 3, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The evaluated loss, and the buffers, after some steps on batches that drift."""
    given = {"ranks": 2, "microbatches": 4, "schedule": "gpipe", "deferred_batch_norm": True, "seed": 0, **options}
    with pipeline(model, (x,), loss=squared_error, **given) as pipe:
        for step in range(steps):
            pipe.step(x * (1 + step) + step, target=y)
        before = buffers(model)
        loss = pipe.evaluate(x, target=y).loss
        assert all(map(torch.equal, before.values(), buffers(model).values()))
    return loss, buffers(model)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_the_statistics_are_those_of_the_whole_batch(momentum: float | None) -> None:
    model, (x, y) = normed(momentum=momentum), batch()
    whole = copy.deepcopy(model)
    for step in range(3):
        whole(x * (1 + step) + step)
    loss, found = train(model, x, y)
    expected = buffers(whole)
    assert found["1.num_batches_tracked"] == expected["1.num_batches_tracked"] == 3
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(found[name], expected[name])
    whole.eval()
    torch.testing.assert_close(loss, squared_error(whole(x), y))
    _, plain = train(normed(momentum=momentum), x, y, deferred_batch_norm=False)
    assert plain["1.num_batches_tracked"] == 3 * 4
    assert not torch.allclose(plain["1.running_var"], expected["1.running_var"], rtol=1e-3)


class Own(nn.BatchNorm1d):
    """A class of somebody's own, with an activation behind it."""

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input))


class Twice(nn.Module):
    """Uses its norm by position and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return self.norm(x) + self.norm(input=x * 2)


@pytest.mark.parametrize(
    ("layers", "shapes", "recompute"),
    [
        (lambda: (nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 2, 3)), [(ROWS, 2, 6, 6), (ROWS, 2, 2, 2)], 1),
        (lambda: (nn.Linear(WIDTH, WIDTH), Own(WIDTH), nn.Linear(WIDTH, WIDTH)), [(ROWS, WIDTH)] * 2, "never"),
        (lambda: (Twice(), nn.Linear(WIDTH, WIDTH)), [(ROWS, WIDTH)] * 2, "never"),
        (lambda: (Twice(), nn.Linear(WIDTH, WIDTH)), [(ROWS, WIDTH)] * 2, 1),
    ],
    ids=["images", "a class that derives from batch norm", "used twice", "used twice, layers run again"],
)
def test_one_step_leaves_the_buffers_that_one_forward_of_the_whole_batch_leaves(
    layers: Any, shapes: list[tuple[int, ...]], recompute: Any
) -> None:
    torch.manual_seed(0)
    x, y = map(torch.randn, shapes)
    model = nn.Sequential(*layers())
    whole = copy.deepcopy(model)
    whole(x)
    _, found = train(model, x, y, steps=1, recompute=recompute)
    for name, expected in whole.named_buffers():
        torch.testing.assert_close(found[name], expected)


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks", "recompute"),
    [("gpipe", 2, 1, "always"), ("interleaved-1f1b", 2, 2, {1: "always"}), ("zb-v", 2, 2, 1)],
)
def test_the_result_is_that_of_one_device(schedule: str, ranks: int, chunks: int, recompute: Any) -> None:
    model, x, y = everything(layers=4)
    options: Any = {"microbatches": 5, "deferred_batch_norm": True, "recompute": recompute, "exact": True}
    proven(model, x, y, schedule=schedule, ranks=ranks, stages_per_rank=chunks, **options)


def test_norms_in_evaluation_mode_and_without_statistics_are_left_alone() -> None:
    model, (x, y) = normed(), batch()
    model.append(nn.BatchNorm1d(WIDTH).eval())
    model.append(nn.BatchNorm1d(WIDTH, track_running_stats=False))
    _, found = train(model, x, y)
    assert found["1.num_batches_tracked"] == 3
    assert found["4.num_batches_tracked"] == 0
    assert torch.equal(found["4.running_var"], torch.ones(WIDTH))


class Uneven(nn.Module):
    """Calls its norm once more where values ask for it."""

    even = False

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm, self.after = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.before(x * 1.0))
        return self.after(self.norm(x) if not self.even and float(x.detach()[0, 0]) > 0 else x)


def test_a_norm_that_is_called_another_number_of_times_is_refused_and_nothing_is_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither buffers nor gradients. The refusal goes through `Control.fail`, which tells other ranks."""
    uneven, (x, y) = Uneven(), batch()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), uneven, nn.Linear(WIDTH, WIDTH))
    before, told = buffers(model), list[BaseException]()
    with pipeline(model, (x,), ranks=2, microbatches=3, loss=squared_error, deferred_batch_norm=True) as pipe:
        monkeypatch.setattr(pipe.session.control, "fail", lambda error: told.append(error) or error)
        with pytest.raises(ArgumentError, match="called 2 times in one microbatch and 1 in another") as raised:
            pipe.step(x, target=y)
        assert told == [raised.value]
        assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
        assert all(p.grad is None for p in model.parameters())
        uneven.even = True
        pipe.step(x, target=y)
        assert int(uneven.norm.num_batches_tracked) == 1


# -- what is refused --------------------------------------------------------------------------------------------------


class Functional(nn.Module):
    """Batch norm that no module of torch runs."""

    def __init__(self, mean: str = "running_mean", var: str = "running_var") -> None:
        super().__init__()
        self.names = mean, var
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer(mean, torch.zeros(WIDTH))
        self.register_buffer(var, torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mean, var = (getattr(self, name) for name in self.names)
        return F.batch_norm(self.layer(x), mean, var, training=True)


class Splitting(nn.BatchNorm1d):
    """As timm's SplitBatchNorm2d: another norm takes a part of the batch."""

    def __init__(self, features: int) -> None:
        super().__init__(features)
        self.aux_bn = nn.ModuleList([nn.BatchNorm1d(features)])

    def forward(self, input: Tensor) -> Tensor:
        own, other = input.chunk(2)
        return torch.cat([super().forward(own), self.aux_bn[0](other)])


def compiled() -> nn.Sequential:
    model = normed()
    model[1].compile()
    return model


@pytest.mark.filterwarnings("default")  # torch.compile's own
@pytest.mark.parametrize(
    ("model", "words"),
    [
        (compiled, "'1' is compiled"),
        (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Splitting(WIDTH)), r"'1' \(Splitting\) has other batch norms"),
        (lambda: nn.Sequential(*mlp(1), Functional()), r"'1' \(Functional\) keeps running statistics of its own"),
        (
            lambda: Forward(lambda self, x: self.inner(x), inner=Functional("a", "b")),
            "is a call of batch norm as a function",
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.InstanceNorm2d(3, track_running_stats=True)),
            r"'1' \(InstanceNorm2d\) normalizes by itself",
        ),
    ],
)
def test_what_cannot_be_deferred_is_refused(model: Any, words: str) -> None:
    made = model()
    x = torch.randn(4, 3, 5, 5) if any(isinstance(m, nn.Conv2d) for m in made.modules()) else batch()[0]
    with pytest.raises(ArgumentError, match=rf"deferred_batch_norm=True: .*{words}"):
        pipeline(made, (x,), microbatches=2, loss=squared_error, deferred_batch_norm=True)


def stop_tracking(model: nn.Module) -> None:
    model.get_submodule("1").track_running_stats = False  # type: ignore[assignment]


@pytest.mark.parametrize("change", [stop_tracking, lambda model: model[1].eval()], ids=["tracking", "mode"])
def test_a_norm_that_is_switched_off_between_steps_keeps_its_statistics(change: Any) -> None:
    """As it is when norms are frozen after some steps of training."""
    model, (x, y) = nn.Sequential(*normed(), nn.BatchNorm1d(WIDTH)), batch()
    with pipeline(model, (x,), loss=squared_error, ranks=2, microbatches=4, deferred_batch_norm=True) as pipe:
        pipe.step(x, target=y)
        change(model)
        before, last = buffers(model[1]), buffers(model[-1])
        pipe.step(x, target=y)
        assert all(map(torch.equal, before.values(), buffers(model[1]).values()))
        assert not torch.equal(last["running_mean"], model[-1].running_mean)
