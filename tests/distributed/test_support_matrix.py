"""The support matrix: each cell works, to what plain torch gives, or is refused with its reason. None is silent.
And some of the zoo in real processes.
"""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import jobs
import pytest

from penstock.schedule import schedule_specs
from scaffolding.ranks import Ranks
from support import cell_jobs
from support.features import FAMILIES, FEATURES, cells, refusal, sampled, splits_nothing
from support.page import page
from zoo import MICROBATCHES
from zoo.matrix import Cell
from zoo.matrix import refusal as refusal_in_zoo

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("of_sample", "layers"),
    [
        pytest.param((True,), 4, id="sample"),
        pytest.param((True, False), 8, id="all, with two layers a stage", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("feature", [feature.name for feature in FEATURES])
def test_each_cell_works_or_is_refused(ranks4: Ranks, feature: str, of_sample: tuple[bool, ...], layers: int) -> None:
    """Two ranks have four stages at most, so that with four layers each has at least one."""
    mine = [cell for cell in cells() if cell[1] == feature and sampled(cell) in of_sample]
    assert mine
    for rank, seen in enumerate(ranks4.run(cell_jobs.run, mine, layers, seconds=280)):
        for cell, result in zip(mine, seen, strict=True):
            assert result.wrong == "", f"{cell}, rank {rank}"
            expected = refusal(cell)
            assert bool(result.refused) == bool(expected), f"{cell}, rank {rank}: {result.refused or 'works'}"
            assert expected in result.refused, cell
            family = next(family for family in FAMILIES if family.name == cell[0])
            waits = family.splits and not expected and not splits_nothing(cell)
            assert (result.waits > 0) == waits, f"{cell}, rank {rank}: {result.waits} waits for W"


def test_the_sample_has_each_family_each_feature_and_each_reason() -> None:
    tried = {cell for cell in cells() if sampled(cell)}
    assert {cell[0] for cell in tried if not refusal(cell)} == {family.name for family in FAMILIES}
    assert {feature for cell in tried for feature in cell[1:]} == {feature.name for feature in FEATURES}
    assert {refusal(cell) for cell in tried} == {refusal(cell) for cell in cells()}


def test_the_documents_say_so() -> None:
    written = Path(__file__).parents[2] / "docs" / "support.md"
    assert written.read_text() == page(), "print it anew: PYTHONPATH=tests python -m support > docs/support.md"


# -- some of the zoo: many cells of its matrix in one job -------------------------------------------------------------


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
        found.append(next(cell for name in schedules if refusal_in_zoo(cell := Cell(model, name, ranks)) is None))
    return found


def assert_proven(pool: Ranks, cells: list[Cell], transport: str) -> None:
    asked = [(cell.model, {"schedule": cell.schedule}) for cell in cells]
    options = {"microbatches": MICROBATCHES, "transport": transport, "seed": 7}
    for cell, *reports in zip(cells, *pool.run(jobs.verify_zoo, asked, options, seconds=250.0), strict=True):
        assert set(reports) == {reports[0]}, "each rank has the same report"
        ok, summary = reports[0]
        assert ok, f"{cell}: {summary}"


@pytest.mark.filterwarnings("ignore")
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


@pytest.mark.filterwarnings("ignore")
def test_two_names_of_what_another_rank_holds(ranks2: Ranks) -> None:
    """On rank 1 of this placement neither stage uses the parameter that has two names in one module."""
    assert_proven(ranks2, [Cell("parameter_alias", "dualpipe-v", 2)], "auto")


def test_the_runs_of_these_have_every_schedule() -> None:
    tried = {cell.schedule for ranks, first in ((2, 2), (4, 5)) for cell in some_cells(KINDS, ranks, first)}
    assert tried == set(RUN)
