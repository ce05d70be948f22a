"""How good the default cut is: its slowest stage against that of the best cut, of cuts by work, and of equal layers.

python benchmarks/balance/cuts.py [MODEL ...]     (needs transformers; prints a Markdown table)

All cuts are tried where there are few; otherwise those that a long profile puts first. The best is chosen in some
rounds and measured in others. Rounds take all cuts in turn. Times are the processor's (one thread), which other load on
the machine changes little.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import penstock
from penstock import Profile
from penstock.demo import model as demo
from penstock.network.fabric.traffic.measure import stage_seconds
from penstock.partition.measure import clock

STAGES, ALL, FIRST = 4, 20, 8
CHOOSING, JUDGING = 2, 4
"""Rounds to choose the best cut in, and rounds to compare it in."""


class Tower(nn.Module):
    """Blocks on one kind of input."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(demo.Block(width, 4, 0.0) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class TwoTowers(nn.Module):
    """A wide tower and a narrow one, compared at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Tower(256, 4), Tower(128, 6)
        self.meet = nn.Linear(256 + 128, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.meet(torch.cat([self.left(x).mean(1), self.right(y).mean(1)], 1))


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def cnn() -> nn.Module:
    """A residual network of nine blocks: much work on few channels first, little on many channels last."""
    widths = [(32, 32, 1)] * 3 + [(32, 64, 2)] + [(64, 64, 1)] * 2 + [(64, 128, 2)] + [(128, 128, 1)] * 2
    blocks = [Residual(*width) for width in widths]
    stem = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU())
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


class Vocabulary(nn.Module):
    """A GPT of 8 blocks whose head has a weight of its own."""

    def __init__(self, words: int = 6144, width: int = 128, layers: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(demo.Block(width, 4, 0.0) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=192, intermediate_size=512, num_hidden_layers=8, num_attention_heads=4, vocab_size=8000
    )
    return transformers.LlamaForCausalLM(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "GPT, 8 blocks, 6,144 words": (Vocabulary, (torch.randint(0, 6144, (4, 64)),)),
    "CNN, 9 residual blocks": (cnn, (torch.randn(2, 3, 64, 64),)),
    "ResNet-50": (
        lambda: transformers.ResNetForImageClassification(transformers.ResNetConfig()),
        (torch.randn(2, 3, 96, 96),),
    ),
    "Llama, 8 layers, 8,000 words": (llama, (torch.randint(0, 8000, (4, 64)),)),
    "two towers": (TwoTowers, (torch.randn(4, 64, 256), torch.randn(4, 64, 128))),
}


def chosen(model: nn.Module, given: tuple[Tensor, ...], balance: Any) -> tuple[str, ...]:
    """Where a pipeline would cut, for one microbatch of these inputs."""
    with penstock.pipeline(
        model, given, ranks=STAGES, microbatches=1, schedule="gpipe", loss_fn=lambda y: y, balance=balance
    ) as pipe:
        return pipe.cuts


def tried(profile: Profile) -> list[tuple[str, ...]]:
    """All cuts, or those with the least slowest stage by the profile."""
    names, seconds = [unit.name for unit in profile.units], [unit.seconds for unit in profile.units]
    if math.comb(len(names) - 1, STAGES - 1) <= ALL:
        starts = list(combinations(range(1, len(names)), STAGES - 1))
    else:
        spans = combinations(range(1, len(names)), STAGES - 1)
        starts = sorted(spans, key=lambda cut: slowest(seconds, cut))[:FIRST]
    return [tuple(names[start] for start in cut) for cut in starts]


def slowest(seconds: Sequence[float], cut: Sequence[int]) -> float:
    return max(sum(seconds[a:b]) for a, b in pairwise((0, *cut, len(seconds))))


def rounds(
    model: nn.Module, given: tuple[Tensor, ...], cuts: Sequence[tuple[str, ...]], count: int
) -> dict[tuple[str, ...], float]:
    """The slowest stage of each cut, in milliseconds: each stage's least median, since other load only adds time."""
    found: dict[tuple[str, ...], list[list[float]]] = {cut: [] for cut in cuts}
    for _ in range(count):
        for cut, runs in found.items():
            runs.append([sum(times) for times in stage_seconds(model, given, {}, STAGES, cuts=list(cut))])
    return {cut: 1e3 * max(map(min, zip(*runs, strict=True))) for cut, runs in found.items()}


def row(name: str) -> str:
    make, given = MODELS[name]
    torch.manual_seed(0)
    model = make()
    cuts = {balance: chosen(model, given, balance) for balance in ("time", "flops", "layers")}
    every = tried(penstock.profile(model, given, microbatches=1, budget_seconds=10.0))
    first = rounds(model, given, list(dict.fromkeys([*every, *cuts.values()])), CHOOSING)
    best = min(first, key=lambda cut: first[cut])
    found = rounds(model, given, list(dict.fromkeys([best, *cuts.values()])), JUDGING)
    times = [found[cuts["time"]], found[best], found[cuts["flops"]], found[cuts["layers"]]]
    ratios = f"{times[0] / min(times[:2]):.2f} | {times[3] / times[0]:.2f}"
    return f"| {name} | {len(first)} | " + " | ".join(f"{time:.1f}" for time in times) + f" | {ratios} |"


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    clock.time = SimpleNamespace(perf_counter_ns=time.process_time_ns)  # type: ignore[assignment]
    clock.read_wait_ns = lambda _: 0  # the processor's time does not include waits
    print("| model | cuts tried | default ms | best ms | flops ms | layers ms | default / best | layers / default |")
    print("|---|" + "---|" * 7)
    for name in names or MODELS:
        print(row(name), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
