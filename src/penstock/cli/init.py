"""`penstock init`: writes a training script to start from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Literal

from penstock._base.errors import ArgumentError
from penstock._base.files import write_text
from penstock.cli._options import argument, option, screen


def init(
    file: Path = argument("Script to write.", default=Path("train.py")),
    model: Literal["gpt", "cnn", "transformers"] = option("Model that it trains.", default="gpt"),
) -> None:
    """Write a training script that runs as it is, with a make() for the other commands."""
    if file.exists():
        raise ArgumentError(f"{file}: file exists; pass another name")
    write_text(file, files("penstock.cli").joinpath("scripts", f"{model}.txt").read_text(encoding="utf-8"))
    next_commands = {
        f"penstock run --ranks 2 {file}": "train it in two processes",
        f"penstock verify {file} --ranks 2": "compare it with one device",
        "penstock report runs/first": "see where the time went",
    }
    width = max(map(len, next_commands))
    console = screen()
    console.print(f"wrote {file}. Next:")
    for command, purpose in next_commands.items():
        console.print(f"  {command:<{width}}  # {purpose}")
