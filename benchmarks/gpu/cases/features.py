"""What stages do besides forward and backward, checkpoints, and the masks of dropout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from cases.case import Case, Found, Setting
from cases.models import gpt, mlp
from cases.verification import in_one_process, in_several
from penstock import checkpoint

PART = 1

FEATURES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "compile, split backward": ("gpt", "autocast", "zb-h1", {"compile": True}),
    "compile": ("mlp", "float32", "1f1b", {"compile": True}),
    "recompute": ("gpt", "float32", "1f1b", {"recompute": "always"}),
    "recompute every layer": ("gpt", "autocast", "zb-h1", {"recompute": 1}),
    "offload": ("gpt", "float32", "gpipe", {"offload": True}),
    "offload, split backward": ("gpt", "float32", "zb-h1", {"offload": True}),
    "offload and recompute": ("gpt", "autocast", "gpipe", {"offload": True, "recompute": "always"}),
    "deferred batch norm": ("convnet", "float32", "1f1b", {"deferred_batch_norm": True}),
    "gradients in float32": ("gpt", "bf16", "zb-h1", {"grad_dtype": torch.float32}),
    "check_finite": ("gpt", "float32", "1f1b", {"check_finite": True}),
}
"""By name: model, precision, schedule and options."""


def cases() -> Iterator[Case]:
    for name, (model, precision, schedule, options) in FEATURES.items():
        seconds = 90.0 if "compile" in name else 45.0
        alone = partial(in_one_process, model, precision, schedule, **options)
        yield Case(f"feature/one process/{name}", PART, alone, seconds)
        several = partial(in_several, model, precision, schedule, **options)
        yield Case(f"feature/2 processes/{name}", PART, several, seconds)
    yield Case("feature/one process/check_finite finds an infinite value", PART, infinite)
    yield Case("checkpoint/under another split", PART, checkpoints)
    yield Case("dropout/the same masks for every p", PART, masks)


def infinite(setting: Setting) -> Found:
    """A step with an infinite weight is refused, with the module that it is in."""
    setting.prepare()
    torch.manual_seed(0)
    given = gpt(not setting.is_real)
    with torch.no_grad():
        given.model.blocks[5].up.bias[0] = float("inf")
    options = {"loss_fn": given.loss, "microbatches": 8, "devices": setting.device, "check_finite": True}
    with penstock.pipeline(given.model, given.args, ranks=4, **options) as pipe:
        try:
            pipe.step(*given.args, target=given.target)
        except penstock.NonFiniteError as error:
            says = str(error)
            return {"ok": "blocks.5.up" in says, "says": says}
    return {"ok": False, "says": "a step with an infinite weight was not refused"}


def checkpoints(setting: Setting) -> Found:
    """What four ranks save goes on with two, and with another schedule, as if nothing had happened."""
    setting.prepare()
    torch.manual_seed(0)
    given = gpt(not setting.is_real)
    batches = [(given.args[0], given.target)] * 4
    options = {"loss_fn": given.loss, "microbatches": 8, "devices": setting.device, "seed": 1}
    with penstock.pipeline(given.model, given.args, ranks=4, **options) as pipe:
        expected = around_a_checkpoint(pipe, batches, setting.folder / "saved")
    other = gpt(not setting.is_real).model
    with penstock.pipeline(other, given.args, ranks=2, schedule="zb-h1", **options) as pipe:
        return as_expected(around_a_checkpoint(pipe, batches[2:], setting.folder / "saved"), expected)


def around_a_checkpoint(pipe: penstock.Pipeline, batches: Sequence[tuple[Tensor, Tensor]], folder: Path) -> list[float]:
    """Saves after two of four steps, or loads before two. Returns the losses of the last two."""
    losses = []
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    if len(batches) == 2:
        checkpoint.load(folder, pipe, optimizer)
    for number, (x, y) in enumerate(batches):
        if number == 2:
            checkpoint.save(folder, pipe, optimizer)
        optimizer.zero_grad()
        losses.append(float(pipe.step(x, target=y).loss))
        optimizer.step()
    return losses[-2:]


def as_expected(losses: list[float], expected: list[float]) -> Found:
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    says = f"losses of the next two steps differ by {apart:.1e} of themselves"
    return {"ok": apart < 1e-5, "says": says, "losses": losses, "expected": expected}


class Drops(nn.Module):
    """Gives what a dropout leaves of ones besides its result, so that its mask shows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x).tanh() + 3.0)  # what is zero was dropped


def masks(setting: Setting) -> Found:
    """The last dropout's mask, and the losses, which depend on all masks."""
    setting.prepare()
    width = mlp(not setting.is_real).args[0].shape[1]
    dropped: dict[int, Tensor] = {}
    losses: dict[int, float] = {}
    for ranks in (1, 2, 4, 8):
        torch.manual_seed(0)
        model, x = nn.Sequential(*(Drops(width) for _ in range(8))), torch.randn(16, width)
        options = {"loss_fn": F.mse_loss, "microbatches": 8, "devices": setting.device, "seed": 1}
        with penstock.pipeline(model, (x,), ranks=ranks, **options) as pipe:
            result = pipe.step(x, target=x, outputs=True)
            losses[ranks] = float(result.loss)
            dropped[ranks] = torch.cat([output.detach().cpu() for output in result.outputs]) == 0
    equal = [ranks for ranks, mask in dropped.items() if torch.equal(mask, dropped[1])]
    apart = max(abs(loss - losses[1]) / losses[1] for loss in losses.values())
    share = float(dropped[1].float().mean())
    says = f"equal for p = {equal}, {share:.0%} dropped; losses differ by {apart:.1e} of themselves"
    return {"ok": len(equal) == len(dropped) and apart < 1e-5 and 0.2 < share < 0.4, "says": says, "losses": losses}
