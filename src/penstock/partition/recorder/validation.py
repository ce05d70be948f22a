"""Turns off the argument checks of `torch.distributions` during a recording, since they read values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributions import Distribution


@contextmanager
def without_validation(made: Callable[[], None]) -> Iterator[None]:
    """Keeps distributions from checking their arguments unless told to. Calls `made` when one would have checked."""
    checks, own = Distribution._validate_args, Distribution.__init__

    def noting(self: Distribution, *args: Any, **kwargs: Any) -> None:
        if checks:
            made()
        own(self, *args, **kwargs)

    Distribution.set_default_validate_args(False)
    Distribution.__init__ = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        Distribution.__init__ = own  # type: ignore[method-assign]
        Distribution.set_default_validate_args(checks)
