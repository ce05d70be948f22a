"""What forwards have left of what their backward uses is kept until then, and no longer."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import PartitionError, pipeline
from penstock.schedule import read_csv
from scaffolding.models import squared_error

ODD = 37


class Writes(nn.Module):
    """Updates a parameter that its backward uses, so that nobody else sees a difference."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(ODD))

    def forward(self, x: Tensor) -> Tensor:
        self.scale.data.mul_(1.0)
        return torch.tanh(x) * self.scale


def alive() -> int:
    return sum(type(each) is Tensor and each.shape == (ODD,) for each in gc.get_objects())


def test_no_copies_are_left_behind_a_step() -> None:
    model: Any = nn.Sequential(*(Writes() for _ in range(4)))
    x = torch.randn(8, ODD, generator=torch.Generator().manual_seed(0))
    with pipeline(model, (x,), loss=squared_error, ranks=2, microbatches=4, schedule="gpipe") as pipe:
        pipe.step(x, target=x)
        for parameter in model.parameters():
            parameter.grad = None
        gc.collect()
        assert alive() == 0


class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(ODD))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.detach().mean(0), 0.5)
        return x - self.mean.clone()


class Counts(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


@pytest.mark.parametrize(
    ("block", "carried"), [(Averages, "'1.mean'"), (Counts, "calls"), (lambda: nn.BatchNorm1d(ODD), "'1.running_mean'")]
)
def test_what_is_carried_over_is_refused_where_forwards_are_not_in_order(
    block: Any, carried: str, tmp_path: Path
) -> None:
    x = torch.randn(8, ODD, generator=torch.Generator().manual_seed(0))
    (tmp_path / "own.csv").write_text("0F1,0F0,0B1,0B0\n1F1,1B1,1F0,1B0\n")
    options: dict[str, Any] = {"loss": squared_error, "microbatches": 2, "schedule": read_csv(tmp_path / "own.csv")}
    model = nn.Sequential(nn.Linear(ODD, ODD), block(), nn.Tanh(), nn.Linear(ODD, ODD))
    with pytest.raises(PartitionError, match=f"carries .*{carried}.* in the order 1, 0"):
        pipeline(model, (x,), ranks=2, **options)
    if isinstance(model[1], nn.BatchNorm1d):
        pipeline(model, (x,), ranks=2, deferred_batch_norm=True, **options).close()
