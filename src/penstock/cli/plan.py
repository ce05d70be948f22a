"""`penstock plan`: how to train a model on given devices: replicas, ranks, cuts, microbatches, schedule and more."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from penstock.cli._plans import show, show_lack
from penstock.cli._spread import OUTPUT_PANEL, Json, spread
from penstock.cli._target import link_of, loaded
from penstock.cli._transformer import TransformerOptions
from penstock.errors import ArgumentError

if TYPE_CHECKING:
    from penstock.balance import Profile
    from penstock.plan import Cluster, Kind, Planned, Sizes

EPILOG = """\
A plan uses every device and trains exactly --global-batch rows a step: replicas * microbatches * a microbatch's rows. \
Times are simulated from those of the profile; a stage's gradients are summed over replicas from the end of its last \
backward, beside what is left, and the optimizer takes no time."""
"""Printed below the options."""

_DEVICES = "Devices"


def _option(text: str, *flags: str, **more: Any) -> Any:
    return typer.Option(*flags, help=text, rich_help_panel=_DEVICES, **more)


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The devices to plan for."""

    devices: Annotated[str, _option("How many there are; of several kinds, 4xold,8xnew.", "--devices", "-n")]
    memory: Annotated[
        str | None, _option("What each has: 80GiB, or by kind, old=40GiB,new=80GiB. By default no limit.")
    ] = None
    speed: Annotated[
        str | None, _option("How fast each kind is: old=0.5,new=1. By default 1: as the profile's device.")
    ] = None
    link: Annotated[
        str | None,
        _option(
            'Between two devices: "900gbit delay 3us", a rate and a latency as for tc; by default messages are free.'
        ),
    ] = None
    per_host: Annotated[int | None, _option("How many of them a host has; by default one host has all.")] = None
    between_hosts: Annotated[
        str | None, _option("Between devices of two hosts, if not as --link says; needs --per-host.")
    ] = None
    host_link: Annotated[
        str | None, _option("To the host's memory and back; if given, stages may offload activations.")
    ] = None

    def read(self) -> Cluster:
        """The cluster. Raises ArgumentError if an option is wrong."""
        from penstock.plan import Cluster
        from penstock.simulate import NO_COST

        if self.between_hosts is not None and self.per_host is None:
            raise ArgumentError(f"--between-hosts {self.between_hosts!r} needs --per-host: how many devices a host has")
        return Cluster(
            link=link_of(self.link) or NO_COST,
            devices_per_host=self.per_host,
            between_hosts=link_of(self.between_hosts),
            kinds=self._kinds(),
            host_link=link_of(self.host_link),
        )

    def _kinds(self) -> tuple[Kind, ...]:
        from penstock.fabric.units import size_of
        from penstock.plan import Kind

        counts: dict[str, int] = {}
        for part in self.devices.split(","):
            found = re.fullmatch(r"\s*(-?\d+)(?:x([\w.-]+))?\s*", part)
            if found is None or (found[2] is None and "," in self.devices) or (found[2] or "") in counts:
                raise ArgumentError(
                    f"--devices {self.devices!r}: expected a number, or numbers of several kinds, as in 4xold,8xnew"
                )
            counts[found[2] or ""] = int(found[1])
        sizes = _by_kind("--memory", self.memory, counts)
        speeds = _by_kind("--speed", self.speed, counts)
        return tuple(
            Kind(
                name,
                number,
                math.inf if sizes[name] is None else size_of(sizes[name]),
                1.0 if speeds[name] is None else _speed(speeds[name]),
            )
            for name, number in counts.items()
        )


def _by_kind(option: str, text: str | None, kinds: Collection[str]) -> dict[str, Any]:
    """What an option says of each kind: one for all, or name=value for each."""
    if text is None or "=" not in text:
        return dict.fromkeys(kinds, text)
    given = dict(part.strip().partition("=")[::2] for part in text.split(","))
    if odd := sorted(given.keys() ^ {*kinds}):
        expected = ",".join(f"{name or 'kind'}=..." for name in kinds)
        raise ArgumentError(f"{option} {text!r}: {odd[0]!r} is not both here and in --devices; give {expected}")
    return given


def _speed(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ArgumentError(f"--speed: {text!r} is not a number; 1 is as fast as the profile's device") from None


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
    search: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="How long to search for orders of work better than any schedule."),
    ] = 3.0,
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
    the files; for a transformer that is only numbers yet, on devices that you
    do not have, give --transformer.
    """
    from penstock.plan import Sizes, make_plans

    known, paper = cluster.read(), None
    if numbers.transformer is not None:
        if target is not None or profile:
            raise ArgumentError("--transformer takes the place of TARGET and --profile: give one of the three")
        paper = numbers.read(known, cluster.per_host)
        known = paper.cluster()
    sizes = Sizes.of(paper.profiles() if paper is not None else _profiles(target, profile or []))
    names = _names(schedule)
    found = make_plans(sizes, known, global_batch, names, search_seconds=search)
    if out is not None and found.best:
        found.best[0].save(out)
    if as_json:
        print(json.dumps(to_dict(found)))
    else:
        _print(found, sizes, known, global_batch, names)
        if paper is not None and found.best:
            print(f"\n{paper.told(found.best[0])}")
        if out is not None and found.best:
            print(f"\nwritten to {out}: penstock.pipeline(..., plan={str(out)!r})")
    if not found.best:
        raise typer.Exit(1)


def _print(found: Planned, sizes: Sizes, cluster: Cluster, global_batch: int, schedules: Sequence[str] | None) -> None:
    """The plans; or what is missing, and what would fit."""
    from penstock.plan.remedies import remedies

    console = Console(highlight=False)
    if found.best:
        show(found, console)
    elif found.nearest is not None:
        told = remedies(sizes, cluster, global_batch, schedules, found.nearest)
        show_lack(found, cluster, [*told], console)


def _profiles(target: str | None, files: Sequence[Path]) -> list[Profile]:
    """Those in the files, or measured."""
    from penstock.balance import read_profile

    if (target is None) != bool(files):
        raise ArgumentError("give either a TARGET to measure, or --profile with what was measured")
    if target is None:
        return [read_profile(path) for path in files]
    from penstock.plan.sizes import rows_of

    with loaded(target, "the model") as given:
        from penstock.pipe.profiling import profile as measured

        cutting = {name: value for name, value in given.cutting.items() if name != "merge"}
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
