"""`penstock.cut()`: marks a line of a forward at which a stage may begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LISTENERS: list[Callable[[], None]] = []


def cut() -> None:
    """Marks a line of a model's forward: a stage may begin here, like `pipe_split()` of torch.distributed.pipelining.

    Does nothing except while `penstock.pipeline` records the forward.
    """
    for listener in _LISTENERS:
        listener()


@contextmanager
def calling_at_marks(listener: Callable[[], None]) -> Iterator[None]:
    """Calls `listener` at each mark."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)
