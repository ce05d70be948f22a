"""What a timeline adds to a step: steps with and without one take turns in one run.

    penstock run --ranks 2 benchmarks/timeline/run.py --width 256 --rounds 100
    python benchmarks/timeline/run.py --width 256 --rounds 100

Without torchrun one process drives two ranks. On a GPU, give --device cuda. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from common.pairs import Pair, added, combined
from torch import nn

import penstock

MICROBATCHES = 16
WARM_UP = 4
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time, "cpu_of_the_thread": time.thread_time}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256, help="features of each of 8 layers")
    parser.add_argument("--rows", type=int, default=256, help="rows of each of 16 microbatches")
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--rounds", type=int, default=100, help="pairs of steps")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(options.width, options.width), nn.GELU()) for _ in range(8)))
    x = torch.randn(MICROBATCHES * options.rows, options.width)
    with penstock.pipeline(
        layers,
        (x,),
        loss_fn=nn.functional.mse_loss,
        microbatches=MICROBATCHES,
        schedule=options.schedule,
        devices=options.device,
    ) as pipe:
        pairs = [taken(pipe, x, timed_first=number % 2 == 1) for number in range(WARM_UP + options.rounds)][WARM_UP:]
        actions = sum(map(len, pipe.schedule.rows))
        everyone = pipe.all_gather_object(pairs)
        if pipe.is_main_process:
            rounds = [combined(of_round) for of_round in zip(*everyone, strict=True)]
            print(json.dumps({**vars(options), "processes": len(everyone), "actions": actions, **told(rounds)}))


def taken(pipe: penstock.Pipeline, x: torch.Tensor, *, timed_first: bool) -> Pair:
    """Runs two steps, until loss and timeline have been read."""
    found: dict[bool, dict[str, float]] = {}
    for timeline in (timed_first, not timed_first):
        began = {name: clock() for name, clock in CLOCKS.items()}
        result = pipe.step(x, target=x, timeline=timeline)
        float(result.loss)
        assert (result.timeline is not None) is timeline
        found[timeline] = {name: clock() - began[name] for name, clock in CLOCKS.items()}
    return {name: (found[False][name], found[True][name]) for name in CLOCKS}


def told(rounds: Sequence[Pair]) -> dict[str, object]:
    """By clock, what a timeline adds in percent of a step: the median with its 95% interval, and quartiles."""
    told: dict[str, object] = {}
    for name in CLOCKS:
        plain = statistics.median(pair[name][0] for pair in rounds)
        percents = (100 * (timed - bare) / plain for bare, timed in (pair[name] for pair in rounds))
        told[name] = {"plain_ms": round(plain * 1e3, 2), **added(percents)}
    return told


if __name__ == "__main__":
    main()
