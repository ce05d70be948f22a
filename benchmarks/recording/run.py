"""What recording a run adds to its steps: blocks of steps with and without it take turns in one run.

    penstock run --ranks 2 benchmarks/recording/run.py --width 512 --rounds 12
    python benchmarks/recording/run.py --width 512 --rounds 12

Without torchrun one process drives two ranks. On a GPU, give --device cuda. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from common.pairs import Pair, added, combined
from torch import nn

import penstock
from penstock.pipe.run_info import record
from penstock.trace.runs import RunConfig, read_run

MICROBATCHES = 8
WARM_UP = 10
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=512, help="features of each of 8 layers")
    parser.add_argument("--rows", type=int, default=64, help="rows of each of 8 microbatches")
    parser.add_argument("--rounds", type=int, default=12, help="pairs of blocks")
    parser.add_argument(
        "--block",
        type=int,
        default=50,
        help="steps of a block. Of 50, one has a timeline, as one in fifty has by default. In short blocks none has, "
        "but a machine whose speed drifts changes little between the two of a pair",
    )
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(options.width, options.width), nn.GELU()) for _ in range(8)))
    x = torch.randn(MICROBATCHES * options.rows, options.width)
    given = {"loss_fn": nn.functional.mse_loss, "microbatches": MICROBATCHES, "devices": options.device}
    with penstock.pipeline(layers, (x,), **given) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=1e-3)
        (folder,) = {*pipe.all_gather_object(tempfile.mkdtemp() if pipe.is_main_process else None)} - {None}
        taken(pipe, x, optimizer, WARM_UP)
        pairs = [
            pair(pipe, x, optimizer, options.block, Path(folder) / str(n), recorded_first=n % 2 == 1)
            for n in range(options.rounds)
        ]
        everyone = pipe.all_gather_object(pairs)
        if pipe.is_main_process:
            rounds = [combined(of_round) for of_round in zip(*everyone, strict=True)]
            print(json.dumps({**vars(options), "processes": len(everyone), **told(rounds, options.block)}))


def pair(
    pipe: penstock.Pipeline,
    x: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    steps: int,
    folder: Path,
    *,
    recorded_first: bool,
) -> Pair:
    """Runs two blocks, one of which is recorded in a folder of its own."""
    found: dict[bool, dict[str, float]] = {}
    for recorded in (recorded_first, not recorded_first):
        if recorded:
            record(pipe.session, RunConfig(folder, progress_bar=False))
        taken(pipe, x, optimizer, WARM_UP)
        found[recorded] = taken(pipe, x, optimizer, steps)
        if recorded and pipe.session.recorder is not None:
            pipe.session.recorder.close()
            pipe.session.recorder = None
            assert not pipe.is_main_process or len(read_run(folder).steps()) == WARM_UP + steps
    return {name: (found[False][name], found[True][name]) for name in CLOCKS}


def taken(pipe: penstock.Pipeline, x: torch.Tensor, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, float]:
    """Runs so many steps, of which nobody reads the loss but who records it."""
    began = {name: clock() for name, clock in CLOCKS.items()}
    for _ in range(steps):
        result = pipe.step(x, target=x)
        optimizer.step()
        optimizer.zero_grad()
    float(result.loss)
    return {name: clock() - began[name] for name, clock in CLOCKS.items()}


def told(rounds: Sequence[Pair], steps: int) -> dict[str, object]:
    """By clock, what recording adds in percent of a step: the median with its 95% interval, and quartiles."""
    return {
        name: {
            "step_ms": round(statistics.median(pair[name][0] for pair in rounds) / steps * 1e3, 2),
            **added(100 * (recorded / bare - 1) for bare, recorded in (pair[name] for pair in rounds)),
        }
        for name in CLOCKS
    }


if __name__ == "__main__":
    main()
