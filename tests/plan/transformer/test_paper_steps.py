"""Whole steps of published jobs, from the vendor's specifications and round figures: nothing is fitted."""

import pytest

from penstock.costs.hardware import device
from penstock.plan import Cluster, FixedNumbers, Sizes, make_plans
from penstock.plan.transformer import (
    ClusterSpec,
    ParallelLayout,
    TrainingConfig,
    TransformerConfig,
    predict_step,
    profile_of,
    transformer,
    units_of,
)


@pytest.mark.parametrize(
    "row",  # layers, width, heads, tensor and pipeline parallel, GPUs, batch, rows, chunks, TFLOP/s of each GPU
    [  # Narayanan et al. 2021, table 1: so many A100; microbatches are not in the table
        (24, 2304, 24, 1, 1, 32, 512, 16, 1, 137),
        (36, 4096, 32, 4, 1, 128, 512, 16, 1, 142),
        (80, 12288, 96, 8, 8, 1536, 2304, 1, 2, 148),
        (128, 25600, 160, 8, 64, 3072, 3072, 1, 2, 163),
    ],
)
def test_rates_of_megatron_are_met_within_a_tenth(row: tuple[int, ...]) -> None:
    layers, hidden, heads, t, p, gpus, batch, rows, chunks, published = row
    model, sequence, replicas = TransformerConfig(layers, hidden, heads, 51200), 2048, gpus // t // p
    job = TrainingConfig(model, sequence, t, recompute="full", dtype="float16")
    layout = ParallelLayout(replicas, p, batch // replicas // rows, rows, chunks)
    step = predict_step(job, ClusterSpec(device("a100")), layout)
    forwards = 4  # the published rate counts the recomputed one (their equation 3)
    rate = model.flops(batch * sequence, sequence) / 3 * forwards / gpus / step.seconds
    assert rate / 1e12 == pytest.approx(published, rel=0.1)


def test_a_step_is_the_pipeline_then_sums_then_the_optimizer() -> None:
    machine, model = ClusterSpec(device("h100")), transformer("llama3-8b")
    job = TrainingConfig(model, 4096, flash_attention=True)
    one = predict_step(job, machine, ParallelLayout(1, 1, 4))
    units = units_of(job, machine, 1)
    assert one.pipeline_seconds == pytest.approx(4 * sum(unit.seconds for unit in units))
    assert one.reduce_seconds == 0
    held = sum(unit.held_bytes + unit.activation_bytes for unit in units)
    assert one.memory_bytes[0] == held + units[-1].working_bytes  # while all that was kept is still there
    two = predict_step(job, machine, ParallelLayout(2, 1, 4))
    rate = machine.link.bytes_per_second
    assert two.reduce_seconds == pytest.approx(2 * model.parameters / rate, rel=1e-3)
    assert two.pipeline_seconds == one.pipeline_seconds
    sharded = predict_step(
        TrainingConfig(model, 4096, flash_attention=True, optimizer_shards=2), machine, ParallelLayout(2, 1, 4)
    )
    assert one.memory_bytes[0] - sharded.memory_bytes[0] == pytest.approx(6 * model.parameters, rel=1e-9)
    assert sharded.optimizer_seconds == two.optimizer_seconds / 2


def test_a_profile_of_numbers_is_planned_like_a_measured_one() -> None:
    machine = ClusterSpec(device("h100"))
    job = TrainingConfig(transformer("llama3-70b"), 4096, 8, True, flash_attention=True, optimizer_shards=8)
    sizes = Sizes.of([profile_of(job, machine, rows) for rows in (1, 2)])
    link = machine.network
    found = make_plans(
        sizes, Cluster(16, machine.device.memory_bytes, link), 64, FixedNumbers(["1f1b", "interleaved-1f1b"])
    )
    best = found.best[0]
    assert best.choice.devices == 16
    assert max(best.memory_bytes) <= machine.device.memory_bytes
    assert len(best.cuts) == best.choice.stages - 1
