"""How even the stages are: the slowest stage's forward and backward over the mean, with four stages on one thread.

python benchmarks/balance/run.py [MODEL ...]     (needs transformers; prints a Markdown table)
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from penstock.network.fabric.traffic.measure import stage_seconds
from penstock.partition import Balance

STAGES, ROUNDS = 4, 3
BALANCES: tuple[Balance, ...] = ("parameters", "flops")
PICTURES, TOKENS = torch.randn(2, 3, 224, 224), torch.randint(0, 1000, (1, 128))

MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "ResNet-50": (lambda: transformers.ResNetForImageClassification(transformers.ResNetConfig()), PICTURES),
    "EfficientNet-B0": (
        lambda: transformers.EfficientNetForImageClassification(
            transformers.EfficientNetConfig(width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280)
        ),
        PICTURES,
    ),
    "ConvNeXt-T": (lambda: transformers.ConvNextForImageClassification(transformers.ConvNextConfig()), PICTURES),
    "Swin-T": (lambda: transformers.SwinForImageClassification(transformers.SwinConfig()), PICTURES),
    "GPT-2": (lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config()), TOKENS),
    "Llama, 12 layers of 512": (
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                hidden_size=512, intermediate_size=1376, num_hidden_layers=12, num_attention_heads=8, vocab_size=32000
            )
        ),
        TOKENS,
    ),
}


def slowest_over_mean(model: nn.Module, given: Tensor, balance: Balance) -> float:
    """The slowest stage's time over the mean. Takes each stage's fastest median, since other load only adds time."""
    kwargs: dict[str, Any] = {"use_cache": False} if not given.is_floating_point() else {}
    rounds = [stage_seconds(model, (given,), kwargs, STAGES, balance=balance) for _ in range(ROUNDS)]
    seconds = [min(sum(times[stage]) for times in rounds) for stage in range(STAGES)]
    return max(seconds) / statistics.mean(seconds)


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| model | " + " | ".join(BALANCES) + " |\n|---|" + "---|" * len(BALANCES))
    for name in names or MODELS:
        make, given = MODELS[name]
        ratios = [slowest_over_mean(make(), given, balance) for balance in BALANCES]
        print(f"| {name} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
