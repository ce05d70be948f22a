"""The training of train_gpt.py in PyTorch Lightning: its Trainer runs the loop, logs, and writes checkpoints.

python examples/train_lightning.py                            # one process, one rank
penstock run --ranks 2 examples/train_lightning.py            # two processes, the same training
"""

import argparse
import os
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from train_gpt import GPT, batch, loss

import penstock
from penstock.integrations.lightning import PipelineStrategy


class Sorter(lightning.LightningModule):
    """The Lightning module: which pipeline, which optimizer, and what a step does."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False  # the pipeline runs backward itself

    def configure_model(self):
        if not hasattr(self, "pipe"):
            torch.manual_seed(0)  # every process builds the same model
            self.pipe = penstock.pipeline(GPT(), batch(0)[:1], microbatches=8, loss_fn=loss)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.pipe.parameters(), lr=2e-3)

    def training_step(self, batch, index):
        inputs, targets = batch
        result = self.pipe.step(inputs, target=targets)
        self.optimizers().step()
        self.optimizers().zero_grad()
        self.log("loss", result.loss)


class Batches:
    """Stands in for a DataLoader: every rank reads every batch. Lightning saves its position with each checkpoint."""

    def __init__(self, steps):
        self.steps, self.done = steps, 0

    def __len__(self):
        return self.steps

    def __iter__(self):
        while self.done < self.steps:
            self.done += 1
            yield batch(self.done)

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


class Print(Callback):
    """Prints a line for every 20th step, from the first process."""

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.is_global_zero and trainer.global_step % 20 == 0:
            print(f"step {trainer.global_step:4d}  loss {trainer.callback_metrics['loss']:.6f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--folder", default="runs/lightning")
    parser.add_argument("--resume", help="a checkpoint to go on from")
    options = parser.parse_args()

    # The warning says that checkpoints are taken after the optimizer's step. That is what we want.
    warnings.filterwarnings("ignore", "Using ModelCheckpoint with manual optimization")
    trainer = lightning.Trainer(
        strategy=PipelineStrategy(),
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),  # processes on each machine
        max_steps=options.steps,
        callbacks=[Print(), ModelCheckpoint(options.folder, filename="{step}", every_n_train_steps=20, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Sorter(), Batches(options.steps), ckpt_path=options.resume)


if __name__ == "__main__":
    main()
