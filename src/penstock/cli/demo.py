"""`penstock demo`: trains a small GPT on Python's own source code in a pipeline on this machine."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console

from penstock.cli._options import CUT, option
from penstock.demo.settings import Settings
from penstock.distributed.launch.processes import launch
from penstock.schedule import MICROBATCHES


def demo(
    ranks: int = option("Number of ranks, 1 to 4.", "--ranks", "-n", default=2),
    schedule: str = option("Name of the schedule; `penstock schedules` lists them.", default="1f1b"),
    microbatches: int = option(f"{CUT}.", default=MICROBATCHES),
    steps: int = option("Number of batches to train on.", default=60),
    out: Path = option("Directory for the timeline and the metrics.", default=Path("runs/demo")),
) -> None:
    """Train a small GPT on Python's own source code in a pipeline. It takes a minute or two."""
    settings = Settings(ranks, schedule, microbatches, steps, out)
    print(settings.introduction(), flush=True)
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
