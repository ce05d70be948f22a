"""Right models raise no alarm, under one schedule after another, with what the unsplit model does computed once.

More of them, with ties, batch norm and layer drop among them, are in test_zoo_matrix.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.partition import partitioner
from penstock.runtime.batch.cut import Microbatch
from penstock.verification import verify as verification
from penstock.verification.reference_copy import with_reference
from penstock.verification.verify import Verification

WIDTH = 7


class Layers(nn.Module):
    """Linear layers; `between` follows each, and is told the layer's index."""

    def __init__(self, between: Callable[[Layers, int, Tensor], Tensor] = lambda self, i, x: torch.tanh(x)) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.between, self.dropout = between, nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = self.between(self, i, layer(x))
        return x


def noise(self: Layers, i: int, x: Tensor) -> Tensor:
    return x + torch.randn_like(x) if self.training else x


class Counts(nn.Linear):
    """Keeps how often it was called."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x) * (1 + 0.01 * self.calls)


class Cache(nn.Module):
    """Makes a table when it is first asked for one of its length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.tables = nn.Linear(WIDTH, WIDTH), dict[int, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.arange(len(x), dtype=x.dtype)[:, None] / len(x)
        return self.layer(x) + self.tables[len(x)]


class Writes(nn.Module):
    """Updates a buffer where autograd does not see it, in evaluations too, and its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.mul_(0.5)) * self.scale.clone()
        self.scale.data.mul_(0.9)
        return y


class Exchanges(nn.Module):
    """Puts another module in the place of one in its first forward, as BigBird does where sequences are short."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.after = nn.Linear(WIDTH, WIDTH), nn.Module()

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.after, nn.Dropout):
            self.after = nn.Dropout(0.2).train(self.training)
        y: Tensor = self.after(self.layer(x))
        return y


class Requires(nn.Module):
    """Has a buffer require a gradient while it trains, as VectorQuantize of vector_quantize_pytorch does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("zero", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + self.zero.requires_grad_(self.training)
        return y


class Missing:
    """Stands in for a module that is not installed, as MONAI's `optional_import` makes one."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError(name)


def beside_a_missing_module() -> nn.Module:
    missing = Missing()
    return Layers(lambda self, i, x: x if missing is None else torch.tanh(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Layers,
    "dropout": lambda: Layers(lambda self, i, x: self.dropout(x)),
    "functional dropout": lambda: Layers(lambda self, i, x: F.dropout(x, 0.2, self.training)),
    "noise": lambda: Layers(noise),
    "count": lambda: nn.Sequential(Counts(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), *(nn.Tanh() for _ in range(4))),
    "cache": lambda: nn.Sequential(Cache(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "writes": lambda: nn.Sequential(Writes(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "exchange": lambda: nn.Sequential(Exchanges(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "a buffer's gradient": lambda: nn.Sequential(Requires(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "missing module": beside_a_missing_module,
    "spectral norm": lambda: nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    ),
}


@pytest.mark.parametrize(
    ("name", "autocast"),
    [*((name, False) for name in MODELS), ("plain", True), ("dropout", True)],
)
def test_a_right_model_raises_no_alarm(name: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    references = []
    reference = verification.reference

    def noting(*given: Any) -> Any:
        references.append(given)
        return reference(*given)

    monkeypatch.setattr(verification, "reference", noting)
    torch.manual_seed(0)
    x, y = torch.randn(2, 8, WIDTH)
    options = {"ranks": 2, "microbatches": 4, "loss_fn": F.mse_loss, "seed": 3}
    one = Verification(*with_reference(MODELS[name], F.mse_loss), Microbatch((x,), {}, y), options, full_batch=False)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        for schedule in ("1f1b", "zb-h1"):
            report = one.report(schedule)
            assert report.ok, report.summary()
            assert report.first is None
    assert len(references) == 1


def test_schedules_with_as_many_stages_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stages, measured = [], partitioner.decide_by_measuring

    def noting(recording: Any, model: nn.Module, cuts: Sequence[str], *given: Any) -> Any:
        stages.append(len(cuts) + 1)
        return measured(recording, model, cuts, *given)

    monkeypatch.setattr(partitioner, "decide_by_measuring", noting)
    x, y = torch.randn(2, 8, WIDTH)
    options = {"ranks": 2, "microbatches": 4}
    one = Verification(*with_reference(Layers(), F.mse_loss), Microbatch((x,), {}, y), options, full_batch=False)
    for schedule in ("1f1b", "zb-v", "gpipe", "1f1b-v"):
        assert one.report(schedule).ok
    assert stages == [2, 4]
