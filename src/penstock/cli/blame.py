"""`penstock blame`: compares a third-party pipeline with the unsplit model, and names its first wrong action."""

from __future__ import annotations

from pathlib import Path

from penstock._base.errors import VerificationError, check_counts
from penstock._base.files import check_writable, write_text
from penstock._base.formatting import pluralize
from penstock.cli._options import JSON, REQUIRED, argument, check_suffix, option, output_option, print_json, screen
from penstock.cli._target import TARGET, load_target


def blame(
    target: str = TARGET,
    command: list[str] = argument(
        "Command that starts the ranks: torchrun ..., or python ...", metavar="-- COMMAND", default=REQUIRED
    ),
    steps: int = option("Number of optimizer steps to compare; the job is then ended.", default=3),
    timeout: int = option("Seconds per step after which the job is ended and judged.", default=300),
    out: Path | None = output_option("Also write a page with the wrong action framed.", metavar="FILE"),
    as_json: bool = JSON,
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
    from penstock.verification.blame import command as job
    from penstock.verification.blame.finding import page

    check_counts(steps=steps, timeout=timeout)
    check_suffix("--out", out, ".html", ".htm")
    check_writable(out, f"--out {out}")
    command = command[1:] if command[:1] == ["--"] else command
    job.resolve_command(command)  # raises before anything is loaded
    with load_target(target, "the model or the loss") as loaded_target:
        report = job.blame(command, loaded_target, steps, timeout)
    if out is not None:
        write_text(out, page(report), "--out")
    if as_json:
        print_json(report.to_dict())
    else:
        sizes = {"rank": report.ranks, "stage": report.stages, "microbatch": report.microbatches, "step": report.steps}
        console = screen()
        console.print(", ".join(pluralize(count, noun) for noun, count in sizes.items()))
        for note in report.notes:
            console.print(f"note: {note}")
        if report.ok:
            console.print(report.summary(), style="green")
    if not report.ok:
        raise VerificationError(report.summary())
