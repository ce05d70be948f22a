"""Runs a script on several ranks and leaves nothing behind: torchrun, with a pipeline's defaults.

`supervise` starts agents (agent.py), forwards signals, waits, and ends what is left, for one machine as for many hosts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from types import FrameType
from typing import IO, Any

from penstock._base.errors import ArgumentError, check_counts
from penstock._base.process import cores
from penstock.distributed.launch.agent import TAG, agent_command, kill_remaining, remaining_processes
from penstock.distributed.launch.endings import (
    FAILURES,
    RankFailure,
    describe_exit,
    describe_signal,
    shell_status,
    was_interrupted,
    write_failure_to_runs,
)
from penstock.distributed.launch.user import User

VERIFY = "PENSTOCK_VERIFY"
"""Of the environment: set if pipelines are to be verified in their first step."""

LAUNCH_SECONDS = 8.0
"""What agents have to end after a signal, or once one has failed, before everything is killed."""
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Added to the environment of agents: torch warns about host names that are not in DNS, and of each rank that ends."""
_POLL_SECONDS = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def launch(command: Sequence[str], ranks: int, threads: int | None = None) -> int:
    """Run a Python script once for each rank, on a free port of this machine, and wait until all have ended.

    SIGINT, SIGTERM and SIGHUP are passed on. The ranks then have a few seconds to end; a second one ends them at once.

    Args:
        command: the script's path, or `-m` and a module, then its arguments.
        ranks: how many processes.
        threads: OMP_NUM_THREADS of each; by default the environment's, otherwise the cores divided by the ranks.

    Returns the exit status of the first rank that failed, with 128 + n for one that was killed by signal n, or 0. Names
    that rank in a last line.

    Raises:
        ArgumentError: that cannot be started.
        KeyboardInterrupt: such a signal ended it, whose number is the argument.
    """
    check(command, ranks, threads)
    agent = agent_command(["--standalone", f"--nproc-per-node={ranks}", *command])
    with temporary_file("failures") as failures:
        ended = supervise([agent], {**QUIET, **os.environ, **thread_environment(ranks, threads), FAILURES: failures})
        outcome = explain_end(ended, failures, [f"the agent of ranks 0 to {ranks - 1}"])
    return outcome.report()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended.

    Attributes:
        status: as in a shell: 0, the exit status of the first rank that failed, or 128 + n for signal n.
        message: by `explain_end`: what failed first, in a line, or that a signal to this process ended everything; ""
            if nothing did.
        received: the first signal that was passed on, if any was.
        happened: what a network's scenario changed, in order.
        agent: the first that failed; None: none did.
        exitcode: its exit status, or -n for signal n.
    """

    status: int
    message: str = ""
    received: int | None = None
    happened: tuple[Any, ...] = ()
    agent: int | None = None
    exitcode: int = 0

    def report(self) -> int:
        """Print what failed first, and return the exit status. Raise KeyboardInterrupt: a signal, its argument."""
        if self.received:
            raise KeyboardInterrupt(self.received)
        if self.message:
            print(f"penstock: {self.message}", file=sys.stderr, flush=True)
        return self.status


def explain_end(ended: Outcome, failures: str, agents: Sequence[str], user: User | None = None) -> Outcome:
    """Explain how a job ended whose agents ended so. What failed first goes into the folders of runs, too.

    Args:
        failures: the file that `FAILURES` named.
        agents: what to call each.
        user: whose the ranks were, if not this process's own.
    """
    first = RankFailure.first(failures)
    status = ended.status
    if ended.received:
        failed = first is not None and first.message and not was_interrupted(first.message)
        message = str(first) if failed else describe_signal(ended.received)
    elif ended.agent is None:
        return ended
    elif ended.exitcode < 0 or first is None:
        message = f"{agents[ended.agent]} {describe_exit(ended.exitcode)}"
    else:
        status, message = shell_status(first.exitcode or 1), str(first)
    with user.acting() if user else contextlib.nullcontext():
        write_failure_to_runs(failures, message)
    return replace(ended, status=status, message=message)


@dataclass(frozen=True, slots=True)
class EndTimeouts:
    """How long agents have to end.

    Attributes:
        failed_seconds: after one has failed.
        ends_others: whether the others are signaled to end then; otherwise they run on until that time is up.
        signal_seconds: after a signal that was passed on.
        interrupt_seconds: after SIGINT.
    """

    failed_seconds: float = LAUNCH_SECONDS
    ends_others: bool = True
    signal_seconds: float = LAUNCH_SECONDS
    interrupt_seconds: float = LAUNCH_SECONDS


DEFAULT_TIMEOUTS = EndTimeouts()


def supervise(
    commands: Iterable[Sequence[str]],
    environment: Mapping[str, str],
    *,
    outputs: Sequence[IO[bytes]] = (),
    poll: Callable[[], object] = lambda: None,
    seconds: float = float("inf"),
    forwards: bool = True,
    timeouts: EndTimeouts = DEFAULT_TIMEOUTS,
) -> Outcome:
    """Start agents and wait until all have ended, or have to. None of their processes is left.

    Args:
        commands: of the agents: `agent_command`, or what runs it elsewhere.
        environment: of them all.
        outputs: for each agent, what takes all that it and its ranks print; by default this process's own do, and its
            input is theirs.
        poll: called some twenty times a second, and once all have ended; what it raises ends them.
        seconds: that it may take.
        forwards: SIGINT, SIGTERM and SIGHUP are passed on. Otherwise they do what they do.
        timeouts: how long they have to end.

    Raises:
        TimeoutError: it took more than `seconds`.
    """
    until = time.monotonic() + seconds
    shares_input = not (outputs or sys.stdin is None or sys.stdin.isatty())  # the background reads no terminal
    agents: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_end, agents)
        jobs = []
        received = stack.enter_context(_forward_signals(_SIGNALS if forwards else (), agents))
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # agents inherit that, and are not interrupted
        stack.callback(signal.pthread_sigmask, signal.SIG_SETMASK, mask)
        for number, command in enumerate(commands):
            jobs.append(secrets.token_hex(8))  # each its own: an agent kills at its end what is left of its job
            stack.callback(kill_remaining, jobs[-1])
            agents.append(
                subprocess.Popen(
                    command,
                    env={**environment, TAG: jobs[-1]},
                    stdin=None if shares_input else subprocess.DEVNULL,
                    stdout=outputs[number] if outputs else None,
                    stderr=subprocess.STDOUT if outputs else None,
                    process_group=0,  # a Ctrl-C of the terminal comes to us alone
                )
            )
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        first = _wait(agents, jobs, received, poll, until, timeouts)
        exitcode = 0 if first is None else agents[first].returncode
        if received:
            return Outcome(128 + received[0], received=received[0], agent=first, exitcode=exitcode)
        return Outcome(shell_status(exitcode), agent=first, exitcode=exitcode)


def _wait(
    agents: Sequence[subprocess.Popen[bytes]],
    jobs: Sequence[str],
    received: Sequence[int],
    poll: Callable[[], object],
    until: float,
    timeouts: EndTimeouts,
) -> int | None:
    """Wait until all have ended, or until waiting stops: at a deadline, at a second signal, or after a
    signal once no rank is left, as an agent takes seconds to end. Return the first that failed, if any."""
    first: int | None = None
    deadline = float("inf")
    while True:
        statuses = [agent.poll() for agent in agents]
        poll()
        if first is None and not received:
            first = next((number for number, status in enumerate(statuses) if status), None)
            if first is not None and timeouts.ends_others:  # as torchrun does with the other ranks of its machine
                _send(agents, signal.SIGTERM)
        if None not in statuses:
            return first
        now = time.monotonic()
        if deadline == float("inf") and received:
            is_interrupted = received[0] == signal.SIGINT
            deadline = now + (timeouts.interrupt_seconds if is_interrupted else timeouts.signal_seconds)
        elif deadline == float("inf") and first is not None:
            deadline = now + timeouts.failed_seconds
        if now > deadline or len(received) > 1:
            return first
        if received and not any(remaining_processes(job, [agent.pid for agent in agents]) for job in jobs):
            return first
        if now > until:
            raise TimeoutError("the job exceeded its time limit")
        time.sleep(_POLL_SECONDS)


def _send(agents: Iterable[subprocess.Popen[bytes]], number: int) -> None:
    for agent in agents:
        with contextlib.suppress(ProcessLookupError):
            agent.send_signal(number)


def _end(agents: Sequence[subprocess.Popen[bytes]]) -> None:
    _send(agents, signal.SIGKILL)
    for agent in agents:
        agent.wait()


@contextlib.contextmanager
def _forward_signals(numbers: Sequence[int], agents: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Pass signals on to the agents; yield the list of those that came."""
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        _send(agents, number)

    previous = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def temporary_file(name: str, user: User | None = None) -> Iterator[str]:
    """Yield the path of an empty file that is gone with this process; on Linux it is in memory, so that no disk is
    full. For another user, who cannot open such a file, it is one on disk, which that user can write, but not
    replace."""
    if sys.platform != "linux" or user:
        with tempfile.TemporaryDirectory(prefix=f"penstock-{name}-") as folder:
            file = Path(folder, name)
            file.touch()
            if user:
                user.take_ownership(file)
                os.chmod(folder, 0o711)
            yield str(file)
        return
    descriptor = os.memfd_create(f"penstock-{name}")
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def thread_environment(ranks: int, threads: int | None) -> dict[str, str]:
    """Return what sets the number of threads of each rank; nothing if the environment does, and `threads` is None."""
    if threads is None and "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(threads or max(1, cores() // ranks))}


def check(command: Sequence[str], ranks: int, threads: int | None) -> None:
    """Raise ArgumentError if `launch` cannot start this."""
    check_counts(required=False, ranks=ranks, threads=threads)
    target = command[1:2] if command and command[0] == "-m" else command[:1]
    if not target:
        raise ArgumentError("no script given: name a Python file, or -m and a module")
    if command[0] == "-m":
        package = target[0].partition(".")[0]
        if PathFinder.find_spec(package, [os.getcwd(), *sys.path]) is None:
            raise ArgumentError(f"no module {target[0]!r}: it is neither in {os.getcwd()} nor installed")
    elif Path(target[0]).is_dir() and not (Path(target[0]) / "__main__.py").is_file():
        raise ArgumentError(
            f"{target[0]!r} is a folder without a __main__.py: name the script in it, or -m and a module"
        )
    elif not Path(target[0]).exists():
        raise ArgumentError(f"no script {target[0]!r} in {os.getcwd()}: pass its path, or -m and a module")
    elif not (Path(target[0]).is_dir() or Path(target[0]).is_file()):  # each rank would read all of /dev/zero
        raise ArgumentError(f"{target[0]!r} is no regular file: pass the path of a script, or -m and a module")
