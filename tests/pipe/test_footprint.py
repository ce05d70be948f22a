"""What stages take on fake tensors is what autograd saves when they run; ranks add it up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock._base.pytree import flatten, map_tensors
from penstock._base.stages import TensorMeta
from penstock.partition import NoStreams, Partition, Partitioner
from penstock.partition.measure.footprint import Footprint, footprint
from scaffolding import models
from scaffolding.models import Layers


@pytest.mark.parametrize("name", ["mlp", "skips", "convnet", "gpt", "encoder_decoder", "in_place", "dicts"])
def test_a_stage_keeps_what_autograd_saves(name: str) -> None:
    case = models.CASES[name]()
    partition = Partitioner(case.model, 2, streams=NoStreams())(case.args, case.kwargs)
    before = {key: value.clone() for key, value in partition.stages[0].module.state_dict().items()}
    found = [footprint(stage.module, [i.meta for i in stage.meta.inputs]) for stage in partition.stages]
    for stage in partition.stages:
        assert all(parameter.grad is None for parameter in stage.module.parameters())
    for key, value in partition.stages[0].module.state_dict().items():
        assert torch.equal(value, before[key])
    assert [each.kept for each in found if each is not None] == list(saved(partition, case))


def saved(partition: Partition, case: models.Case) -> Iterator[int]:
    """The bytes that autograd saves in each stage's forward, besides parameters and buffers."""
    given = partition.arrange(
        flatten((map_tensors(torch.clone, case.args), map_tensors(torch.clone, case.kwargs))).leaves
    )
    values = {(-1, i.name): x for i, x in zip(partition.stages[0].meta.inputs, given, strict=True)}
    for stage in partition.stages:
        kept = {t.untyped_storage().data_ptr(): t for t in (*stage.module.parameters(), *stage.module.buffers())}
        own = set(kept)

        def pack(tensor: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            return kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            made = stage.module(*(values[i.source, i.name] for i in stage.meta.inputs))
        values |= {(stage.meta.index, o.name): x for o, x in zip(stage.meta.outputs, made, strict=True)}
        yield sum(t.untyped_storage().nbytes() for number, t in kept.items() if number not in own)


def test_what_an_lstm_keeps_is_estimated() -> None:
    """Its workspace is empty on fake tensors, and the most of what it keeps."""
    model, x = Recurrent(), torch.randn(16, 50, 64)
    partition = Partitioner(model, 1, streams=NoStreams())((x,), {})
    found = footprint(partition.stages[0].module, [each.meta for each in partition.stages[0].meta.inputs])
    assert found is not None
    assert found.kept == pytest.approx(next(saved(partition, models.Case(model, (x,), {}, None, None))), rel=0.1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(64, 128, 2, batch_first=True)
        self.second = nn.LSTM(128, 16, bidirectional=True, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.second(self.first(x)[0])[0]
        return made


def test_a_linear_layer_by_hand() -> None:
    """It keeps its input; its backward has all gradients at once, its parameters' until they are added to `.grad`."""
    meta = TensorMeta((5, 3), (3, 1), "float32", True)
    found = footprint(nn.Sequential(nn.Linear(3, 7), Listed()), [meta])
    assert found == Footprint(4 * 5 * 3, 4 * (5 * 7 + 5 * 3 + 7 * 3 + 7), inputs=(4 * 5 * 3,), outputs=(0,))


class Listed(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [x]


class Branches(nn.Module):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [x * 2 if x.sum() > 0 else x]


def test_a_stage_that_does_not_run_on_fake_tensors_has_no_footprint() -> None:
    assert footprint(Branches(), [TensorMeta((5, 3), (3, 1), "float32", True)]) is None


def test_ranks_add_up_their_stages() -> None:
    """A tied weight counts once on the rank of both its stages; pieces of the batch wait, and targets stay."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    model[3].weight = model[0].weight
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    options = {"target": y, "loss_fn": F.mse_loss, "balance": "flops", "cuts": ["1", "2", "3"]}
    found = penstock.inspect(model, (x,), stages=4, schedule="zb-v", microbatches=4, **options)
    first, second = found.memory
    assert [first.parameters, second.parameters] == [64, 2 * 64]
    assert [first.gradients, second.gradients] == [64, 2 * 64]
    assert [first.batch, second.batch] == [8 * 16 + 8 * 16, 0]
    assert [first.optimizer, second.optimizer] == [2 * 64, 2 * 2 * 64]
    held = first.parameters + first.gradients + first.optimizer
    assert first.peak == held + first.activations + first.working + first.batch
    two = penstock.inspect(model, (x,), stages=2, microbatches=4, **options | {"cuts": ["2"]}).memory
    assert [one.batch for one in two] == [8 * 16, 8 * 16], "inputs are on the first rank, targets on the last"


@pytest.mark.parametrize(
    "options",
    [{"recompute": "except_last"}, {"offload": True}, {"recompute": "always", "schedule": "zb-h1"}],
    ids=str,
)
def test_what_is_not_predicted_is_left_out(options: dict[str, object]) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    given = {"stages": 2, "microbatches": 2, "balance": "flops"} | options
    assert penstock.inspect(model, (torch.randn(4, 4),), **given).memory == ()


class Skipping(Layers):
    """The last layer also needs what the first one made."""

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        result: Tensor = self.layers[3](self.layers[2](self.layers[1](first))) + first
        return result


def test_a_value_that_skips_stages_counts_at_every_cut_that_it_crosses() -> None:
    """Each value counts once a cut, although it travels from its producer to each stage that uses it: a profile's cuts
    do not know which stages lie between.
    """
    model, x = Skipping(8, 4), torch.randn(6, 8)
    profile = penstock.profile(model, (x,), microbatches=2, budget_seconds=0)
    cuts = [unit.name for unit in profile.units[1:]]
    crossings = penstock.inspect(model, (x,), stages=4, microbatches=2, cuts=cuts).crossings
    assert [(one.source, one.target) for one in crossings] == [(0, 1), (0, 3), (1, 2), (2, 3)]
    for cut, unit in enumerate(profile.units[1:], 1):
        values = {(one.source, one.value): one.bytes for one in crossings if one.source < cut <= one.target}
        assert unit.boundary_bytes == sum(values.values())
        assert unit.boundary_gradient_bytes == unit.boundary_bytes


def test_a_profile_knows_what_is_left_for_w() -> None:
    """Of a linear layer its input and its result's gradient; of what has no weights nothing."""
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    units = penstock.profile(model, (torch.zeros(32, 64),), microbatches=1, budget_seconds=0.0).units
    assert [unit.weight_gradient_bytes for unit in units] == [32 * (64 + 128) * 4, 0, 32 * (128 + 64) * 4]
