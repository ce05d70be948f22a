"""What splitting the backward costs: I and W together against the full backward B, in Penstock and in torch.

The contestants take turns, so that other load on the machine affects all alike. Only times from one run are compared.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from common.machine import environment
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input, stage_backward_weight

import penstock
from penstock.schedule import Action, Op, Overlap, Schedule, generate, split_backward

STAGES = 3
MEASURED = 1
"""The middle stage, which both receives and sends gradients, like most stages of a deep pipeline."""
LAYERS_PER_STAGE = 2
HEADS = 4
MICROBATCHES = 4
WARMUP_ROUNDS = 3


@dataclass(frozen=True)
class Size:
    """One workload. A microbatch is one row of `seq` positions of `dim` features."""

    name: str
    dim: int
    seq: int
    rounds: int


SIZES = {
    size.name: size
    for size in (
        Size("small", dim=32, seq=8, rounds=100),
        Size("medium", dim=256, seq=128, rounds=40),
        Size("large", dim=384, seq=256, rounds=12),
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


Seconds = dict[str, float]
"""Seconds by op (F, and B or I and W), over all microbatches of a step."""


# -- the contestants --------------------------------------------------------------------------------------------------


class Contest:
    """The ways to run a backward of one size, with the same weights in the same memory."""

    def __init__(self, size: Size) -> None:
        torch.manual_seed(0)
        layers = [Block(size.dim) for _ in range(STAGES * LAYERS_PER_STAGE)]
        self.x = torch.randn(MICROBATCHES, size.seq, size.dim)
        self.y = torch.randn(MICROBATCHES, size.seq, size.dim)
        whole = generate("1f1b", STAGES, MICROBATCHES)
        split = split_backward(whole)
        self.pipes = {
            name: penstock.pipeline(layers, (self.x,), ranks=STAGES, schedule=schedule, loss_fn=F.mse_loss)
            for name, schedule in {"B": whole, "I+W": split, "I+W, late": with_late_weights(split)}.items()
        }
        self.stage = nn.Sequential(*layers[MEASURED * LAYERS_PER_STAGE : (MEASURED + 1) * LAYERS_PER_STAGE])
        self.parameters = [parameter for layer in layers for parameter in layer.parameters()]
        self.gradient = torch.randn(1, size.seq, size.dim)
        self.runs: dict[str, Callable[[], Seconds]] = {
            "B": lambda: self._penstock("B"),
            "I+W": lambda: self._penstock("I+W"),
            "I+W, late": lambda: self._penstock("I+W, late"),
            "torch B": self._torch_whole,
            "torch I+W": self._torch_split,
        }

    def zero(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def gradients(self, name: str) -> list[Tensor]:
        """What one step leaves in the measured stage's `.grad`."""
        self.zero()
        self.runs[name]()
        found = [parameter.grad for parameter in self.stage.parameters()]
        self.zero()
        if any(grad is None for grad in found):
            raise RuntimeError(f"{name}: a parameter has no gradient")
        return [grad for grad in found if grad is not None]

    def _penstock(self, name: str) -> Seconds:
        timeline = self.pipes[name].step(self.x, target=self.y, timeline=True).timeline
        assert timeline is not None
        seconds: Seconds = {}
        for span in timeline:
            if span.action.stage == MEASURED and span.action.op.is_compute:
                part = span.action.op.value
                seconds[part] = seconds.get(part, 0.0) + span.end_seconds - span.start_seconds
        return seconds

    def _torch_whole(self) -> Seconds:
        return self._torch(lambda x, y: [("B", lambda: stage_backward(y, self.gradient, [x]))])

    def _torch_split(self) -> Seconds:
        def parts(x: Tensor, y: Tensor) -> list[tuple[str, Callable[[], object]]]:
            groups: list[Any] = []

            def of_inputs() -> None:
                groups.extend(stage_backward_input([y], [self.gradient], [x], self.stage.parameters())[1])

            return [("I", of_inputs), ("W", lambda: stage_backward_weight(self.stage.parameters(), groups))]

        return self._torch(parts)

    def _torch(self, parts: Callable[[Tensor, Tensor], list[tuple[str, Callable[[], object]]]]) -> Seconds:
        """Runs the measured stage alone, each microbatch's parts one after another."""
        seconds: Seconds = {}
        for row in self.x.unsqueeze(1):
            x = row.clone().requires_grad_()
            y = self.stage(x)
            for part, run in parts(x, y):
                began = time.perf_counter()
                run()
                seconds[part] = seconds.get(part, 0.0) + time.perf_counter() - began
        return seconds


def with_late_weights(schedule: Schedule) -> Schedule:
    """The schedule with each W one microbatch later, after the next one's I."""
    rows = []
    for row in schedule.rows:
        items: list[Action | Overlap] = []
        late: list[Action | Overlap] = []
        for item in row.items():
            if isinstance(item, Action) and item.op is Op.W:
                items += late
                late = [item]
            else:
                items.append(item)
        rows.append(items + late)
    return schedule.with_rows(rows)


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(contest: Contest, rounds: int) -> dict[str, list[Seconds]]:
    """Each contestant's seconds per round; a different one starts each round."""
    names = list(contest.runs)
    found: dict[str, list[Seconds]] = {name: [] for name in names}
    for number in range(-WARMUP_ROUNDS, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            contest.zero()
            gc.collect()
            seconds = contest.runs[name]()
            if number >= 0:
                found[name].append(seconds)
    return found


def compare(contest: Contest) -> dict[str, bool]:
    """Whether split and full backwards leave the same bits. Takes two steps: the first learns what can be split."""
    equal = {}
    for split, whole in (("I+W", "B"), ("I+W, late", "B"), ("torch I+W", "torch B")):
        contest.gradients(split)
        mine, other = contest.gradients(split), contest.gradients(whole)
        equal[split] = all(torch.equal(a, b) for a, b in zip(mine, other, strict=True))
    return equal


def summary(found: dict[str, list[Seconds]], shares: dict[int, float]) -> dict[str, Any]:
    """Quartiles of the times per microbatch, and of ratios of times within a round."""

    def backward(name: str) -> list[float]:
        return [seconds.get("B", 0.0) + seconds.get("I", 0.0) + seconds.get("W", 0.0) for seconds in found[name]]

    def ratios(split: str, whole: str) -> list[float]:
        return quartiles([a / b for a, b in zip(backward(split), backward(whole), strict=True)])

    forwards = [[seconds["F"] for seconds in found[name]] for name in ("I+W", "B")]
    return {
        "milliseconds": {name: quartiles([1000 * s / MICROBATCHES for s in backward(name)]) for name in found},
        "split_over_whole": ratios("I+W", "B"),
        "late_split_over_whole": ratios("I+W, late", "B"),
        "torch_split_over_whole": ratios("torch I+W", "torch B"),
        "split_over_torch_split": ratios("I+W", "torch I+W"),
        "part_of_i": quartiles([seconds["I"] / (seconds["I"] + seconds["W"]) for seconds in found["I+W"]]),
        "forward_over_whole_forward": quartiles([a / b for a, b in zip(*forwards, strict=True)]),
        "split_share": shares[MEASURED],
    }


def quartiles(values: Sequence[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return [round(value, 4) for value in statistics.quantiles(values, n=4, method="inclusive")]


# -- the report -------------------------------------------------------------------------------------------------------


def show(results: dict[str, Any], console: Console) -> None:
    """Prints the table, and whether the targets were met."""
    table = Table(title="I + W over B, medians (quartiles)")
    for column in ("size", "dim", "seq", "B ms", "I+W ms", "I+W / B", "W late", "torch", "F / F", "exact"):
        table.add_column(column, justify="left" if column == "size" else "right")
    for size in results["sizes"]:
        ms = size["milliseconds"]
        table.add_row(
            size["name"],
            str(size["dim"]),
            str(size["seq"]),
            f"{ms['B'][1]:.2f}",
            f"{ms['I+W'][1]:.2f}",
            *(
                f"{size[key][1]:.3f} ({size[key][0]:.3f}, {size[key][2]:.3f})"
                for key in ("split_over_whole", "late_split_over_whole", "torch_split_over_whole")
            ),
            f"{size['forward_over_whole_forward'][1]:.3f}",
            "yes" if size["equal"]["I+W"] and size["equal"]["I+W, late"] else "NO",
        )
    console.print(table)
    for size in results["sizes"]:
        if size["name"] == "medium":
            reached = size["split_over_whole"][1] <= 1.10
            console.print(f"{'reached    ' if reached else 'NOT reached'}  medium: I + W at most 1.10 times B")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, help="rounds of each size (default: 100, 40 and 12; at least 2)")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("results.json"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    found: list[dict[str, Any]] = []
    for size in (SIZES[name] for name in chosen.sizes):
        size = size if chosen.rounds is None else replace(size, rounds=chosen.rounds)
        contest = Contest(size)
        equal = compare(contest)
        measured = measure(contest, size.rounds)
        shares = contest.pipes["I+W"].deferred_weight_grad_fraction
        found.append({**asdict(size), "equal": equal, **summary(measured, dict(shares))})
    results = {"environment": environment(torch=torch.__version__, threads=1), "sizes": found}
    chosen.json.write_text(json.dumps(results, indent=2) + "\n")
    show(results, Console(width=None if os.isatty(1) else 160))


if __name__ == "__main__":
    main()
