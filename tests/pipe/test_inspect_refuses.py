"""`inspect` refuses what `verify` refuses, in the same words: for the loss, the target, the schedule and the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock._base.errors import PenstockError

WIDTH, ROWS = 4, 8
RANKS, MICROBATCHES = 2, 4


def layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def norms() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.relu_())


def penalised(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: (output - target).square().mean() + sum(p.square().sum() for p in model.parameters())


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


X, Y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
GPIPE = penstock.schedule.generate("gpipe", 2, 4)

CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]] = {
    "no scalar": (layers, {"loss": nn.MSELoss(reduction="none"), "target": Y}, {}),
    "no target": (layers, {"loss": nn.MSELoss()}, {}),
    "a target of other rows": (layers, {"loss": squares, "target": Y[1:]}, {}),
    "no loss": (layers, {"loss": None}, {}),
    "no gradient": (layers, {"loss": lambda output, target: squares(output.detach(), target), "target": Y}, {}),
    "weights of all stages": (layers, {"loss": penalised, "target": Y}, {}),
    "two copies of a norm": (norms, {"loss": squares, "target": Y}, {"schedule": "dualpipe"}),
    "an input that is the target": (InPlace, {"loss": squares, "target": X}, {}),
    "nothing of the kind to recompute": (layers, {"loss": squares, "target": Y}, {"recompute": "sometimes"}),
    "a stage too many": (layers, {"loss": squares, "target": Y}, {"recompute": {7: "always"}}),
    "weights that sum to nothing": (layers, {"loss": squares, "target": Y, "reduction": lambda target: 0.0}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_inspect_says_what_verify_says(name: str) -> None:
    make, given, options = CASES[name]

    def made() -> tuple[nn.Module, Any]:
        model, loss = make(), given["loss"]
        return model, loss(model) if loss is penalised else loss

    def said(look: bool) -> str:
        try:
            if look:
                model, loss = made()
                asked = {**given, "loss": loss, **options}
                penstock.inspect(model, (X,), stages=RANKS, microbatches=MICROBATCHES, **asked)
            else:
                penstock.verify(made, (X,), ranks=RANKS, microbatches=MICROBATCHES, **given, **options)
        except PenstockError as error:
            return str(error)
        return ""

    assert said(look=False)
    assert said(look=True) == said(look=False)


def test_what_the_loss_raises_is_said() -> None:
    """It is not refused, since the made-up output has values that a real one may not have."""

    def fussy(output: Tensor, target: Tensor) -> Tensor:
        if output[0, 0] > 0.25:
            raise ValueError("out of range")
        return squares(output, target)

    for loss, target, said in ((fussy, Y, "out of range"), (nn.CrossEntropyLoss(), Y[:, 1:], "RuntimeError")):
        (note,) = penstock.inspect(layers(), (X,), loss=loss, target=target).notes
        assert "the loss could not be tried on a made-up output" in note
        assert said in note


def test_a_loss_is_left_as_it_was() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.seen = 0, [0]
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            self.calls += 1
            self.seen.append(self.calls)
            self.mean.add_(1)
            return squares(output, target)

    loss = Counts()
    model = layers()
    generator = torch.get_rng_state()
    before = [p.clone() for p in model.parameters()]
    assert penstock.inspect(model, (X,), loss=loss, target=Y).notes == ()
    assert (loss.calls, loss.seen, float(loss.mean)) == (0, [0], 0)
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(p, old) and p.grad is None for p, old in zip(model.parameters(), before, strict=True))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_on_the_meta_device_stays_there() -> None:
    with torch.device("meta"):
        model = norms()
    parameters = list(model.parameters())
    found = penstock.inspect(model, (X,), loss=squares, target=Y[:, :1], microbatches=MICROBATCHES)
    assert found.notes == ()
    assert all(now is before and now.is_meta for now, before in zip(model.parameters(), parameters, strict=True))
    with pytest.raises(PenstockError, match="returned a tensor of shape"):
        penstock.inspect(model, (X,), loss=lambda y, t: (y - t) ** 2, target=Y[:, :1], microbatches=MICROBATCHES)


def test_stages_are_those_of_one_copy() -> None:
    found = penstock.inspect(layers(), (X,), stages=2, schedule="dualpipe", microbatches=MICROBATCHES)
    assert [stage.index for stage in found.stages] == [0, 1]
    assert found.ties == ()
    plain = penstock.inspect(layers(), (X,), stages=2, microbatches=MICROBATCHES)
    assert [stage.modules for stage in found.stages] == [stage.modules for stage in plain.stages]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"stages": "4"}, "stages='4': expected an integer"),
        ({"microbatches": 2.0}, "microbatches=2.0: expected an integer"),
        ({"stages_per_rank": "2", "schedule": "interleaved-1f1b"}, "stages_per_rank='2': expected an integer"),
        ({"stages": 3, "schedule": "interleaved-1f1b"}, "puts 2 on each rank"),
        ({"stages": 3, "schedule": GPIPE}, "stages=3, but schedule 'gpipe' has 2; pass stages=2"),
    ],
)
def test_numbers_that_the_schedule_cannot_have(given: dict[str, Any], words: str) -> None:
    with pytest.raises(PenstockError, match=words):
        penstock.inspect(layers(), (X,), **given)


def test_numbers_come_from_the_schedule() -> None:
    assert len(penstock.inspect(layers(), (X,), stages=4, schedule="interleaved-1f1b").stages) == 4
    assert penstock.inspect(layers(), (X,), stages=2, schedule=GPIPE).microbatches == 4


def test_a_frozen_model_is_verified_although_its_loss_takes_no_gradient() -> None:
    model = layers().requires_grad_(False)
    with pytest.warns(UserWarning, match="no parameter and no input of the model requires a gradient"):
        report = penstock.verify(model, (X,), target=Y, loss_fn=squares, ranks=RANKS, microbatches=MICROBATCHES)
    assert report.ok
    assert penstock.inspect(model, (X,), loss=squares, target=Y).notes == ()
