"""How fast schedules are generated, simulated and checked, and how much memory that takes.

Each case runs in its own process, so that its peak memory is its own. Times are medians over a few rounds; CPU time is
given as well, since other processes disturb it less than wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy
from common.machine import environment
from rich.console import Console
from rich.table import Table

from penstock.schedule import Schedule, add_communication, check, generate
from penstock.simulate import critical_path, idle, memory, simulate
from penstock.simulate.costs import LinkCost, StageCost

CASES = {"p=8": (8, 4096), "p=512": (512, 4096)}
COST = StageCost(1.0, 1.0, 1.0, output_bytes=10, activation_bytes=4, weight_gradient_bytes=1)
LINK = LinkCost(0.1, 1000.0)
AIMS = {"simulate": 1.0}
"""In million actions per second."""


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Measures one case: each operation in turn, several times."""
    ranks, microbatches = CASES[name]
    schedule = generate("1f1b", ranks, microbatches)
    actions = sum(map(len, schedule.rows))
    timeline = simulate(schedule, COST, LINK)
    steps: dict[str, Callable[[], object]] = {
        "generate": lambda: generate("1f1b", ranks, microbatches),
        "simulate": lambda: simulate(schedule, COST, LINK),
        "simulate, links contended": lambda: simulate(schedule, COST, LINK, contended=True),
        "idle": lambda: idle(schedule, timeline),
        "critical path": lambda: critical_path(schedule, timeline),
        "memory": lambda: memory(schedule, COST, timeline),
        "check": lambda: legal(schedule),
    }
    found = {step: {"actions": actions} | timed(run, rounds) for step, run in steps.items()}
    if ranks < 100:
        lowered = add_communication(schedule)
        count = sum(map(len, lowered.rows))
        found["check, with messages"] = {"actions": count} | timed(lambda: legal(lowered), rounds)
    return {"ranks": ranks, "microbatches": microbatches, "rounds": rounds, "steps": found}


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
    for column in ("case", "step", "actions", "seconds", "CPU seconds", "M actions/s", "us/action", "peak GB"):
        table.add_column(column, justify="left" if column in ("case", "step") else "right")
    for name, case in results["cases"].items():
        for step, found in case["steps"].items():
            seconds, actions = found["seconds"], found["actions"]
            table.add_row(
                name,
                step,
                f"{actions:,}",
                f"{seconds:.3f}",
                f"{found['cpu_seconds']:.3f}",
                f"{actions / seconds / 1e6:.2f}",
                f"{seconds / actions * 1e6:.2f}",
                f"{found['peak_gigabytes']:.2f}",
            )
    console = Console(width=None if os.isatty(1) else 120)
    console.print(table)
    console.print(f"other load when this began: {results['environment']['load_before']}")
    for step, aim in AIMS.items():
        for name, case in results["cases"].items():
            rate = case["steps"][step]["actions"] / case["steps"][step]["seconds"] / 1e6
            verdict = "reached    " if rate >= aim else "NOT reached"
            console.print(f"{verdict}  {step} {name}: at least {aim} M actions/s, measured {rate:.2f}", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, help="rounds of each step (default: 15, at p=512 3)")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("results.json"))
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)  # given to a case's own process
    chosen = parser.parse_args()
    if chosen.case:
        print(json.dumps(measure(chosen.case, chosen.rounds or (3 if chosen.case == "p=512" else 15))))
        return
    machine = environment(numpy=numpy.__version__, load_before=round(os.getloadavg()[0], 2))
    results: dict[str, Any] = {"environment": machine, "cases": {}}
    rounds = [] if chosen.rounds is None else ["--rounds", str(chosen.rounds)]
    for name in chosen.cases:
        command = [sys.executable, __file__, "--case", name, *rounds]
        results["cases"][name] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    chosen.json.write_text(json.dumps(results, indent=2) + "\n")
    show(results)


if __name__ == "__main__":
    main()
