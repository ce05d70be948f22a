"""Operations and bytes of units, against those counted by hand: forward, whole backward, and its input gradient; and
what they say of times that were published."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.costs import OpCounts, Profile, estimate, fit_efficiency
from penstock.costs.hardware import Operation, device
from penstock.partition.cut.candidates import candidates
from penstock.partition.measure.measuring import measure
from penstock.partition.measure.pieces import UnmeasurableError
from penstock.partition.record.attempts import record
from scaffolding.models import Forward

ROWS, IN, OUT = 6, 8, 16
FLOAT = 4


def profile_of(model: nn.Module, *args: Tensor) -> Profile:
    recording = record(model, args, {})
    return measure(recording, model, candidates(recording, model, "flops"), args, {}, None, memory=True)


def second(layer: nn.Module, *before: nn.Module, given: Tensor) -> OpCounts:
    """What a layer does that is not the first, so that its inputs take a gradient."""
    found = profile_of(nn.Sequential(*before, layer), given).units[-1].operations
    assert found is not None
    return found


def products(operations: Sequence[Operation]) -> list[tuple[float, float, int]]:
    return sorted((each.flops, each.bytes, each.count) for each in operations if each.flops)


def flops(operations: Sequence[Operation]) -> float:
    return sum(each.flops * each.count for each in operations)


def moved(operations: Sequence[Operation]) -> float:
    return sum(each.bytes * each.count for each in operations)


def test_linear() -> None:
    found = second(nn.Linear(IN, OUT), nn.Linear(IN, IN), given=torch.randn(ROWS, IN))
    product = 2 * ROWS * IN * OUT
    given, made, weight, bias = (FLOAT * n for n in (ROWS * IN, ROWS * OUT, IN * OUT, OUT))
    assert products(found.forward) == [(product, given + weight + bias + made, 1)]
    assert products(found.backward) == [(product, given + weight + made, 2)]  # one for each factor
    assert products(found.input_gradient) == [(product, given + weight + made, 1)]
    # besides the products: the bias' gradient is a sum, and both gradients are added to what is there
    sums = made + bias
    assert moved(found.backward) - 2 * (given + weight + made) == sums + 3 * (weight + bias)
    assert moved(found.forward) == given + weight + bias + made


def test_what_takes_no_gradient_is_not_counted() -> None:
    frozen = nn.Linear(IN, OUT)
    frozen.requires_grad_(False)
    found = second(frozen, nn.Linear(IN, IN), given=torch.randn(ROWS, IN))
    assert found.backward == found.input_gradient
    assert flops(found.backward) == 2 * ROWS * IN * OUT
    first = profile_of(nn.Sequential(nn.Linear(IN, OUT), nn.Linear(OUT, IN)), torch.randn(ROWS, IN)).units[0].operations
    assert first is not None
    assert (first.input_gradient, flops(first.backward)) == ((), 2 * ROWS * IN * OUT)


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool) -> None:
    batch, heads, length, width = 2, 3, 10, 4

    def attend(self: Any, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x * self.gain, x, x, is_causal=causal)

    attention = Forward(attend, gain=nn.Parameter(torch.ones(1)))
    found = second(attention, nn.Linear(width, width), given=torch.randn(batch, heads, length, width))
    pairs = batch * heads * (length * (length + 1) // 2 if causal else length * length)
    assert flops(found.forward) == 2 * (2 * pairs * width)  # with the keys, and with the values
    assert flops(found.backward) == 5 * (2 * pairs * width)  # scores again, and four gradients
    tensor = FLOAT * batch * heads * length * width
    kernel = next(each for each in found.forward if each.flops)
    assert kernel.bytes == 4 * tensor + FLOAT * batch * heads * length  # no scores: it is fused


def test_layer_norm() -> None:
    found = second(nn.LayerNorm(IN), nn.Linear(IN, IN), given=torch.randn(ROWS, IN))
    tensor, parameters, statistics = FLOAT * ROWS * IN, FLOAT * 2 * IN, FLOAT * 2 * ROWS
    assert flops((*found.forward, *found.backward)) == 0
    assert [(each.bytes, each.count) for each in found.forward] == [(2 * tensor + parameters + statistics, 1)]
    backward = 3 * tensor + 2 * parameters + statistics  # gradient and input in, gradient out; parameters and theirs
    assert moved(found.backward) == backward + 3 * parameters


def test_convolution() -> None:
    batch, side = 2, 5
    found = second(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(3, 3, 1), given=torch.randn(batch, 3, side, side))
    product = 2 * batch * side * side * 3 * 4 * 9
    assert flops(found.forward) == product
    assert flops(found.backward) == 2 * product
    assert flops(found.input_gradient) == product
    assert {each.dtype for each in found.forward if each.flops} == {"tf32"}  # torch's default for convolutions


def test_embedding_reads_only_what_is_asked_for() -> None:
    rows, width, given = 1000, 8, torch.zeros(3, 5, dtype=torch.long)
    model = nn.Sequential(nn.Embedding(rows, width), nn.Linear(width, width))
    found = profile_of(model, given).units[0].operations
    assert found is not None
    made, table = FLOAT * 15 * width, FLOAT * rows * width
    assert [each.bytes for each in found.forward] == [8 * 15 + 2 * made]
    # its gradient is as large as the table, and added to what is there
    assert moved(found.backward) == (made + 8 * 15 + table) + 3 * table


def test_low_precision_and_autocast_have_their_own_peaks() -> None:
    model = nn.Sequential(nn.Linear(IN, IN), nn.Linear(IN, IN))
    with torch.autocast("cpu", torch.bfloat16):
        found = profile_of(model, torch.randn(ROWS, IN)).units[1].operations
    assert found is not None
    assert {each.dtype for each in (*found.forward, *found.backward) if each.flops} == {"bfloat16"}
    low = profile_of(model.to(torch.bfloat16), torch.randn(ROWS, IN, dtype=torch.bfloat16)).units[1].operations
    assert low is not None
    assert products(low.forward) == [(2 * ROWS * IN * IN, 2 * (2 * ROWS * IN + IN * IN + IN), 1)]


def test_bytes_are_those_of_a_measurement_and_weights_need_no_memory() -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 9), *(nn.Sequential(nn.LayerNorm(9), nn.Linear(9, 9)) for _ in range(3)))

    given, real = torch.randn(4, 7), model()
    recording = record(real, (given,), {})
    measured = measure(recording, real, candidates(recording, real, "flops"), (given,), {}, 0.0)
    with torch.device("meta"):
        empty = model()
    counted = profile_of(empty, given)
    assert all(parameter.is_meta and parameter.grad is None for parameter in empty.parameters())
    names = ("name", "like", "activation_bytes", "parameter_bytes", "gradient_bytes", "boundary_bytes")
    assert [[getattr(unit, name) for name in names] for unit in counted.units] == [
        [getattr(unit, name) for name in names] for unit in measured.units
    ]


def test_what_depends_on_values_cannot_be_counted() -> None:
    with pytest.raises(UnmeasurableError, match="running its units on fake tensors fails"):
        profile_of(
            nn.Sequential(nn.Linear(IN, IN), Forward(lambda _, x: x[x > 0].sum() * x), nn.Linear(IN, IN)),
            torch.randn(ROWS, IN),
        )


def test_experts_multiply_their_own_rows_only() -> None:
    rows, experts, width, out = 32, 4, 8, 16
    before = nn.Linear(width, width, dtype=torch.bfloat16)

    def route(self: Any, x: Tensor) -> Tensor:
        ends = torch.arange(1, experts + 1, dtype=torch.int32) * (len(x) // experts)
        return torch._grouped_mm(x, self.weight, offs=ends)

    layer = Forward(route, weight=nn.Parameter(torch.zeros(experts, width, out, dtype=torch.bfloat16)))
    found = second(layer, before, given=torch.zeros(rows, width, dtype=torch.bfloat16))
    product = 2 * rows * width * out
    assert (flops(found.forward), flops(found.backward), flops(found.input_gradient)) == (product, 2 * product, product)


def test_a_tied_weight_counts_where_it_is_used() -> None:
    rows, width, ids = 100, 8, torch.zeros(3, 5, dtype=torch.long)
    parts = {"table": nn.Embedding(rows, width), "head": nn.Linear(width, rows, bias=False)}
    parts["head"].weight = parts["table"].weight
    table, head = profile_of(Forward(lambda self, x: self.head(self.table(x)), **parts), ids).units
    assert (table.parameter_bytes, head.parameter_bytes) == (FLOAT * rows * width,) * 2
    assert table.operations is not None
    assert head.operations is not None
    assert flops((*table.operations.forward, *table.operations.backward)) == 0
    assert flops(head.operations.backward) == 2 * (2 * 15 * rows * width)
    assert table.operations.input_gradient == ()


# -- beside times that were published for A100s: without any calibration, and calibrated by another model --------------


A100 = device("a100")
PUBLISHED = json.loads((Path(__file__).parents[1] / "scaffolding" / "published.json").read_text())["tables5and6"]
LAYERS, GIVEN_ROWS = 3, {"1.5B": 6, "14.6B": 1}
"""Of a stage in the middle, and of a microbatch: Qi et al. 2023, table 3."""


class Block(nn.Module):
    """A layer of GPT as Megatron-LM has it: its attention writes the scores."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout, self.heads = nn.Dropout(0.1), heads

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        qkv = self.qkv(self.first(x)).view(B, T, 3, self.heads, D // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = self.dropout(torch.softmax(q @ k.transpose(-1, -2), -1))
        x = x + self.dropout(self.out((weights @ v).transpose(1, 2).reshape(B, T, D)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.second(x)))))


def rows_of(model: str) -> dict[str, float]:
    return next(one for one in PUBLISHED if one["model"] == model)


@functools.cache
def counted(model: str) -> Profile:
    given = rows_of(model)
    width = int(given["hidden"])
    with torch.device("meta"):
        first, *blocks = nn.Linear(width, width), *(Block(width, int(given["heads"])) for _ in range(2))
        layers = nn.Sequential(first, *blocks).to(torch.bfloat16)
    x = torch.zeros(GIVEN_ROWS[model], int(given["seq"]), width, dtype=torch.bfloat16)
    found = penstock.profile(layers, (x,), microbatches=1, device=A100)
    return replace(found, units=found.units[1:2])


def measured(model: str) -> Profile:
    """The same with what was published for a layer."""
    given, profile = rows_of(model), counted(model)
    names = {"forward_seconds": "forward", "input_gradient_seconds": "backward_input"}
    names["weight_gradient_seconds"] = "backward_weight"
    unit = replace(profile.units[0], **{name: given[key] * 1e-6 / LAYERS for name, key in names.items()})
    return replace(profile, units=(unit,), source="measured", device_name="NVIDIA A100-SXM4-80GB")


@pytest.mark.parametrize("model", GIVEN_ROWS)
def test_forward_and_input_gradient_are_near_without_calibration(model: str) -> None:
    guessed, given = counted(model).units[0], rows_of(model)
    assert LAYERS * guessed.forward_seconds * 1e6 == pytest.approx(given["forward"], rel=0.05)
    assert LAYERS * guessed.input_gradient_seconds * 1e6 == pytest.approx(given["backward_input"], rel=0.1)


@pytest.mark.parametrize(("known", "other"), [tuple(GIVEN_ROWS), tuple(reversed(GIVEN_ROWS))])
def test_one_model_calibrates_for_the_other(known: str, other: str) -> None:
    guessed = estimate(counted(other), A100, fit_efficiency([measured(known)], A100)).units[0]
    assert guessed.seconds == pytest.approx(measured(other).units[0].seconds, rel=0.1)
