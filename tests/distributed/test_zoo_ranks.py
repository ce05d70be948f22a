"""Some of the zoo in real processes: many cells of the matrix in one job for each number of ranks and transport."""

from __future__ import annotations

from itertools import cycle

import jobs
import pytest

from penstock.schedule import schedule_specs
from scaffolding.ranks import Ranks
from zoo import MICROBATCHES
from zoo.matrix import Cell, refusal

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]

TRANSPORTS = ["auto", "distributed"]
RUN = [entry.name for entry in schedule_specs()]
KINDS = [
    *("t5", "lstm", "plain_arguments", "channels_last", "own_function", "dicts", "no_parameters", "tied_three"),
    *("resnet", "unet", "llama_left_padded", "mixtral"),
]
"""One of each kind that a message between processes may spoil."""
ON_TWO = ["plain_arguments", "channels_last", "dicts", "no_parameters"]
"""In short runs, on two ranks: no tensors, strides of their own, several tensors, nothing to train."""


def some_cells(models: list[str], ranks: int, first: int) -> list[Cell]:
    """Each model under the next schedule that takes it, from the `first` on."""
    schedules = cycle(RUN[first:] + RUN[:first])
    found = []
    for model in models:
        found.append(next(cell for name in schedules if refusal(cell := Cell(model, name, ranks)) is None))
    return found


def assert_proven(pool: Ranks, cells: list[Cell], transport: str) -> None:
    asked = [(cell.model, {"schedule": cell.schedule}) for cell in cells]
    options = {"microbatches": MICROBATCHES, "transport": transport, "seed": 7}
    for cell, *reports in zip(cells, *pool.run(jobs.verify_zoo, asked, options, seconds=250.0), strict=True):
        assert set(reports) == {reports[0]}, "each rank has the same report"
        ok, summary = reports[0]
        assert ok, f"{cell}: {summary}"


@pytest.mark.parametrize(
    ("ranks", "transport", "kinds"),
    [
        pytest.param(2, "distributed", ON_TWO, id="two"),
        pytest.param(2, "auto", KINDS, marks=pytest.mark.long),
        pytest.param(4, "distributed", KINDS, marks=pytest.mark.long),
    ],
)
def test_a_model_of_each_kind(ranks: int, transport: str, kinds: list[str], request: pytest.FixtureRequest) -> None:
    pool: Ranks = request.getfixturevalue(f"ranks{ranks}")
    first = ranks + TRANSPORTS.index(transport)
    assert_proven(pool, some_cells(kinds, ranks, first), transport)


def test_two_names_of_what_another_rank_holds(ranks2: Ranks) -> None:
    """On rank 1 of this placement neither stage uses the parameter that has two names in one module."""
    assert_proven(ranks2, [Cell("parameter_alias", "dualpipe-v", 2)], "auto")


def test_the_runs_of_these_have_every_schedule() -> None:
    tried = {cell.schedule for ranks, first in ((2, 2), (4, 5)) for cell in some_cells(KINDS, ranks, first)}
    assert tried == set(RUN)
