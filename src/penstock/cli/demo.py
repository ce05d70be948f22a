"""`penstock demo`: trains a small GPT on Python's own source code in a pipeline on this machine."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from penstock._base.formatting import pluralize
from penstock.cli._options import CUT, option
from penstock.demo.settings import CONTEXT, LAYERS, PARAMETERS, ROWS, Settings
from penstock.distributed.launch.processes import launch
from penstock.schedule import MICROBATCHES, grid


def demo(
    ranks: int = option("Number of ranks, 1 to 4.", "--ranks", "-n", default=2),
    schedule: str = option("Name of the schedule; `penstock schedules` lists them.", default="1f1b"),
    microbatches: int = option(f"{CUT}.", default=MICROBATCHES),
    steps: int = option("Number of batches to train on.", default=60),
    out: Path = option("Directory for the timeline and the metrics.", default=Path("runs/demo")),
) -> None:
    """Train a small GPT on Python's own source code in a pipeline. It takes a minute or two."""
    settings = Settings(ranks, schedule, microbatches, steps, out)
    print(introduction(settings), flush=True)
    status = 1
    try:
        if ranks > 1:
            status = launch(["-m", "penstock.demo", *settings.arguments()], ranks)
        else:
            from penstock.demo.train import main

            main(settings.arguments())
            status = 0
    finally:
        if status:
            Console().show_cursor()  # an interrupted progress bar hides it
    raise typer.Exit(status)


def introduction(settings: Settings) -> str:
    """Describe the demo in 80 columns. Raise ArgumentError if an option is out of range."""
    schedule = settings.order()
    p, m = settings.ranks, settings.microbatches
    split = "in one process" if p == 1 else f"split over {p} processes"
    return f"""\
penstock demo: a small GPT learns Python, {split}

  model     {LAYERS} transformer blocks, {PARAMETERS / 1e6:.1f} million parameters, dropout 0.1;
            it reads bytes; embedding and output layer share their weights
  text      the source files of Python's standard library, 8 MB
  batch     {ROWS} rows of {CONTEXT} bytes, cut into m = {pluralize(m, "microbatch")}
  pipeline  p = {pluralize(p, "rank")} (processes), schedule {settings.schedule}; in slots of equal length:

{grid(schedule, width=80)}

  F: forward, B: backward, then the microbatch; a dot is a slot in which the
  rank waits. All the dots together are the bubble."""
