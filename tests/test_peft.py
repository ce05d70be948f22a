"""Adapters of the `peft` library on a frozen base: unedited, to the bit, saved as `peft` saves them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from scaffolding.models import Case, gpt2, llama
from scaffolding.ranks import Ranks
from scaffolding.representatives import long_after

torch.set_num_threads(1)  # bits are compared

STEPS, RATE = 3, 0.05


def adapted(name: str, **options: Any) -> Case:
    """A frozen base with trained adapters, and a batch of eight rows."""
    from peft import LoraConfig, get_peft_model

    case = {"gpt2": gpt2, "llama": llama}[name]()
    targets: dict[str, Any] = {"fan_in_fan_out": True} if name == "gpt2" else {"target_modules": ["q_proj", "up_proj"]}
    config = LoraConfig(r=2, lora_alpha=4, task_type="CAUSAL_LM", init_lora_weights=False, **targets, **options)
    with warnings.catch_warnings():  # peft reads a name that transformers deprecates
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing")
        model = get_peft_model(case.model, config)
    ids = torch.randint(4, 32, (8, 7), generator=torch.Generator().manual_seed(1))
    return Case(model, (), {"input_ids": ids, "labels": ids}, None, lambda output, _: output.loss)


def by_hand() -> dict[str, Tensor]:
    """The adapters after some steps of the unsplit model, by the names under which `peft` saves them."""
    from peft import get_peft_model_state_dict

    case = adapted("gpt2")
    assert isinstance(case.model, nn.Module)
    optimizer = torch.optim.SGD((p for p in case.model.parameters() if p.requires_grad), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for ids in case.kwargs["input_ids"].chunk(4):
            (case.model(input_ids=ids.clone(), labels=ids.clone(), use_cache=False).loss / 4).backward()
        optimizer.step()
    saved: dict[str, Tensor] = get_peft_model_state_dict(case.model)
    return saved


def train(rank: int, ranks: int | None, schedule: str) -> dict[str, Tensor]:
    """The same in a pipeline: the adapters alone, gathered from all ranks."""
    from peft import get_peft_model_state_dict

    case = adapted("gpt2")
    with penstock.pipeline(case.model, (), case.kwargs, ranks=ranks, microbatches=4, schedule=schedule) as pipe:
        optimizer = torch.optim.SGD(pipe.parameter_groups(lambda name, parameter: {}), lr=RATE)
        for _ in range(STEPS):
            optimizer.zero_grad()
            pipe.step(**case.kwargs)
            optimizer.step()
        trained = {name: p.detach() for name, p in pipe.named_parameters() if p.requires_grad}
        everything = {name: tensor for part in pipe.all_gather_object(trained) for name, tensor in part.items()}
        saved: dict[str, Tensor] = get_peft_model_state_dict(pipe.model, state_dict=everything)
        return saved


@pytest.mark.parametrize(
    ("name", "ranks", "schedule"),
    long_after(1, ("gpt2", 2, "zb-v"), ("gpt2", 4, "1f1b"), ("gpt2", 2, "dualpipe-v"), ("llama", 2, "zb-h1")),
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


@pytest.mark.distributed
@pytest.mark.parametrize("in_processes", long_after(1, False, True))  # each rank imports peft
def test_adapters_alone_are_saved_under_pefts_names(in_processes: bool, ranks2: Ranks) -> None:
    expected = by_hand()
    for saved in ranks2.run(train, None, "zb-h1") if in_processes else [train(0, 4, "1f1b")]:
        assert_same(saved, expected)


def assert_same(saved: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert saved.keys() == expected.keys()
    assert len(saved) == 8
    for name, tensor in saved.items():
        assert torch.equal(tensor, expected[name]), name


def _module(model: nn.Module | list[nn.Module]) -> nn.Module:
    assert isinstance(model, nn.Module)
    return model
