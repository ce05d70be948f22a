"""What ranks run to train in half precision, and the same written by hand for one device."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock

ROWS, MICROBATCHES, STEPS = 8, 4, 9
OVERFLOWS = (0, 1)
"""The steps whose batch makes gradients that float16 cannot hold."""

SCALER: dict[str, Any] = {"init_scale": 2.0**14, "growth_interval": 2}


class FirstOverflows(nn.Module):
    """Large inputs overflow the gradient of the first weight alone: only one rank meets an infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 9)
        nn.init.normal_(self.first.weight, std=1e-5)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def model() -> nn.Module:
    torch.manual_seed(0)
    return FirstOverflows()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(ROWS, 9, generator=generator), torch.randn(ROWS, 9, generator=generator)
    return (torch.full_like(x, 6e4) if step in OVERFLOWS else x), y


class Trained(NamedTuple):
    """Weights by name; of each step the scale, the loss, and the norm that was clipped (infinite if skipped)."""

    weights: dict[str, Tensor]
    scales: list[float]
    losses: list[float]
    norms: list[float]


def by_hand(clip: bool = True, dtype: torch.dtype = torch.float16) -> Trained:
    """What torch's own loop does on one device."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", **SCALER)
    seen = Trained({}, [], [], [])
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        for x, y in zip(*(t.chunk(MICROBATCHES) for t in batch(step)), strict=True):
            with torch.autocast("cpu", dtype=dtype):
                loss = F.mse_loss(net(x.clone()), y.clone()) / MICROBATCHES
            scaler.scale(loss).backward()
            total += loss.detach()
        seen.scales.append(scaler.get_scale())
        if clip:
            scaler.unscale_(optimizer)
            seen.norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)))
        scaler.step(optimizer)
        scaler.update()
        seen.losses.append(float(total))
    return seen._replace(weights={name: p.detach() for name, p in net.named_parameters()})


def in_a_pipeline(rank: int, clip: bool = True, dtype: torch.dtype = torch.float16, **options: Any) -> Trained:
    """The same loop for a pipeline."""
    options = {"microbatches": MICROBATCHES, "loss": F.mse_loss} | options
    seen = Trained({}, [], [], [])
    with penstock.pipeline(model(), (batch(0)[0],), **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
        scaler = penstock.GradScaler(pipe, **SCALER)
        for step in range(STEPS):
            x, y = batch(step)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                result = pipe.step(x, target=y, loss_scale=scaler.get_scale())
            seen.scales.append(scaler.get_scale())
            if clip:
                scaler.unscale_(optimizer)
                seen.norms.append(float(pipe.clip_grad_norm_(0.1)))
            scaler.step(optimizer)
            scaler.update()
            seen.losses.append(float(result.loss))
        return seen._replace(weights={name: p.detach().clone() for name, p in pipe.named_parameters()})


def in_a_pipeline_of(rank: int, options: dict[str, Any]) -> Trained:
    return in_a_pipeline(rank, **options)
