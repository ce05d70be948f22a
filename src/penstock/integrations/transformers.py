"""The Trainer of transformers around a pipeline: loop, logs, callbacks, checkpoints. Needs `penstock[transformers]`.

The Trainer has no hook for a pipeline, and is built on Accelerate, which has none either. This subclass overrides what
touches the model: documented methods where there are any; the private ones are grouped at its end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from penstock import checkpoint
from penstock._base.errors import ArgumentError
from penstock.integrations.accelerate import ranks_as_one_device
from penstock.pipe.pipeline import Pipeline
from penstock.runtime.step.bound_schedules import OutputsOption

try:
    from transformers import PreTrainedModel, Trainer, TrainingArguments
except ImportError as error:
    raise ImportError(f"this needs the package transformers ({error}): pip install penstock[transformers]") from error

FOLDER = "pipeline"
"""The folder in each of the Trainer's checkpoints with the part of the pipeline: weights, optimizer, scheduler."""

REFUSED = {
    "fp16": "bf16 works, and so does a plain loop with penstock.GradScaler",
    "fsdp": "shard stages in a plain loop, with penstock.pipeline(parallelize=)",
    "deepspeed": "it would divide the model once more",
    "torch_compile": "pass penstock.pipeline(compile=True)",
    "activation_checkpointing": "pass penstock.pipeline(recompute=)",
    "gradient_checkpointing": "pass penstock.pipeline(recompute=)",
    "label_smoothing_factor": "it needs a loss besides the model's own",
    "auto_find_batch_size": "the pipeline's batch is cut as its example was",
}
"""Training arguments that do not reach the pipeline's stages, each with what to do."""


class PipelineTrainer(Trainer):
    """`transformers.Trainer` with `pipe` in place of `model`, in all processes that `penstock run` or torchrun starts.

        args = TrainingArguments("runs/trainer", max_grad_norm=1.0, ...)
        with penstock.pipeline(model, (), example, microbatches=4, reduction="sum") as pipe:
            trainer = PipelineTrainer(pipe, args, train_dataset=data, data_collator=collate)
            trainer.train()

    `example` is a batch of the collator's, with labels: the model computes its own loss. If its forward takes
    `num_items_in_batch` (by `**kwargs`: language models, mostly), the Trainer passes the number of labels in the batch.
    Such losses of microbatches add up, therefore `reduction="sum"`. Others are means over rows: `reduction="mean"`.

    Every rank reads every batch: `per_device_train_batch_size` is the pipeline's batch. A checkpoint has the whole
    model for `from_pretrained`, and a folder from which training goes on with any number of ranks.

    Args:
        pipe: the pipeline; close it after training (`with`), so that an error on one rank ends the others.
        args, kwargs: as for `Trainer`.

    Raises:
        ArgumentError: something that `Trainer` would do does not reach the pipeline's stages (see REFUSED), or the
            pipeline has replicas, or a loss of its own, or another reduction.
    """

    def __init__(self, pipe: Pipeline, args: TrainingArguments, **kwargs: Any) -> None:
        self.pipe = pipe
        self._count_is_used = False
        _check_supported(pipe, args, kwargs)
        _ = args.device  # Accelerate initializes its device state
        ranks_as_one_device()
        super().__init__(pipe.model, args, **kwargs)
        expected, reduction = "sum" if self.model_accepts_loss_kwargs else "mean", pipe.session.options.reduction
        if reduction != expected:
            verb = "takes" if self.model_accepts_loss_kwargs else "does not take"
            raise ArgumentError(
                f"reduction={reduction!r}: {type(pipe.model).__name__} {verb} num_items_in_batch; for the losses of "
                f"its microbatches, pass penstock.pipeline(reduction={expected!r})"
            )
        self.accelerator.prepare_model = lambda model, *_, **__: model  # it stays where its stages are
        self.accelerator.clip_grad_norm_ = lambda _, *norms: pipe.clip_grad_norm_(*norms)

    # -- steps --------------------------------------------------------------------------------------------------------

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Forward and backward of one batch, and its loss."""
        if self.model_accepts_loss_kwargs and not self._count_is_used:
            self._check_count(inputs, num_items_in_batch)
        self.pipe.train()
        parts = 1 if self.model_accepts_loss_kwargs else self.current_gradient_accumulation_steps
        with self.accelerator.autocast():
            result = self.pipe.step(**self._inputs(inputs, num_items_in_batch), loss_scale=1 / parts)
        loss: Tensor = result.loss.detach().to(self.args.device) / parts
        return loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Any]:
        """Return the loss, the outputs and the labels of one batch, the same on every rank."""
        labels = [inputs[name] for name in self.label_names if inputs.get(name) is not None]
        _, num_items = self.get_batch_samples(iter([inputs]), 1, self.args.device)
        outputs: OutputsOption = False if prediction_loss_only else "all"
        with self.accelerator.autocast():
            result = self.pipe.evaluate(**self._inputs(inputs, num_items), outputs=outputs)
        loss = result.loss.detach().to(self.args.device) if labels else None
        if prediction_loss_only:
            return loss, None, None
        config = getattr(self.pipe.model, "config", None)
        ignored = ignore_keys or getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        logits = _concatenate_outputs(result.outputs, {"loss", *ignored})
        return loss, logits[0] if len(logits) == 1 else logits, labels[0] if len(labels) == 1 else tuple(labels) or None

    def _inputs(self, inputs: Mapping[str, Any], num_items: Tensor | int | None) -> dict[str, Any]:
        """Return a batch as the model takes it. `num_items` becomes a tensor: a number would be a constant of the
        recording."""
        if num_items is None or not self.model_accepts_loss_kwargs:
            return dict(inputs)
        return {**inputs, "num_items_in_batch": torch.as_tensor(num_items)}

    def _check_count(self, inputs: Mapping[str, Any], num_items: Tensor | int | None) -> None:
        """Check once that the model divides its loss by `num_items` and adds no other loss."""
        counts = (num_items or 1, 2 * (num_items or 1))
        full, half = (float(self.pipe.evaluate(**self._inputs(inputs, n)).loss) for n in counts)
        if not math.isclose(full, 2 * half, rel_tol=1e-5):
            raise ArgumentError(
                f"{type(self.pipe.model).__name__} has a loss of {full:.6g}, and of {half:.6g} for twice the "
                "num_items_in_batch, where half was expected. If it ignores the number, set "
                "model.accepts_loss_kwargs = False and pass penstock.pipeline(reduction='mean'); if it adds other "
                "losses, switch them off"
            )
        self._count_is_used = True

    # -- the optimizer, and what is saved -----------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer of the training arguments, over this process's parameters, in the same groups on every
        rank."""
        if self.optimizer is None:
            model = self.pipe.model
            stated = self.optimizer_cls_and_kwargs
            kind, options = stated or self.get_optimizer_cls_and_kwargs(self.args, cast(PreTrainedModel, model))
            if options.keys() & {"params", "model", "optimizer_dict"}:
                raise ArgumentError(f"optim={self.args.optim!r} asks for the unsplit model; choose another optimizer")
            decayed = set(self.get_decay_parameter_names(model))
            decay = self.args.weight_decay
            groups = self.pipe.parameter_groups(lambda name, _: {"weight_decay": decay if name in decayed else 0.0})
            self.optimizer = kind(groups, **options)
        optimizer: torch.optim.Optimizer = self.optimizer
        return optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write a folder for `from_pretrained`. Every rank calls it; the first one writes."""
        weights: dict[str, Tensor] = {}
        for part in self.pipe.all_gather_object(
            {name: tensor.cpu() for name, tensor in self.pipe.state_dict().items()}
        ):
            weights.update(part)
        self._save(output_dir, state_dict=weights)

    # -- private methods of Trainer -----------------------------------------------------------------------------------

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: the pipeline has already moved its stages."""

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer, stateful = self._state()
        checkpoint.save(Path(output_dir, FOLDER), self.pipe, optimizer, stateful=stateful, keep_last=1)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # all ranks have the same state
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Done by `_load_optimizer_and_scheduler`, when there is an optimizer."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._restore(checkpoint)

    def _load_best_model(self) -> None:
        if self.state.best_model_checkpoint is not None:
            self._restore(self.state.best_model_checkpoint)

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _restore(self, folder: str) -> None:
        optimizer, stateful = self._state()
        if checkpoint.load(Path(folder, FOLDER), self.pipe, optimizer, stateful=stateful) is None:
            raise ArgumentError(f"{folder}: expected a folder {FOLDER!r} in it, as PipelineTrainer saves")

    def _state(self) -> tuple[torch.optim.Optimizer, dict[str, checkpoint.Stateful]]:
        """Return the other contents of checkpoints: the optimizer, out of Accelerate's wrapper, and the
        scheduler."""
        assert self.optimizer is not None
        assert self.lr_scheduler is not None
        optimizer: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return optimizer, {"scheduler": self.lr_scheduler}


def _concatenate_outputs(outputs: Iterable[Any], ignored: set[str]) -> tuple[Tensor, ...]:
    """Join the microbatches' outputs to those of the batch, without what is ignored."""
    parts = [dict(output) for output in outputs]
    return tuple(torch.cat([part[name] for part in parts]) for name in parts[0] if name not in ignored)


def _check_supported(pipe: Pipeline, args: TrainingArguments, kwargs: Mapping[str, Any]) -> None:
    for name, remedy in REFUSED.items():
        if getattr(args, name, None):
            raise ArgumentError(f"{name}={getattr(args, name)!r} does not reach the pipeline's stages: {remedy}")
    if pipe.world.data_parallel > 1:
        raise ArgumentError(
            f"the pipeline has {pipe.world.data_parallel} replicas, and Trainer would not divide batches among them; "
            "use a plain loop"
        )
    if pipe.session.options.loss is not None or kwargs.get("compute_loss_func") is not None:
        raise ArgumentError(
            "expected a pipeline without loss_fn, and no compute_loss_func: the model computes its loss"
        )
