"""The fine-tuning of finetune_transformers.py with Hugging Face Accelerate, as far as its hooks reach.

    python examples/finetune_accelerate.py                               # one process, one rank
    penstock run --ranks 2 examples/finetune_accelerate.py               # two processes, the same training

Accelerate prepares the loaders, the optimizer and the scheduler, casts (`mixed_precision="bf16"`), prints, tracks. It
has no hook for a pipeline: the model, its backward, clipping and checkpoints are the pipeline's.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from finetune_transformers import evaluate, loader, save, small_model, with_count
from transformers import get_cosine_schedule_with_warmup

import penstock
from penstock.integrations.accelerate import ranks_as_one_device


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--texts", type=int, default=1024)
    parser.add_argument("--folder", default="runs/accelerate")
    parser.add_argument("--precision", default="no", choices=("no", "bf16"))
    options = parser.parse_args()

    ranks_as_one_device()  # or every rank would get other rows
    accelerator = Accelerator(mixed_precision=options.precision)
    set_seed(0)  # every process builds the same model
    model, tokenizer = small_model()
    training, held_out = loader(tokenizer, options.texts, seed=1), loader(tokenizer, 64, seed=2)

    example = with_count(next(iter(training)))
    devices = accelerator.device.type
    with penstock.pipeline(model, (), example, microbatches=4, reduction="sum", devices=devices) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
        scheduler = get_cosine_schedule_with_warmup(optimizer, 0, options.epochs * len(training))
        # Not the model: it stays in the pipeline.
        optimizer, scheduler, training, held_out = accelerator.prepare(optimizer, scheduler, training, held_out)
        for epoch in range(1, options.epochs + 1):
            for batch in training:
                with accelerator.autocast():
                    result = pipe.step(**with_count(batch))  # in place of model(...) and accelerator.backward(loss)
                pipe.clip_grad_norm_(1.0)  # accelerator.clip_grad_norm_ would take each rank's own norm
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            with accelerator.autocast():
                loss = evaluate(pipe, held_out)
            accelerator.print(f"epoch {epoch}  loss {float(result.loss):.4f}  held out {loss:.4f}", flush=True)
        save(pipe, tokenizer, options.folder)  # accelerator.save_state would save the first rank's stages


if __name__ == "__main__":
    main()
