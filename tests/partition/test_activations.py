"""How much a microbatch keeps from its forward to its backward: what `inspect` says, and what torch keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock import inspect
from penstock.partition import NoStreams, Partitioner
from penstock.partition.choose_cuts import StageBudget
from scaffolding.models import OneLayer, gpt

WIDTH, ROWS = 8, 6
ROW = 4 * WIDTH  # bytes


class ByValues(OneLayer):
    """Runs for real when it is recorded."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * (1 + len(x.detach().sum(1).nonzero().tolist()))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class ChecksItsNorm(nn.Module):
    """As a layer of timm's DenseNet with `memory_efficient=True`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = checkpoint(self.norm, self.layer(x), use_reentrant=False)
        return torch.tanh(normed)


def kept(model: nn.Module, *args: Tensor, **kwargs: Tensor) -> int:
    """Bytes of the memory that one forward of the unsplit model saves, parameters and buffers aside."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _ = model(*args, **kwargs)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))),
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(4))),
    ],
)
def test_the_stages_keep_what_torch_keeps(make: Callable[[], nn.Module]) -> None:
    model, x = make(), torch.randn(ROWS, WIDTH)
    (whole,) = inspect(model, (x,), stages=1, microbatches=1).stages
    assert whole.activation_bytes == kept(model, x)
    halves = [stage.activation_bytes for stage in inspect(model, (x,), stages=2, microbatches=1).stages]
    crossing = ROWS * ROW  # which one stage may save as its result, and the other as its input
    assert kept(model, x) <= sum(each or 0 for each in halves) <= kept(model, x) + crossing


def test_a_transformer_keeps_what_torch_keeps() -> None:
    case = gpt()
    (whole,) = inspect(case.model, case.args, case.kwargs, stages=1, microbatches=1).stages
    assert whole.activation_bytes == kept(case.model, *case.args, **case.kwargs)


def test_a_norm_that_runs_again_in_backward_counts_no_batch() -> None:
    model = nn.Sequential(*(ChecksItsNorm() for _ in range(4)))
    assert all(stage.activation_bytes for stage in inspect(model, (torch.randn(ROWS, WIDTH),), stages=2).stages)
    assert not any(block.norm.num_batches_tracked for block in model)


def test_it_is_that_of_one_microbatch() -> None:
    model, x = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), torch.randn(ROWS, WIDTH)
    found = inspect(model, (x,), stages=2, microbatches=3)
    assert found.microbatches == 3
    assert [stage.activation_bytes for stage in found.stages] == [2 * 2 * ROW] * 2


def test_a_stage_keeps_what_the_model_would_run_again() -> None:
    x = torch.randn(ROWS, WIDTH)
    (whole,) = inspect(Checkpointed(), (x,), stages=1, microbatches=1).stages
    assert whole.activation_bytes == 5 * ROWS * ROW


def test_what_does_not_run_on_fake_tensors_is_unknown() -> None:
    x = torch.randn(ROWS, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), ByValues(WIDTH), nn.Linear(WIDTH, WIDTH), ByValues(WIDTH))
    assert [stage.activation_bytes for stage in inspect(model, (x,), stages=2).stages] == [None, None]
    notes = Partitioner(model, 2, streams=NoStreams(), budget=StageBudget(1e6))((x,)).notes
    (note,) = (note for note in notes if "memory" in note)
    assert "of 2 units ('1' is the first) does not count as memory" in note


def test_what_units_share_is_seen_when_they_run_for_real() -> None:
    x = torch.randn(ROWS, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), ByValues(WIDTH), nn.Linear(WIDTH, WIDTH))
    found = Partitioner(model, 2, streams=NoStreams()).profile((x,), budget_seconds=0.0)
    # tanh keeps its result, which the next unit keeps, too; the others keep what the unit before does not
    assert [unit.shared_bytes for unit in found.units] == [0, 0, ROWS * ROW, 0]
