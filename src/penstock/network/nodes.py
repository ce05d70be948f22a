"""A job of torchrun over hosts: an agent on each, as on real machines, and one end for all of them.

Agents do not watch each other, so here is who ends the others once one has failed, and who says which rank was first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO

from penstock.errors import ArgumentError
from penstock.launch import processes as launch
from penstock.launch.step_file import VARIABLE as STEP_FILE
from penstock.launch.step_file import read_step
from penstock.network.director import Happened, playing
from penstock.network.machines import Machines
from penstock.network.scenario import Event

PORT = 29500
"""Of the first host's store: nothing else listens in a namespace of our own."""
JOIN_SECONDS = 300.0
"""In which every agent has to be there: many of them load torch on few cores."""
POLL_SECONDS = 0.05
INTERRUPTED_SECONDS = 1.0
"""What the ranks have to end after a Ctrl-C: one that waits for another over a network may not see it at all."""


def agent_commands(
    machines: Machines, arguments: Sequence[str], *, per_host: int = 1, join_seconds: float = JOIN_SECONDS
) -> Iterator[list[str]]:
    """What to start for each host, in the environment of a `launch.job` of its own.

    Args:
        machines: the hosts; the first has rank 0.
        arguments: the script's path, or `-m` and a module, then its own.
        per_host: ranks on each.
        join_seconds: in which every agent has to be there.
    """
    for host in range(len(machines.hosts)):
        where = [
            f"--nnodes={len(machines.hosts)}",
            f"--nproc-per-node={per_host}",
            f"--node-rank={host}",
            f"--master-addr={machines.addresses[0]}",
            f"--master-port={PORT}",
            f"--rdzv-conf=timeout={join_seconds:.0f}",
        ]
        yield machines.command(host, launch.agent_command([*where, *arguments]))


@dataclass(frozen=True, slots=True)
class Job:
    """A script and its ranks, spread evenly over hosts: the first ranks are on host 0.

    Attributes:
        command: the script's path, or `-m` and a module, then its own arguments.
        ranks: on all hosts together.
        hosts: how many.
        threads: OMP_NUM_THREADS of each rank; by default the environment's, or else the cores divided by the ranks.

    Raises:
        ArgumentError: it cannot be started.
    """

    command: tuple[str, ...]
    ranks: int
    hosts: int
    threads: int | None = None

    def __post_init__(self) -> None:
        launch.check(self.command, self.ranks, self.threads)
        if self.hosts < 1 or self.ranks % self.hosts:
            raise ArgumentError(
                f"{self.ranks} ranks cannot be spread evenly over {self.hosts} hosts: give as many ranks as hosts, or "
                "twice, three times as many"
            )


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended.

    Attributes:
        status: as a shell has it: 0, the exit status of the first rank that failed, or 128 + n for signal n.
        said: what failed first, in words; "" if nothing did, or a signal to this process ended all.
        happened: what the scenario has changed, in order.
    """

    status: int
    said: str = ""
    happened: tuple[Happened, ...] = ()


def run(
    job: Job,
    machines: Machines,
    *,
    events: Sequence[Event] = (),
    watch: Callable[[int], object] | None = None,
    outputs: Sequence[IO[bytes]] = (),
    seconds: float | None = None,
    forward: bool = True,
) -> Outcome:
    """Runs a job over hosts that are there, and waits until all of it has ended.

    Args:
        job: what, on as many hosts as `machines` has.
        machines: the hosts, which stay.
        events: of a scenario that is played meanwhile.
        watch: called some twenty times a second with the number of the training step that runs, -1 before the first.
        outputs: for each host, what takes all that its ranks print; by default this process's own output and errors.
        seconds: how long it may take.
        forward: SIGINT, SIGTERM and SIGHUP are passed on to the ranks, which then have a few seconds to end, one after
            SIGINT. Otherwise they do what they do.

    Raises:
        TimeoutError: it took more than `seconds`. All of it has ended.
        FabricError: the hosts' network has ended, or a change of the scenario could not be made. The same.
    """
    until = float("inf") if seconds is None else time.monotonic() + seconds
    agents: list[subprocess.Popen[bytes]] = []
    jobs: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.callback(end_agents, agents)
        failures, step_file = stack.enter_context(memory("failures")), stack.enter_context(memory("step"))
        commands = agent_commands(machines, job.command, per_host=job.ranks // job.hosts)
        for host, argv in enumerate(commands):
            environment = stack.enter_context(launch.job())
            jobs.append(environment[launch.TAG])
            launch.share_cores(environment, job.ranks, job.threads)
            environment |= {launch.FAILURES: failures, STEP_FILE: step_file}
            output = outputs[host] if outputs else None
            agents.append(start_agent(argv, environment, launch.usual_input(), output))
        with (
            playing(machines, events, lambda: read_step(step_file)) as played,
            launch.forwarded_signals(agents) if forward else _no_signals() as received,
        ):

            def look() -> None:
                machines.check()
                if watch is not None:
                    watch(read_step(step_file))

            first = _wait(agents, jobs, received, look, until)
        if received:
            return Outcome(128 + received[0], happened=tuple(played.happened))
        outcome = _outcome(launch.RankFailure.read_all(failures), agents, first)
        return replace(outcome, happened=tuple(played.happened))


def _wait(
    agents: Sequence[subprocess.Popen[bytes]],
    jobs: Sequence[str],
    received: Sequence[int],
    look: Callable[[], object],
    until: float,
) -> int | None:
    """Until all have ended, or at a signal all ranks. Returns the first that failed, if any; after that, or a signal,
    the others are ended."""
    first: int | None = None
    deadline = float("inf")
    while True:
        statuses = [agent.poll() for agent in agents]
        if first is None and not received:
            first = next((host for host, status in enumerate(statuses) if status), None)
            if first is not None:  # as torchrun does with the other ranks of its machine
                for agent in agents:
                    with contextlib.suppress(ProcessLookupError):
                        agent.terminate()
        if None not in statuses:
            return first
        now = time.monotonic()
        if (first is not None or received) and deadline == float("inf"):
            is_interrupted = bool(received) and received[0] == signal.SIGINT
            deadline = now + (INTERRUPTED_SECONDS if is_interrupted else launch.LAUNCH_SECONDS)
        if now > deadline or len(received) > 1:
            return first
        known = [agent.pid for agent in agents]
        if received and not any(launch.left(job, known) for job in jobs):
            return first
        if now > until:
            raise TimeoutError("the job took longer than it may")
        look()
        time.sleep(POLL_SECONDS)


def _outcome(
    failures: Sequence[launch.RankFailure], agents: Sequence[subprocess.Popen[bytes]], first: int | None
) -> Outcome:
    if failures:
        failure = min(failures, key=lambda failure: failure.at_ns)
        return Outcome(failure.status, str(failure))
    if first is None:
        return Outcome(0)
    exitcode = agents[first].returncode
    return Outcome(launch.shell_status(exitcode), f"the agent of host {first} {launch.how_it_ended(exitcode)}")


@contextlib.contextmanager
def _no_signals() -> Iterator[list[int]]:
    yield []


def start_agent(
    argv: Sequence[str], environment: dict[str, str], given: int | None, output: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Starts a host's agent.

    Args:
        argv: of `agent_commands`.
        environment: of a `launch.job` of its own.
        given: its standard input, as `subprocess` has it.
        output: takes all that it and its ranks print; None: this process's own output and errors do.
    """
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns of host names that are not in DNS
    return subprocess.Popen(
        argv,
        env=environment,
        stdin=given,
        stdout=output,
        stderr=None if output is None else subprocess.STDOUT,
        process_group=0,  # a Ctrl-C of the terminal comes to us alone
    )


def end_agents(agents: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kills those that still run, and waits for all."""
    for agent in agents:
        with contextlib.suppress(ProcessLookupError):
            agent.kill()
    for agent in agents:
        agent.wait()


@contextlib.contextmanager
def memory(name: str) -> Iterator[str]:
    """The path of an empty file in memory that is gone with this process, however that ends."""
    descriptor = os.memfd_create(f"penstock-{name}")
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)
