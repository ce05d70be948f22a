"""What ranks run for `test_links`."""

from __future__ import annotations

import json
from unittest import mock

import torch
from torch import nn

import penstock
from penstock import PenstockError, Profile
from penstock.costs import UnitCost
from penstock.pipe import profiling
from scaffolding.stand_in import DEVICE


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def profiled(rank: int) -> str:
    """The profile with links, as this rank got it."""
    found = penstock.profile(model(), (torch.randn(4, 8),), microbatches=2, budget_seconds=0.0, links=True)
    return json.dumps(found.to_dict())


def refused(rank: int) -> str:
    """What this rank raised."""
    with torch.device("meta"):
        layers = model()
    try:
        penstock.profile(layers, (torch.randn(4, 8),), microbatches=2, budget_seconds=0.0, links=True)
    except PenstockError as error:
        return str(error)
    return ""


def uneven() -> Profile:
    """A made-up profile of the model, whose middle cut sends most."""
    sizes = (0, 1_000, 10_000, 1_000)
    units = tuple(UnitCost(str(i), 1.0, 1.0, 1.0, boundary_bytes=size) for i, size in enumerate(sizes))
    parameters = {name: tuple(value.shape) for name, value in model().named_parameters()}
    return Profile(units, "cpu", "float32", parameters)


def profiled_on_device() -> tuple[str, int, float]:
    """A device of torch's, but not of CUDA: what the profile says of it."""
    layers = model().to(DEVICE)
    with mock.patch.object(profiling, "ACCELERATOR_FACTOR", 1):  # 8 takes it three seconds
        found = penstock.profile(layers, (torch.randn(4, 8).to(DEVICE),), microbatches=2, budget_seconds=0.05)
    return found.device, found.runs, found.units[1].forward_seconds
