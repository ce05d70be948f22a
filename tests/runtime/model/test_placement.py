"""A model built on the CPU moves to its devices before anything takes hold of its tensors, and is recorded for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock
from penstock.runtime.model.ownership import move
from runtime.model import placement_jobs as jobs
from scaffolding.ranks import Ranks
from scaffolding.stand_in import DEVICE, on_the_device


@pytest.mark.parametrize("devices", [DEVICE, ["cpu", DEVICE], [DEVICE, "cpu"]], ids=str)
def test_buffers_state_dicts_and_checkpoints_are_those_that_train(device_rank: Ranks, devices: Any) -> None:
    device_rank.run(on_the_device, jobs.buffers, devices)


@pytest.mark.parametrize("job", [jobs.shared, jobs.recorded_for, jobs.for_real, jobs.by_example, jobs.current_devices])
def test_on_a_device(device_rank: Ranks, job: Callable[[], None]) -> None:
    device_rank.run(on_the_device, job)


@pytest.mark.parametrize(
    "given",
    [{"recompute": 1}, {"schedule": "zb-h1"}, {"schedule": "dualpipe"}, {"check_finite": True}],
    ids=str,
)
def test_options_on_a_device(device_rank: Ranks, given: dict[str, Any]) -> None:
    device_rank.run(on_the_device, jobs.option, given)


def test_what_two_devices_would_have_to_hold_is_refused(device_rank: Ranks) -> None:
    (said,) = device_rank.run(on_the_device, jobs.one_buffer_two_devices)
    assert "is used on stages [0, 1], which one process would have to hold on ['cpu', 'standin']" in said


def test_a_module_that_two_devices_share_moves_in_parts() -> None:
    """On the meta device, where parameters become new objects: what is tied stays tied."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    model.register_buffer("held", torch.ones(2))
    kept = [model[0].bias, model.held]
    moving = [model[0].weight, model[1].bias]
    assert move(model, {id(tensor): torch.device("meta") for tensor in moving})
    assert model[0].weight is model[1].weight
    assert model[0].weight.is_meta
    assert model[1].bias.is_meta
    assert all(now is before for now, before in zip([model[0].bias, model.held], kept, strict=True))
    assert not move(model, {id(model.held): torch.device("cpu")})


# -- where nobody says: where the model is -----------------------------------------------------------------------------


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
