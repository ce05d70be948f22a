"""The checks of `torch.distributions`, which read values: a recording proceeds as if they were off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributions import Distribution


@contextmanager
def without_validation(made: Callable[[], None]) -> Iterator[None]:
    """No distribution checks its arguments unless told to. Calls `made` whenever one would have checked."""
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
