"""Start the hosts of one machine (namespaces or plain processes), follow their samples, and stop everything.

The hosts run as under a real torchrun: an agent and a worker each. Their output goes to `host-<n>.log`.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock._base import owner
from penstock._base.files import read_bytes, read_json, write_json
from penstock._base.words import counted
from penstock.distributed.launch.agent import agent_command
from penstock.distributed.launch.endings import FAILURES, RankFailure, how_it_ended
from penstock.distributed.launch.processes import QUIET, Ended, Patience, memory, supervise
from penstock.distributed.launch.step_file import VARIABLE as STEP_FILE
from penstock.distributed.launch.step_file import read_step
from penstock.errors import ArgumentError, FabricError
from penstock.network.fabric.emulation.spec import Spec, Watch
from penstock.network.fabric.emulation.start_board import VARIABLE as BOARD
from penstock.network.fabric.samples import RUN, SAMPLES, STEPS
from penstock.network.machines import Machines
from penstock.network.nodes import agent_commands
from penstock.network.scenario import Event, playing

EMULATION = "penstock.network.fabric.emulation.host"
"""The module that each host runs, with the run's folder as its argument."""
_END_BYTES = 64 << 10
_PATIENCE = Patience(failed_seconds=10.0, ends_others=False, signal_seconds=0.0, interrupt_seconds=0.0)
"""How long to wait for hosts to end.

After one host fails, the others get some time to end on their own and to report why. After a signal they get none:
every trial is already in its file, and a host that waits for another may never see a signal.
"""


def emulate(
    spec: Spec,
    folder: Path,
    machines: Machines | None = None,
    watch: Watch | None = None,
    events: Sequence[Event] = (),
) -> None:
    """Runs a spec on hosts started here, and waits for it to end.

    Args:
        folder: the run's folder; anything left there by an earlier run is replaced.
        machines: one per host; None if the hosts are plain processes on this machine.
        watch: told of each trial that has ended.
        events: changes to the machines' network during the run; a step is a trial.

    Raises:
        ArgumentError: another run writes there.
        FabricError: a host did not join, was lost, or failed. The samples up to then are in the folder.
        KeyboardInterrupt: a signal arrived, whose number is its argument; all hosts have ended.
    """
    told = 0

    def look() -> None:
        nonlocal told
        if machines is not None:
            machines.check()
        while watch is not None and told < read_step(steps):  # a trial that begins ends the one before it
            watch(told)
            told += 1

    owner.claim(folder, look, f"--out {folder}")
    for stale in (*(folder / name for name in (RUN, SAMPLES, STEPS)), *folder.glob("host-*.log")):
        stale.unlink(missing_ok=True)
    spec.write(folder)
    with contextlib.ExitStack() as stack:
        steps, board, failures = (stack.enter_context(memory(name)) for name in ("step", "start", "failures"))
        files = {STEP_FILE: steps, BOARD: board, FAILURES: failures}
        environment = {**QUIET, "OMP_NUM_THREADS": "1", **os.environ, **files}
        commands = _commands(spec, folder, machines)
        logs = [stack.enter_context((folder / f"host-{number}.log").open("wb")) for number in range(len(commands))]
        try:
            with playing(machines, events, lambda: read_step(steps)) as happened:
                ended = supervise(commands, environment, outputs=logs, look=look, patience=_PATIENCE)
        except FabricError as error:
            _add(folder, str(error))
            raise
        killed = [failure for failure in RankFailure.read_all(failures) if (failure.exitcode or 0) < 0]
    if machines is not None:
        _add(folder, switch_qdiscs=machines.qdiscs(), switch=machines.told(), happened=[*map(asdict, happened)])
    _check_end(ended, killed, folder, by_host=machines is not None)
    if watch is not None:
        for number in range(told, spec.trials):
            watch(number)


def _commands(spec: Spec, folder: Path, machines: Machines | None) -> list[list[str]]:
    what = ["-m", EMULATION, str(folder.resolve())]
    if machines is None:
        return [agent_command(["--standalone", f"--nproc-per-node={spec.hosts}", *what])]
    return list(agent_commands(machines, what, join_seconds=spec.join_seconds))


def _add(folder: Path, missing: str = "", **found: Any) -> None:
    """Adds to run.json what host 0 could not write, or does not know."""
    path = folder / RUN
    with contextlib.suppress(OSError, ValueError):
        record = read_json(path)
        if not record["complete"] and not record["missing"]:
            record["missing"] = missing
        record.update({name: value for name, value in found.items() if value})
        write_json(path, record)


def _end(path: Path) -> bytes:
    """The last of a file, which may be long. Raises OSError or ArgumentError."""
    return read_bytes(path, start=max(0, path.stat().st_size - _END_BYTES))


def _check_end(ended: Ended, killed: Sequence[RankFailure], folder: Path, *, by_host: bool) -> None:
    """Records and raises what ended the hosts before their time."""
    if ended.received:
        _add(folder, f"stopped by {signal.Signals(ended.received).name}")
        raise KeyboardInterrupt(ended.received)
    if ended.agent is not None:
        text = _cause(folder, ended, killed, by_host)
        _add(folder, text)
        raise FabricError(text)


def _cause(folder: Path, ended: Ended, killed: Sequence[RankFailure], by_host: bool) -> str:
    """Explains why the run failed: who was killed, or what host 0 or the first host to fail reported."""
    try:
        trials = _end(folder / SAMPLES).rsplit(b"\n", 2)[-2].split(b",")[0]
        count = int(trials) + 1 if trials.isdigit() else 0
        saved = f"{counted(count, 'trial')} saved in {folder}" if count else "no trial had finished"
    except (OSError, IndexError, ArgumentError):
        saved = "no trial had finished"
    host, status = ended.agent, ended.status
    logs = sorted(folder.glob("host-*.log"))
    lines = [line for log in logs for line in _end(log).decode(errors="replace").split("\n")]
    said = [line.removeprefix("penstock: error: ") for line in lines if line.startswith("penstock: error: ")]
    if by_host and status > 128 and status - 128 in {*signal.Signals}:
        text = f"host {host} {how_it_ended(128 - status)}"
    elif killed:
        first = min(killed, key=lambda failure: failure.at_ns)
        text = f"host {first.rank} {how_it_ended(first.exitcode or 0)}"
    else:
        text = said[0] if said else f"host {host} ended with exit status {ended.exitcode}; see {folder}/host-{host}.log"
    return f"{text}; {saved}"
