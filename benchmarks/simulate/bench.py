"""How fast schedules are generated, simulated and checked, and how much memory that takes.

Each case runs in its own process, so that its peak memory is its own. Times are medians over a few rounds; CPU time is
given as well, since other processes disturb it less than wall time. With --before REVISION, the code of that revision
takes turns with the present one, so that both see the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy
from common.machine import environment
from rich.console import Console
from rich.table import Table

from penstock.schedule import Schedule, add_communication, check, generate
from penstock.simulate import critical_path, idle_time_by_cause, memory, simulate
from penstock.simulate.costs import LinkCost, StageCost

CASES = {"p=8": (8, 4096), "p=512": (512, 4096)}
COMMAND = "p=1024, the command"
"""`penstock simulate` as a whole: the schedule, its times, why ranks wait, their memory, and a table of all ranks."""
OPTIONS = (
    "simulate --schedule 1f1b --ranks 1024 --microbatches 8192 --output-bytes 10 --bandwidth 1000 --link-latency 0.1"
)
ROOT = Path(__file__).parents[2]
COST = StageCost(1.0, 1.0, 1.0, output_bytes=10, activation_bytes=4, weight_gradient_bytes=1)
LINK = LinkCost(0.1, 1000.0)
AIMS = {"simulate": 5.0}
"""In million actions per second."""
MAX_SECONDS, MAX_GIGABYTES = 10, 1
"""For the command."""


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Measures one case: each operation in turn, several times."""
    ranks, microbatches = CASES[name]
    schedule = generate("1f1b", ranks, microbatches)
    actions = sum(map(len, schedule.rows))
    timeline = simulate(schedule, COST, LINK)
    steps: dict[str, Callable[[], object]] = {
        "generate": lambda: generate("1f1b", ranks, microbatches),
        "simulate": lambda: simulate(schedule, COST, LINK),
        "idle": lambda: idle_time_by_cause(schedule, timeline),
        "critical path": lambda: critical_path(schedule, timeline),
        "memory": lambda: memory(schedule, COST, timeline),
    }
    found = {step: {"actions": actions} | timed(run, rounds) for step, run in steps.items()}
    if ranks < 100:  # checks are slow: p = 8 says how slow
        found["check"] = {"actions": actions} | timed(lambda: legal(schedule), rounds)
        lowered = add_communication(schedule)
        count = sum(map(len, lowered.rows))
        found["check, with messages"] = {"actions": count} | timed(lambda: legal(lowered), rounds)
    return {"ranks": ranks, "microbatches": microbatches, "rounds": rounds, "steps": found}


def command(rounds: int) -> dict[str, Any]:
    """The whole command, in this process; older code refuses so many actions unless told otherwise."""
    from penstock.cli import _schedule_options, main

    vars(_schedule_options)["MAX_ACTIONS"] = 10**9
    sys.argv = ["penstock", *OPTIONS.split()]
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)

    def run() -> None:
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise

    found = {"actions": 2 * 1024 * 8192} | timed(run, rounds)
    sys.stdout = sys.__stdout__
    return {"ranks": 1024, "microbatches": 8192, "rounds": rounds, "steps": {"the command": found}}


def legal(schedule: Schedule) -> None:
    if found := check(schedule):
        raise SystemExit(f"the schedule is not legal: {found[0]}")


def timed(run: Callable[[], object], rounds: int) -> dict[str, Any]:
    """Median times in seconds, and the process's peak memory so far."""
    walls, cpus = [], []
    for _ in range(rounds):
        wall, cpu = time.perf_counter(), time.process_time()
        run()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return {
        "seconds": round(statistics.median(walls), 4),
        "best_seconds": round(min(walls), 4),
        "cpu_seconds": round(statistics.median(cpus), 4),
        "peak_gigabytes": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9, 3),
    }


def show(results: dict[str, Any]) -> None:
    table = Table(title="1F1B: medians")
    columns = ("case", "code", "step", "actions", "seconds", "CPU seconds", "M actions/CPU s", "us/action", "peak GB")
    for column in columns:
        table.add_column(column, justify="left" if column in ("case", "code", "step") else "right")
    for name, codes in results["cases"].items():
        for code, case in codes.items():
            for step, found in case["steps"].items():
                actions = found["actions"]
                table.add_row(
                    name,
                    code,
                    step,
                    f"{actions:,}",
                    f"{found['seconds']:.3f}",
                    f"{found['cpu_seconds']:.3f}",
                    f"{actions / found['cpu_seconds'] / 1e6:.2f}",
                    f"{found['cpu_seconds'] / actions * 1e6:.2f}",
                    f"{found['peak_gigabytes']:.2f}",
                )
    console = Console(width=None if os.isatty(1) else 120)
    console.print(table)
    console.print(f"other load when this began: {results['environment']['load_before']}")
    for name, codes in results["cases"].items():
        for step, found in codes["now"]["steps"].items():
            rate = found["actions"] / found["cpu_seconds"] / 1e6  # one thread: its time on a machine that is idle
            if step in AIMS:
                verdict = "reached    " if rate >= AIMS[step] else "NOT reached"
                print(f"{verdict}  {step} {name}: at least {AIMS[step]} M actions per CPU second, measured {rate:.2f}")
            if name == COMMAND:
                seconds, gigabytes = found["cpu_seconds"], found["peak_gigabytes"]
                reached = seconds <= MAX_SECONDS and gigabytes <= MAX_GIGABYTES
                verdict = "reached    " if reached else "NOT reached"
                aims = f"{MAX_SECONDS} CPU seconds and {MAX_GIGABYTES} GB"
                print(f"{verdict}  {name}: {seconds:.1f} s and {gigabytes:.2f} GB; the aim is {aims}")


def unpacked(revision: str, folder: str) -> Path:
    """The source of another revision."""
    packed = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return Path(folder) / "src"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=[*CASES, COMMAND], default=[*CASES, COMMAND])
    parser.add_argument("--rounds", type=int, help="rounds of each step (default: 15; of the larger cases 1)")
    parser.add_argument("--before", metavar="REVISION", help="measure the code of this revision, too")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("results.json"))
    parser.add_argument("--case", choices=[*CASES, COMMAND], help=argparse.SUPPRESS)  # given to a case's own process
    chosen = parser.parse_args()
    if chosen.case:
        few = {"p=512": 1, COMMAND: 1}
        rounds = chosen.rounds or few.get(chosen.case, 15)
        print(json.dumps(command(rounds) if chosen.case == COMMAND else measure(chosen.case, rounds)))
        return
    machine = environment(
        numpy=numpy.__version__, load_before=round(os.getloadavg()[0], 2), before=chosen.before or "not measured"
    )
    results: dict[str, Any] = {"environment": machine, "cases": {}}
    more = [] if chosen.rounds is None else ["--rounds", str(chosen.rounds)]
    with tempfile.TemporaryDirectory() as folder:
        codes = {"now": ROOT / "src"}
        if chosen.before:
            codes = {"before": unpacked(chosen.before, folder), **codes}
        for name in chosen.cases:
            results["cases"][name] = {}
            for code, source in codes.items():
                call = [sys.executable, __file__, "--case", name, *more]
                ran = subprocess.run(
                    call, check=True, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(source)}
                )
                results["cases"][name][code] = json.loads(ran.stdout)
    chosen.json.write_text(json.dumps(results, indent=2) + "\n")
    show(results)


if __name__ == "__main__":
    main()
