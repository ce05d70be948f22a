"""`penstock inspect`: shows how a model would be split: its stages, what crosses between them, what they share."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock._base.words import counted, in_ranges, sized
from penstock.cli._options import Json, option, spread
from penstock.cli._target import Microbatches, SplitOptions, TargetName, loaded
from penstock.report.text import table
from penstock.schedule import generator

if TYPE_CHECKING:
    from penstock.pipe.inspection import Crossing, Inspection, StageFound


@spread
def inspect(
    target: TargetName,
    *,
    stages: Annotated[int, option("The number of stages.", "--stages", "-n")] = 2,
    microbatches: Microbatches = None,
    split: SplitOptions,
    as_json: Json = False,
) -> None:
    """Show how a model would be split: stages, what crosses each cut, ties, skips.

    TARGET is a function that returns (model, args, target, loss), as for
    `penstock verify`. The forward is recorded with fake tensors, and the loss is
    tried on a made-up output; only `--balance time` runs parts of a large model, to
    see how long they take. What `verify` would refuse with the same options is
    refused here too, with the module, the source line and the remedy, unless only
    real values reveal it.
    """
    generator(split.schedule)  # raises before anything is loaded
    with loaded(target, "the model or the loss", weights=split.balance == "time") as given:
        from penstock.pipe.inspection import inspect as look

        found = look(
            given.model,
            given.args,
            given.kwargs,
            stages=stages,
            microbatches=microbatches,
            target=given.target,
            loss_fn=given.loss,
            reduction="mean" if given.reduction is None else given.reduction,
            **split.arguments(),
            **given.cutting,
        )
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        show(found, Console(highlight=False))


def show(found: Inspection, console: Console) -> None:
    """Prints the tables."""
    size = f"{found.parameters:,} parameters, {sized(found.parameter_bytes)}"
    console.print(Text(f"{found.model}: {size}, {counted(len(found.stages), 'stage')}", "bold"))
    whole = found.microbatches == 1
    console.print(
        f"activations and what crosses: for {'the batch' if whole else f'one of {found.microbatches} microbatches'}",
        end="\n\n",
    )
    console.print(_stages(found))
    if found.crossings:
        console.print()
        console.print(_crossings(found))
    if found.memory:
        console.print("\nmemory of each rank under the schedule")
        console.print(_memory(found))
    if lines := _remarks(found):
        console.print()
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _stages(found: Inspection) -> Table:
    known = any(stage.seconds is not None for stage in found.stages)
    differ = any(stage.gradient_bytes != stage.parameter_bytes for stage in found.stages)
    heads = (
        *("work", *(("ms",) if known else ()), "parameters", "share", "size"),
        *(("gradients",) if differ else ()),
        "activations",
    )
    made = table("stage", "begins at", *heads, left=2, overflow="fold")
    for stage in found.stages:
        made.add_row(
            str(stage.index),
            Text(stage.begins or "the start"),
            f"{stage.work_share:.1%}",
            *((f"{1e3 * (stage.seconds or 0.0):.3g}",) if known else ()),
            f"{stage.parameters:,}",
            f"{stage.parameter_share:.1%}",
            sized(stage.parameter_bytes),
            *((sized(stage.gradient_bytes),) if differ else ()),
            "unknown" if stage.activation_bytes is None else sized(stage.activation_bytes),
        )
    return made


def _crossings(found: Inspection) -> Table:
    made = table("from", "to", "made by", "shape", "", "size", left=5, overflow="fold")
    for crossing in found.crossings:
        remarks = [
            *(["skips"] if crossing.target - crossing.source > 1 else []),
            *([] if crossing.takes_gradient else ["no gradient"]),
        ]
        shape = f"{crossing.dtype} {'x'.join(map(str, crossing.shape)) or 'scalar'}"
        made.add_row(
            str(crossing.source),
            str(crossing.target),
            Text(_maker(crossing)),
            shape,
            ", ".join(remarks),
            sized(crossing.bytes),
        )
    return made


def _memory(found: Inspection) -> Table:
    kinds = ("parameters", "gradients", "optimizer", "activations", "working", "batch", "peak")
    made = table("rank", *kinds, overflow="fold")
    for rank, each in enumerate(found.memory):
        made.add_row(str(rank), *(sized(getattr(each, kind)) for kind in kinds))
    return made


def _remarks(found: Inspection) -> list[str]:
    return [
        *(f"stage {s.index} runs {', '.join(in_ranges(s.modules))}" for s in found.stages if s.modules),
        *(f"tied: {tie.name} on stages {_listed(tie.stages)}; gradients are added up" for tie in found.ties),
        *(f"stage {s.index} takes no gradient: its parameters are frozen" for s in found.stages if _frozen(s)),
        *(f"stage {s.index} updates {_listed(s.updated)}" for s in found.stages if s.updated),
        *(f"stage {s.index} draws random numbers in {_listed(s.draws)}" for s in found.stages if s.draws),
        *(f"holds for batches of this kind only: {branch}" for branch in found.branches),
        *(f"note: {note}" for note in found.notes),
    ]


def _frozen(stage: StageFound) -> bool:
    return stage.parameters > 0 and stage.trained == 0


def _maker(crossing: Crossing) -> str:
    if not crossing.source_line:
        return crossing.module or f"input {crossing.value}"
    line = crossing.source_line.rpartition("site-packages" + os.sep)[2].removeprefix(str(Path.cwd()) + os.sep)
    return f"{crossing.module or 'the model'} ({line})"


def _listed(things: tuple[object, ...]) -> str:
    some = [str(thing) for thing in things[:6]]
    return ", ".join(some) + (f" and {len(things) - 6} more" if len(things) > 6 else "")
