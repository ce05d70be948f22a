"""What a timeline takes on a device: jobs for a rank that has the stand-in device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import penstock
from penstock.schedule import Op
from scaffolding import stand_in
from scaffolding.stand_in import DEVICE


def timed_steps() -> dict[str, dict[str, int]]:
    """What a step without a timeline takes, and the first and the second with one; `actions`: how many there are."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(8, 4)
    taken = {}
    with penstock.pipeline(
        model, (x,), ranks=2, microbatches=4, loss=F.mse_loss, devices=DEVICE, schedule="zb-h1"
    ) as pipe:
        for _ in range(6):
            pipe.step(x, target=x)
        for name, timeline in (("plain", False), ("first", True), ("second", True)):
            stand_in.calls.clear()
            stand_in.waits.clear()
            result = pipe.step(x, target=x, timeline=timeline)
            taken[name] = {**stand_in.calls, **stand_in.waits}
        assert result.timeline is not None
        assert all(span.start_seconds <= span.end_seconds for span in result.timeline)
        assert all(result.timeline.busy_seconds(rank) > 0 for rank in range(2))
        assert sum(span.action.op is Op.W for span in result.timeline) == 8
        taken["actions"] = {"all": len(result.timeline)}
    return taken
