"""What a timeline adds to a step: steps with and without one take turns in one run.

    penstock run --ranks 2 benchmarks/timeline/run.py --width 256 --rounds 40

Without torchrun one process drives two ranks. On a GPU, give --device cuda.
"""

import argparse
import json
import statistics
import time

import torch
from torch import nn

import penstock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(options.width, options.width), nn.GELU()) for _ in range(8)))
    x = torch.randn(16 * options.width, options.width)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with penstock.pipeline(layers, (x,), loss=nn.functional.mse_loss, microbatches=16, devices=options.device) as pipe:
        for number in range(4 + 2 * options.rounds):
            timeline = number % 2 == 1
            began = time.perf_counter()
            float(pipe.step(x, target=x, timeline=timeline).loss)
            if number >= 4:
                seconds[timeline].append(time.perf_counter() - began)
        first = pipe.session.engine.world.is_first
    ratios = [timed / plain for plain, timed in zip(seconds[False], seconds[True], strict=True)]
    if first:
        quartiles = statistics.quantiles(ratios, n=4)
        print(json.dumps({"plain_seconds": statistics.median(seconds[False]), "ratio_quartiles": quartiles}))


if __name__ == "__main__":
    main()
