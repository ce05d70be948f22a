"""The Trainer of transformers trains a pipeline as it trains the unsplit model; what cannot work is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
    default_data_collator,
)

import penstock
from penstock._base.errors import ArgumentError
from penstock.integrations.accelerate import ranks_as_one_device
from penstock.integrations.transformers import PipelineTrainer
from penstock.pipe.pipeline import Pipeline

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


@pytest.fixture(autouse=True)
def fresh(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accelerate keeps its state for the whole process."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def language_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=20, tie_word_embeddings=False, **sizes))


def sentences(number: int = 64) -> list[dict[str, Any]]:
    """Tokens of one length, of whose labels some do not count."""
    torch.manual_seed(1)
    ids = torch.randint(20, (number, 9))
    labels = torch.where(torch.rand(number, 9) < 0.3, -100, ids)
    return [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    given = {
        "max_steps": 4,
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 16,
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "save_strategy": "no",
    }
    return TrainingArguments(str(folder), **{**given, **more})


def split(model: torch.nn.Module, data: list[dict[str, Any]], reduction: str = "sum", **options: Any) -> Pipeline:
    return penstock.pipeline(
        model, (), default_data_collator(data[:16]), microbatches=4, reduction=reduction, **options
    )


def losses(trainer: Trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_it_trains_what_the_plain_trainer_trains(tmp_path: Path) -> None:
    """Whose accumulated batches are the pipeline's microbatches: to the bit, clipping and schedule included."""
    data = sentences()
    plain = language_model()
    accumulating = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    trainer = Trainer(plain, arguments(tmp_path, **accumulating), train_dataset=data, eval_dataset=data[:20])
    trainer.train()
    with split(language_model(), data, ranks=2) as pipe:
        ours = PipelineTrainer(pipe, arguments(tmp_path), train_dataset=data, eval_dataset=data[:20])
        ours.train()
        assert losses(ours) == pytest.approx(losses(trainer), rel=1e-6)
        norms = [[line["grad_norm"] for line in each.state.log_history if "loss" in line] for each in (ours, trainer)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
        for name, value in plain.state_dict().items():
            assert torch.equal(pipe.state_dict()[name], value), name
        evaluated, expected = ours.predict(data[:20]), trainer.predict(data[:20])
    assert torch.equal(torch.tensor(evaluated.label_ids), torch.tensor(expected.label_ids))
    torch.testing.assert_close(torch.tensor(evaluated.predictions), torch.tensor(expected.predictions))
    assert evaluated.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"])


def test_what_does_not_reach_the_stages_is_refused(tmp_path: Path) -> None:
    data = sentences()
    with split(language_model(), data) as pipe:
        with pytest.raises(ArgumentError, match=r"activation_checkpointing=True .*penstock.pipeline\(recompute=\)"):
            PipelineTrainer(pipe, arguments(tmp_path, activation_checkpointing=True))
        with pytest.raises(ArgumentError, match="no compute_loss_func"):
            PipelineTrainer(pipe, arguments(tmp_path), compute_loss_func=lambda *_: 0)
        ours = PipelineTrainer(pipe, arguments(tmp_path, optim="galore_adamw", optim_target_modules=["mlp"]))
        with pytest.raises((ArgumentError, ImportError)):
            ours.create_optimizer()
    with split(language_model(), data, "mean") as pipe:
        with pytest.raises(ArgumentError, match=r"takes num_items_in_batch; .*reduction='sum'"):
            PipelineTrainer(pipe, arguments(tmp_path))


def test_an_accelerator_that_counts_processes_came_too_early() -> None:
    Accelerator(cpu=True)
    ranks_as_one_device(cpu=True).num_processes = 2
    with pytest.raises(ArgumentError, match="call this before it is"):
        ranks_as_one_device(cpu=True)


def test_the_first_rank_is_the_one_that_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where Accelerate, without an accelerator and not told to use the CPU, sees no processes at all."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("backward", "clip_grad_norm_", "save_state", "load_state"):
        monkeypatch.setattr(Accelerator, name, None)  # puts them back afterwards
    ranks_as_one_device()
    assert not PartialState().is_main_process
    assert not Accelerator().is_main_process
    with pytest.raises(
        ArgumentError, match=r"sees the stages of one rank alone; call Pipeline\.clip_grad_norm_ instead"
    ):
        Accelerator().clip_grad_norm_([], 1.0)


@pytest.mark.long  # an option of Trainer's own
def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    every = {"save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    data = sentences()
    with split(language_model(), data, ranks=2) as pipe:
        args = arguments(tmp_path, max_steps=6, **every, **best)
        trainer = PipelineTrainer(pipe, args, train_dataset=data, eval_dataset=data[:20])
        trainer.train()
    history = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert history[0] == max(history), "here the worst is the best: the first"
    expected = LlamaForCausalLM.from_pretrained(tmp_path / "checkpoint-2").state_dict()
    for name, value in trainer.pipe.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("kind", ["ignores", "adds"])
def test_losses_that_do_not_add_up_are_refused(tmp_path: Path, kind: str) -> None:
    class Model(LlamaForCausalLM):
        def forward(self, *args: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
            if kind == "ignores":
                return super().forward(*args, **kwargs)
            output = super().forward(*args, num_items_in_batch=num_items_in_batch, **kwargs)
            output.loss = output.loss + 0.01 * output.logits.square().mean()
            return output

    torch.manual_seed(0)
    data, model = sentences(), Model(language_model().config)
    with split(model, data) as pipe:
        ours = PipelineTrainer(pipe, arguments(tmp_path, remove_unused_columns=False), train_dataset=data)
        with pytest.raises(ArgumentError, match="for twice the num_items_in_batch, where half was expected"):
            ours.train()


@pytest.mark.long  # like the first test, for another kind of model
@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 2}, {"bf16": True}], ids=str)
def test_pictures(tmp_path: Path, options: dict[str, Any]) -> None:
    def model() -> ViTForImageClassification:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 2}
        return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=3, **sizes))

    torch.manual_seed(2)
    data = [{"pixel_values": torch.randn(3, 8, 8), "labels": k % 3} for k in range(64)]
    plain = Trainer(model(), arguments(tmp_path, **options), train_dataset=data)
    plain.train()
    with split(model(), data, ranks=2) as pipe:
        ours = PipelineTrainer(pipe, arguments(tmp_path, **options), train_dataset=data)
        ours.train()
    assert losses(ours) == pytest.approx(losses(plain), rel=1e-2 if "bf16" in options else 1e-4)
