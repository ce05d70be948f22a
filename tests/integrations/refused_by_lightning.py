"""What `test_lightning` gives to Lightning to be refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import penstock
from penstock.integrations.lightning import PipelineStrategy
from scaffolding import small

__all__ = ["MisconfigurationException", "Module", "callbacks", "fit"]


class Module(lightning.LightningModule):
    def __init__(self, *, manual: bool = True, optimizers: int = 1, has_pipe: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.optimizer_count, self.has_pipe = optimizers, has_pipe

    def configure_model(self) -> None:
        if self.has_pipe:
            x, _ = small.batch()
            self.pipe = penstock.pipeline(small.mlp(), (x,), microbatches=4, loss=torch.nn.functional.mse_loss)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.pipe.parameters()) for _ in range(self.optimizer_count)]

    def training_step(self, batch: Any, index: int) -> None:
        raise AssertionError("refused before")


def fit(folder: Path, module: Module, checkpoint: Path | None = None, **options: Any) -> None:
    """Trains on one batch, with a Trainer of these options."""
    trainer = lightning.Trainer(
        strategy=PipelineStrategy(), accelerator="cpu", devices=1, default_root_dir=folder, logger=False, **options
    )
    trainer.fit(module, [small.batch()], ckpt_path=None if checkpoint is None else str(checkpoint))
