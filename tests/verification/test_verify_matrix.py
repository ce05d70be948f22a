"""Every schedule x ranks x microbatches gives the bits of one device, on models of each kind.

Batches have 11 rows, so that 2, 3 and 8 microbatches are of different sizes. A model is recorded once for each size of
microbatch and its reference made once for each number of them: neither knows the schedule or the ranks.
"""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import nn

from penstock._base.errors import PartitionError
from penstock.schedule import Schedule, generate, generator, generators
from penstock.schedule.generators import Numbers
from scaffolding.model_kinds import DEPTHS, EXAMPLES
from scaffolding.representatives import representatives
from zoo.shared import Shared

MICROBATCHES = (1, 2, 3, 8)


pytestmark = pytest.mark.usefixtures("one_thread")


@lru_cache(maxsize=1)  # a fixture with that parameter would be made anew for every test
def shared(example: str) -> Shared:
    torch.manual_seed(0)
    made = EXAMPLES[example]()
    made.model.train()
    return Shared(made)


def schedules_of(name: str, ranks: int) -> list[Schedule]:
    """For numbers of microbatches that the schedule allows; fewer for those whose row differs little from another's."""
    entry = generator(name)
    numbers = [Numbers(ranks, m, entry.chunks) for m in MICROBATCHES]
    allowed = [generate(name, ranks, n.microbatches) for n in numbers if entry.broken(n) is None]
    return allowed if name in CLASSIC else allowed[-2:]


CLASSIC = ("naive", "gpipe", "1f1b")
RUNNABLE = [entry.name for entry in generators()]
CASES = [
    case
    for one_in, names, ranks in (
        (6, CLASSIC, [1, 2, 3, 4]),
        (4, [name for name in RUNNABLE if name not in CLASSIC], [2, 4]),
    )
    for case in representatives(one_in, list(EXAMPLES), names, ranks)
    if case.values[2] * generator(case.values[1]).chunks <= DEPTHS[case.values[0]]
]
CASES.sort(key=lambda case: list(EXAMPLES).index(case.values[0]))  # each is recorded once


@pytest.mark.parametrize(("example", "name", "ranks"), CASES)
def test_bits_of_one_device(example: str, name: str, ranks: int) -> None:
    schedules = schedules_of(name, ranks)
    assert schedules, f"{name} is for no number of microbatches of {MICROBATCHES}"
    copies, model = schedules[0].placement.pipelines, shared(example).model
    if copies > 1 and any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        with pytest.raises(PartitionError, match=f"updates 'blocks.0.1.running_mean' .* runs {copies} copies"):
            shared(example).verify(schedules[0])
        return
    for schedule in schedules:
        report = shared(example).verify(schedule)
        assert report.ok, f"{schedule.microbatches} microbatches: {report.summary()}"
        kinds = {row.kind for row in report.rows}
        assert kinds >= {"output", "loss", "gradient"}
        gradients = [row for row in report.rows if row.kind == "gradient"]
        assert len(gradients) == len(list(model.parameters()))
        if copies == 1:
            assert sum(row.verdict == "equal" for row in gradients) >= len(gradients) - 1  # but for one that is tied
        assert all(row.verdict == "equal" for row in report.rows if row.kind in ("output", "loss"))
        assert {row.name for row in report.rows if row.kind == "buffer"} == {name for name, _ in model.named_buffers()}


def test_the_short_cases_have_every_schedule_and_every_example() -> None:
    short = [case.values for case in CASES if not case.marks]
    assert {name for _, name, _ in short} == set(RUNNABLE)
    assert {example for example, _, _ in short} == set(EXAMPLES)


@pytest.mark.parametrize(
    ("example", "name", "split"),
    representatives(4, list(EXAMPLES), ["naive", "gpipe"], [(1, 3), (2, 2), (2, 3)]),
)
def test_several_chunks_a_rank(example: str, name: str, split: tuple[int, int]) -> None:
    ranks, chunks = split
    report = shared(example).verify(generate(name, ranks, 3, chunks))
    assert report.stages == ranks * chunks
    assert report.ok, report.summary()
