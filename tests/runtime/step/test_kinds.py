"""Batches of which some microbatches take another branch of the forward than others, in one process.

Real ranks do the same in tests/distributed/test_kinds_ranks.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from penstock import pipeline, verify
from penstock.schedule import generate
from scaffolding.branching import WIDTH, Branching, batch_of, cuts, several_kinds
from scaffolding.by_hand import assert_same_gradients, assert_steps_by_hand
from scaffolding.models import Forward, squared_error
from scaffolding.representatives import long_after

MICROBATCHES = 6


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    long_after(3, ("1f1b", 1), ("zb-v", 2), ("chimera", 1), ("interleaved-1f1b", 2), ("dualpipe", 1)),
)
def test_each_microbatch_goes_its_way(schedule: str, chunks: int) -> None:
    order = generate(schedule, 2, MICROBATCHES, chunks)
    torch.manual_seed(0)
    model = Branching(order.placement.depth)
    reference = copy.deepcopy(model)
    but = [name for name, _ in model.named_parameters()] if order.placement.pipelines > 1 else []
    batches = [batch_of(ways, seed) for seed, ways in enumerate(several_kinds(MICROBATCHES))]
    options: dict[str, Any] = {"ranks": 2, "schedule": order, "cuts": cuts(order.placement.depth)}
    with pipeline(model, batches[0][:2], loss=squared_error, **options) as pipe:
        assert_steps_by_hand(pipe, reference, (*batches, *batches), squared_error, MICROBATCHES, but=but)


class Reused(nn.Module):
    """Layers that use their two weights once, twice or in a product with another, as a plain number says."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
        if way == 0:
            return torch.relu(self.b(self.a(x)))
        if way == 1:
            return torch.tanh(self.b(x)) * self.a.weight[0]
        return self.a(self.b(self.a(x)))


def reuse(self: Any, x: torch.Tensor, ways: torch.Tensor) -> torch.Tensor:
    way = int(ways.max())
    for layer in self.layers:
        x = layer(x, way)
    return x


@pytest.mark.parametrize("schedule", ["zb-h1", pytest.param("1f1b", marks=pytest.mark.long)])
def test_microbatches_with_the_same_traffic_may_use_a_weight_in_other_ways(schedule: str) -> None:
    torch.manual_seed(0)
    model = Forward(reuse, layers=nn.ModuleList(Reused() for _ in range(2)))
    reference = copy.deepcopy(model)
    options: dict[str, Any] = {"ranks": 2, "schedule": schedule, "microbatches": 3, "cuts": ["layers.1"]}
    ways = [torch.tensor(each).repeat_interleave(2) for each in ((0, 2, 1), (1, 0, 0))]
    batches = [(torch.randn(6, WIDTH), each, torch.ones(6, WIDTH)) for each in ways]
    with pipeline(model, batches[0][:2], loss=squared_error, **options) as pipe:
        assert_steps_by_hand(pipe, reference, (*batches, *batches), squared_error, 3)


# -- what stages do besides ------------------------------------------------------------------------------------------


FEATURES: dict[str, dict[str, Any]] = {
    "dropout": {},
    "recompute stages": {"recompute": "always"},
    "recompute layers": {"recompute": 2},
    "offload": {"offload": True, "recompute": "except_last"},
    "compile": {"compile": {"backend": "aot_eager"}},
    "check_finite": {"check_finite": True},
    "autocast": {},
}


@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")  # torch.compile's own
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(
    "feature", [pytest.param(name, marks=() if name == "offload" else pytest.mark.long) for name in FEATURES]
)
def test_features_serve_all_kinds(feature: str, schedule: str) -> None:
    """Masks are drawn, so the reference is a pipeline of one rank."""
    torch.manual_seed(0)
    model = Branching(4, dropout=0.3)
    reference = copy.deepcopy(model)
    batches = [batch_of(ways, seed) for seed, ways in enumerate(several_kinds(MICROBATCHES))]
    split: dict[str, Any] = {"ranks": 2, "schedule": schedule, "cuts": ["layers.2"], **FEATURES[feature]}
    given: dict[str, Any] = {"microbatches": MICROBATCHES, "seed": 3, "loss": squared_error}
    with (
        pipeline(model, batches[0][:2], **split, **given) as pipe,
        pipeline(reference, batches[0][:2], ranks=1, schedule="gpipe", **given) as one,
    ):
        for x, mask, y in (*batches, *batches):
            model.zero_grad()
            reference.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=feature == "autocast"):
                assert torch.equal(pipe.step(x, mask, target=y).loss, one.step(x, mask, target=y).loss)
            assert_same_gradients(model, reference)
        if schedule == "zb-h1" and feature != "recompute layers":
            assert min(pipe.deferred_weight_grad_fraction.values()) > 0.5


def test_evaluation_takes_the_same_ways() -> None:
    torch.manual_seed(0)
    model = Branching(2)
    x, mask, _ = batch_of(several_kinds(MICROBATCHES)[0], 0)
    with pipeline(model, (x, mask), ranks=2, microbatches=MICROBATCHES, loss=squared_error, cuts=cuts(2)) as pipe:
        outputs = pipe.evaluate(x, mask, outputs=True).outputs
    for output, part, own in zip(outputs, x.chunk(MICROBATCHES), mask.chunk(MICROBATCHES), strict=True):
        assert torch.equal(output, model(part.clone(), own.clone()))


# -- padded sequences -------------------------------------------------------------------------------------------------


def test_a_padded_batch_of_which_one_microbatch_has_no_padding() -> None:
    """As it comes from a data set. The attention of `transformers` then needs no mask for that microbatch."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 32}
    heads = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model("phi", **sizes, **heads)

    def make() -> nn.Module:
        torch.manual_seed(0)
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
        return model.train()

    ids = torch.randint(1, 64, (8, 10), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[:4, 7:] = mask[6:, 9:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    options = {"schedule": "1f1b", "reduction": lambda labels: (labels[:, 1:] != -100).sum()}
    report = verify(make, kwargs=batch, ranks=2, microbatches=4, **options)
    assert report.ok
    assert report.exact
