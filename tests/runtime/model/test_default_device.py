"""Where a pipeline computes unless its user says: where the model is; a CPU beside an accelerator is pointed out."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock


def _trains(**options: object) -> None:
    x = torch.randn(4, 4)
    with penstock.pipeline(nn.Sequential(nn.Linear(4, 4)), (x,), loss_fn=F.mse_loss, microbatches=2, **options) as pipe:  # type: ignore[arg-type]
        pipe.step(x, target=x)


def test_the_cpu_beside_an_accelerator_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    with pytest.warns(
        UserWarning, match="computes on the CPU, where the model and the example are, although there is cuda"
    ):
        _trains()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _trains(devices="cpu")


def test_without_an_accelerator_nothing_is_said() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _trains()
