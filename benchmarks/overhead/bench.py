"""What the runtime adds to each action: Penstock and `torch.distributed.pipelining` beside the bare calls of stages.

The contestants take turns in the same processes. Stages are tiny, so that a step is mostly the runtime's own time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from common.machine import environment
from common.ranks import gathered, in_two_processes, measured
from contest import CASES, DIM, MICROBATCHES, ROWS, Case, Contest, one_process
from measuring import WARMUP_STEPS, calls, measure, measure_one_process, messages, summary
from rich.console import Console
from rich.table import Table

TARGET_MICROSECONDS = 40.0
COMPARED = ("penstock", "floor", "torch")


def run_rank(cases: Sequence[Case], rounds: int, rank: int) -> dict[str, Any]:
    """Measures the cases; runs in each of the two processes."""
    found: dict[str, Any] = {"cases": []}
    for case in cases:
        contest = Contest(case, rank)
        for step in contest.steps.values():
            for _ in range(WARMUP_STEPS):
                contest.weights.zero()
                step()
        contest.compare()
        counted = {}
        for name, step in contest.steps.items():
            dist.barrier()
            counted[name] = calls(step)
        gc.collect()
        gc.freeze()
        gc.disable()
        times = measure(contest, rounds)
        gc.enable()
        gc.unfreeze()
        of_ranks = gathered((contest.actions, counted))
        found["cases"].append({**asdict(case), **summary(times, of_ranks)})
        contest.pipe.close()
    found["messages"] = messages(rank)
    return found


def show(results: dict[str, Any], console: Console) -> None:
    """Prints the tables."""
    table = Table(title="microseconds of processor per action beyond the bare calls: median (lower quartile, least)")
    table.add_column("schedule")
    for column in (
        *("Penstock", "in one process", "floor", "torch", "Penstock beyond floor", "all threads: Penstock", "torch"),
        *("bare, whole", "calls: Penstock", "floor", "torch", "step ms: Penstock", "torch", "bare"),
    ):
        table.add_column(column, justify="right")
    beyond = "thread_microseconds_beyond_bare"
    for case in results["cases"]:
        table.add_row(
            case["schedule"],
            _shown(case["penstock"], beyond),
            _shown(case, "one_process_microseconds_beyond_bare"),
            *(_shown(case.get(name), beyond) for name in ("floor", "torch")),
            _shown(case["penstock"], "thread_microseconds_beyond_floor"),
            *(_shown(case.get(name), "process_microseconds_beyond_bare") for name in ("penstock", "torch")),
            _shown(case["bare"], "thread_microseconds_per_action"),
            *(str(case[name]["calls_beyond_bare"]) if isinstance(case[name], dict) else "" for name in COMPARED),
            *(_shown(case.get(name), "step_milliseconds") for name in ("penstock", "torch", "bare")),
        )
    console.print(table)
    for name, sides in results["messages"].items():
        text = ", ".join(f"{side} {us[2]:.1f} ({us[1]:.1f}, {us[0]:.1f})" for side, us in sides.items())
        console.print(f"a message of {ROWS * DIM * 4} bytes, microseconds of the thread, {name}: {text}")
    for case in results["cases"]:
        found = case["penstock"][beyond][2]
        reached = "reached    " if found <= TARGET_MICROSECONDS else "NOT reached"
        console.print(
            f"{reached}  {case['schedule']}: at most {TARGET_MICROSECONDS:.0f} ({found:.1f})", highlight=False
        )


def _shown(one: Any, key: str) -> str:
    return f"{one[key][2]:.1f} ({one[key][1]:.1f}, {one[key][0]:.1f})" if isinstance(one, dict) else ""


def _python_speed() -> float:
    """Milliseconds for a million turns of an empty loop, at best: how fast Python is here."""
    found = []
    for _ in range(9):
        began = time.thread_time_ns()
        for _ in range(1_000_000):
            pass
        found.append((time.thread_time_ns() - began) / 1e6)
    return round(min(found), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=120, help="rounds of each schedule (default: 120)")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("results.json"))
    parser.add_argument("--rank-folder", type=Path, help=argparse.SUPPRESS)  # given to the two processes
    chosen = parser.parse_args()
    if chosen.rank_folder:
        cases = [CASES[name] for name in chosen.schedules]
        measured(lambda rank: run_rank(cases, chosen.rounds, rank), chosen.rank_folder)
        return
    load, speed = os.getloadavg()[0], _python_speed()
    machine = environment(torch=torch.__version__, load_before=load, python_loop_milliseconds=speed)
    results: dict[str, Any] = {"environment": machine, "rounds": chosen.rounds, "microbatches": MICROBATCHES}
    torch.set_num_threads(1)
    beyond_bare = [measure_one_process(one_process(CASES[name]), chosen.rounds) for name in chosen.schedules]
    results |= in_two_processes(__file__)
    for case, one in zip(results["cases"], beyond_bare, strict=True):
        case["one_process_microseconds_beyond_bare"] = one
    chosen.json.write_text(json.dumps(results, indent=2) + "\n")
    show(results, Console(width=None if os.isatty(1) else 240))


if __name__ == "__main__":
    main()
