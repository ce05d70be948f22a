"""One comparison: on both sides of each tolerance, so that a wider or narrower one fails here. The numbers are written
out, since a test that reads them from the code would move with them."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.verification.comparison import (
    Comparison,
    Difference,
    FullBatchCheck,
    Verdict,
    VerificationReport,
    compare,
    merge_rows,
)

KINDS = ["output", "loss", "gradient", "buffer"]
TIED = "terms of several stages, added in another order"


def verdict(
    mine: Tensor | None,
    other: Tensor | None,
    *,
    kind: str = "gradient",
    exact: bool = True,
    why: str = "",
    terms: Tensor | None = None,
) -> Verdict:
    row = compare(kind, "x", (0,), mine, other, exact, why, terms)
    assert row.ok == (row.verdict in ("equal", "close"))
    assert (row.verdict == "close") == bool(row.tolerance_reason)
    return row.verdict


def beside(other: Tensor, difference: float) -> Tensor:
    """`other`, whose largest entry is elsewhere, with a small entry that is off by so much."""
    mine = other.clone()
    mine[0] += difference
    return mine


@pytest.mark.parametrize(
    ("dtype", "within", "beyond"),
    [
        (torch.float64, 0.9e-6, 1.1e-6),
        (torch.float32, 0.9e-6, 1.1e-6),
        (torch.float16, 3 / 1024, 5 / 1024),  # 4 epsilons
        (torch.bfloat16, 3 / 128, 5 / 128),
        (torch.complex64, 0.9e-6, 1.1e-6),
    ],
)
def test_what_was_added_in_another_order_has_a_tolerance(dtype: torch.dtype, within: float, beyond: float) -> None:
    """Of the tensor's largest finite entry, in whichever entry the difference is."""
    for scale, beside_nan in itertools.product((1.0, 1024.0), (False, True)):
        other = torch.tensor([0.0, 0.5, -1.0, *[math.nan] * beside_nan]).to(dtype) * scale
        for sign in (1, -1):
            near, far = (beside(other, sign * part * scale) for part in (within, beyond))
            assert verdict(near, other, why=TIED) == "close"
            assert verdict(far, other, why=TIED) == "different"
            assert verdict(near, other) == "different", "nothing was added in another order"
        for wrong in (other * 0, other * 2):
            assert verdict(wrong, other, why=TIED) == verdict(other, wrong, why=TIED) == "different"


@pytest.mark.parametrize(
    ("dtype", "within", "beyond"),
    [
        (torch.float64, 0.9e-6, 1.1e-6),
        (torch.float32, 0.9e-6, 1.1e-6),
        (torch.bfloat16, 3 / 128, 5 / 128),
        (torch.complex64, 0.9e-6, 1.1e-6),
    ],
)
def test_terms_that_cancel_have_a_tolerance_of_their_own_size(dtype: torch.dtype, within: float, beyond: float) -> None:
    """Entry by entry: terms of one are no excuse for another."""
    other, terms = torch.zeros(2).to(dtype), torch.tensor([1.0, 100.0], dtype=torch.float64)
    near, far = (torch.tensor([part, 0.0]).to(dtype) for part in (within, beyond))
    assert verdict(near, other, why=TIED, terms=terms) == "close"
    assert verdict(far, other, why=TIED, terms=terms) == "different"
    assert verdict(near, other, why=TIED) == "different", "its terms are not known"
    assert verdict(near, other, terms=terms) == "different", "nothing was added in another order"
    assert verdict(near, other, why=TIED, terms=terms[:1]) == "different", "these are terms of something else"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_compared_alike(kind: str) -> None:
    other = torch.tensor([1.0, 2.0])
    one_bit = torch.nextafter(other, other + 1)
    assert verdict(other.clone(), other, kind=kind) == "equal"
    assert verdict(one_bit, other, kind=kind) == "different"
    assert verdict(one_bit, other, kind=kind, exact=False) == "close"
    assert verdict(None, other, kind=kind) == "missing"
    assert verdict(other, None, kind=kind) == "unexpected"
    assert verdict(None, None, kind=kind) == "equal"


@pytest.mark.parametrize(
    ("dtype", "within", "beyond"),
    [  # those of torch.testing.assert_close: relative to the entry, and absolute near 0
        (torch.float32, 1.2e-6, 1.5e-6),
        (torch.bfloat16, 1.5e-2, 2.4e-2),
        (torch.float64, 0.9e-7, 1.5e-7),
    ],
)
def test_where_bits_are_not_demanded_torchs_tolerances_hold(dtype: torch.dtype, within: float, beyond: float) -> None:
    other = torch.full((3,), 1000.0).to(dtype)
    assert verdict(other * (1 + within), other, exact=False) == "close"
    assert verdict(other * (1 + beyond), other, exact=False) == "different"
    assert verdict(other * (1 + within), other, exact=True) == "different"


@pytest.mark.parametrize("why", [TIED, ""])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex64])
def test_no_tolerance_reaches_what_is_not_finite(dtype: torch.dtype, why: str) -> None:
    """An infinite entry is no measure for the others, nor do infinite terms excuse anything."""
    exact, terms = bool(why), torch.full((3,), math.inf, dtype=torch.float64)
    kinds = [1.0, math.inf, -math.inf, math.nan]
    for first, second in itertools.product(kinds, kinds):
        mine, other = (torch.tensor([kind, 1.0, 2.0]).to(dtype) for kind in (first, second))
        spoiled = torch.tensor([first, 0.0, 0.0]).to(dtype)
        for known in (None, terms):
            same = verdict(mine, other, exact=exact, why=why, terms=known)
            assert same == (
                "equal" if mine.isfinite()[0] == other.isfinite()[0] and str(first) == str(second) else "different"
            )
            assert verdict(spoiled, other, exact=exact, why=why, terms=known) == "different"
            assert verdict(other, spoiled, exact=exact, why=why, terms=known) == "different"


@pytest.mark.parametrize(
    ("kind", "values", "found"),
    [
        ("loss", [math.nan], "undefined"),
        ("loss", [-math.inf], "undefined"),
        ("gradient", [math.nan, math.inf], "undefined"),
        ("gradient", [math.nan, 0.0], "equal"),
        ("gradient", [], "equal"),
        ("output", [math.nan, math.nan], "undefined"),
        ("output", [-math.inf, -math.inf], "equal"),
        ("output", [-math.inf, math.nan, 1.0], "equal"),
        ("buffer", [math.nan, math.nan], "equal"),
        ("buffer", [math.inf], "equal"),
    ],
)
def test_equal_values_of_which_none_is_finite_prove_nothing(kind: str, values: list[float], found: Verdict) -> None:
    """Masks are infinite on purpose, and a buffer is NaN until it is set; NaN that is computed swallows all else."""
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        other = torch.tensor(values).to(dtype)
        assert verdict(other.clone(), other, kind=kind, why=TIED) == found
        assert verdict(other.clone(), other, kind=kind, exact=False) == found


@pytest.mark.parametrize(
    ("dtype", "within", "beyond"),
    [
        (torch.float64, 0.9e-7, 1.1e-7),
        (torch.complex128, 0.9e-7, 1.1e-7),
        (torch.float32, 0.9e-5, 1.1e-5),
        (torch.bfloat16, 3 / 128, 5 / 128),
    ],
)
def test_where_bits_are_not_demanded_small_entries_are_measured_by_the_largest(
    dtype: torch.dtype, within: float, beyond: float
) -> None:
    """And never by more than `assert_close` allows. Whatever its size, a gradient of zeros, or 10% off, is another."""
    other = torch.tensor([0.0, 1.0]).to(dtype) * 2**-13
    near, far = (beside(other, part * 2**-13) for part in (within, beyond))
    assert verdict(near, other, exact=False) == "close"
    for wrong in (far, torch.zeros_like(other), other * 1.1):
        assert verdict(wrong, other, exact=False) == verdict(other, wrong, exact=False) == "different"
    large = torch.tensor([0.0, 100.0]).to(dtype)
    assert verdict(beside(large, 2e-5), large, exact=False) == "different"


def test_bits_are_compared_and_not_numbers() -> None:
    nan, zero = torch.tensor([math.nan, 1.0]), torch.zeros(1)
    assert verdict(nan.clone(), nan) == "equal"
    assert verdict(-nan, torch.tensor([math.nan, -1.0])) == "equal", "hardware leaves a NaN's sign open"
    assert verdict(torch.tensor([math.nan, -0.0]), torch.tensor([math.nan, 0.0])) == "different"
    assert verdict(-zero, zero) == "different"
    assert verdict(torch.ones(2, 3), torch.ones(3, 2), exact=False, why=TIED) == "different"
    assert verdict(torch.ones(2), torch.ones(2).double(), exact=False, why=TIED) == "different"
    assert verdict(torch.ones(3, 2).t(), torch.ones(2, 3)) == "equal"


def test_what_was_computed_in_lower_precision_than_it_was_added_in() -> None:
    """Its terms are that far from each other. Whatever is the same terms in another order is held to the sum's."""
    other = torch.tensor([0.5, -1.0])

    def found(factor: float, exact: bool = False, why: str = "") -> Verdict:
        return compare("gradient", "x", (0,), other * factor, other, exact, why, computed_in=torch.bfloat16).verdict

    assert found(1 + 1.5e-2) == "close"
    assert found(1 + 1.8e-2) == "different"
    assert found(1 + 1.5e-2, exact=True) == "different"
    assert found(1 + 1.5e-2, exact=True, why=TIED) == "different"
    assert found(1 + 0.9e-6, exact=True, why=TIED) == "close"


def report(*rows: Comparison, whole: FullBatchCheck | None = None) -> VerificationReport:
    return VerificationReport(rows, "gpipe", 2, 2, 4, 0.0, True, full_batch=whole)


@pytest.mark.parametrize("wrong", ["different", "missing", "unexpected", "close"])
def test_one_wrong_row_is_enough(wrong: Verdict) -> None:
    """A value that is merely close is wrong where nothing allows it."""
    fine, bad = Comparison("gradient", "a", (0,), "equal"), Comparison("gradient", "b", (1,), wrong, 0.5, 1.0, "", 2)
    assert report(fine).ok
    assert report(fine, bad).failures == (bad,)
    assert report(fine, bad).summary().startswith("1 of 2 values differ; the first is gradient b on stage 1")
    assert report(fine, bad).summary().endswith(", in step 2")
    made = replace(report(bad), first=Difference(2, "what enters 'a'", 1, 0, 0.5, 1.0, "it is twice what it should be"))
    said = "first difference: step 2, microbatch 1 on stage 0: what enters 'a' differs by 0.5"
    assert made.summary().startswith(said)
    assert ". Downstream, 1 of 1 values differ; the first is gradient b" in made.summary()


NAN, ONE, TERMS = torch.tensor([math.nan]), torch.ones(1), torch.tensor([2.0], dtype=torch.float64)
UNDEFINED = [
    compare(kind, "x", (0,), value, value, True)
    for kind, value in (("gradient", NAN), ("gradient", ONE), ("loss", NAN))
]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [compare("gradient", "x", (0, 1), torch.tensor([1e-6]), torch.tensor([1e-9]), True, TIED, TERMS)],
            "1 value is within 5.0e-07 of its largest entry, or of the terms that cancel in it",
        ),
        (
            [compare("gradient", "x", (0,), ONE, torch.tensor([math.inf]), True, TIED)],
            "one is NaN or infinite where the other is not",
        ),
        ([compare("gradient", "x", (0,), ONE, torch.ones(3), True)], "by inf (largest entry on one device inf)"),
        (UNDEFINED, "inconclusive: on one device, too, the loss is not finite, 1 of 2 grad"),
        (
            [*UNDEFINED, compare("gradient", "c", (1,), ONE * 2, ONE, True)],
            "1 of 4 values differ; the first is gradient c",
        ),
    ],
)
def test_the_summary_says(rows: list[Comparison], said: str) -> None:
    assert said in report(*rows).summary()


@pytest.mark.parametrize(
    ("found", "ok"), [("close", True), ("explained", True), ("warning", True), ("different", False)]
)
def test_a_batch_that_is_cut_wrongly_is_not_ok(found: Any, ok: bool) -> None:
    made = report(Comparison("loss", "loss", (0,), "equal"), whole=FullBatchCheck(1.0, 2.0, found, "a reason"))
    assert made.ok == made.to_dict()["ok"] == ok
    assert ("a reason" in made.summary()) == (found in ("warning", "different"))


@pytest.mark.parametrize(
    ("verdicts", "counts"),
    [
        ([("equal", 0.0), ("close", 0.2), ("close", 0.5), ("close", 0.3)], ("close", 0.5)),
        ([("close", 0.5), ("missing", 0.0), ("different", 0.9)], ("missing", 0.0)),
        ([("different", 0.1), ("close", 0.5), ("equal", 0.0)], ("different", 0.1)),
    ],
)
def test_of_several_ranks_and_steps_the_first_wrong_or_the_furthest_counts(
    verdicts: list[tuple[Verdict, float]], counts: tuple[Verdict, float]
) -> None:
    why = {"close": TIED}
    (row,) = merge_rows(
        Comparison("gradient", "a", (0,), word, far, 1.0, why.get(word, "")) for word, far in verdicts
    ).values()
    assert (row.verdict, row.max_difference) == counts
