"""Run a torchrun job across hosts, with an agent on each as on real machines, and find out which rank failed first."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO

from penstock._base.errors import ArgumentError
from penstock.distributed.launch.agent import agent_command
from penstock.distributed.launch.endings import FAILURES
from penstock.distributed.launch.processes import (
    QUIET,
    EndTimeouts,
    Outcome,
    check,
    explain_end,
    supervise,
    temporary_file,
    thread_environment,
)
from penstock.distributed.launch.step_file import VARIABLE as STEP_FILE
from penstock.distributed.launch.step_file import read_step
from penstock.distributed.launch.user import User
from penstock.network.machines import Machines
from penstock.network.scenario import Event, play

PORT = 29500
"""The port of the first host's store; nothing else listens in a namespace of our own."""
JOIN_SECONDS = 300.0
"""How long agents have to join: many of them may be loading torch on few cores."""
PATIENCE = EndTimeouts(interrupt_seconds=1.0)
"""Short after a Ctrl-C, because a rank that waits for another over a network may never notice it."""


@dataclass(frozen=True, slots=True)
class Job:
    """A script and its ranks, spread evenly over hosts: the first ranks are on host 0.

    Attributes:
        command: the script's path, or `-m` and a module, then its own arguments.
        ranks: the total number of ranks on all hosts.
        hosts: the number of hosts.
        threads: OMP_NUM_THREADS of each rank; default: the environment's, or otherwise the cores divided by the ranks.
        user: who runs the ranks; default: this process's.
        join_seconds: how long agents have to join.

    Raises:
        ArgumentError: the job cannot be started.
    """

    command: tuple[str, ...]
    ranks: int
    hosts: int
    threads: int | None = None
    user: User | None = None
    join_seconds: float = JOIN_SECONDS

    def __post_init__(self) -> None:
        check(self.command, self.ranks, self.threads)
        if self.hosts < 1 or self.ranks % self.hosts:
            raise ArgumentError(
                f"{self.ranks} ranks cannot be spread evenly over {self.hosts} hosts: pass as many ranks as hosts, or "
                "twice, three times as many"
            )


def run(
    job: Job,
    machines: Machines | None,
    *,
    events: Sequence[Event] = (),
    outputs: Sequence[IO[bytes]] = (),
    look: Callable[[int], object] = lambda step: None,
    seconds: float = float("inf"),
    forwards: bool = True,
    patience: EndTimeouts = PATIENCE,
    env: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a job on hosts that exist, and are kept, and wait until all of it has ended.

    Args:
        machines: the hosts; None: all ranks are processes of this machine, with one agent.
        events: a scenario to play in the meantime.
        look: called some twenty times a second with the last step to have begun, -1 before the first.
        outputs, seconds, forwards, patience: as for `supervise`.
        env: added to the environment of the ranks.

    Raises:
        TimeoutError: the job took more than `seconds`.
        FabricError: the hosts' network has ended, or a change of the scenario could not be made.
    """
    with temporary_file("failures", job.user) as failures, temporary_file("step", job.user) as step:

        def poll() -> None:
            if machines is not None:
                machines.check()
            look(read_step(step))

        files = {**thread_environment(job.ranks, job.threads), FAILURES: failures, STEP_FILE: step, **(env or {})}
        with play(machines, events, lambda: read_step(step)) as happened:
            outcome = supervise(
                _commands(job, machines),
                {**QUIET, **os.environ, **files},
                outputs=outputs,
                poll=poll,
                seconds=seconds,
                forwards=forwards,
                timeouts=patience,
            )
        per_host = job.ranks // job.hosts
        agents = [f"the agent of host {n} (ranks {n * per_host} to {(n + 1) * per_host - 1})" for n in range(job.hosts)]
        return replace(explain_end(outcome, failures, agents, job.user), happened=tuple(happened))


def _commands(job: Job, machines: Machines | None) -> Iterator[list[str]]:
    """Yield the command that starts each agent, the first of which has rank 0."""
    if machines is None:
        yield agent_command(["--standalone", f"--nproc-per-node={job.ranks}", *job.command])
        return
    options = [f"--nnodes={job.hosts}", f"--nproc-per-node={job.ranks // job.hosts}", f"--master-port={PORT}"]
    options += [f"--master-addr={machines.addresses[0]}", f"--rdzv-conf=timeout={job.join_seconds:.0f}"]
    for host in range(job.hosts):
        command = agent_command([*options, f"--node-rank={host}", *job.command])
        yield machines.command(host, job.user.command(command) if job.user else command)
