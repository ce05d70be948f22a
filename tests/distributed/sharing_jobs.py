"""What ranks that have the stand-in device run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock
from scaffolding import stand_in


def refusal(rank: int) -> str:
    """What is said where two ranks would compute on the one device. The model stays where it is."""
    stand_in.install()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(penstock.ArgumentError) as raised:
        penstock.pipeline(model, (torch.randn(4, 4),), microbatches=2, loss=F.mse_loss, devices=stand_in.DEVICE)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    return str(raised.value)


def devices_of_two_types(rank: int) -> str:
    """What each rank says where rank 0 computes on the device, and rank 1 on the CPU."""
    torch.manual_seed(0)
    stand_in.install()
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    try:
        device = "cpu" if rank else stand_in.DEVICE
        penstock.pipeline(layers, (torch.randn(4, 6),), microbatches=2, loss=F.mse_loss, devices=device)
    except penstock.ArgumentError as error:
        return str(error)
    return ""
