"""How long building a pipeline takes, in training steps of it, and how often the model's forward is recorded.

    python benchmarks/building/bench.py --layers 16 32 64 128

One process drives four ranks on one thread. The model is a small Llama that computes its own loss.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from common.machine import environment
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import penstock
from penstock.partition.record import attempts

RANKS, MICROBATCHES, ROWS, TOKENS, VOCABULARY = 4, 8, 8, 128, 512
STEPS = 3


def measure(layers: int) -> dict[str, Any]:
    """Builds a pipeline of a Llama of so many layers, and takes a few steps."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=8,
        )
    )
    tokens = torch.randint(VOCABULARY, (ROWS, TOKENS))
    batch = {"input_ids": tokens, "labels": tokens}
    with mock.patch.object(attempts, "_record", wraps=attempts._record) as record:
        began = time.perf_counter()
        pipe = penstock.pipeline(model, (), batch, ranks=RANKS, microbatches=MICROBATCHES)
        build_seconds = time.perf_counter() - began
    step_seconds = []
    with pipe:
        pipe.step(**batch)
        for _ in range(STEPS):
            began = time.perf_counter()
            pipe.step(**batch)
            step_seconds.append(time.perf_counter() - began)
    step = statistics.median(step_seconds)
    return {
        "layers": layers,
        "build_seconds": round(build_seconds, 2),
        "step_seconds": round(step, 2),
        "steps": round(build_seconds / step, 2),
        "recordings": record.call_count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[16, 32, 64, 128])
    options = parser.parse_args()
    torch.set_num_threads(1)
    measure(2)  # imports, and what torch makes once
    rows = [measure(layers) for layers in options.layers]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    path = Path(__file__).with_name("results.json")
    path.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
