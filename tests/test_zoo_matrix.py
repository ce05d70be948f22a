"""Every model of the zoo under every schedule gives the bits of one device, or is refused with a reason.

A few cells run always, the rest is long. In one process; for real ones, see distributed/test_support_matrix.py.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from pathlib import Path

import pytest

from penstock import ArgumentError, PartitionError
from penstock.schedule import generate, names, schedule_specs
from zoo import MICROBATCHES, ZOO
from zoo.matrix import ALIKE, RANKS, Cell, cells, page, refusal, table
from zoo.shared import Shared

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of transformers
    pytest.mark.usefixtures("one_thread"),
]

CELLS = [
    pytest.param(*cell, marks=() if cell.sampled else pytest.mark.long, id="-".join(map(str, cell))) for cell in cells()
]


@lru_cache(maxsize=1)  # a fixture with that parameter would be made anew for every test
def shared(model: str) -> Shared:
    return Shared(ZOO[model].case())


@pytest.mark.parametrize(("model", "schedule", "ranks"), CELLS)
def test_bits_of_one_device_or_a_reason(model: str, schedule: str, ranks: int) -> None:
    reason = refusal(Cell(model, schedule, ranks))
    if reason is not None:
        with pytest.raises((ArgumentError, PartitionError)) as caught:
            shared(model).verify(generate(schedule, ranks, MICROBATCHES))
        assert reason in str(caught.value)
        return
    order = generate(schedule, ranks, MICROBATCHES)
    report = shared(model).verify(order)
    assert report.ok, report.summary()
    gradients = {row.name: row.verdict for row in report.rows if row.kind == "gradient"}
    assert len(gradients) == len(list(shared(model).model.parameters()))
    assert all(row.verdict == "equal" for row in report.rows if row.kind in ("output", "loss"))
    if order.placement.pipelines == 1:
        assert {name for name, verdict in gradients.items() if verdict != "equal"} <= set(ZOO[model].tied)


def test_the_sample_has_every_model_every_schedule_and_every_refusal() -> None:
    every, sampled = list(cells()), [cell for cell in cells() if cell.sampled]
    assert len(every) == len(ZOO) * len(names()) * len(RANKS)
    assert {cell.ranks for cell in sampled} == set(RANKS)
    cut = [cell for cell in sampled if cell.ranks > 1 and refusal(cell) is None]
    models, schedules = Counter(cell.model for cell in cut), Counter(cell.schedule for cell in cut)
    assert {model for model in ZOO if not models[model]} == set(ALIKE)
    assert min(schedules[entry.name] for entry in schedule_specs()) >= 2
    # Without the numbers and names of the cell.
    rules = [{re.sub(r"\d+|'.*'", "", refusal(cell) or "") for cell in some} for some in (every, sampled)]
    assert rules[0] == rules[1]


def test_the_table_has_a_mark_for_every_cell() -> None:
    rows = [line.split("|") for line in table().splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(ZOO)
    assert all(mark.strip() for row in rows[1:] for mark in row[1:-1])


def test_the_documented_table_is_this_one() -> None:
    """If it is not: `PYTHONPATH=tests python -m zoo > docs/zoo.md`."""
    assert (Path(__file__).parents[1] / "docs" / "zoo.md").read_text(encoding="utf-8") == page() + "\n"
