"""Starts the hosts of one machine, namespaces or plain processes, follows the samples, and ends everything.

The hosts run as under a real torchrun: an agent and a worker each. What they print goes to `host-<n>.log`.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock.errors import FabricError
from penstock.fabric.emulation.board import VARIABLE as BOARD
from penstock.fabric.emulation.spec import Spec
from penstock.fabric.emulation.watch import Watch
from penstock.fabric.samples import RUN, SAMPLES, STEPS
from penstock.launch.processes import agent_command, forwarded_signals, job
from penstock.launch.step_file import VARIABLE, read_step
from penstock.network.director import playing
from penstock.network.machines import Machines
from penstock.network.nodes import agent_commands, end_agents, memory, start_agent
from penstock.network.scenario import Event

EMULATION = "penstock.fabric.emulation.host"
"""The module that each host runs, with the run's folder as its argument."""
_GRACE_SECONDS = 10.0
"""What the other hosts get to end by themselves once one has failed."""

_POLL_SECONDS = 0.1


def emulate(
    spec: Spec,
    folder: Path,
    machines: Machines | None = None,
    watch: Watch | None = None,
    module: str = EMULATION,
    events: Sequence[Event] = (),
) -> None:
    """Runs a spec on hosts that are started here, and waits for its end.

    Args:
        folder: of the run; what an earlier run left in it is replaced.
        machines: one for each host; None: the hosts are processes of this machine.
        watch: looks on.
        module: that the hosts run.
        events: that change the machines' network; a step is a trial.

    Raises:
        FabricError: a host did not join, was lost, or failed. The samples until then are in the folder.
        KeyboardInterrupt: a signal came, whose number it has; all hosts have ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (RUN, SAMPLES, STEPS):
        (folder / stale).unlink(missing_ok=True)
    for stale_log in folder.glob("host-*.log"):
        stale_log.unlink()
    spec.write(folder)
    with contextlib.ExitStack() as stack:
        steps, board = stack.enter_context(memory("step")), stack.enter_context(memory("start"))
        agents: list[subprocess.Popen[bytes]] = []
        stack.callback(end_agents, agents)
        for number, argv in enumerate(_commands(spec, folder, machines, module)):
            environment = stack.enter_context(job())
            environment |= {VARIABLE: steps, BOARD: board}
            environment.setdefault("OMP_NUM_THREADS", "1")
            if machines is None:
                environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
            log = stack.enter_context((folder / f"host-{number}.log").open("wb"))
            agents.append(start_agent(argv, environment, subprocess.DEVNULL, log))
        with _scenario(machines, events, steps) as happened, forwarded_signals(agents) as received:
            try:
                ended = _wait(agents, received, _Tail(folder, spec), watch, machines)
            except FabricError as error:
                _add(folder, str(error))
                raise
    if machines is not None:
        _add(folder, switch_qdiscs=machines.qdiscs(), switch=machines.told(), happened=happened)
    if received:
        _add(folder, f"stopped by {signal.Signals(received[0]).name}")
        raise KeyboardInterrupt(received[0])
    if ended is not None:
        text = _cause(folder, ended, agents, machines is not None)
        _add(folder, text)
        raise FabricError(text)


@contextlib.contextmanager
def _scenario(machines: Machines | None, events: Sequence[Event], steps: str) -> Iterator[list[dict[str, Any]]]:
    """Plays it while the block runs; what has happened is in the list at the end."""
    happened: list[dict[str, Any]] = []
    if machines is None:
        yield happened
        return
    with playing(machines, events, lambda: read_step(steps)) as played:
        yield happened
    happened += [asdict(one) for one in played.happened]


def _commands(spec: Spec, folder: Path, machines: Machines | None, module: str) -> Iterator[list[str]]:
    what = ["-m", module, str(folder.resolve())]
    if machines is None:
        yield agent_command(["--standalone", f"--nproc-per-node={spec.hosts}", *what])
        return
    yield from agent_commands(machines, what, join_seconds=spec.join_seconds)


def _wait(
    agents: Sequence[subprocess.Popen[bytes]],
    received: Sequence[int],
    tail: _Tail,
    watch: Watch | None,
    machines: Machines | None,
) -> int | None:
    """Until all have ended. Returns the first that failed, if any; the others then get a few seconds.

    After a signal they get none: each trial is in its file, and what waits for another host may never see a signal.
    """
    failed: int | None = None
    deadline = float("inf")
    while True:
        statuses = [agent.poll() for agent in agents]
        if machines is not None:
            machines.check()
        if watch is not None:
            for number, durations in tail.read():
                watch.trial(number, durations)
            watch.tick()
        if all(status is not None for status in statuses):
            return next((n for n, status in enumerate(statuses) if status), None) if failed is None else failed
        if failed is None:
            failed = next((n for n, status in enumerate(statuses) if status), None)
        if received:
            return failed
        if failed is not None and deadline == float("inf"):
            deadline = time.monotonic() + _GRACE_SECONDS
        if time.monotonic() > deadline:
            return failed
        time.sleep(_POLL_SECONDS)


class _Tail:
    """The trials of a samples file that grows."""

    def __init__(self, folder: Path, spec: Spec) -> None:
        transfers = spec.workload.transfers
        self._path = folder / SAMPLES
        self._rows = sum(len(transfer.ranks) or spec.hosts for transfer in transfers)
        self._position = 0
        self._rest = b""
        self._seen = 0
        self._durations = [0] * len(transfers)

    def read(self) -> Iterator[tuple[int, list[int]]]:
        """Those that were written whole since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._position)
                new = file.read()
        except FileNotFoundError:
            return
        self._position += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            if not line[:1].isdigit():
                continue
            trial, transfer, _, start, end = map(int, line.split(b","))
            self._durations[transfer] = max(self._durations[transfer], end - start)
            self._seen += 1
            if self._seen == self._rows:
                yield trial, self._durations
                self._seen, self._durations = 0, [0] * len(self._durations)


def _add(folder: Path, missing: str = "", **found: Any) -> None:
    """Into run.json, what host 0 could not say, or does not know."""
    path = folder / RUN
    with contextlib.suppress(OSError, ValueError):
        record = json.loads(path.read_text())
        if not record["complete"] and not record["missing"]:
            record["missing"] = missing
        record.update({name: value for name, value in found.items() if value})
        aside = path.with_suffix(".tmp")
        aside.write_text(json.dumps(record, indent=1))
        aside.replace(path)


def _cause(folder: Path, first: int, agents: Sequence[subprocess.Popen[bytes]], by_host: bool) -> str:
    """Why the run failed, from what host 0 or the first that failed has said."""
    try:
        trials = (folder / SAMPLES).read_bytes().rsplit(b"\n", 2)[-2].split(b",")[0]
        ended = int(trials) + 1 if trials.isdigit() else 0
        saved = f"{ended} {'trial is' if ended == 1 else 'trials are'} in {folder}" if ended else "no trial had ended"
    except (OSError, IndexError):
        saved = "no trial had ended"
    status = agents[first].returncode
    lines = [line for log in sorted(folder.glob("host-*.log")) for line in log.read_text(errors="replace").split("\n")]
    said = [line.removeprefix("penstock: error: ") for line in lines if line.startswith("penstock: error: ")]
    killed = [
        line.removeprefix("penstock: ") for line in lines if line.startswith("penstock: rank") and "killed" in line
    ]
    if by_host and (ended_by := _signal(status)):
        killed.insert(0, f"host {first} was ended by {ended_by}")
    text = (killed or said or [f"host {first} ended with exit status {status}; see {folder}/host-{first}.log"])[0]
    return f"{text}; {saved}"


def _signal(status: int | None) -> str | None:
    """The name of the signal that an exit status, a process's or a shell's, stands for."""
    number = 0 if status is None else -status if status < 0 else status - 128
    try:
        return signal.Signals(number).name
    except ValueError:
        return None
