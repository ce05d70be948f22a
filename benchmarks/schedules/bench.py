"""Schedules with several chunks per rank and split backwards: Penstock against torch's own, in the same two processes.

The workload is the small size of `benchmarks/runtime`, where overhead dominates. The contestants take turns.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from bench import LAYERS, RANKS, SIZES, Block, quartiles
from common.machine import environment, noting_others, others_share
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleDualPipeV,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import penstock
from penstock.distributed.launch.processes import launch

SIZE = SIZES["small"]
CHUNKS = 2
PAIRS: dict[str, tuple[str, Any]] = {
    "interleaved-1f1b": ("ScheduleInterleaved1F1B", ScheduleInterleaved1F1B),
    "zb-h1": ("ScheduleInterleavedZeroBubble", ScheduleInterleavedZeroBubble),
    "zb-v": ("ScheduleZBVZeroBubble", ScheduleZBVZeroBubble),
    "dualpipe-v": ("ScheduleDualPipeV", ScheduleDualPipeV),
}
"""Our schedules and torch's. Torch has ZB-H1 only with two chunks per rank."""

WARMUP_ROUNDS = 2
Step = Callable[[], object]


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block(SIZE.dim) for _ in range(LAYERS)]


def ours(name: str, x: Tensor, y: Tensor) -> tuple[Step, list[nn.Parameter], Any]:
    pipe = penstock.pipeline(layers(), (x,), schedule=name, microbatches=SIZE.microbatches, loss_fn=F.mse_loss)
    return lambda: pipe.step(x, target=y), list(pipe.parameters()), pipe


def theirs(make: Any, v: bool, rank: int, x: Tensor, y: Tensor) -> tuple[Step, list[nn.Parameter]]:
    stages = CHUNKS * RANKS
    own = [rank, stages - 1 - rank] if v else [rank, RANKS + rank]
    per_stage = LAYERS // stages
    blocks = layers()
    modules = [nn.Sequential(*blocks[s * per_stage : (s + 1) * per_stage]) for s in own]
    made = [PipelineStage(m, s, stages, torch.device("cpu")) for m, s in zip(modules, own, strict=True)]
    schedule = make(made, SIZE.microbatches, loss_fn=F.mse_loss)
    args = (x,) if 0 in own else ()
    last = {"target": y, "losses": []} if stages - 1 in own else {}

    def step() -> None:
        schedule.step(*args, **last, return_outputs=False)

    return step, [p for m in modules for p in m.parameters()]


def alone(x: Tensor, y: Tensor) -> tuple[Step, list[nn.Parameter]]:
    """The whole model in one process, microbatch by microbatch."""
    model = nn.Sequential(*layers())
    rows = [(a.clone(), b.clone()) for a, b in zip(x.unsqueeze(1), y.unsqueeze(1), strict=True)]

    def step() -> None:
        for a, b in rows:
            (F.mse_loss(model(a), b) / len(rows)).backward()

    return step, list(model.parameters())


def run_rank(rounds: int, folder: Path) -> None:
    """Runs in each of the two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    x, y = (torch.randn(SIZE.microbatches, SIZE.seq, SIZE.dim) for _ in range(2))
    contest: dict[str, tuple[Step, list[nn.Parameter]]] = {"alone": alone(x, y)}
    pipes = []
    for name, (theirs_name, make) in PAIRS.items():
        step, parameters, pipe = ours(name, x, y)
        contest[f"{name} penstock"] = step, parameters
        pipes.append(pipe)
        contest[f"{name} torch"] = theirs(
            make, theirs_name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV"), rank, x, y
        )
    seconds: dict[str, list[float]] = {name: [] for name in contest}
    names = list(contest)
    gc.collect()
    gc.freeze()
    for number in range(-WARMUP_ROUNDS, rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            step, parameters = contest[name]
            for parameter in parameters:
                parameter.grad = None
            gc.collect()
            dist.barrier()
            if name == "alone" and rank != 0:
                seconds[name].append(0.0)
                continue
            began = time.perf_counter()
            step()
            if number >= 0:
                seconds[name].append(time.perf_counter() - began)
    for pipe in pipes:
        pipe.close()
    of_ranks: list[Any] = [None] * RANKS
    dist.all_gather_object(of_ranks, {name: times[-rounds:] for name, times in seconds.items()})
    if rank == 0:
        slower = {
            name: [max(pair) for pair in zip(*(times[name] for times in of_ranks), strict=True)] for name in names
        }
        (folder / "found.json").write_text(json.dumps(slower))
    dist.barrier()
    dist.destroy_process_group()


def summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    found: dict[str, Any] = {"alone_milliseconds": quartiles([1000 * s for s in seconds["alone"]]), "schedules": []}
    for name, (theirs_name, _) in PAIRS.items():
        mine, other = seconds[f"{name} penstock"], seconds[f"{name} torch"]
        found["schedules"].append(
            {
                "name": name,
                "torch": theirs_name,
                "penstock_milliseconds": quartiles([1000 * s for s in mine]),
                "torch_milliseconds": quartiles([1000 * s for s in other]),
                "times_as_fast": quartiles([b / a for a, b in zip(mine, other, strict=True)]),
            }
        )
    return found


def show(results: dict[str, Any], console: Console) -> None:
    table = Table(
        title=f"{LAYERS} layers on {RANKS} ranks, dim {SIZE.dim}, seq {SIZE.seq}, m {SIZE.microbatches}: medians"
    )
    for column in ("schedule", "torch's", "Penstock ms", "torch ms", "times as fast"):
        table.add_column(column, justify="left" if column in ("schedule", "torch's") else "right")
    for row in results["schedules"]:
        low, middle, high = row["times_as_fast"]
        times = (f"{row[f'{who}_milliseconds'][1]:.1f}" for who in ("penstock", "torch"))
        table.add_row(row["name"], row["torch"], *times, f"{middle:.2f} ({low:.2f}, {high:.2f})")
    console.print(table)
    console.print(f"one process alone: {results['alone_milliseconds'][1]:.1f} ms")
    console.print(others_share(results["environment"]))
    for row in results["schedules"]:
        reached = row["times_as_fast"][1] >= 2
        console.print(
            f"{'reached    ' if reached else 'NOT reached'}  {row['name']}: at least twice as fast as torch's"
        )


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("results.json"))
    parser.add_argument("--rank-folder", type=Path, help=argparse.SUPPRESS)  # given to the two processes
    chosen = parser.parse_args(argv)
    if chosen.rank_folder:
        run_rank(chosen.rounds, chosen.rank_folder)
        return
    results: dict[str, Any] = {"environment": environment()}
    with noting_others(results["environment"]), tempfile.TemporaryDirectory() as folder:
        status = launch([__file__, *argv, "--rank-folder", folder], RANKS, threads=1)
        if status:
            sys.exit(status)
        results |= summary(json.loads((Path(folder) / "found.json").read_text()))
    chosen.json.write_text(json.dumps(results, indent=2) + "\n")
    show(results, Console(width=None if os.isatty(1) else 120))


if __name__ == "__main__":
    main(sys.argv[1:])
