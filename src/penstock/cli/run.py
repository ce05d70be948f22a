"""`penstock run`: a script on several ranks of this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.errors import ArgumentError
from penstock.launch import launch


def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT [ARGUMENTS]", help="The script, or a module with -m; then its own."),
    ],
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="How many processes, each a rank.")],
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads a rank; by default the cores divided by the ranks.")
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module's name, as in python -m.")] = False,
    nnodes: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a training script once for each rank, on this machine. What follows the script is the script's.

    For several machines, run torchrun on each: the same script works.
    """
    if nnodes is not None:
        raise ArgumentError(
            f"--nnodes is torchrun's, and this is for one machine: run `torchrun --nnodes {nnodes} --nproc-per-node "
            f"{ranks} ...` on each machine; see 'Several machines' in the guide"
        )
    raise typer.Exit(launch(["-m", *command] if module else command, ranks, threads))
