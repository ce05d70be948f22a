"""`penstock run`: a script on several ranks of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.launch import launch


def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT [ARGUMENTS]...", help="The script, or a module with -m; then its own."),
    ],
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="How many processes, each a rank.")],
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads a rank; by default the cores divided by the ranks.")
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module's name, as in python -m.")] = False,
) -> None:
    """Run a training script once for each rank, on this machine. What follows the script is the script's."""
    raise typer.Exit(launch(["-m", *command] if module else command, ranks, threads))
