"""How the rows of all ranks and steps become a report: nothing is lost on the way, least of all what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from penstock.verification.comparison import Comparison, compare, merged

ONE = torch.ones(2)
LOSS = Comparison("loss", "loss", (1,), "equal")
FINE, CLOSE = (
    Comparison("gradient", "a", (0, 1), "equal"),
    Comparison("gradient", "a", (0, 1), "close", 0.5, 1.0, "a tie"),
)
WRONG = [Comparison("gradient", "a", (0, 1), "missing"), Comparison("gradient", "a", (0, 1), "different", 0.1, 1.0)]


def test_trap_15_what_no_stage_holds_is_missing() -> None:
    assert compare("gradient", "a", (), None, ONE, True).verdict == "missing"
    assert compare("gradient", "frozen", (), None, None, True).verdict == "equal"


@pytest.mark.parametrize("fine", [FINE, CLOSE])
@pytest.mark.parametrize("wrong", WRONG)
def test_of_several_copies_the_wrong_one_counts(fine: Comparison, wrong: Comparison) -> None:
    for rows in ([LOSS, fine, wrong], [LOSS, wrong, fine]):
        assert list(merged(rows).values()) == [LOSS, wrong]


@pytest.mark.parametrize("fine", [FINE, CLOSE])
@pytest.mark.parametrize("wrong", WRONG)
def test_of_several_steps_the_first_wrong_one_counts(fine: Comparison, wrong: Comparison) -> None:
    for steps, number in (([fine, wrong, WRONG[1]], 2), ([wrong, fine, fine], 1), ([fine, fine, wrong], 3)):
        (row,) = merged(row if row.ok else replace(row, step=step) for step, row in enumerate(steps, 1)).values()
        assert (row.verdict, row.step) == (wrong.verdict, number)


def test_of_steps_that_are_as_promised_the_furthest_counts() -> None:
    closer = Comparison("gradient", "a", (0, 1), "close", 0.2, 1.0, "a tie")
    for steps in ([FINE, closer, CLOSE], [CLOSE, closer, FINE]):
        assert list(merged(steps).values()) == [CLOSE]
