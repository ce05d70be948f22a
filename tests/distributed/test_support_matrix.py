"""The support matrix: each cell works, to what plain torch gives, or is refused with its reason. None is silent."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaffolding.ranks import Ranks
from support import cell_jobs
from support.features import FAMILIES, FEATURES, cells, refusal, sampled, splits_nothing
from support.page import page

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
