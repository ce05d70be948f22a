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


def test_a_meta_model_with_torch_for_cuda_and_no_gpu_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_built(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", as_built)
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    x = torch.randn(4, 4)
    with penstock.pipeline(model, (x,), loss_fn=F.mse_loss, microbatches=2) as pipe:
        assert pipe.device.type == "cpu"
        pipe.step(x, target=x)


def test_without_an_accelerator_nothing_is_said() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _trains()
