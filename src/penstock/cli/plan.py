"""`penstock plan`: how to train a model on given devices: replicas, ranks, cuts, microbatches, schedule and more."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.cli._cluster import ClusterOptions, cautions, check_of
from penstock.cli._outcome import HEADS, format_of, print_unbroken, table
from penstock.cli._spread import OUTPUT_PANEL, Json, spread
from penstock.cli._target import loaded
from penstock.cli._transformer import USUAL_ON_PAPER, TransformerOptions
from penstock.errors import ArgumentError
from penstock.simulate import Cause
from penstock.words import counted, sized

if TYPE_CHECKING:
    from penstock.balance import Profile
    from penstock.plan import Choice, Cluster, Lost, Plan, Planned
    from penstock.simulate import LinkCost

EPILOG = """\
A plan uses every device and trains exactly --global-batch rows a step: replicas * microbatches * a microbatch's rows. \
Times are simulated from those of the profile; a stage's gradients are summed over replicas from the end of its last \
backward, beside what is left, and the optimizer takes no time."""
"""Printed below the options."""


@spread
def plan(
    cluster: ClusterOptions,
    numbers: TransformerOptions,
    global_batch: Annotated[int, typer.Option(help="Rows of one step, over all replicas.")],
    target: Annotated[
        str | None, typer.Argument(metavar="[TARGET]", help="module:function or file.py:function, to be measured here.")
    ] = None,
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Instead of TARGET: what `penstock profile` wrote; repeat it for microbatches of other sizes.",
        ),
    ] = None,
    schedule: Annotated[str | None, typer.Option(help="Schedules to choose from: 1f1b,zb-h1; by default all.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the best plan, for penstock.pipeline.", rich_help_panel=OUTPUT_PANEL),
    ] = None,
    as_json: Json = False,
) -> None:
    """Choose replicas, ranks, cuts, microbatches, schedule and more for a model and its devices.

    TARGET is a function that returns (model, args, target, loss), as for
    `penstock verify`. It is measured here, with its whole batch and an eighth
    of it as microbatches. To plan for another device, profile there, and give
    the files, or name it (--device h100) for an estimate. For a transformer that
    is only numbers yet, give --transformer.
    """
    from penstock.plan import Sizes, make_plans

    paper = None
    if numbers.transformer is not None:
        if target is not None or profile:
            raise ArgumentError("--transformer takes the place of TARGET and --profile: give one of the three")
        paper = numbers.read(cluster.read(), cluster.per_host, cluster.kind)
        known, profiles = paper.cluster(), paper.profiles()
    else:
        known, profiles = cluster.specified.read(), _profiles(target, profile or [], cluster)
        known = cluster.specified.read(_measured_link(profiles))
    sizes = Sizes.of(profiles)
    names = _names(schedule or (None if paper is None else USUAL_ON_PAPER))
    found = make_plans(sizes, known, global_batch, names)
    if out is not None and found.best:
        found.best[0].save(out)
    if as_json:
        print(json.dumps({**to_dict(found), "notes": cautions(profiles)}))
    else:
        console = Console(highlight=False)
        for note in () if paper is not None else (*cluster.said, *cautions(profiles)):
            console.print(Text(f"note: {note}"), soft_wrap=True)
        show(found, known, console)
        if paper is not None and found.best:
            print(f"\n{paper.told(found.best[0])}")
        if out is not None and found.best:
            print(f"\nwritten to {out}: penstock.pipeline(..., plan={str(out)!r})")
    if not found.best:
        raise typer.Exit(1)


def _measured_link(profiles: Sequence[Profile]) -> LinkCost | None:
    """The slowest link of the first profile that measured any; None if none did."""
    from penstock.plan.stage_costs import slowest_link

    return next((link for profile in profiles if (link := slowest_link(profile)) is not None), None)


def _profiles(target: str | None, files: Sequence[Path], cluster: ClusterOptions) -> list[Profile]:
    """Those in the files, or measured, or estimated for the device that was named."""
    from penstock.balance import read_profile

    if (target is None) != bool(files):
        raise ArgumentError("give either a TARGET to measure, or --profile with what was measured")
    if target is None:
        found = [read_profile(path) for path in files]
        if cluster.kind is not None:
            check_of(found, cluster.kind)
        return found
    from penstock.plan.sizes import rows_of

    with loaded(target, "the model") as given:
        from penstock.pipe.profiling import profile as measured

        cutting = {name: value for name, value in given.cutting.items() if name != "merge"}
        if cluster.kind is not None:
            cutting |= {"device": cluster.kind, "calibrate": cluster.calibrate or ()}
        example = given.model, given.args, given.kwargs
        whole = measured(*example, microbatches=1, budget_seconds=1.0, **cutting)
        pieces = min(8, rows_of(whole))
        if pieces == 1:
            return [whole]
        return [whole, measured(*example, microbatches=pieces, budget_seconds=1.0, **cutting)]


def _names(text: str | None) -> list[str] | None:
    from penstock.schedule.generators import generator

    return None if text is None else [generator(name.strip()).name for name in text.split(",")]


def to_dict(found: Planned) -> dict[str, Any]:
    """Everything that was found, for JSON."""
    return {
        "plans": [one.to_dict() for one in found.best],
        "lost": [asdict(one) for one in found.lost],
        "nearest": None if found.nearest is None else found.nearest.to_dict(),
    }


def show(found: Planned, cluster: Cluster, console: Console) -> None:
    """Prints the best plans, the stages of the best, and why others lost; or what is missing if nothing fits."""
    if not found.best:
        _show_lack(found, cluster, console)
        return
    best = found.best[0]
    console.print(
        f"[bold]{counted(len(found.best), 'plan')}, the fastest first[/], of {len(found.best) + len(found.lost)}"
    )
    console.print()
    print_unbroken(console, _plans(found.best))
    console.print(
        "\ndp: replicas. pp: ranks. v: stages a rank. m: microbatches a replica, of so many rows.\n"
        "Idle: the share of the ranks' time that is lost. Again: stages whose forward runs again in backward.\n"
        "Memory: of the fullest rank.",
        style="dim",
    )
    console.print("\n[bold]Stages of the first[/]")
    print_unbroken(console, _stages(best))
    if found.lost:
        console.print("\n[bold]Why not[/]")
        others = table("", "", left=2)
        others.show_header = False
        for lost in _typical(found):
            others.add_row(_named(lost.choice), _why(lost, best))
        print_unbroken(console, others)


def _plans(plans: Sequence[Plan]) -> Table:
    causes = [cause for cause in Cause if any(cause.value in plan.idle for plan in plans)]
    sums = any(plan.reduce_seconds for plan in plans)
    heads = ("step s", "rows/s", "idle", *(HEADS[cause] for cause in causes), *(("sum\ngrads s",) if sums else ()))
    made = table("schedule", "dp", "pp", "v", "m", "rows", *heads, "again", "memory")
    steps = format_of([plan.step_seconds for plan in plans])
    rates = format_of([plan.rows_per_second for plan in plans], most=2)
    reduces = format_of([plan.reduce_seconds for plan in plans])
    for plan in plans:
        choice = plan.choice
        numbers = (choice.replicas, choice.ranks, choice.chunks, choice.microbatches, choice.rows)
        made.add_row(
            choice.schedule,
            *map(str, numbers),
            steps(plan.step_seconds),
            rates(plan.rows_per_second),
            f"{plan.bubble:.1%}",
            *(f"{100 * plan.idle.get(cause.value, 0.0):.1f}" for cause in causes),
            *((reduces(plan.reduce_seconds),) if sums else ()),
            f"{len(plan.recompute)} of {choice.stages}" if plan.recompute else "-",
            sized(max(plan.memory_bytes)),
        )
    return made


def _stages(plan: Plan) -> Table:
    made = table("stage", "begins with", "F + B", "of the mean", "recomputed", left=2)
    mean = sum(plan.stage_seconds) / len(plan.stage_seconds)
    seconds = format_of(plan.stage_seconds)
    for stage, (name, each) in enumerate(zip(("", *plan.cuts), plan.stage_seconds, strict=True)):
        share = f"{each / mean:.2f}" if mean else "-"
        made.add_row(str(stage), name or "-", seconds(each), share, "yes" if stage in plan.recompute else "-")
    return made


def _typical(found: Planned) -> list[Lost]:
    """Of the choices that lost, the best for each number of ranks, and for each schedule with the winner's ranks."""
    ranks = found.best[0].choice.ranks
    seen = {_kind(plan.choice, ranks) for plan in found.best}
    typical = []
    for lost in found.lost:
        if _kind(lost.choice, ranks) not in seen:
            seen.add(_kind(lost.choice, ranks))
            typical.append(lost)
    return typical


def _kind(choice: Choice, ranks: int) -> tuple[int, str]:
    return (choice.ranks, choice.schedule if choice.ranks == ranks else "")


def _named(choice: Choice) -> str:
    return (
        f"{choice.schedule}, dp {choice.replicas} x pp {choice.ranks}"
        f"{f' x {choice.chunks}' if choice.chunks > 1 else ''}, {choice.microbatches} x {choice.rows}"
    )


def _why(lost: Lost, best: Plan) -> str:
    if lost.lacking_bytes:
        return f"does not fit: its fullest rank needs {sized(lost.lacking_bytes)} more"
    slower = f"{lost.step_seconds / best.step_seconds - 1:.1%} slower" if best.step_seconds else "no faster"
    if lost.bubble is None:
        return f"at least {slower}: its busiest rank's work alone takes that long"
    why = [f"ranks idle {lost.bubble:.1%} of the time"] if lost.bubble else []
    if lost.recomputed:
        why.append(f"{counted(lost.recomputed, 'stage')} recomputed")
    if lost.reduce_seconds:
        why.append(f"{lost.reduce_seconds / lost.step_seconds:.1%} of the step for sums of gradients")
    return f"{slower}: {', '.join(why)}" if why else slower


def _show_lack(found: Planned, cluster: Cluster, console: Console) -> None:
    nearest = found.nearest
    if nearest is None:
        raise ArgumentError("no schedule works for these numbers; leave --schedule out, or give another --global-batch")
    rank = nearest.fullest
    needed = nearest.memory_bytes[rank]
    console.print(
        f"[bold]Nothing fits[/] into {sized(nearest.limit_bytes[rank])} a device. {_named(nearest.choice)}, with "
        f"{len(nearest.recompute)} of {nearest.choice.stages} stages recomputed, comes nearest: its rank {rank} needs "
        f"{sized(needed)}, {sized(nearest.lacking_bytes)} more than there is. It fits with --memory "
        f"{math.ceil(needed / 2**20)}MiB; otherwise give more devices, or smaller microbatches."
    )
