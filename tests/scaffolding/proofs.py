"""`verify` in a line, for the tests whose whole question is whether a model trains as on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock import Report, verify
from scaffolding.models import squared_error


def proven(model: Any, x: Any, y: Any, loss: Callable[..., Any] | None = squared_error, **options: Any) -> Report:
    """The report on a model with the one input `x` and the target `y`. Raises VerificationError if anything differs."""
    return verify(model, (x,), target=y, loss_fn=loss, **options).check()
