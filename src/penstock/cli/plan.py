"""`penstock plan`: how to train a model on given devices: replicas, ranks, cuts, microbatches, schedule and more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from penstock._base.errors import ArgumentError, check_seconds
from penstock._base.files import check_writable
from penstock._base.words import counted
from penstock.cli._device_options import ClusterOptions, TransformerOptions
from penstock.cli._options import JSON, REQUIRED, argument, option, output_option, print_json, screen
from penstock.cli._plan_tables import show, show_lack
from penstock.cli._target import compute_as_ranks, profile_target, profiles_of

if TYPE_CHECKING:
    from penstock.costs import Profile
    from penstock.distributed.launch.target import Target
    from penstock.plan import Cluster, Plan, Sizes

EPILOG = """\
A plan uses every device and trains exactly --global-batch rows a step: replicas * microbatches * a microbatch's rows. \
Times are simulated from those of the profile; a stage's gradients are summed over replicas from the end of its last \
backward, beside what is left. A step includes the time of AdamW's update, if the profile has it."""
"""Printed below the options."""


def plan(
    cluster: ClusterOptions,
    numbers: TransformerOptions,
    global_batch: int = option("Rows of one step, over all replicas.", default=REQUIRED),
    target: str | None = argument(
        "module:function, file.py:function or hf:config.json, to be measured here.", metavar="[TARGET]"
    ),
    profile: list[Path] | None = option(
        "What `penstock profile` wrote, instead of measuring; repeat it for other sizes of microbatches.",
        metavar="FILE",
    ),
    schedule: str | None = option("Schedules to choose from: 1f1b,zb-h1; by default all."),
    replicas: int | None = option("Data-parallel replicas; by default any number."),
    pipeline: int | None = option("Ranks of each pipeline; by default any number."),
    microbatches: int | None = option("Microbatches of each replica; by default any number."),
    search: float = option(
        "How long to search, on a usual machine, for orders of work better than any schedule; a busy or slow one takes "
        "longer and finds the same.",
        metavar="SECONDS",
        default=3.0,
    ),
    out: Path | None = output_option("Write the best plan, for penstock.pipeline.", metavar="FILE"),
    as_json: bool = JSON,
) -> None:
    """Choose replicas, ranks, cuts, microbatches, schedule and more for a model and its devices.

    TARGET is a function that returns (model, args, target, loss), as for
    `penstock verify`. It is measured here, with its whole batch and an eighth
    of it as microbatches. On a CPU it runs with the threads that each rank will
    have. To plan for another device, profile there, and pass the files, or name
    it (--device h100) for an estimate. For a transformer that is only numbers yet,
    pass --transformer.
    """
    from penstock.plan import Wanted, make_plans
    from penstock.plan.remedies import remedies
    from penstock.schedule.generators import generator

    check_seconds(search=search)
    check_writable(out, f"--out {out}")
    chosen = None if schedule is None else [generator(name.strip()).name for name in schedule.split(",")]
    wanted = Wanted(chosen, replicas, pipeline, microbatches)  # raises before anything is measured
    paper, notes, unsaid = None, list[str](), ""
    if numbers.transformer is not None:
        if target is not None or profile:
            raise ArgumentError("--transformer takes the place of TARGET and --profile: pass one of the three")
        paper = numbers.read(cluster)
        known, sizes = paper.cluster(), paper.sizes()
    else:
        numbers.check_unused()
        profiles = _profiles(target, profile or [], cluster)
        known, sizes, unsaid = _measured(profiles, cluster)
        notes = _cautions(profiles)
    found = make_plans(sizes, known, global_batch, wanted, search_seconds=search)
    if out is not None and found.best:
        found.best[0].save(out)
    if as_json:
        nearest = None if found.nearest is None else found.nearest.to_dict()
        lost = [asdict(one) for one in found.lost]
        print_json({"plans": [one.to_dict() for one in found.best], "lost": lost, "nearest": nearest, "notes": notes})
    else:
        console = screen()
        if (per_host := known.devices_per_host) is not None and (rest := known.devices % per_host):
            last = f"the last of {counted(known.hosts, 'host')} has {rest} of {counted(per_host, 'device')}"
            notes.append(last)
        if found.best:
            notes += _beyond(sizes, found.best[0].choice.rows)
        for note in [*([] if paper else cluster.said), *notes]:
            console.print(Text(f"note: {note}"), soft_wrap=True)
        if found.best:
            show(found, console, known)
        elif found.nearest is not None:
            told = remedies(sizes, known, global_batch, wanted, found.nearest)
            show_lack(found, known, [*told], console, numbers.tensor_parallel)
        if unsaid:
            console.print(f"\n{unsaid}")
        if paper is not None and found.best:
            print(f"\n{paper.told(found.best[0])}")
        if out is not None and found.best:
            print(f"\nwritten to {out}{_to_follow(found.best[0], out)}")
    if not found.best:
        raise typer.Exit(1)


def _measured(profiles: Sequence[Profile], cluster: ClusterOptions) -> tuple[Cluster, Sizes, str]:
    """The devices with what profiles know of them, what units cost, and what to say of links that were not measured."""
    from penstock.costs.links import assumed, slowest_link, usual_link
    from penstock.plan import Sizes

    measured = next(filter(None, map(slowest_link, profiles)), None)
    action = next((one.action_seconds for one in profiles if one.action_seconds is not None), None)
    update = max(one.optimizer_byte_seconds or 0.0 for one in profiles)
    known = cluster.read(measured or usual_link(profiles[0].device), action, update)
    if cluster.specified.link is not None or measured is not None or known.devices == 1:
        return known, Sizes.of(profiles), ""
    said = f"{assumed(known.link)}, sums likewise. Pass --link, or a profile made with --links."
    return known, Sizes.of(profiles), f"Nobody measured links: {said}"


def _cautions(profiles: Sequence[Profile]) -> list[str]:
    """What to say of profiles that were not measured, or not on a quiet machine."""
    from penstock.costs.sizes import doubts

    own = (note for one in profiles for note in one.notes)
    return list(dict.fromkeys((*own, *(note for one in profiles for note in doubts(one)))))


def _to_follow(plan: Plan, file: Path) -> str:
    """How a script follows the plan, to the letter."""
    choice = plan.choice
    if choice.replicas == 1:
        return f": penstock.pipeline(..., plan={str(file)!r}), or any script by penstock run --plan {file} train.py"
    rows = choice.microbatches * choice.rows
    made, _, _ = plan.mesh.partition("(")
    return (
        f" for penstock run --plan {file} train.py. Its replicas need a mesh, and each its own {rows} of a batch's "
        f"{choice.replicas * rows} rows; in the script:\n"
        f"  from torch.distributed.device_mesh import {made}\n"
        f"  mesh = {plan.mesh}\n"
        f'  x, y = (whole.chunk({choice.replicas})[mesh.get_local_rank("dp")] for whole in (x, y))\n'
        "  penstock.pipeline(model, (x,), ..., mesh=mesh)"
    )


def _beyond(sizes: Sizes, rows: int) -> list[str]:
    """What to say of microbatches of a size beyond those in the profiles; nothing if it is among them."""
    known = sorted(sizes.profiles)
    if known[0] <= rows <= known[-1]:
        return []
    seen = f"{known[0]} to {known[-1]}" if len(known) > 1 else str(known[0])
    sure = ",".join(map(str, sorted({rows, *known})))
    smaller = ", and small microbatches usually take longer" if rows < known[0] else ""
    return [
        f"the best plan has microbatches of {counted(rows, 'row')}, and the profile knows those of {seen}: its times "
        f"are extended from there{smaller}; add --microbatch-sizes {sure} to `penstock profile` to be sure"
    ]


def _profiles(target: str | None, files: Sequence[Path], cluster: ClusterOptions) -> list[Profile]:
    """Those in the files, or measured, or estimated for the device that was named."""
    devices, device = cluster.read().devices, cluster.kind  # raises before anything is measured
    if target is None and not files:
        raise ArgumentError("pass a TARGET to measure, or --profile with what was measured")
    from penstock.costs.sizes import rows_of
    from penstock.pipe.profiling import input_device

    def measure(given: Target) -> list[Profile]:
        estimate = {} if device is None else {"device": device, "calibrate": cluster.calibrate or ()}
        options = {"budget_seconds": 1.0, "target": given.target, **estimate}
        if device is None and input_device((given.args, given.kwargs), given.model).type == "cpu":
            compute_as_ranks(min(cluster.per_host or devices, devices))
        whole = profile_target(given, microbatches=1, **options)
        pieces = min(8, rows_of(whole))
        return [whole] if pieces == 1 else [whole, profile_target(given, microbatches=pieces, **options)]

    found = profiles_of(target, files, measure, weights=device is None)
    for profile in found:
        if device is not None and profile.device != device.type:
            raise ArgumentError(
                f"--device {device.key}: the profile is of {profile.device_name or profile.device} ({profile.device}), "
                f"not of {device.name} ({device.type}); estimate one: penstock profile TARGET --device {device.key}"
            )
    return found
