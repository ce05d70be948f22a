"""`penstock plan`: chooses how to train a model on given devices: replicas, ranks, cuts, microbatches, schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from penstock._base.errors import ArgumentError, check_seconds
from penstock._base.files import check_writable
from penstock._base.formatting import pluralize
from penstock.cli._cluster_options import ClusterOptions, TransformerOptions
from penstock.cli._options import JSON, REQUIRED, argument, option, output_option, print_json, screen
from penstock.cli._plan_tables import show, show_shortfall
from penstock.cli._target import compute_as_ranks, load_profiles, profile_target

if TYPE_CHECKING:
    from penstock.costs import Profile
    from penstock.distributed.launch.target import Target
    from penstock.plan import Cluster, Plan, Sizes

EPILOG = """\
A plan uses every device and trains exactly --global-batch-size samples per step (replicas * microbatches * their \
size). Times are simulated from the profile's. The gradient all-reduce of a stage starts when its last backward ends, \
and overlaps with the remaining work. A step includes the AdamW update if the profile has its time."""
"""Epilog of the help."""


def plan(
    cluster: ClusterOptions,
    transformer: TransformerOptions,
    global_batch_size: int = option("Samples per step, over all replicas.", default=REQUIRED),
    target: str | None = argument(
        "Model to measure here: module:function, file.py:function or hf:config.json.", metavar="[TARGET]"
    ),
    profile: list[Path] | None = option(
        "Output of `penstock profile`, instead of measuring; repeat it for other microbatch sizes.",
        metavar="FILE",
    ),
    schedule: str | None = option("Schedules to choose from: 1f1b,zb-h1; default: all."),
    replicas: int | None = option("Data-parallel replicas; default: any number."),
    pipeline: int | None = option("Ranks per pipeline; default: any number."),
    microbatches: int | None = option("Microbatches per replica; default: any number."),
    search_time: float = option(
        "How long to search, on a typical machine, for better schedules than the named ones; a busy or slow one takes "
        "longer and finds the same.",
        metavar="SECONDS",
        default=3.0,
    ),
    out: Path | None = output_option("Write the best plan, for penstock.pipeline.", metavar="FILE"),
    as_json: bool = JSON,
) -> None:
    """Choose replicas, ranks, cuts, microbatches, schedule and more for a model and its devices.

    TARGET is a function that returns (model, args, target, loss), as for
    `penstock verify`. It is measured here, with its full batch and an eighth
    of it as microbatches. On a CPU it runs with the threads that each rank will
    have. To plan for another device, profile there and pass the files, or name
    it (--device h100) for an estimate. For an analytic transformer model, pass
    --transformer.
    """
    from penstock.costs.sizes import profile_notes
    from penstock.plan import FixedNumbers, make_plans
    from penstock.plan.remedies import remedies
    from penstock.schedule.generators import schedule_spec

    check_seconds(search_time=search_time)
    check_writable(out, f"--out {out}")
    schedules = None if schedule is None else [schedule_spec(name.strip()).name for name in schedule.split(",")]
    fixed = FixedNumbers(schedules, replicas, pipeline, microbatches)  # raises before anything is measured
    paper, notes, link_note = None, list[str](), ""
    if transformer.transformer is not None:
        if target is not None or profile:
            raise ArgumentError("--transformer replaces TARGET and --profile: pass only one of the three")
        paper = transformer.read(cluster)
        devices, sizes = paper.cluster(), paper.sizes()
    else:
        transformer.check_unused()
        profiles = _profiles(target, profile or [], cluster)
        devices, sizes, link_note = _measured(profiles, cluster)
        notes = profile_notes(profiles)
    result = make_plans(sizes, devices, global_batch_size, fixed, search_seconds=search_time)
    if out is not None and result.best:
        result.best[0].save(out)
    if as_json:
        nearest = None if result.closest is None else result.closest.to_dict()
        rejected = [asdict(plan) for plan in result.rejected]
        plans = [plan.to_dict() for plan in result.best]
        print_json({"plans": plans, "lost": rejected, "nearest": nearest, "notes": notes})
    else:
        console = screen()
        if (per_host := devices.devices_per_host) is not None and (extra := devices.devices % per_host):
            notes.append(
                f"the last of {pluralize(devices.hosts, 'host')} has {extra} of {pluralize(per_host, 'device')}"
            )
        if result.best:
            notes += filter(None, [sizes.extrapolation_note(result.best[0].choice.rows)])
        for note in [*([] if paper else cluster.notes), *notes]:
            console.print(f"note: {note}", soft_wrap=True)
        if result.best:
            show(result, console, devices)
        elif result.closest is not None:
            group = transformer.tensor_parallel
            fixes = [*remedies(sizes, devices, global_batch_size, fixed, result.closest, group)]
            show_shortfall(result, fixes, console)
        if link_note:
            console.print(f"\n{link_note}")
        if paper is not None and result.best:
            print(f"\n{paper.describe(result.best[0])}")
        if out is not None and result.best:
            print(f"\nwritten to {out}{_usage(result.best[0], out)}")
    if not result.best:
        raise typer.Exit(1)


def _measured(profiles: Sequence[Profile], cluster: ClusterOptions) -> tuple[Cluster, Sizes, str]:
    """Return the devices with what profiles measured of them, the costs, and a note on links that were not measured."""
    from penstock.costs.links import describe_link, slowest_link, usual_link
    from penstock.plan import Sizes

    measured = next(filter(None, map(slowest_link, profiles)), None)
    action = next((profile.action_seconds for profile in profiles if profile.action_seconds is not None), None)
    update = max(profile.optimizer_byte_seconds or 0.0 for profile in profiles)
    devices = cluster.read(measured or usual_link(profiles[0].device), action, update)
    if cluster.links()[0] is not None or measured is not None or devices.devices == 1:
        return devices, Sizes.of(profiles), ""
    note = f"{describe_link(devices.link)} for messages and all-reduces. Pass --link, or a profile made with --links."
    return devices, Sizes.of(profiles), f"Links were not measured: {note}"


def _usage(plan: Plan, file: Path) -> str:
    """Return the code with which a script follows the plan."""
    choice = plan.choice
    if choice.replicas == 1:
        return f": penstock.pipeline(..., plan={str(file)!r}), or any script by penstock run --plan {file} train.py"
    rows = choice.microbatches * choice.rows
    constructor, _, _ = plan.mesh.partition("(")
    return (
        f" for penstock run --plan {file} train.py. Its replicas need a mesh, and each takes {rows} of the "
        f"{choice.replicas * rows} samples of a batch; in the script:\n"
        f"  from torch.distributed.device_mesh import {constructor}\n"
        f"  mesh = {plan.mesh}\n"
        f'  x, y = (whole.chunk({choice.replicas})[mesh.get_local_rank("dp")] for whole in (x, y))\n'
        "  penstock.pipeline(model, (x,), ..., mesh=mesh)"
    )


def _profiles(target: str | None, files: Sequence[Path], cluster: ClusterOptions) -> list[Profile]:
    """Read the files, measure TARGET, or estimate it for --device."""
    devices, device = cluster.read().devices, cluster.kind  # raises before anything is measured
    if target is None and not files:
        raise ArgumentError("pass a TARGET to measure, or --profile")
    from penstock.costs.sizes import measured_rows
    from penstock.pipe.profiling import input_device

    def measure(target: Target) -> list[Profile]:
        estimate = {} if device is None else {"device": device, "calibrate": cluster.calibrate or ()}
        options = {"budget_seconds": 1.0, "target": target.target, **estimate}
        if device is None and input_device((target.args, target.kwargs), target.model).type == "cpu":
            compute_as_ranks(min(cluster.devices_per_host or devices, devices))
        full = profile_target(target, microbatches=1, **options)
        count = min(8, measured_rows(full))
        return [full] if count == 1 else [full, profile_target(target, microbatches=count, **options)]

    profiles = load_profiles(target, files, measure, weights=device is None)
    for profile in profiles:
        if device is not None and profile.device != device.type:
            raise ArgumentError(
                f"--device {device.key}: the profile is of {profile.device_name or profile.device} ({profile.device}), "
                f"not of {device.name} ({device.type}); estimate one: penstock profile TARGET --device {device.key}"
            )
    return profiles
