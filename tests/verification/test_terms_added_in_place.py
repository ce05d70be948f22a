"""On an accelerator, W adds products to half-precision gradients without rounding them first. `verify` allows for that,
by the sizes of what is rounded, and for nothing else. The CPU is made to add in place."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import VerificationReport, verify
from penstock.runtime.exact import rules as exact
from penstock.runtime.split_backward.weight_gradients import MatrixProduct
from penstock.verification.comparison import compare

WIDTH, LAYERS, MICROBATCHES = 24, 4, 8
WEIGHTS = {f"{layer}.0.weight" for layer in range(LAYERS)}


@pytest.fixture(autouse=True)
def as_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "computes_apart", lambda device: False)


def proof(dtype: torch.dtype = torch.bfloat16, **options: Any) -> VerificationReport:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers).to(dtype)
    x, y = torch.randn(2, 64, WIDTH).to(dtype)
    options = {"schedule": "zb-h1", "exact": False, **options}
    return verify(
        model, (x,), target=y, loss=F.mse_loss, ranks=2, microbatches=MICROBATCHES, full_batch=False, **options
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_that_are_added_in_place_are_close(dtype: torch.dtype) -> None:
    report = proof(dtype)
    assert report.ok, report.summary()
    assert {row.name for row in report.rows if row.verdict == "close"} == WEIGHTS, "or nothing was added in place"


@pytest.mark.parametrize("options", [{"schedule": "1f1b"}, {"grad_dtype": torch.float32}])
def test_nothing_is_allowed_for_where_nothing_is_added_in_place(options: dict[str, Any]) -> None:
    report = proof(exact=True, **options)
    assert report.ok, report.summary()


Add = Callable[[MatrixProduct, Tensor], None]


def missing(add: Add, product: MatrixProduct, total: Tensor, before: MatrixProduct) -> None:
    pass


def doubled(add: Add, product: MatrixProduct, total: Tensor, before: MatrixProduct) -> None:
    add(product, total)
    add(product, total)


def stale(add: Add, product: MatrixProduct, total: Tensor, before: MatrixProduct) -> None:
    add(before, total)


@pytest.mark.parametrize("wrong", [missing, doubled, stale])
def test_one_term_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch, wrong: Callable[..., None]) -> None:
    add, calls, befores = MatrixProduct.add_to, itertools.count(), list[MatrixProduct]()

    def planted(self: MatrixProduct, total: Tensor) -> None:
        if next(calls) == 20:  # of 28 in the first step
            wrong(add, self, total, befores[-1])
        else:
            add(self, total)
        befores.append(MatrixProduct(self.first.clone(), self.second.clone(), self.transposed))

    monkeypatch.setattr(MatrixProduct, "add_to", planted)
    report = proof()
    (row,) = report.failures
    assert row.name in WEIGHTS
    assert row.step == 1


@pytest.mark.parametrize(("dtype", "epsilon"), [(torch.bfloat16, 2**-7), (torch.float16, 2**-10)])
def test_the_allowance_is_one_epsilon_of_what_is_rounded(dtype: torch.dtype, epsilon: float) -> None:
    """Entry by entry, and only where bits are not demanded."""
    other, rounded = torch.zeros(2).to(dtype), torch.tensor([8.0, 0.0], dtype=torch.float64)

    def verdict(difference: float, *, entry: int = 0, exact: bool = False) -> str:
        mine = other.clone()
        mine[entry] = difference
        return compare("gradient", "x", (0,), mine, other, exact, rounded=rounded).verdict

    assert verdict(7.9 * epsilon) == "close"
    assert verdict(8.1 * epsilon) == "different"
    assert verdict(7.9 * epsilon, exact=True) == "different"
    assert verdict(7.9 * epsilon, entry=1) == "different"
