"""Adapters of the `peft` library on a frozen base: unedited, to the bit, saved as `peft` saves them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from distributed.peft_jobs import adapted, by_hand, train
from scaffolding.ranks import Ranks
from scaffolding.representatives import long_after

torch.set_num_threads(1)  # bits are compared


@pytest.mark.parametrize(
    ("name", "ranks", "schedule"),
    long_after(
        *(1, ("gpt2", 2, "zb-v"), ("gpt2", 1, "naive"), ("gpt2", 2, "dualpipe-v"), ("gpt2", 4, "1f1b")),
        *(("gpt2", 4, "zb-h1"), ("llama", 4, "1f1b"), ("llama", 2, "zb-h1")),
    ),
)
def test_adapters_have_the_gradients_of_one_device(name: str, ranks: int, schedule: str) -> None:
    case = adapted(name, lora_dropout=0.2)
    report = penstock.verify(case.model, kwargs=case.kwargs, ranks=ranks, microbatches=4, schedule=schedule, exact=True)
    report.raise_if_failed()
    trained = {row.name for row in report.rows if row.kind == "gradient" and row.max_reference > 0}
    assert trained == {name for name, p in _module(case.model).named_parameters() if p.requires_grad}


@pytest.mark.parametrize("schedule", long_after(1, "zb-h1", "1f1b"))
def test_stages_without_adapters_have_no_backward(schedule: str) -> None:
    case = adapted("gpt2", layers_to_transform=[2])
    options: dict[str, Any] = {"ranks": 4, "microbatches": 4, "schedule": schedule, "balance": "parameters"}
    with penstock.pipeline(case.model, (), case.kwargs, **options) as pipe:
        backward = {action.stage for row in pipe.schedule.rows for action in row if action.op.value in "BIW"}
        assert backward == {2, 3}  # the last one hands the gradient on
        names = {name for name, _ in pipe.named_parameters()}
    assert names == {name for name, _ in _module(adapted("gpt2", layers_to_transform=[2]).model).named_parameters()}
    penstock.verify(
        adapted("gpt2", layers_to_transform=[2]).model, kwargs=case.kwargs, exact=True, **options
    ).raise_if_failed()


@pytest.mark.parametrize(("ranks", "schedule"), long_after(1, (4, "1f1b"), (1, "naive"), (2, "zb-h1")))
def test_adapters_alone_are_saved_under_pefts_names(ranks: int, schedule: str) -> None:
    assert_same(train(0, ranks, schedule), by_hand())


@pytest.mark.long  # each rank imports peft
@pytest.mark.distributed
def test_every_rank_gathers_the_adapters(ranks2: Ranks) -> None:
    for saved in ranks2.run(train, None, "zb-h1"):
        assert_same(saved, by_hand())


def assert_same(saved: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert saved.keys() == expected.keys()
    assert len(saved) == 8
    for name, tensor in saved.items():
        assert torch.equal(tensor, expected[name]), name


def _module(model: nn.Module | list[nn.Module]) -> nn.Module:
    assert isinstance(model, nn.Module)
    return model
