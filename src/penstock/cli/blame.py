"""`penstock blame`: holds a pipeline that somebody else wrote against the unsplit model, and names what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from penstock._base.errors import VerificationError, check_counts
from penstock._base.files import check_writable, finite, write_text
from penstock._base.words import counted
from penstock.cli._options import Json, output_option, spread
from penstock.cli._target import TargetName, loaded


@spread
def blame(
    target: TargetName,
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND", help="What starts the ranks: torchrun ..., or python ...")
    ],
    steps: Annotated[int, typer.Option(help="How many optimizer steps to compare; the job is then ended.")] = 3,
    timeout: Annotated[int, typer.Option(help="Seconds a step may take before the job is ended, and judged.")] = 300,
    out: Annotated[
        Path | None, output_option("Write a page as well, with the wrong action framed.", metavar="FILE")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find out why a pipeline trains wrongly: run it, unedited, and compare it with the unsplit model.

    The pipeline may be written with torch.distributed.pipelining or with send and
    recv. TARGET is a function that returns (model, args, target, loss), as for
    penstock verify, or a fifth value: a dict with batches, a function of the step
    (from 0) that returns (args, target); optimizer, a function of the model; and
    clip_grad_norm, what gradients are clipped to.

    The exit status is 0 if the pipeline trains as the unsplit model does, 1 if not,
    and 2 if nothing could be compared.
    """
    from penstock.cli.show import refuse_other
    from penstock.verification.blame import command as job
    from penstock.verification.blame.page import page

    check_counts(steps=steps, timeout=timeout)
    refuse_other("--out", out, ".html", ".htm")
    check_writable(out, f"--out {out}")
    command = command[1:] if command[:1] == ["--"] else command
    job.checked(command)  # raises before anything is loaded
    with loaded(target, "the model or the loss") as given:
        found = job.blame(command, given, steps, timeout)
    if out is not None:
        write_text(out, page(found), "--out")
    if as_json:
        print(json.dumps(finite(found.to_dict()), allow_nan=False))
    else:
        sizes = {"rank": found.ranks, "stage": found.stages, "microbatch": found.microbatches, "step": found.steps}
        console = Console(highlight=False, file=sys.stdout)
        console.print(", ".join(counted(count, what) for what, count in sizes.items()), markup=False)
        for note in found.notes:
            console.print(f"note: {note}", markup=False)
        if found.ok:
            console.print(found.summary(), markup=False, style="green")
    if not found.ok:
        raise VerificationError(found.summary())
