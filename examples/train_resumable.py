"""Training that resumes by itself after a crash: it saves a checkpoint every few steps, and starts from the last one.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_resumable.py

Kill a rank, or kill the whole job and start it again: the losses are bit for bit those of an uninterrupted run.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import penstock
from penstock import checkpoint


def build():
    """Builds the same model in every process, at every start."""
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(8) for m in (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))))


def batch(number):
    """The data for a step. They depend on its number only, so resuming needs nothing else."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(32, 16, generator=generator)
    return x, x.flip(1).sin()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--folder", default="runs/resumable", help="one that all ranks see")
    options = parser.parse_args()

    with penstock.pipeline(build(), batch(0)[:1], loss_fn=F.mse_loss, microbatches=8, seed=0) as pipe:
        decay = [p for name, p in pipe.named_parameters() if name.endswith("weight")]
        rest = [p for name, p in pipe.named_parameters() if not name.endswith("weight")]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
        others = {"scheduler": scheduler}

        checkpoint.load(options.folder, pipe, optimizer, stateful=others)  # returns None on the first start
        while pipe.step_count < options.steps:
            x, y = batch(pipe.step_count)
            result = pipe.step(x, target=y)
            pipe.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            loss = float(result.loss)
            if pipe.is_main_process:
                print(f"step {pipe.step_count:3d}  loss {loss:.6f}", flush=True)
            if pipe.step_count % options.every == 0:
                checkpoint.save(
                    options.folder, pipe, optimizer, stateful=others, blocking=False
                )  # training goes on meanwhile


if __name__ == "__main__":
    main()
