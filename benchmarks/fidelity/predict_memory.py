"""What ranks' devices hold at most, of published runs with Megatron-LM. Nothing is fitted."""

from __future__ import annotations

import csv
import json
from unittest import mock

from result import DATA, Result, summed

from penstock.costs.hardware import device
from penstock.plan.transformer import (
    ClusterSpec,
    ParallelLayout,
    TrainingConfig,
    TransformerConfig,
    predict_step,
    transformer,
)
from penstock.plan.transformer import memory as memory_model
from penstock.plan.transformer.job import GRADIENT_BYTES

HALF = 2
"""Bytes of a gradient that is added up in 16 bits, as Megatron-LM does in fp16."""


def memory() -> list[Result]:
    return [*simumax_memory(), *vocabulary_memory()]


def simumax_memory() -> list[Result]:
    """Of all stages. TransformerEngine's layers and cross entropy, ZeRO-1; groups of devices divide tokens."""
    errors: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    with (DATA / "simumax_memory.csv").open() as file:
        for row in csv.DictReader(file):
            layers, tp, pp, dp, sequence = (int(row[name]) for name in ("layers", "tp", "pp", "dp", "seq"))
            model = transformer(f"{row['model']},layers={layers},kv-heads={row['kv_heads']}")
            kinds = {"flash_attention": True, "fused_loss": True}
            job = TrainingConfig(model, sequence, tp, tp > 1, optimizer_shards=dp, **kinds)
            for stage, mine in enumerate(with_dummies(job, ParallelLayout(dp, pp, 4))):
                true = float(row[f"allocated_stage{stage}_gib"])
                errors.setdefault(row["model"], []).append(mine / 2**30 / true - 1)
                theirs.setdefault(row["model"], []).append(float(row[f"simumax_stage{stage}_gib"]) / true - 1)
    return [
        Result(f"SimuMax, {name}: nothing fitted", "memory", tuple(each), f"SimuMax {summed(theirs[name])}", "1")
        for name, each in errors.items()
    ]


def with_dummies(job: TrainingConfig, layout: ParallelLayout) -> list[float]:
    """What ranks hold, as TransformerEngine (from 2.3, `get_dummy_wgrad`) makes it: where products add to float32 sums,
    each shape of a matrix has a gradient of 16 bits that nobody reads, all the time, and none is made for a product."""
    product = memory_model._matmul_workspace
    with mock.patch.object(memory_model, "_matmul_workspace", lambda job, rows, row_bytes: product(job, rows, 0.0)):
        step = predict_step(job, ClusterSpec(device("b200")), layout)
    layers, head = (HALF * size / job.tensor_parallel for size in (job.model.layer_matrices, job.model.output))
    return [size + layers + head * (rank == layout.ranks - 1) for rank, size in enumerate(step.memory_bytes)]


def vocabulary_memory() -> list[Result]:
    """Of the fullest rank, and of the least full, of plain 1F1B on 8 A100: a GPT without shared embeddings, in fp16."""
    most, least = [], []
    for row in json.loads((DATA / "vocab_1f1b.json").read_text()):
        layers, ranks = row["layers_per_stage"], row["ranks"]
        model = TransformerConfig(
            row["layers"], row["hidden"], row["heads"], row["vocab"], intermediate_size=row["ffn"], positions=row["seq"]
        )
        job = TrainingConfig(model, row["seq"], flash_attention=True, dtype="float16")
        layout = ParallelLayout(1, ranks, row["microbatches"], row["microbatch_size"], layers=tuple(layers))
        step = predict_step(job, ClusterSpec(device("a100")), layout)
        parameters = [count * (model.layer_matrices + model.layer_vectors) for count in layers]
        parameters[0] += model.embedding
        parameters[-1] += model.output
        mine = [
            size - (GRADIENT_BYTES - HALF) * count for size, count in zip(step.memory_bytes, parameters, strict=True)
        ]
        most.append(max(mine) / 2**20 / row["memory_allocated_max_mib"] - 1)
        least.append(min(mine) / 2**20 / row["memory_allocated_min_mib"] - 1)
    return [
        Result("vocabulary, plain 1F1B: nothing fitted", "memory, fullest rank", tuple(most), "", "3"),
        Result("vocabulary, plain 1F1B: nothing fitted", "memory, least full rank", tuple(least), "", "3"),
    ]
