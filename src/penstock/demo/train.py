"""Trains a small GPT in a pipeline: an ordinary script to copy. Run it in one process, or in several:

    penstock run --ranks 2 -m penstock.demo

Only the calls to `penstock` and `pipe` have to do with the pipeline; the rest is plain PyTorch.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console

import penstock
from penstock.demo import show
from penstock.demo.data import Batch, Corpus, standard_library
from penstock.demo.model import GPT, loss
from penstock.demo.settings import CONTEXT, HELD_OUT_BATCHES, LAYERS, ROWS, Settings
from penstock.report import write_perfetto
from penstock.schedule.timeline import Timeline
from penstock.trace.runs import RunConfig

LEARNING_RATE = 2e-3
WARMUP_STEPS = 10
TIMED_EVERY = 5
"""One step in this many is timed: recording when each action ran, and gathering that, costs a little."""
LINE_EVERY = 10
"""One step in this many gets a line."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Verify one step, train, and show the result. Every process runs this; only the first one prints."""
    settings = parse(arguments)
    is_main = os.environ.get("RANK", "0") == "0"
    console = Console(quiet=not is_main, highlight=False)
    settings.out.mkdir(parents=True, exist_ok=True)
    corpus = standard_library()

    show.heading(console, "1", "Verify: one training step, compared with the unsplit model")
    show.paragraph(console, verify(settings, corpus).summary())

    torch.manual_seed(0)  # every process builds the same model; the pipeline keeps this process's stages
    model = GPT(layers=LAYERS, context=CONTEXT)
    example, _ = corpus.batch(0, ROWS, CONTEXT)
    with penstock.pipeline(
        model,
        (example,),
        schedule=settings.schedule,
        microbatches=settings.microbatches,
        loss_fn=loss,
        run_dir=RunConfig(settings.out, settings.steps, TIMED_EVERY),
    ) as pipe:
        held_out = corpus.held_out_batches(HELD_OUT_BATCHES, ROWS, CONTEXT)
        before = evaluate(pipe, held_out)
        show.heading(console, "2", f"Train: {settings.steps} steps of {ROWS} rows of {CONTEXT} bytes")
        rates, timelines = train(pipe, settings, corpus, console)
        after = evaluate(pipe, held_out)
        memory_bytes = pipe.all_gather_object(show.peak_memory_bytes())

    show.heading(console, "3", "Result")
    show.result(console, settings, (before, after), median(rates), show.compare(pipe.schedule, timelines), memory_bytes)
    if is_main:
        write_perfetto(timelines[-1], settings.out / show.TIMELINE)


def verify(settings: Settings, corpus: Corpus) -> penstock.VerificationReport:
    """Verify, in the processes that then train, that a step of the pipeline equals a step of the unsplit model.

    Leave out the comparison with the whole batch, which would take more memory than the training whose peak is shown.
    """
    torch.manual_seed(0)
    inputs, targets = corpus.batch(0, ROWS, CONTEXT)
    model = GPT(layers=LAYERS, context=CONTEXT)
    return penstock.verify(
        model,
        (inputs,),
        target=targets,
        loss_fn=loss,
        schedule=settings.schedule,
        microbatches=settings.microbatches,
        full_batch=False,
    ).raise_if_failed()


def train(
    pipe: penstock.Pipeline, settings: Settings, corpus: Corpus, console: Console
) -> tuple[list[float], list[Timeline]]:
    """Train; return each step's tokens per second, and the timelines of the steps that were timed."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warmup_and_decay(step, settings.steps))
    speeds: list[float] = []
    timelines: list[Timeline] = []
    for number in range(1, settings.steps + 1):
        start = time.perf_counter()
        inputs, target = feed(pipe, corpus.batch(number, ROWS, CONTEXT))
        timed = number % TIMED_EVERY == 0 or number == settings.steps
        result = pipe.step(*inputs, target=target, timeline=timed)  # forward and backward of all microbatches
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        speeds.append(ROWS * CONTEXT / (time.perf_counter() - start))
        timelines += [] if result.timeline is None else [result.timeline]
        if number % LINE_EVERY == 0 or number in (1, settings.steps):
            step = f"{number:>{len(str(settings.steps))}}/{settings.steps}"
            bubble = f"  bubble {timelines[-1].bubble_rate:4.0%}" if timelines else ""
            console.print(f"  step {step}  loss {float(result.loss):.3f}  {speeds[-1]:6,.0f} bytes/s{bubble}")
    return speeds, timelines


def evaluate(pipe: penstock.Pipeline, batches: Sequence[Batch]) -> float:
    """Return the mean loss on held-out text, in nats per byte."""
    losses = []
    for batch in batches:
        inputs, target = feed(pipe, batch)
        losses.append(float(pipe.evaluate(*inputs, target=target).loss))
    return sum(losses) / len(losses)


def feed(pipe: penstock.Pipeline, batch: Batch) -> tuple[tuple[Any, ...], Any]:
    """Return the inputs and targets that this process needs: only the first stage reads inputs, only the last one
    targets."""
    inputs, targets = batch
    return (inputs,) if pipe.needs_inputs else (), targets if pipe.needs_targets else None


def warmup_and_decay(step: int, steps: int) -> float:
    """Return the share of the full learning rate: a linear warm-up, then a linear decay to the last step."""
    return min((step + 1) / WARMUP_STEPS, (steps - step) / max(1, steps - WARMUP_STEPS))


def parse(arguments: Sequence[str] | None) -> Settings:
    """Parse the options; `ranks` is the number of processes that were started."""
    default = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default=default.schedule)
    parser.add_argument("--microbatches", type=int, default=default.microbatches)
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--out", type=Path, default=default.out)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    settings = Settings(ranks, **vars(parser.parse_args(arguments)))
    settings.order()
    return settings
