"""How the rows of all ranks and steps become a report: nothing is lost on the way, least of all what is wrong."""

from __future__ import annotations

import pytest
import torch

from penstock.proof.comparison import Comparison, over_steps
from penstock.proof.reference import Expected
from penstock.proof.verify import _complete

ONE = torch.ones(2)
LOSS = Comparison("loss", "loss", (1,), "equal")
FINE, CLOSE = (
    Comparison("gradient", "a", (0, 1), "equal"),
    Comparison("gradient", "a", (0, 1), "close", 0.5, 1.0, "a tie"),
)
WRONG = [Comparison("gradient", "a", (0, 1), "missing"), Comparison("gradient", "a", (0, 1), "different", 0.1, 1.0)]


def test_trap_15_what_no_stage_holds_is_missing() -> None:
    expected = Expected([[ONE], [ONE]], ONE, {"a": ONE, "frozen": None}, {"b": ONE})
    found = {(row.kind, row.name): row.verdict for row in _complete([LOSS], expected)}
    assert found == {
        ("output", "0 of microbatch 0"): "missing",
        ("output", "0 of microbatch 1"): "missing",
        ("loss", "loss"): "equal",
        ("gradient", "a"): "missing",
        ("gradient", "frozen"): "equal",
        ("buffer", "b"): "missing",
    }


@pytest.mark.parametrize("fine", [FINE, CLOSE])
@pytest.mark.parametrize("wrong", WRONG)
def test_of_several_copies_the_wrong_one_counts(fine: Comparison, wrong: Comparison) -> None:
    expected = Expected([], ONE, {"a": ONE}, {})
    for rows in ([LOSS, fine, wrong], [LOSS, wrong, fine]):
        assert list(_complete(rows, expected)) == [LOSS, wrong]


@pytest.mark.parametrize("fine", [FINE, CLOSE])
@pytest.mark.parametrize("wrong", WRONG)
def test_of_several_steps_the_first_wrong_one_counts(fine: Comparison, wrong: Comparison) -> None:
    for steps, number in (([fine, wrong, WRONG[1]], 2), ([wrong, fine, fine], 1), ([fine, fine, wrong], 3)):
        (row,) = over_steps([[one] for one in steps])
        assert (row.verdict, row.step) == (wrong.verdict, number)


def test_of_steps_that_are_as_promised_the_furthest_counts() -> None:
    closer = Comparison("gradient", "a", (0, 1), "close", 0.2, 1.0, "a tie")
    for steps in ([FINE, closer, CLOSE], [CLOSE, closer, FINE]):
        assert list(over_steps([[one] for one in steps])) == [CLOSE]
