"""How often the host waits for its device in a step between processes, each of which has a device of its own.

The device is the stand-in, whose tensors travel as NCCL's do (`device_group_jobs`): a rank that waits for a message
waits for the other host, and for no device.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from device_group_jobs import device_groups, own_device
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import penstock
from runtime.step.waiting_jobs import ROWS, STEADY, WIDTH, Masked, tokens_that_count
from scaffolding import stand_in, stand_in_streams
from scaffolding.stand_in import DEVICE

MORE = 6
"""More steps than there may be losses under way."""


class Steps(NamedTuple):
    waits: dict[str, int]
    """In one steady step."""
    losses: list[float]


def trained(device: str, given: dict[str, Any], also: str) -> Steps:
    """Trains the model of `waiting_jobs`.

    Args:
        also: what a user does in each step: "clip" the gradients, or "read" the loss on the first rank alone. "hang":
            the device does nothing of the steady step until the host has given it all of that.
    """
    given = {"microbatches": 4, "loss": F.cross_entropy, "seed": 0, "reduction": tokens_that_count, **given}
    autocast = torch.autocast(device, torch.bfloat16) if given.pop("autocast", False) else nullcontext()
    model = Masked(nn.LayerNorm)
    x, mask, y = torch.randn(ROWS, WIDTH), torch.ones(ROWS, dtype=torch.int64), torch.arange(ROWS) % WIDTH
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    results = []
    with penstock.pipeline(model, (x, mask), devices=device, **given) as pipe:
        for step in range(STEADY + MORE):
            if step == STEADY:
                stand_in.waits.clear()
                if also == "hang":
                    stand_in_streams.hang()
            optimizer.zero_grad()
            with autocast:
                results.append(pipe.step(x, mask, target=y))
            if also == "clip":
                pipe.clip_grad_norm_(1.0)
            if also == "read" and pipe.is_main_process:
                float(results[-1].loss)
            optimizer.step()
            if step == STEADY:
                waits = dict(stand_in.waits)
                if also == "hang":
                    assert repr(results[-1]).startswith("StepResult(loss=under way"), results[-1]
                    stand_in_streams.go_on()
        control = pipe.session.control
        assert all(loss.sources == control.mesh_peers for loss in control._losses), "a sum waits for all of them"
        return Steps(waits, [float(result.loss) for result in results])


def waits(rank: int, shape: tuple[int, int], given: dict[str, Any], also: str) -> Steps:
    """Trains over (dp, pp) ranks."""
    own_device(rank)
    mesh = DeviceMesh("cpu", torch.arange(shape[0] * shape[1]).view(shape), mesh_dim_names=("dp", "pp"))
    with device_groups():
        return trained(DEVICE, {**given, "mesh": mesh}, also)
