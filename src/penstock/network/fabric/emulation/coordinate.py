"""Start the hosts of one machine (namespaces or plain processes), follow their samples, and stop everything.

The hosts run as under a real torchrun: an agent and a worker each. Their output goes to `host-<n>.log`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock._base import owner
from penstock._base.errors import ArgumentError, FabricError
from penstock._base.files import read_bytes, read_json, write_json
from penstock._base.formatting import pluralize
from penstock.distributed.launch.processes import EndTimeouts, temporary_file
from penstock.network import nodes
from penstock.network.fabric.emulation.spec import BOARD, Spec, Watch
from penstock.network.fabric.samples import RUN, SAMPLES, STEPS
from penstock.network.machines import Machines
from penstock.network.scenario import Event

EMULATION = "penstock.network.fabric.emulation.host"
"""The module that each host runs, with the run's folder as its argument."""
_END_BYTES = 64 << 10
_PATIENCE = EndTimeouts(failed_seconds=10.0, ends_others=False, signal_seconds=0.0, interrupt_seconds=0.0)
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
    """Run a spec on hosts started here, and wait for it to end.

    Args:
        folder: the run's folder; anything left there by an earlier run is replaced.
        machines: one per host; None if the hosts are plain processes on this machine.
        watch: called with the number of each trial that has ended.
        events: changes to the machines' network during the run; a step is a trial.

    Raises:
        ArgumentError: another run writes there.
        FabricError: a host did not join, was lost, or failed. The samples up to then are in the folder.
        KeyboardInterrupt: a signal arrived, whose number is its argument; all hosts have ended.
    """
    reported = 0

    def report(trial: int) -> None:
        nonlocal reported
        while watch is not None and reported < trial:  # a trial that begins ends the one before it
            watch(reported)
            reported += 1

    owner.claim(folder, report, f"--out {folder}")
    for stale in (*(folder / name for name in (RUN, SAMPLES, STEPS)), *folder.glob("host-*.log")):
        stale.unlink(missing_ok=True)
    spec.write(folder)
    threads = None if "OMP_NUM_THREADS" in os.environ else 1
    job = nodes.Job(
        ("-m", EMULATION, str(folder.resolve())), spec.hosts, spec.hosts, threads, join_seconds=spec.join_seconds
    )
    with contextlib.ExitStack() as stack:
        files = [folder / f"host-{number}.log" for number in range(1 if machines is None else spec.hosts)]
        logs = [stack.enter_context(file.open("wb")) for file in files]
        env = {BOARD: stack.enter_context(temporary_file("start"))}
        try:
            outcome = nodes.run(job, machines, events=events, outputs=logs, look=report, patience=_PATIENCE, env=env)
        except FabricError as error:
            _update_record(folder, str(error))
            raise
    if machines is not None:
        _update_record(folder, switch=machines.counters(), happened=[asdict(event) for event in outcome.happened])
    if outcome.received:
        _update_record(folder, f"stopped by {signal.Signals(outcome.received).name}")
        raise KeyboardInterrupt(outcome.received)
    if outcome.message:
        text = f"{re.sub(r'^rank ', 'host ', outcome.message)}; {_describe_saved(folder)}"
        _update_record(folder, text)
        raise FabricError(text)
    report(spec.trials)


def _update_record(folder: Path, missing: str = "", **entries: Any) -> None:
    """Add to run.json what host 0 could not write, or does not know."""
    path = folder / RUN
    with contextlib.suppress(OSError, ValueError):
        record = read_json(path)
        if not record["complete"] and not record["missing"]:
            record["missing"] = missing
        record.update({name: value for name, value in entries.items() if value})
        write_json(path, record)


def _describe_saved(folder: Path) -> str:
    """Describe how many trials are in the file, which may be large: only its end is read."""
    path = folder / SAMPLES
    with contextlib.suppress(OSError, IndexError, ArgumentError):
        end = read_bytes(path, start=max(0, path.stat().st_size - _END_BYTES))
        trial = end.rsplit(b"\n", 2)[-2].split(b",")[0]
        if trial.isdigit():
            return f"{pluralize(int(trial) + 1, 'trial')} saved in {folder}"
    return "no trial had finished"
