"""`penstock run`: runs a script on several ranks of this machine, or on hosts emulated on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from penstock._base.errors import ArgumentError, FabricError
from penstock.cli._network import NetworkOptions, network_option
from penstock.cli._options import REQUIRED, argument, option
from penstock.distributed.launch.processes import VERIFY, check, launch
from penstock.distributed.launch.user import User

if TYPE_CHECKING:
    from penstock.network.machines import Machines
    from penstock.network.nodes import Job
    from penstock.network.scenario import Event

SETTINGS = {"allow_interspersed_args": False}
"""Options after the script belong to it."""


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Options for the ranks that run the script."""

    ranks: int | None = option("Number of ranks, one process each; default: the plan's.", "--ranks", "-n")
    plan: Path | None = option("Output of `penstock plan`: the script's pipeline follows it.", metavar="FILE")
    threads: int | None = option("Threads per rank; default: cores / ranks.", "--threads")
    module: bool = option("Treat SCRIPT as a module name, as in python -m.", "--module", "-m", default=False)
    verify: bool = option("Verify each pipeline in its first step; stop if a value differs.", "--verify", default=False)

    def count(self) -> int:
        """Return the number of processes to start, and set the plan in their environment."""
        if self.plan is None:
            if self.ranks is None:
                raise ArgumentError("the number of ranks is missing; pass --ranks 4, for example, or --plan")
            return self.ranks
        from penstock.plan.plan import VARIABLE, read_plan

        devices = read_plan(self.plan).choice.devices
        if self.ranks not in (None, devices):
            raise ArgumentError(f"--ranks {self.ranks}, but {self.plan} is for {devices} processes; omit --ranks")
        os.environ[VARIABLE] = str(self.plan.resolve())
        return devices


def run(
    *,
    command: list[str] = argument(
        "Script, or a module with -m; then its arguments.", metavar="SCRIPT [ARGUMENTS]", default=REQUIRED
    ),
    rank_options: RankOptions,
    network: NetworkOptions,
    hosts: int | None = network_option(
        "Spread the ranks evenly over this many hosts, network namespaces of this machine (Linux, as root)."
    ),
    user: str | None = network_option(
        "User that runs the script on --hosts; default: root, which creates them.", metavar="NAME"
    ),
) -> None:
    """Run a training script once for each rank, on this machine. Arguments after the script are passed on to it.

    With --hosts the ranks run on hosts emulated on this machine, joined by the
    links that --link describes.

    For several machines, run torchrun on each: the same script works.
    """
    command, ranks = ["-m", *command] if rank_options.module else command, rank_options.count()
    check(command, ranks, rank_options.threads)
    if rank_options.verify:
        os.environ[VERIFY] = "1"
    if hosts is None:
        if unused := [*network.given(), *(["--user"] if user else [])]:
            raise ArgumentError(
                f"{unused[0]} needs --hosts: without it ranks are processes of this machine, without links"
            )
        raise typer.Exit(launch(command, ranks, rank_options.threads))
    from penstock.network.nodes import Job

    machines, events = network.machines(hosts)
    raise typer.Exit(_over_network(Job(tuple(command), ranks, hosts, rank_options.threads), machines, events, user))


def _over_network(job: Job, machines: Machines, events: Sequence[Event], user: str | None) -> int:
    """Create the hosts, run the job on them, and report on the network. Return the exit status."""
    from penstock.network import nodes
    from penstock.network.fabric.views.network import network_lines
    from penstock.network.namespaces import why_not

    if (reason := why_not()) is not None:
        raise FabricError(f"{reason}. Without --hosts and --link, ranks are processes of this machine")
    if user is not None:
        job = replace(job, user=User(user))
    elif name := os.environ.get("SUDO_USER"):
        script = job.command[job.command[0] == "-m"]
        _print_notes([f"{script} runs as root, not as {name}; pass --user {name} to change that"])
    with machines:
        described, outcome = machines.describe(), nodes.run(job, machines, events=events)
        happened = [str(event) for event in outcome.happened]
        _print_notes(network_lines(described, counters=machines.counters(), events=happened))
    return outcome.report()


def _print_notes(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"penstock: {line}", file=sys.stderr)
