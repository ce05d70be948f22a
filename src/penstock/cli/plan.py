"""`penstock plan`: how to train a model on given devices: replicas, ranks, cuts, microbatches, schedule and more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from penstock._base.errors import ArgumentError, check_seconds
from penstock._base.files import check_writable
from penstock._base.words import counted
from penstock.cli._cluster import ClusterOptions, cautions, check_of
from penstock.cli._options import Json, option, output_option, spread
from penstock.cli._plan_tables import show, show_lack
from penstock.cli._target import compute_as_ranks, profile_target, profiles_of
from penstock.cli._transformer import TransformerOptions

if TYPE_CHECKING:
    from penstock.costs import Profile
    from penstock.distributed.launch.target import Target
    from penstock.plan import Plan, Planned, Sizes

EPILOG = """\
A plan uses every device and trains exactly --global-batch rows a step: replicas * microbatches * a microbatch's rows. \
Times are simulated from those of the profile; a stage's gradients are summed over replicas from the end of its last \
backward, beside what is left. A step includes the time of AdamW's update, if the profile has it."""
"""Printed below the options."""


@spread
def plan(
    cluster: ClusterOptions,
    numbers: TransformerOptions,
    global_batch: Annotated[int, option("Rows of one step, over all replicas.")],
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[TARGET]", help="module:function, file.py:function or hf:config.json, to be measured here."
        ),
    ] = None,
    profile: Annotated[
        list[Path] | None,
        option(
            "What `penstock profile` wrote, instead of measuring; repeat it for other sizes of microbatches.",
            metavar="FILE",
        ),
    ] = None,
    schedule: Annotated[str | None, option("Schedules to choose from: 1f1b,zb-h1; by default all.")] = None,
    replicas: Annotated[int | None, option("Data-parallel replicas; by default any number.")] = None,
    pipeline: Annotated[int | None, option("Ranks of each pipeline; by default any number.")] = None,
    microbatches: Annotated[int | None, option("Microbatches of each replica; by default any number.")] = None,
    search: Annotated[
        float,
        option(
            "How long to search, on a usual machine, for orders of work better than any schedule; a busy or slow "
            "one takes longer and finds the same.",
            metavar="SECONDS",
        ),
    ] = 3.0,
    out: Annotated[Path | None, output_option("Write the best plan, for penstock.pipeline.", metavar="FILE")] = None,
    as_json: Json = False,
) -> None:
    """Choose replicas, ranks, cuts, microbatches, schedule and more for a model and its devices.

    TARGET is a function that returns (model, args, target, loss), as for
    `penstock verify`. It is measured here, with its whole batch and an eighth
    of it as microbatches. On a CPU it runs with the threads that each rank will
    have. To plan for another device, profile there, and pass the files, or name
    it (--device h100) for an estimate. For a transformer that is only numbers yet,
    pass --transformer.
    """
    from penstock.costs import Profile
    from penstock.costs.links import assumed, slowest_link, usual_link
    from penstock.plan import Sizes, Wanted, make_plans
    from penstock.plan.remedies import remedies

    check_seconds(search=search)
    check_writable(out, f"--out {out}")
    wanted = Wanted(_names(schedule), replicas, pipeline, microbatches)  # raises before anything is measured
    paper, profiles, unsaid = None, list[Profile](), ""
    if numbers.transformer is not None:
        if target is not None or profile:
            raise ArgumentError("--transformer takes the place of TARGET and --profile: pass one of the three")
        paper = numbers.read(cluster.read(), cluster.per_host, cluster.kind)
        known, sizes = paper.cluster(), paper.sizes()
    else:
        numbers.check_unused()
        cluster.specified.read()  # raises before anything is measured
        profiles = _profiles(target, profile or [], cluster)
        sizes, measured = Sizes.of(profiles), next(filter(None, map(slowest_link, profiles)), None)
        action = next((one.action_seconds for one in profiles if one.action_seconds is not None), None)
        update = max(one.optimizer_byte_seconds or 0.0 for one in profiles)
        known = cluster.specified.read(measured or usual_link(profiles[0].device), action, update)
        if cluster.specified.link is None and measured is None and known.devices > 1:
            unsaid = (
                f"Nobody measured links: {assumed(known.link)}, sums likewise. Pass --link, or a profile made with "
                "--links."
            )
    found = make_plans(sizes, known, global_batch, wanted, search_seconds=search)
    if out is not None and found.best:
        found.best[0].save(out)
    if as_json:
        print(json.dumps({**to_dict(found), "notes": cautions(profiles)}))
    else:
        console = Console(highlight=False)
        for note in () if paper is not None else (*cluster.said, *cautions(profiles)):
            console.print(Text(f"note: {note}"), soft_wrap=True)
        if (per_host := known.devices_per_host) is not None and (rest := known.devices % per_host):
            last = f"the last of {counted(known.hosts, 'host')} has {rest} of {counted(per_host, 'device')}"
            console.print(Text(f"note: {last}"), soft_wrap=True)
        if found.best and (note := _beyond(sizes, found.best[0].choice.rows)):
            console.print(Text(f"note: {note}"), soft_wrap=True)
        group = 1 if paper is None else numbers.tensor_parallel
        if found.best:
            show(found, console, known)
        elif found.nearest is not None:
            told = remedies(sizes, known, global_batch, wanted, found.nearest)
            show_lack(found, known, [*told], console, group)
        if unsaid:
            console.print(f"\n{unsaid}")
        if paper is not None and found.best:
            print(f"\n{paper.told(found.best[0])}")
        if out is not None and found.best:
            print(f"\nwritten to {out}{_to_follow(found.best[0], out)}")
    if not found.best:
        raise typer.Exit(1)


def _to_follow(plan: Plan, file: Path) -> str:
    """How a script follows the plan, to the letter."""
    alone = f"penstock.pipeline(..., plan={str(file)!r}), or any script by penstock run --plan {file} train.py"
    choice = plan.choice
    if choice.replicas == 1:
        return f": {alone}"
    rows, batch = choice.microbatches * choice.rows, choice.replicas * choice.microbatches * choice.rows
    made, _, _ = plan.mesh.partition("(")
    return (
        f" for penstock run --plan {file} train.py. Its replicas need a mesh, and each its own {rows} of a batch's "
        f"{batch} rows; in the script:\n"
        f"  from torch.distributed.device_mesh import {made}\n"
        f"  mesh = {plan.mesh}\n"
        f'  x, y = (whole.chunk({choice.replicas})[mesh.get_local_rank("dp")] for whole in (x, y))\n'
        "  penstock.pipeline(model, (x,), ..., mesh=mesh)"
    )


def _beyond(sizes: Sizes, rows: int) -> str:
    """What to say of microbatches of a size beyond those in the profiles; empty if it is among them."""
    known = sorted(sizes.profiles)
    if known[0] <= rows <= known[-1]:
        return ""
    seen = f"{known[0]} to {known[-1]}" if len(known) > 1 else str(known[0])
    sure = ",".join(map(str, sorted({rows, *known})))
    smaller = ", and small microbatches usually take longer" if rows < known[0] else ""
    return (
        f"the best plan has microbatches of {counted(rows, 'row')}, and the profile knows those of {seen}: its times "
        f"are extended from there{smaller}; add --microbatch-sizes {sure} to `penstock profile` to be sure"
    )


def _profiles(target: str | None, files: Sequence[Path], cluster: ClusterOptions) -> list[Profile]:
    """Those in the files, or measured, or estimated for the device that was named."""
    if target is None and not files:
        raise ArgumentError("pass a TARGET to measure, or --profile with what was measured")
    from penstock.costs.sizes import rows_of
    from penstock.pipe.profiling import input_device

    kind, devices = cluster.kind, cluster.specified.read().devices

    def measure(given: Target) -> list[Profile]:
        estimate = {} if kind is None else {"device": kind, "calibrate": cluster.calibrate or ()}
        options = {"budget_seconds": 1.0, "target": given.target, **estimate}
        if kind is None and input_device((given.args, given.kwargs), given.model).type == "cpu":
            compute_as_ranks(min(cluster.per_host or devices, devices))
        whole = profile_target(given, microbatches=1, **options)
        pieces = min(8, rows_of(whole))
        return [whole] if pieces == 1 else [whole, profile_target(given, microbatches=pieces, **options)]

    found = profiles_of(target, files, measure, weights=kind is None)
    if kind is not None:
        check_of(found, kind)
    return found


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
