"""What a split backward costs is measured (benchmarks/split_backward); that it defers all that it should is tested."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from penstock import pipeline
from scaffolding.by_hand import assert_steps_by_hand
from scaffolding.models import squared_error


def test_trap_16_all_weights_of_linear_layers_wait_for_w() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(7, 7, bias=False), nn.Tanh())))
    x, target = torch.randn(8, 7), torch.randn(8, 7)
    with pipeline(
        model, (x,), ranks=2, microbatches=4, schedule="zb-h1", loss=nn.functional.mse_loss
    ) as pipe:  # fmt: skip
        pipe.step(x, target=target)
        assert pipe.deferred_weight_grad_fraction == {0: 1.0, 1: 1.0}


class Trims(nn.Module):
    """Trims padding, so that the strides of a linear layer's input, and so its operators, differ by microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.last(self.first(x[:, : int(lengths.max())]).tanh()).sum(1)


class Trimmed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.last = nn.Embedding(9, 6), Trims(), nn.Linear(6, 6)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.last(self.block(self.embed(ids), lengths))


def test_a_layer_that_runs_otherwise_in_a_later_microbatch_waits_for_w_as_a_whole() -> None:
    torch.manual_seed(0)
    model, ids, target = Trimmed(), torch.randint(0, 9, (8, 5)), torch.randn(8, 6)
    lengths = torch.tensor([5, 5, 3, 2, 5, 4, 4, 4])
    reference = copy.deepcopy(model)
    with pipeline(
        model, (ids, lengths), ranks=2, microbatches=4, schedule="zb-h1", loss=squared_error, cuts=["last"]
    ) as pipe:
        assert_steps_by_hand(pipe, reference, [(ids, lengths, target)] * 2, squared_error, 4)
        assert pipe.deferred_weight_grad_fraction[0] > 0.9
