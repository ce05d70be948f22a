"""PyTorch Lightning's Trainer around a pipeline: loops, callbacks, loggers, checkpoints. Needs `penstock[lightning]`.

A strategy tells Lightning how processes work together. This one decides nothing about the model: the module makes its
own pipeline, and calls `Pipeline.step` instead of a backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from penstock._base.errors import ArgumentError
from penstock.checkpoint import load, save
from penstock.pipe.pipeline import Pipeline

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import ParallelStrategy
except ImportError as error:
    raise ImportError(f"this needs the package lightning ({error}): pip install penstock[lightning]") from error

T = TypeVar("T")


AVERAGE = "keep torch.optim.swa_utils.AveragedModel(self.pipe.model), and update it in training_step"
CALLBACKS = {
    "WeightAveraging": AVERAGE,
    "StochasticWeightAveraging": AVERAGE,
    "LearningRateFinder": "set the learning rate: with manual optimization, nothing changes it during the search",
    "ModelPruning": "prune the model before penstock.pipeline(model, ...)",
}
"""Callbacks that copy or change the LightningModule's own modules, which are not the stages: what to do instead."""


class PipelineStrategy(ParallelStrategy):
    """For `Trainer(strategy=PipelineStrategy(), devices=ranks on each machine, num_nodes=machines)`.

    torchrun or `penstock run` starts the processes. The module makes its pipeline and steps it:

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.automatic_optimization = False  # the pipeline runs backward itself

            def configure_model(self):
                if not hasattr(self, "pipe"):
                    self.pipe = penstock.pipeline(model, (example,), loss_fn=loss)

            def configure_optimizers(self):
                return torch.optim.AdamW(self.pipe.parameters())

            def training_step(self, batch, index):
                result = self.pipe.step(batch[0], target=batch[1])
                self.optimizers().step()
                self.optimizers().zero_grad()
                self.log("loss", result.loss, prog_bar=True)

    Every rank reads every batch. A checkpoint is a folder, from which training can resume with another number of ranks
    or another schedule.

    Raises:
        ArgumentError: a callback does not reach the stages (see CALLBACKS); the module has no pipeline, or would run
            backward again; or the Trainer's precision is not 32 bits (use `torch.autocast` in `training_step` instead).
    """

    @property
    def pipe(self) -> Pipeline:
        """The module's pipeline."""
        attribute = getattr(self.lightning_module, "pipe", None)
        if not isinstance(attribute, Pipeline):
            raise ArgumentError(
                f"{type(self.lightning_module).__name__}.pipe is {attribute!r}: expected a pipeline, as "
                "penstock.pipeline returns it; make it in configure_model"
            )
        return attribute

    # -- properties of the processes, for Lightning ------------------------------------------------------------------

    is_distributed = True
    """True, so that `self.log(sync_dist=True)` takes effect."""

    @property
    def root_device(self) -> torch.device:
        devices = self.parallel_devices or [torch.device("cpu")]
        return devices[self.local_rank % len(devices)]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For the sampler that Lightning puts into data loaders: every rank reads every batch, in the same order."""
        return {"num_replicas": 1, "rank": 0}

    # -- from start to end ------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        super().setup_environment()
        trainer: Any = self.lightning_module and self.lightning_module.trainer
        for callback in trainer.callbacks if trainer else ():
            for remedy in [CALLBACKS[kind.__name__] for kind in type(callback).__mro__ if kind.__name__ in CALLBACKS]:
                name = type(callback).__name__
                raise ArgumentError(
                    f"the callback {name} does not reach the pipeline's stages; remove it, and {remedy}"
                )
        if self.world_size > 1 and not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if self.root_device.type == "cuda" else "gloo")

    def setup(self, trainer: Trainer) -> None:
        module: LightningModule | None = self.lightning_module
        if module is not None and module.automatic_optimization:
            raise ArgumentError(
                f"{type(module).__name__}.automatic_optimization is True, and Lightning would run backward after "
                "Pipeline.step has; set it to False, and step the optimizer in training_step"
            )
        if self.precision_plugin.precision != "32-true":
            raise ArgumentError(
                f"Trainer(precision={self.precision_plugin.precision!r}) does not reach the pipeline's stages; omit "
                "it, and use torch.autocast in training_step"
            )
        _ = self.pipe
        super().setup(trainer)

    def model_to_device(self) -> None:
        """Do nothing: the pipeline has already moved its stages to their devices."""

    def on_exception(self, exception: BaseException) -> None:
        """Report this rank's exception to the others."""
        if isinstance(pipe := getattr(self.lightning_module, "pipe", None), Pipeline):
            pipe.__exit__(type(exception), exception, exception.__traceback__)

    def teardown(self) -> None:
        """Leave the module where it is: it may contain other ranks' stages, whose tensors have no values here."""
        assert self.cluster_environment is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- between processes ------------------------------------------------------------------------------------------

    def _gathered(self, value: Any) -> list[Any]:
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def barrier(self, name: str | None = None) -> None:
        self._gathered(None)

    def broadcast(self, obj: T, src: int = 0) -> T:
        value: T = self._gathered(obj)[src]
        return value

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        return torch.stack([value.to(tensor.device) for value in self._gathered(tensor.detach().cpu())])

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        total = self.all_gather(tensor).sum(0)
        name = str(reduce_op).rpartition(".")[2].lower()  # a name, or torch's ReduceOp
        if name not in ("mean", "avg", "sum"):
            raise ArgumentError(f"reduce_op={reduce_op!r}: expected 'mean' or 'sum'")
        return total if name == "sum" else total / self.world_size

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        decisions = self._gathered(decision)
        return decisions.count(True) == len(decisions) if all else True in decisions

    # -- checkpoints: Lightning's part is saved with the pipeline's ----------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        save(filepath, self.pipe, self.optimizers, extra=checkpoint, keep_last=1)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        loaded = load(checkpoint_path, self.pipe, self.optimizers, weights_only=weights_only is not False)
        if loaded is None:
            raise ArgumentError(f"ckpt_path={str(checkpoint_path)!r}: there is no checkpoint; pass the folder of one")
        extra: dict[str, Any] = loaded.extra
        return extra

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Done by `load_checkpoint`."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Done by `load_checkpoint`."""
