"""What ranks that have the stand-in device run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import penstock
from scaffolding import stand_in
from scaffolding.refusals import refusal_of


def refusal(rank: int) -> str:
    """What is said where two ranks would compute on the one device. The model stays where it is."""
    stand_in.install()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(4, 4)
    said = refusal_of(penstock.pipeline, model, (x,), microbatches=2, loss=F.mse_loss, devices=stand_in.DEVICE)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    return said


def devices_of_two_types(rank: int) -> str:
    """What each rank says where rank 0 computes on the device, and rank 1 on the CPU."""
    torch.manual_seed(0)
    stand_in.install()
    layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    device = "cpu" if rank else stand_in.DEVICE
    return refusal_of(penstock.pipeline, layers, (torch.randn(4, 6),), microbatches=2, loss=F.mse_loss, devices=device)
