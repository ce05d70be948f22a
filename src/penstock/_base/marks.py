"""Functions that a forward may call: `penstock.cut()`, where a stage may begin, and queries of its place in a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LISTENERS: list[Callable[[Callable[[], object]], None]] = []


class _Now:
    stage: int | None = None
    microbatch: int | None = None


NOW = _Now()
"""The running computation. It is not per thread: autograd runs a device's backwards in its own threads."""


def cut() -> None:
    """Mark a line of a model's forward: a stage may begin here, like `pipe_split()` of torch.distributed.pipelining.

    Does nothing except while `penstock.pipeline` records the forward.
    """
    _notify(cut)


def current_microbatch() -> int | None:
    """Return the index of the microbatch whose forward, loss or backward runs; None outside a step. It is 0 while a
    model is recorded; code that is recorded call by call may not ask, since it would keep that."""
    _notify(current_microbatch)
    return NOW.microbatch


def current_stage() -> int | None:
    """Return the index of the stage that computes, as in `pipe.stages`; see `current_microbatch`. An unsplit model that
    `verify` compares with is stage 0."""
    _notify(current_stage)
    return NOW.stage


def _notify(function: Callable[[], object]) -> None:
    for listener in _LISTENERS:
        listener(function)


@contextmanager
def computing(stage: int | None, microbatch: int | None) -> Iterator[None]:
    """Wrap a computation, or all those of a step. Restore what was before, if it ran within another step."""
    before = NOW.stage, NOW.microbatch
    NOW.stage, NOW.microbatch = stage, microbatch
    try:
        yield
    finally:
        NOW.stage, NOW.microbatch = before


@contextmanager
def calling_at_marks(listener: Callable[[Callable[[], object]], None]) -> Iterator[None]:
    """Call `listener` with the function of this module that a forward calls."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)
