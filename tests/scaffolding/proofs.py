"""Proofs in a line: that a model trains as on one device, and what spoils one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock import Pipeline, VerificationReport, verify
from scaffolding.models import squared_error


def proven(
    model: Any, x: Any, y: Any, loss: Callable[..., Any] | None = squared_error, **options: Any
) -> VerificationReport:
    """The report on a model with the one input `x` and the target `y`. Raises VerificationError if anything differs."""
    return verify(model, (x,), target=y, loss_fn=loss, **options).raise_if_failed()


def close(report: VerificationReport) -> None:
    """It trains as on one device, and what it trains is that of the whole batch, but for rounding."""
    whole = report.raise_if_failed().full_batch
    assert whole is not None
    assert whole.verdict == "close", whole.text


def after_each_step(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Pipeline], object]) -> None:
    """Every step of a pipeline is followed by `spoil(pipeline)`."""
    step = Pipeline.step

    def spoilt(self: Pipeline, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        spoil(self)
        return result

    monkeypatch.setattr(Pipeline, "step", spoilt)
