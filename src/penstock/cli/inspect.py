"""`penstock inspect`: shows how a model would be split: stages, transfers between them, tied parameters."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from penstock._base.formatting import collapse_ranges, format_bytes, pluralize
from penstock.cli._options import JSON, option, print_json, screen
from penstock.cli._target import OF_BATCH, TARGET, SplitOptions, load_target
from penstock.report.text import print_columns
from penstock.schedule import schedule_spec

if TYPE_CHECKING:
    from penstock.pipe.inspection import Inspection, StageTransfer


def inspect(
    target: str = TARGET,
    *,
    stages: int = option("Number of stages.", "--stages", "-n", default=2),
    microbatches: int | None = OF_BATCH,
    split: SplitOptions,
    as_json: bool = JSON,
) -> None:
    """Show how a model would be split: stages, what crosses each cut, ties, skips.

    TARGET is a function that returns (model, args, target, loss), as for
    `penstock verify`. The forward is recorded with fake tensors, and the loss is
    tried on a made-up output; only `--balance time` runs parts of a large model, to
    time them. Whatever `verify` would refuse with the same options is refused here
    too, with the module, the source line and the fix, unless it depends on real
    values.
    """
    schedule_spec(split.schedule)  # raises before anything is loaded
    with load_target(target, "the model or the loss", weights=split.balance == "time") as loaded_target:
        from penstock.pipe.inspection import inspect as inspect_model

        inspection = inspect_model(
            loaded_target.model,
            loaded_target.args,
            loaded_target.kwargs,
            stages=stages,
            microbatches=microbatches,
            target=loaded_target.target,
            loss_fn=loaded_target.loss,
            reduction="mean" if loaded_target.reduction is None else loaded_target.reduction,
            **split.arguments(),
            **loaded_target.cutting,
        )
    if as_json:
        print_json(inspection.to_dict())
    else:
        show(inspection, screen())


def show(inspection: Inspection, console: Console) -> None:
    """Print the tables."""
    size = f"{inspection.parameters:,} parameters, {format_bytes(inspection.parameter_bytes)}"
    console.print(f"{inspection.model}: {size}, {pluralize(len(inspection.stages), 'stage')}", style="bold")
    piece = "the batch" if inspection.microbatches == 1 else f"one of {inspection.microbatches} microbatches"
    console.print(f"activations and transfers: for {piece}", end="\n\n")
    _show_stages(inspection, console)
    if inspection.crossings:
        console.print()
        _show_crossings(inspection, console)
    if inspection.memory:
        console.print("\nmemory per rank under the schedule")
        kinds = ("parameters", "gradients", "optimizer", "activations", "working", "batch", "peak")
        columns = {kind: [format_bytes(getattr(rank, kind)) for rank in inspection.memory] for kind in kinds}
        columns = {"workspace" if kind == "working" else kind: sizes for kind, sizes in columns.items()}
        print_columns(console, {"rank": range(len(inspection.memory)), **columns})
    for number, line in enumerate(_remarks(inspection)):
        console.print(line if number else f"\n{line}", soft_wrap=True)


def _show_stages(inspection: Inspection, console: Console) -> None:
    stages = inspection.stages
    differ = any(stage.gradient_bytes != stage.parameter_bytes for stage in stages)
    columns: dict[str, Iterable[object]] = {
        "stage": [stage.index for stage in stages],
        "first module": [stage.first_module or "the start" for stage in stages],
        "est. cost": [f"{stage.work_fraction:.1%}" for stage in stages],
        "ms": [None if stage.seconds is None else f"{1e3 * stage.seconds:.3g}" for stage in stages],
        "parameters": [f"{stage.parameters:,}" for stage in stages],
        "% params": [f"{stage.parameter_fraction:.1%}" for stage in stages],
        "size": [format_bytes(stage.parameter_bytes) for stage in stages],
        "gradients": [format_bytes(stage.gradient_bytes) if differ else None for stage in stages],
        "activations": [
            "unknown" if stage.activation_bytes is None else format_bytes(stage.activation_bytes) for stage in stages
        ],
    }
    print_columns(console, columns, left=2)


def _show_crossings(inspection: Inspection, console: Console) -> None:
    def remarks(crossing: StageTransfer) -> str | None:
        skips = ["skips"] if crossing.target - crossing.source > 1 else []
        return ", ".join(skips if crossing.requires_grad else [*skips, "no gradient"]) or None

    columns: dict[str, Iterable[object]] = {
        "from": [crossing.source for crossing in inspection.crossings],
        "to": [crossing.target for crossing in inspection.crossings],
        "produced by": map(_producer, inspection.crossings),
        "shape": [
            f"{crossing.dtype} {'x'.join(map(str, crossing.shape)) or 'scalar'}" for crossing in inspection.crossings
        ],
        "note": map(remarks, inspection.crossings),
        "size": [format_bytes(crossing.bytes) for crossing in inspection.crossings],
    }
    print_columns(console, columns, left=5)


def _remarks(inspection: Inspection) -> list[str]:
    stages = inspection.stages
    return [
        *(f"stage {s.index} runs {', '.join(collapse_ranges(s.modules))}" for s in stages if s.modules),
        *(f"tied: {tie.name} on stages {_listed(tie.stages)}; gradients are summed" for tie in inspection.ties),
        *(
            f"stage {s.index} takes no gradient: its parameters are frozen"
            for s in stages
            if s.parameters > 0 and s.trainable_parameters == 0
        ),
        *(f"stage {s.index} updates {_listed(s.mutated_buffers)}" for s in stages if s.mutated_buffers),
        *(f"stage {s.index} draws random numbers in {_listed(s.random_modules)}" for s in stages if s.random_modules),
        *(f"valid for this input signature only: {branch}" for branch in inspection.branches),
        *(f"note: {note}" for note in inspection.notes),
    ]


def _producer(crossing: StageTransfer) -> str:
    if not crossing.source_line:
        return crossing.module or f"input {crossing.value}"
    line = crossing.source_line.rpartition("site-packages" + os.sep)[2].removeprefix(str(Path.cwd()) + os.sep)
    return f"{crossing.module or 'the model'} ({line})"


def _listed(items: tuple[object, ...]) -> str:
    omitted = f" and {len(items) - 6} more" if len(items) > 6 else ""
    return ", ".join(map(str, items[:6])) + omitted
