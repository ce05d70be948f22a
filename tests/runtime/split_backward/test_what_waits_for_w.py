"""What a split backward costs is measured (benchmarks/split_backward); that it defers all that it should is tested."""

from __future__ import annotations

import torch
from torch import nn

from penstock import pipeline


def test_trap_16_all_weights_of_linear_layers_wait_for_w() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(7, 7, bias=False), nn.Tanh())))
    x, target = torch.randn(8, 7), torch.randn(8, 7)
    with pipeline(
        model, (x,), ranks=2, microbatches=4, schedule="zb-h1", loss=nn.functional.mse_loss
    ) as pipe:  # fmt: skip
        pipe.step(x, target=target)
        assert pipe.split_share == {0: 1.0, 1: 1.0}
