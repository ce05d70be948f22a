"""Compiled code rounds elsewhere than eager code under autocast. `verify` measures what autocast's precision costs the
unsplit model itself, and allows compiled stages about as much."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import VerificationReport, verify
from penstock.runtime.loss.loss import LossHead

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler


class Upcast(nn.Module):
    """Rounds elsewhere when it is compiled, as code does that a compiler has fused: its product stays in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            product = (x.unsqueeze(-2) * self.linear.weight).sum(-1) + self.linear.bias
        else:
            product = self.linear(x)
        return x + self.norm(F.gelu(product))


def proof() -> VerificationReport:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(*(Upcast(12) for _ in range(4)))
    x, y = torch.randn(2, 16, 12)
    options: dict[str, Any] = {"ranks": 2, "microbatches": 8, "schedule": "zb-h1", "compile": {"backend": "aot_eager"}}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return verify(model, (x,), target=y, loss=F.mse_loss, full_batch=False, **options)


def test_code_that_rounds_elsewhere_is_close() -> None:
    report = proof()
    assert report.ok, report.summary()
    assert sum(row.verdict == "close" for row in report.rows) > 8, "or it does not round elsewhere"


def test_a_microbatch_that_counts_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    seed, calls = LossHead.seed, itertools.count()

    def wrong(self: LossHead, microbatch: int) -> Any:
        found = seed(self, microbatch)
        return found * 2 if next(calls) == 3 else found

    monkeypatch.setattr(LossHead, "seed", wrong)
    report = proof()
    assert {row.kind for row in report.failures} == {"gradient"}
    assert len(report.failures) > 8
