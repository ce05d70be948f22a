"""Adapters of `peft` on small models of `transformers`: how they are made, and trained on ranks."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from scaffolding.models import Case, gpt2, llama

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
