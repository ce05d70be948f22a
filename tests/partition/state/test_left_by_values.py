"""Numbers and detached tensors that a mixture finds from values and leaves in an attribute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import pipeline

X, TARGET = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 6)


class Mixture(nn.Module):
    """Asks which rows its gate has chosen, so that it runs as a whole, on made-up values in a recording."""

    def __init__(self, leave: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.gate, self.expert, self.leave = nn.Linear(6, 6), nn.Linear(6, 6), leave
        self.load: Any = None

    def forward(self, x: Tensor) -> Tensor:
        gates = self.gate(x).softmax(-1)
        self.leave(self, gates)
        (rows,) = torch.where(gates.argmax(-1) == 0)
        x = x * gates[:, :1]
        return x.index_add(0, rows, self.expert(x[rows])) if len(rows) else x


def sets(make: Callable[[Tensor], Any]) -> Callable[[Any, Tensor], None]:
    def leave(block: Any, gates: Tensor) -> None:
        block.load = make(gates)

    return leave


NUMBER = sets(lambda g: float(g.max()))
COUNTS = sets(lambda g: [int(g.argmax(-1).eq(k).sum()) for k in range(6)])


@pytest.mark.parametrize("leave", [NUMBER, COUNTS])
def test_a_loss_that_does_not_read_it_is_not(leave: Callable[[Any, Tensor], None]) -> None:
    model = nn.Sequential(Mixture(leave), nn.Linear(6, 6), nn.Linear(6, 6))
    with pipeline(model, (X,), loss=F.mse_loss, ranks=2, microbatches=4, schedule="gpipe") as pipe:
        for _ in range(2):
            assert torch.isfinite(pipe.step(X, target=TARGET).loss)
