"""What each rank does in PyTorch Lightning: lightning_job.py [fail].

Trains until `EarlyStopping` ends it, and prints rank, steps and the last losses as JSON. With `fail`, rank 1 raises in
its second step. `fit` is for what Lightning is given to be refused.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import penstock
from penstock.integrations.lightning import PipelineStrategy

__all__ = ["MisconfigurationException", "Module", "callbacks", "fit"]

sys.path.insert(0, str(Path(__file__).parents[1]))
from scaffolding import small


class Module(lightning.LightningModule):
    def __init__(self, *, fails: bool = False, manual: bool = True, has_pipe: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.fails, self.has_pipe = fails, has_pipe

    def configure_model(self) -> None:
        if self.has_pipe and not hasattr(self, "pipe"):
            x, _ = small.batch()
            self.pipe = penstock.pipeline(small.mlp(), (x,), microbatches=4, loss=torch.nn.functional.mse_loss)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.pipe.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def training_step(self, batch: Any, index: int) -> None:
        if self.fails and self.pipe.world.rank == 1 and self.trainer.global_step == 1:
            raise ValueError("the data ran dry")
        x, y = batch
        result = self.pipe.step(x, target=y)
        self.optimizers().step()
        self.optimizers().zero_grad()
        self.log("loss", result.loss)

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()

    def validation_step(self, batch: Any, index: int) -> None:
        x, y = batch
        self.log("validation", self.pipe.evaluate(x, target=y).loss, sync_dist=True)
        self.log("rank", float(self.trainer.global_rank), sync_dist=True, reduce_fx="sum")


def fit(folder: Path, module: Module, checkpoint: Path | None = None, **options: Any) -> None:
    """Trains on one batch, with a Trainer of these options."""
    trainer = lightning.Trainer(
        strategy=PipelineStrategy(), accelerator="cpu", devices=1, default_root_dir=folder, logger=False, **options
    )
    trainer.fit(module, [small.batch()], ckpt_path=None if checkpoint is None else str(checkpoint))


def main() -> None:
    torch.set_num_threads(1)
    trainer = lightning.Trainer(
        strategy=PipelineStrategy(),
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        max_epochs=9,
        callbacks=[callbacks.EarlyStopping("validation", patience=2, min_delta=1e9)],
        enable_checkpointing=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(trainer.global_rank)  # shuffled, and yet every rank reads the same
    rows = [small.batch(rows) for rows in (11, 11)]
    rows[1][0].neg_()
    batches = torch.utils.data.DataLoader(rows, batch_size=None, shuffle=True)
    torch.manual_seed(0)
    trainer.fit(Module(fails=sys.argv[1:] == ["fail"]), batches, batches)
    shown = {name: float(value).hex() for name, value in sorted(trainer.callback_metrics.items())}
    sys.stdout.write(json.dumps([trainer.global_rank, trainer.global_step, shown]) + "\n")


if __name__ == "__main__":
    main()
