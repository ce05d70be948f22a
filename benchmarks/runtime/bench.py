"""Penstock against `torch.distributed.pipelining` and against the ceiling: the same step, in the same two processes.

The contestants take turns, so that other load on the machine affects all alike. Only times from one run are compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common.machine import environment, noting_others, others_share
from common.ranks import CPU, RANKS, Step, Weights, gathered, in_two_processes, measured, transport_of
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import penstock
from penstock._base.stages import Link

LAYERS = 8
HEADS = 4
WARMUP_ROUNDS = 3
PING_PONGS = 2000
NAMES = ("penstock", "torch", "ceiling")


@dataclass(frozen=True)
class Size:
    """One workload. A microbatch is one row of `seq` positions of `dim` features."""

    name: str
    dim: int
    seq: int
    microbatches: int
    rounds: int

    @property
    def fill(self) -> float:
        """m / (m + p - 1): the share of the ceiling's speed that remains after filling and draining the pipeline."""
        return self.microbatches / (self.microbatches + RANKS - 1)


SIZES = {
    size.name: size
    for size in (
        Size("small", dim=32, seq=8, microbatches=32, rounds=120),
        Size("medium", dim=256, seq=128, microbatches=8, rounds=48),
        Size("large", dim=384, seq=256, microbatches=8, rounds=24),
    )
}


class Block(nn.Module):
    """A transformer layer without dropout: causal self-attention and an MLP, each behind a layer norm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:  # rows, seq, dim
        rows, seq, dim = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, seq, 3, HEADS, dim // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, seq, dim))
        mixed: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + mixed


# -- the three contestants --------------------------------------------------------------------------------------------


class Contest:
    """The three ways to run a step of one size, with the same weights in the same memory."""

    def __init__(self, size: Size, rank: int) -> None:
        torch.manual_seed(0)
        layers = [Block(size.dim) for _ in range(LAYERS)]
        x = torch.randn(size.microbatches, size.seq, size.dim)
        y = torch.randn(size.microbatches, size.seq, size.dim)
        self.pipe = penstock.pipeline(layers, (x,), schedule="1f1b", microbatches=size.microbatches, loss_fn=F.mse_loss)
        per_stage = LAYERS // RANKS
        stage = nn.Sequential(*layers[rank * per_stage : (rank + 1) * per_stage])
        self.weights = Weights(self.pipe, [stage])
        self.steps: dict[str, Step] = {
            "penstock": lambda: self.pipe.step(x, target=y),
            "torch": _torch_step(stage, rank, size, x, y),
            "ceiling": _ceiling_step(stage, rank, size, x, y),
        }

    def gradients(self, name: str) -> list[Tensor]:
        """What one step leaves in `.grad`."""
        found = self.weights.gradients(self.steps[name])
        if any(grad is None for grad in found):
            raise RuntimeError(f"{name}: a parameter has no gradient")
        return [grad for grad in found if grad is not None]


def _torch_step(stage: nn.Module, rank: int, size: Size, x: Tensor, y: Tensor) -> Step:
    schedule = Schedule1F1B(PipelineStage(stage, rank, RANKS, CPU), size.microbatches, loss_fn=F.mse_loss)
    if rank == 0:
        return lambda: schedule.step(x, return_outputs=False)
    return lambda: schedule.step(target=y, losses=[], return_outputs=False)


def _ceiling_step(stage: nn.Module, rank: int, size: Size, x: Tensor, y: Tensor) -> Step:
    """Forward and backward of every microbatch on this rank's stage alone, without waiting for anything."""
    inputs = [row.clone() for row in x.unsqueeze(1)]
    targets = [row.clone() for row in y.unsqueeze(1)]
    gradient = torch.randn(1, size.seq, size.dim)
    seed = torch.tensor(1 / size.microbatches)

    def first() -> None:
        for row in inputs:
            torch.autograd.backward(stage(row), gradient)

    def last() -> None:
        for row, target in zip(inputs, targets, strict=True):
            torch.autograd.backward(F.mse_loss(stage(row.detach().requires_grad_()), target), seed)

    return first if rank == 0 else last


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(contest: Contest, rounds: int) -> dict[str, list[float]]:
    """Each contestant's seconds per round: from the barrier to the end of the step on the slower rank."""
    orders = list(permutations(NAMES))
    mine: dict[str, list[float]] = {name: [] for name in NAMES}
    for number in range(-WARMUP_ROUNDS, rounds):
        for name in orders[number % len(orders)]:
            contest.weights.zero()
            gc.collect()
            step = contest.steps[name]
            dist.barrier()
            began = time.perf_counter()
            step()
            seconds = time.perf_counter() - began
            if number >= 0:
                mine[name].append(seconds)
    of_ranks = gathered(mine)
    return {name: [max(times) for times in zip(*(times[name] for times in of_ranks), strict=True)] for name in NAMES}


def compare(contest: Contest) -> dict[str, Any]:
    """Whether Penstock and torch leave the same gradients on both ranks."""
    ours, theirs = contest.gradients("penstock"), contest.gradients("torch")
    equal = all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(ours, theirs, strict=True))
    found = gathered((equal, apart))
    if not all(apart <= 1e-5 for _, apart in found):  # NaN must fail too
        raise RuntimeError(f"Penstock and torch leave different gradients (relative difference by rank: {found})")
    return {"equal": all(equal for equal, _ in found), "max_relative_difference": max(apart for _, apart in found)}


def latencies(rank: int, folder: Path) -> dict[str, float]:
    """Median one-way times in microseconds for 1 KiB, the small size's activation, with the receive posted ahead."""
    peer, sent, received = 1 - rank, torch.zeros(256), torch.zeros(256)
    posted: list[dist.Work | None] = []

    def irecv() -> None:
        posted.append(dist.irecv(received, peer))

    def finish(work: dist.Work | None) -> None:
        if work is not None:
            work.wait()

    gloo = _ping_pong(rank, irecv, lambda: finish(dist.isend(sent, peer)), lambda: finish(posted.pop()))
    found = {"gloo isend/irecv": gloo}
    engine, transport = transport_of(rank)
    there = transport.channel(0, Link(0, 1, ((0, "a"),)), 0, 1, backward=False)
    back = transport.channel(0, Link(1, 0, ((0, "a"),)), 1, 0, backward=True)
    out, into = (there, back) if rank == 0 else (back, there)

    def send() -> None:
        out.send(0, [sent])

    _ping_pong(rank, lambda: into.post(0), send, lambda: into.receive(0), times=1)
    transport.end_step()
    found["Penstock channel"] = _ping_pong(rank, lambda: into.post(0), send, lambda: into.receive(0))
    dist.barrier()
    engine.close()
    with _connected(rank, folder / "socket") as link:
        payload, buffer = bytes(1024), bytearray(1024)
        found["Unix socket"] = _ping_pong(
            rank, lambda: None, lambda: link.sendall(payload), lambda: link.recv_into(buffer, 1024, socket.MSG_WAITALL)
        )
    return found


def _ping_pong(rank: int, post: Step, send: Step, receive: Step, times: int = PING_PONGS) -> float:
    """Half the median round-trip time, in microseconds. Meaningful on rank 0 only."""
    trips = []
    dist.barrier()
    for _ in range(times):
        began = time.perf_counter()
        post()
        if rank == 0:
            send()
            receive()
        else:
            receive()
            send()
        trips.append(time.perf_counter() - began)
    return statistics.median(trips) / 2 * 1e6


def _connected(rank: int, path: Path) -> socket.socket:
    link = socket.socket(socket.AF_UNIX)
    if rank == 0:
        with link as server:
            server.bind(str(path))
            server.listen()
            dist.barrier()
            return server.accept()[0]
    dist.barrier()
    link.connect(str(path))
    return link


# -- the two processes ------------------------------------------------------------------------------------------------


def run_rank(sizes: Sequence[Size], folder: Path, rank: int) -> dict[str, Any]:
    """Measures the sizes; runs in each of the two processes. `folder`: for a socket."""
    found: dict[str, Any] = {"sizes": [], "one_way_microseconds": {}}
    for size in sizes:
        contest = Contest(size, rank)
        gradients = compare(contest)
        gc.collect()
        gc.freeze()
        seconds = measure(contest, size.rounds)
        found["sizes"].append({**asdict(size), "gradients": gradients, **summary(size, seconds)})
        contest.pipe.close()
    found["one_way_microseconds"] = latencies(rank, folder)
    return found


def summary(size: Size, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Quartiles of the times, and of ratios of times within a round."""

    def ratios(above: str, below: str, factor: float = 1.0) -> list[float]:
        return [factor * a / b for a, b in zip(seconds[above], seconds[below], strict=True)]

    return {
        "milliseconds": {name: quartiles([1000 * s for s in seconds[name]]) for name in NAMES},
        "penstock_over_torch": quartiles(ratios("penstock", "torch")),
        "penstock_over_ceiling": quartiles(ratios("penstock", "ceiling")),
        "share_of_ceiling": {name: quartiles(ratios("ceiling", name, 1 / size.fill)) for name in ("penstock", "torch")},
    }


def quartiles(values: Sequence[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return [round(value, 4) for value in statistics.quantiles(values, n=4, method="inclusive")]


# -- the report -------------------------------------------------------------------------------------------------------


def verdicts(sizes: Sequence[dict[str, Any]]) -> list[tuple[str, bool]]:
    """The targets, by medians, and whether they were met."""
    found = []
    for size in sizes:
        name, ratio = size["name"], size["penstock_over_torch"][1]
        if name == "small":
            share = size["share_of_ceiling"]["penstock"][1]
            found.append((f"{name}: at least 1.3 times as fast as torch ({1 / ratio:.2f})", 1 / ratio >= 1.3))
            found.append((f"{name}: at least 85% of ceiling * m/(m+p-1) ({share:.1%})", share >= 0.85))
        else:
            found.append((f"{name}: time at most torch's ({ratio:.3f})", ratio <= 1.0))
            found.append((f"{name}: never above 1/0.97 of torch's time ({ratio:.3f})", ratio <= 1 / 0.97))
    return found


def show(results: dict[str, Any], console: Console) -> None:
    """Prints the table, the latencies and the targets."""
    title = f"{LAYERS} layers on {RANKS} ranks, 1F1B, 1 row a microbatch: medians, with quartiles for ratios"
    table = Table(title=title)
    columns = ("size", "dim", "seq", "m", "Penstock ms", "torch ms", "ceiling ms")
    for column in (*columns, "Penstock / torch", "Penstock / ceiling", "share", "torch's share", "gradients"):
        table.add_column(column, justify="left" if column == "size" else "right")
    for size in results["sizes"]:
        gradients, share = size["gradients"], size["share_of_ceiling"]
        table.add_row(
            *(str(size[key]) for key in ("name", "dim", "seq", "microbatches")),
            *(f"{size['milliseconds'][name][1]:.1f}" for name in NAMES),
            *("{1:.3f} ({0:.3f}, {2:.3f})".format(*size[f"penstock_over_{name}"]) for name in ("torch", "ceiling")),
            *(f"{share[name][1]:.1%}" for name in ("penstock", "torch")),
            "equal" if gradients["equal"] else f"{gradients['max_relative_difference']:.0e}",
        )
    console.print(table)
    console.print("share: of ceiling * m/(m+p-1), the speed of a pipeline whose only bubble is to fill and to drain")
    one_way = ", ".join(f"{name} {us:.1f}" for name, us in results["one_way_microseconds"].items())
    console.print(f"one way, 1 KiB, median microseconds: {one_way}")
    console.print(others_share(results["environment"]))
    for text, reached in verdicts(results["sizes"]):
        console.print(f"{'reached    ' if reached else 'NOT reached'}  {text}", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, help="rounds of each size (default: 120, 48 and 24; at least 2)")
    parser.add_argument("--quick", action="store_true", help="6 rounds of each size")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("results.json"))
    parser.add_argument("--rank-folder", type=Path, help=argparse.SUPPRESS)  # given to the two processes
    chosen = parser.parse_args()
    rounds = 6 if chosen.quick and chosen.rounds is None else chosen.rounds
    if chosen.rank_folder:
        sizes = [SIZES[name] for name in chosen.sizes]
        sizes = [size if rounds is None else replace(size, rounds=rounds) for size in sizes]
        measured(lambda rank: run_rank(sizes, chosen.rank_folder, rank), chosen.rank_folder)
        return
    results: dict[str, Any] = {"environment": environment(torch=torch.__version__, threads_per_rank=1)}
    with noting_others(results["environment"]):
        results |= in_two_processes(__file__)
    chosen.json.write_text(json.dumps(results, indent=2) + "\n")
    show(results, Console(width=None if os.isatty(1) else 160))


if __name__ == "__main__":
    main()
