"""Forks the ranks of real pipelines, in each of which one rank raises in the second step.

Usage: raising.py FOLDER RANKS CASE... Writes FOLDER/CASE.RANK.log, and prints a JSON object: exit statuses by case.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock

sys.path.insert(0, str(Path(__file__).parents[1]))
from device_group_jobs import device_groups, own_device

from scaffolding import stand_in
from scaffolding.forked import forked
from scaffolding.stand_in import DEVICE

LIMIT_SECONDS = 60.0


class Changing(nn.Linear):
    """Computes in another dtype, or a NaN, once it is told to."""

    double = False
    nan = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y = (y - y.square() - 1).sqrt() if self.nan else y
        return y.double() if self.double else y


def illegal(event: stand_in.Event) -> None:
    raise RuntimeError("an illegal memory access was encountered")


def train(rank: int, ranks: int, case: str, store: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    model = nn.Sequential(*(Changing(4, 4) for _ in range(ranks)))
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    calls: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if case == "loss" and len(calls) == 5:
            raise ValueError("the loss is\nnot a number")
        if case == "evaluates" and len(calls) == 5:
            pipe.evaluate(x, target=y)
        return (output - target).square().mean()

    options = {"check_finite": case == "finite", "devices": DEVICE if case == "device" else None}
    pipe = penstock.pipeline(model, (x,), microbatches=3, loss=loss, **options)
    pipe.step(x, target=y)
    first, last = rank == 0, rank == ranks - 1
    try:
        if case == "dtype" and first:
            model[0].double = True
        if case == "finite" and rank == 1:
            model[1].nan = True
        if case == "user" and rank == 1:
            raise ZeroDivisionError("in the caller's own code")
        if case == "device" and last:  # as the loss leaves it
            stand_in.Event.synchronize = illegal  # type: ignore[method-assign]
        pipe.step(x[:5] if case == "rows" and first else x, target=None if case == "target" and last else y)
        float(pipe.step(x, target=y).loss)
    except Exception as error:
        print(f"raised {type(error).__name__}: {error} {getattr(error, '__notes__', [])}", flush=True)
        again = None
        try:
            pipe.step(x, target=y)
        except penstock.RankFailedError as failure:
            again = failure
        print(f"again {type(again).__name__}: {again}", flush=True)
        raise
    print("the run went on to its end")


def main() -> None:
    folder, ranks, cases = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]

    def run(case: str, rank: int) -> None:
        if case == "device":
            own_device(rank)
        with device_groups() if case == "device" else nullcontext():
            train(rank, ranks, case, f"{folder}/{case}.store")

    ends = forked(folder, dict.fromkeys(cases, ranks), run, LIMIT_SECONDS)
    print(json.dumps({case: [ends[case][rank].status for rank in range(ranks)] for case in cases}))


if __name__ == "__main__":
    main()
