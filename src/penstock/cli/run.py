"""`penstock run`: a script on several ranks of this machine, or on hosts that are made of it, over a network."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli._network import NetworkOptions
from penstock.cli._spread import spread
from penstock.errors import ArgumentError, FabricError
from penstock.launch import check, launch

if TYPE_CHECKING:
    from penstock.fabric.network.machines import Machines
    from penstock.fabric.network.nodes import Job


@spread
def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT [ARGUMENTS]", help="The script, or a module with -m; then its own."),
    ],
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="How many processes, each a rank.")],
    network: NetworkOptions,
    threads: Annotated[
        int | None, typer.Option("--threads", help="Threads a rank; by default the cores divided by the ranks.")
    ] = None,
    module: Annotated[bool, typer.Option("--module", "-m", help="SCRIPT is a module's name, as in python -m.")] = False,
    nnodes: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run a training script once for each rank, on this machine. What follows the script is the script's.

    With --hosts the ranks run on hosts that are made of this machine, joined
    by links as bad as --link says.

    For several machines, run torchrun on each: the same script works.
    """
    if nnodes is not None:
        raise ArgumentError(
            f"--nnodes is torchrun's, and this is for one machine: run `torchrun --nnodes {nnodes} --nproc-per-node "
            f"{ranks} ...` on each machine; see 'Several machines' in the guide"
        )
    command = ["-m", *command] if module else command
    check(command, ranks, threads)
    machines = network.machines()
    if machines is None:
        raise typer.Exit(launch(command, ranks, threads))
    from penstock.fabric.network.nodes import Job

    assert network.hosts is not None
    raise typer.Exit(_over_network(Job(tuple(command), ranks, network.hosts, threads), machines, network))


def _over_network(job: Job, machines: Machines, network: NetworkOptions) -> int:
    """Makes the hosts, runs the job on them, and says what the network was. Returns the exit status."""
    from penstock.fabric.network import nodes
    from penstock.fabric.network.checks import missing

    lacking = missing()
    if lacking is not None:
        raise FabricError(f"{lacking}. Without --hosts and --link, ranks are processes of this machine")
    try:
        with machines:
            began = time.monotonic()
            ended = nodes.run(job, machines)
            _say([ended.said] if ended.said else [])
            _say(_network(machines, network, time.monotonic() - began))
    except KeyboardInterrupt:  # before there was a job to pass it on to, or after it
        return 128 + signal.SIGINT
    return ended.status


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"penstock: {line}", file=sys.stderr)


def _network(machines: Machines, network: NetworkOptions, elapsed_seconds: float) -> list[str]:
    from penstock.fabric.report.network import network_lines

    shaper = machines.shaper
    return network_lines(
        shaper.name if shaper else None,
        network.link,
        hosts=len(machines.hosts),
        own={host: link.text for host, link in machines.topology.own.items()} if machines.topology else {},
        background=network.background or (),
        remarks=shaper.remarks if shaper else (),
        told=machines.told(),
        elapsed_seconds=elapsed_seconds,
    )
