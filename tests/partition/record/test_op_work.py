"""How much work calls are, and that the stages of common models share it evenly."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from penstock import inspect, pipeline
from penstock.partition import Balance, NoStreams, Partitioner
from penstock.partition.record.attempts import record
from penstock.partition.record.op_work import OPERATIONS_PER_BYTE as PER_BYTE
from scaffolding.models import Forward, Layers, gpt


def work(model: nn.Module, *args: Tensor) -> int:
    return sum(fact.work for fact in record(model, args, {}).facts.values())


def test_a_product_counts_once_forward_and_once_for_each_factor_that_takes_a_gradient() -> None:
    rows, wide, narrow = 5, 16, 8
    model, x = nn.Linear(wide, narrow, bias=False), torch.randn(rows, wide)
    once, moved = 2 * rows * wide * narrow, 4 * (rows * wide + wide * narrow + rows * narrow) * PER_BYTE
    assert work(model, x) == 2 * once + 3 * moved
    assert work(model, x.requires_grad_()) == 3 * once + 3 * moved
    with_bias = nn.Linear(wide, narrow)  # which takes a gradient too, but is not a factor
    assert work(with_bias, x) == 3 * once + 3 * (moved + 4 * narrow * PER_BYTE)
    with torch.no_grad():
        assert work(model, x) == once + moved
    assert work(model.requires_grad_(False), x.detach()) == once + moved


def test_attention_and_recurrent_layers_are_products_too() -> None:
    heads, length, width = 2, 64, 32
    q = torch.randn(1, heads, length, width, requires_grad=True)

    attention = Forward(lambda _, q: F.scaled_dot_product_attention(q, q, q))
    assert work(attention, q) > 3 * 4 * heads * length * length * width
    assert work(nn.LSTM(64, 64), torch.randn(30, 1, 64)) > 2 * 2 * 30 * 8 * 64 * 64


def test_a_lookup_reads_its_rows_and_a_depthwise_convolution_is_not_weightless() -> None:
    numbers, width = 10_000, 32
    table, tokens = nn.Embedding(numbers, width), torch.zeros(1, 7, dtype=torch.long)
    head = nn.Linear(width, numbers, bias=False)
    assert 5 * work(table.requires_grad_(False), tokens) < work(head, torch.randn(7, width)) / 100
    depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64)
    assert work(depthwise, torch.randn(1, 64, 14, 14)) > work(nn.Conv2d(64, 64, 1), torch.randn(1, 64, 14, 14)) / 4


PICTURE, TEXT = torch.zeros(1, 3, 224, 224), torch.zeros(1, 128, dtype=torch.long)
COMMON: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "ResNet-50": (lambda: transformers.ResNetForImageClassification(transformers.ResNetConfig()), PICTURE),
    "GPT-2": (lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config()), TEXT),
}


@pytest.mark.parametrize("name", ["GPT-2", pytest.param("ResNet-50", marks=pytest.mark.long)])
def test_four_stages_of_common_models_share_the_work(name: str) -> None:
    make, given = COMMON[name]
    with torch.device("meta"):
        model = make()

    def slowest(balance: Balance) -> float:
        shares = [stage.work_fraction for stage in inspect(model, (given,), stages=4, balance=balance).stages]
        assert sum(shares) == pytest.approx(1)
        return 4 * max(shares)

    assert slowest("flops") < 1.3
    assert slowest("flops") < slowest("parameters")


def test_shares_add_up_with_tied_parameters_counted_once() -> None:
    case = gpt()
    found = inspect(case.model, case.args, case.kwargs, stages=3)
    assert found.ties
    assert sum(stage.parameter_fraction for stage in found.stages) == pytest.approx(1)
    assert sum(stage.work_fraction for stage in found.stages) == pytest.approx(1)


def test_a_batch_of_another_shape_leaves_the_cuts_as_they_are() -> None:
    class Grows(Layers):
        """Its second layer works on as many copies as there are rows."""

        def forward(self, x: Tensor) -> Tensor:
            first, second, *rest = self.layers
            x = second(first(x).expand(x.shape[0] ** 2, *x.shape).contiguous()).mean(0)
            for layer in rest:
                x = layer(x)
            return x

    def cuts(sizes: Sequence[int]) -> tuple[str, ...]:
        partitioner = Partitioner(Grows(8, 4), 2, streams=NoStreams())
        for rows in sizes:
            partitioner((torch.randn(rows, 8),))
        return partitioner.cuts or ()

    assert cuts([1]) != cuts([9])
    assert cuts([1, 9]) == cuts([1])


def test_a_pipeline_balances_work_unless_it_is_told_otherwise() -> None:
    model = nn.Sequential(nn.Embedding(5000, 8), *(nn.Linear(8, 8) for _ in range(7)))  # parameters in front
    ids = torch.zeros(64, 16, dtype=torch.long)
    cuts = {}
    for name in ("default", "flops", "parameters"):
        options = {} if name == "default" else {"balance": name}
        with pipeline(model, (ids,), loss=lambda y: y.mean(), ranks=2, microbatches=2, **options) as pipe:
            cuts[name] = pipe.cuts
    assert cuts["default"] == cuts["flops"] != cuts["parameters"]
