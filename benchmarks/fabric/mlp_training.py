"""The real training that `penstock fabric --preset mlp` emulates, recorded as a run, to compare the emulation with.

    sudo penstock run --ranks 4 --hosts 4 --link 100mbit benchmarks/fabric/mlp_training.py \
        --link 100mbit --out runs/trained

A layer's all-reduce starts as soon as backward has produced its gradients, and ends before backward goes on, as in the
emulation. The images are random, in the shape of 28 x 28 pixels.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.network.conditions import cpu_since, cpu_usage
from penstock.network.fabric.algorithms import ENGINE
from penstock.network.fabric.emulation import clock
from penstock.network.fabric.emulation.rendezvous import gather, record_run
from penstock.network.fabric.emulation.spec import Spec
from penstock.network.fabric.samples import HEAD, SAMPLES, SampleFile
from penstock.network.fabric.workload import MLP_WIDTHS, mlp

ROWS, BATCH = 1797, 32


class Training:
    """The classifier on this rank. A step notes its start, the start and end of each all-reduce, and its end."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        layers = [nn.Linear(fed, made) for fed, made in pairwise(MLP_WIDTHS)]
        relus = [nn.ReLU() for _ in layers[1:]]
        self.model = nn.Sequential(*(each for pair in zip(layers, relus, strict=False) for each in pair), layers[-1])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.images, self.targets = torch.rand(ROWS, MLP_WIDTHS[0]), torch.randint(MLP_WIDTHS[-1], (ROWS,))
        self.marks: list[int] = []
        for layer in layers:
            arrived: list[Tensor] = []
            for parameter in layer.parameters():
                parameter.register_post_accumulate_grad_hook(partial(self.reduce, arrived))

    def step(self) -> Tensor:
        rows = torch.randperm(ROWS)[dist.get_rank() * BATCH :][:BATCH]
        dist.barrier()
        self.marks = [time.monotonic_ns()]
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(self.images[rows]), self.targets[rows]).backward()
        self.optimizer.step()
        return torch.tensor([*self.marks, time.monotonic_ns()])

    def reduce(self, arrived: list[Tensor], parameter: Tensor) -> None:
        """Averages a layer's weight and bias gradients over the ranks, as one message, once both exist."""
        arrived.append(parameter.grad)
        if len(arrived) < 2:
            return
        flat = torch.cat([grad.flatten() for grad in arrived])
        self.marks.append(time.monotonic_ns())
        dist.all_reduce(flat)
        self.marks.append(time.monotonic_ns())
        for grad, total in zip(arrived, flat.split([grad.numel() for grad in arrived]), strict=True):
            grad.copy_(total.view_as(grad) / dist.get_world_size())
        arrived.clear()


def train(spec: Spec, folder: Path) -> None:
    torch.set_num_threads(1)
    with record_run(spec, folder) as (members, record):
        offset, began, training = clock.estimate(members.control), cpu_usage(), Training(spec.seed)
        samples = SampleFile(folder / SAMPLES, HEAD) if members.rank == 0 else None
        steps = []
        for number in range(-spec.checked_trials, spec.trials):
            every = torch.stack(gather(training.step() + offset.offset_ns, members)).numpy()  # rank, mark
            if number >= 0 and samples is not None:
                steps.append(every)
                for place in range(len(spec.workload.transfers)):
                    ends = every[:, 1 + 2 * place : 3 + 2 * place].tolist()
                    samples.add((number, place, rank, start, end) for rank, (start, end) in enumerate(ends))
        record.add(
            cpu=gather(cpu_since(began), members),
            clock=gather(asdict(offset), members),
            warmup=spec.checked_trials,
        )
        if samples is not None:
            samples.close()
            *before, after = (np.median(np.diff(np.stack(steps)), axis=(0, 1))[::2] / 1e9).tolist()
            timed = [replace(one, compute_seconds=s) for one, s in zip(spec.workload.transfers, before, strict=True)]
            record.add(workload=replace(spec.workload, transfers=tuple(timed), compute_seconds=after))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=400)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--link", help="the hosts' link, for the record")
    given = parser.parse_args()
    train(Spec(mlp(), int(os.environ["WORLD_SIZE"]), algorithm=ENGINE, trials=given.trials, link=given.link), given.out)
