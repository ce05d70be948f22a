"""A model built on the CPU moves to its devices before anything takes hold of its tensors, and is recorded for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

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
    [
        {"recompute": 1},
        {"schedule": "zb-h1"},
        {"schedule": "dualpipe"},
        {"check_finite": True},
    ],
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
