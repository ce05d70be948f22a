"""Forwards that are run again in backward: the same bits, nothing counted twice, and less kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from penstock import ArgumentError, PartitionError, pipeline
from penstock.schedule import Op, generate, split_backward
from scaffolding.everything import WIDTH, Layer, everything, inputs_alive
from scaffolding.models import Forward, Layers, OneLayer, squared_error
from scaffolding.proofs import proven
from scaffolding.small import batch, mlp, training_stages

CASES: list[Any] = [
    ("gpipe", 4, 1, {0: "always", 1: 2, 3: "except_last"}),
    ("interleaved-1f1b", 2, 2, 1),
    ("zb-h1", 2, 1, "always"),
]
MICROBATCHES = 5


# -- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "ranks", "chunks", "policy"), CASES, ids=str)
def test_trap_19_the_result_is_that_of_one_device(schedule: str, ranks: int, chunks: int, policy: Any) -> None:
    layers = 2 * ranks * chunks
    model, x, y = everything(layers)
    options: dict[str, Any] = {"microbatches": MICROBATCHES, "recompute": policy, "exact": True}
    report = proven(model, x, y, schedule=schedule, ranks=ranks, stages_per_rank=chunks, **options)
    assert report.stages == ranks * chunks
    assert sum(row.kind == "buffer" for row in report.rows) == 3 * layers


class Checkpointed(nn.Module):
    """Recomputes by itself, as models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(norm=False)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


def checkpointed() -> nn.Module:
    """One block is used twice, so that the same module draws twice in a microbatch."""
    block = Checkpointed()
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), block, nn.Tanh(), block, Checkpointed(), nn.Linear(WIDTH, WIDTH))


class DrawsItself(Layers):
    """Draws in its own forward, which is recorded call by call."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.dropout(layer(x).tanh(), 0.3, self.training)
        return x


class Counts(nn.Module):
    """Its output depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls.clone()


class Restores(nn.Module):
    """Undoes what it has set, after the last thing that its backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.busy, self.act = False, torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        scale, self.busy = 0.5 if self.busy else 1.0, True
        handle = self.linear.register_forward_hook(lambda module, args, output: output * 0.9)
        act, self.act = self.act, lambda x: act(x) * 0.8
        self.norm.eval()
        y = self.act(checkpoint(self.linear, x, use_reentrant=False) + self.norm(x)) * scale
        self.norm.train()
        self.busy, self.act = False, act
        handle.remove()
        return y


def restoring() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Restores(), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def buffers_that_matter() -> nn.Module:
    torch.manual_seed(0)
    spectral = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    counting = nn.Sequential(nn.Linear(WIDTH, WIDTH), Counts())
    average = nn.Sequential(nn.BatchNorm1d(WIDTH, momentum=None), nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), spectral, counting, average)


class Overwriting(OneLayer):
    """Updates what it is given, and that is given to others as well."""

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        x.mul_(scale).sin_()
        return self.layer(x) + x


class Overwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        bias = Forward(lambda self, x: torch.tanh(x + self.bias), bias=nn.Parameter(torch.randn(WIDTH)))
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), *(Overwriting(WIDTH) for _ in range(3)), bias])

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        total = self.layers[4](y)  # keeps nothing of y, which is updated below
        for layer in self.layers[1:4]:
            y = layer(y, scale=1.5)
            total = total + y.detach()
            y = y * 2
        return total + y


def layers() -> nn.Module:
    return nn.Sequential(*(Layer() for _ in range(4)))


def noisy(output: Tensor, target: Tensor) -> Tensor:
    return squared_error(output + torch.randn_like(output), target)


@pytest.mark.parametrize(
    ("make", "policy", "options"),
    [
        (checkpointed, "always", {"schedule": "zb-h1"}),
        (checkpointed, 1, {}),
        (lambda: DrawsItself(WIDTH, 4), "except_last", {}),
        (restoring, 1, {}),
        (buffers_that_matter, "always", {}),
        (buffers_that_matter, 1, {}),
        (Overwritten, "always", {}),
        (Overwritten, 1, {}),
        (mlp, "always", {"loss": noisy}),
        (layers, "always", {"autocast": True}),
        (layers, 1, {"autocast": True}),
    ],
)
def test_what_makes_it_hard_to_run_a_forward_again(make: Any, policy: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    given: dict[str, Any] = {"schedule": "gpipe", "ranks": 2, "microbatches": 3, "exact": True, **options}
    with torch.autocast("cpu", torch.bfloat16, enabled=given.pop("autocast", False)):
        proven(make(), *batch(), recompute=policy, **given)


def test_the_first_run_takes_the_kernels_of_training() -> None:
    """Under no_grad a frozen transformer layer takes a fast path, with other bits."""
    torch.manual_seed(0)
    frozen = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).requires_grad_(False).eval()
    model = nn.Sequential(nn.Linear(8, 8), frozen, nn.Linear(8, 8))
    x, y = torch.randn(6, 5, 8), torch.randn(6, 5, 8)
    with torch.no_grad():
        fast = frozen(x)
    assert not torch.equal(fast, frozen(x.clone().requires_grad_()))
    proven(model, x, y, schedule="gpipe", ranks=2, microbatches=3, recompute="always")


def test_a_layer_that_runs_again_runs_to_its_end() -> None:
    """`torch.utils.checkpoint` would stop at the last saved tensor, and leave undone what comes after it in Python."""
    (x, y), model = batch(), restoring()
    with pipeline(model, (x,), loss=squared_error, ranks=2, microbatches=3, recompute=1) as pipe:
        pipe.step(x, target=y)
    assert (model[1].busy, model[1].norm.training, len(model[1].linear._forward_hooks)) == (False, True, 0)


def test_a_frozen_beginning_is_run_once() -> None:
    model, (x, y) = mlp(), batch()
    model[:3].requires_grad_(False)
    calls = calls_in_a_step(model, (x, y), ranks=2, schedule="gpipe", recompute="always", microbatches=3, cuts=["3"])
    assert calls == {"0": 3, "1": 3, "2": 3, "3": 6, "4": 6, "5": 6}
    proven(model, x, y, schedule="gpipe", ranks=2, microbatches=3, recompute="always", cuts=["3"])


def test_weights_are_learned_from_the_first_forward_though_it_is_run_again() -> None:
    """Learned from the last microbatch, whose backward would then be whole, its gradients would be added too early."""
    order = split_backward(generate("gpipe", 2, 4))
    late = order.with_rows([sorted(row, key=lambda action: action.op is Op.W) for row in order.rows])

    def gradients_of_the_first_step(recompute: Any) -> list[Any]:
        torch.manual_seed(0)
        model, (x, y) = nn.Sequential(*(Layer() for _ in range(6))), batch()
        options: dict[str, Any] = {"schedule": late, "ranks": 2, "recompute": recompute, "seed": 0}
        with pipeline(model, (x,), loss=squared_error, **options) as pipe:
            pipe.step(x, target=y)
            return [parameter.grad for parameter in pipe.parameters()]

    for mine, expected in zip(*map(gradients_of_the_first_step, ("always", "never")), strict=True):
        assert torch.equal(mine, expected)


# -- how often, and how much is kept ----------------------------------------------------------------------------------


def calls_in_a_step(model: nn.Sequential, data: tuple[Tensor, Tensor], **options: Any) -> Counter[str]:
    calls: Counter[str] = Counter()
    with pipeline(model, data[:1], loss=squared_error, **options) as pipe:
        for name, module in model.named_children():
            module.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
        pipe.step(data[0], target=data[1])
        stepped = calls.copy()
        pipe.evaluate(data[0], target=data[1])  # is recorded
        calls.clear()
        pipe.evaluate(data[0], target=data[1])
        assert set(calls.values()) == {options["microbatches"]}
    return stepped


def test_how_often_each_layer_runs() -> None:
    def runs(policy: Any, schedule: str = "gpipe", ranks: int = 2) -> list[int]:
        calls = calls_in_a_step(mlp(8), batch(), ranks=ranks, schedule=schedule, recompute=policy, microbatches=4)
        return [calls[str(layer)] for layer in range(8)]

    assert runs("never") == [4] * 8
    assert runs("always") == [8] * 8
    assert runs("except_last") == [7] * 8
    assert runs(2) == [8, 4] * 4
    assert runs(3) == [8, 4, 4, 8] * 2
    assert runs({1: 2}) == [4] * 4 + [8, 4] * 2
    assert runs("always", "1f1b") == [8] * 4 + [4] * 4  # on the last stage each backward follows its forward at once


def test_what_enters_a_stage_is_all_that_is_kept_of_it() -> None:
    """Of three stages with three layers each, when the last of four microbatches is in the last layer."""

    def alive(policy: Any) -> list[int]:
        return inputs_alive(9, ranks=3, recompute=policy)

    assert alive("never") == [4] * 9
    assert alive("always") == [4, 0, 0, 4, 0, 0, 4, 1, 1]  # the last microbatch is still in the last stage's forward
    assert alive({1: 1}) == [4] * 9  # what enters each layer
    assert alive({1: "except_last"}) == [4, 4, 4, 4, 1, 1, 4, 4, 4]


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recompute": "sometimes"}, ["recompute='sometimes'", "'except_last'", "every n-th layer"]),
        ({"recompute": 0}, ["recompute=0", "n >= 1"]),
        ({"recompute": True}, ["recompute=True", "'always'"]),
        ({"recompute": None}, ["recompute=None", "'always'"]),
        ({"recompute": ["always"]}, ["recompute has 1 entry;", "2 stages"]),
        ({"recompute": {2: "always"}}, ["recompute: there is no stage 2", "0 to 1"]),
        ({"recompute": {0: "all"}}, ["recompute='all'"]),
        ({"offload": "host"}, ["offload='host'", "True or False"]),
        ({"offload": [True]}, ["offload has 1 entry;"]),
    ],
)
def test_bad_choices(options: dict[str, Any], words: list[str]) -> None:
    x, _ = batch()
    with pytest.raises(ArgumentError) as caught:
        pipeline(mlp(), (x,), loss=squared_error, ranks=2, **options)
    assert all(word in str(caught.value) for word in words)


class Renorms(OneLayer):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.layer.weight.mul_(0.5)
        return self.layer(x)


@pytest.mark.parametrize(
    ("model", "recompute", "words"),
    [
        (Renorms(WIDTH), "always", r"recompute: .*stage 0 updates parameter 'layer.weight' in place"),
        (
            Forward(lambda self, x: x @ self.weight, weight=nn.Parameter(torch.randn(WIDTH, WIDTH))),
            2,
            "recompute=2: the code of stage 0 calls no module with parameters",
        ),
    ],
)
def test_what_cannot_be_run_again_is_refused(model: nn.Module, recompute: Any, words: str) -> None:
    with pytest.raises((ArgumentError, PartitionError), match=words):
        pipeline(model, batch()[:1], loss=squared_error, schedule="gpipe", microbatches=3, recompute=recompute)


def test_a_step_that_raised_leaves_nothing() -> None:
    model, x, y = everything(4)
    raised = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if not raised:
            raised.append(1)
            raise ValueError("not today")
        return squared_error(output, target)

    with pipeline(model, (x,), ranks=2, schedule="gpipe", microbatches=3, loss=loss, recompute="always") as pipe:
        with pytest.raises(ValueError, match="not today"):
            pipe.step(x, target=y)
        buffers = {name: id(buffer) for name, buffer in model.named_buffers()}
        pipe.step(x, target=y)
        assert {name: id(buffer) for name, buffer in model.named_buffers()} == buffers
        assert not any(stage._reruns or stage._saved for stage in training_stages(pipe))
