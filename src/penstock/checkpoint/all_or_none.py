"""Actions that succeed on every rank or fail on every rank: all raise the same error, and none is left waiting."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from penstock._base.errors import ArgumentError, CheckpointError, PenstockError
from penstock.pipe.pipeline import Pipeline

T = TypeVar("T")

OWN_PART = "its part of a checkpoint"
"""What a rank is busy with while it reads or writes files, as the ranks that wait for it report it."""


def together(pipe: Pipeline, act: Callable[[], T], fails: str) -> T:
    """Run `act` on every rank and return this rank's result. A collective; `act` itself must not contain one.

    Args:
        pipe: the pipeline whose ranks act.
        act: what each rank runs.
        fails: what could not be done, for the error message.

    Raises:
        ArgumentError: on every rank, if `act` raised one on any rank.
        CheckpointError: on every rank, if `act` raised one or anything else.
    """
    with pipe.session.control.working(OWN_PART):
        future = attempt(act)
    error = future.exception()
    for said in pipe.all_gather_object(error and in_words(error, pipe.world.number)):
        if said is not None:
            kind, text = said
            raise (kind(text) if kind else CheckpointError(f"{fails}: {text}")) from error
    return future.result()


def on_first(pipe: Pipeline, act: Callable[[], T], fails: str) -> T:
    """Run `act` on the first rank only and return its result on every rank. Raise the same errors as `together`."""
    value = together(pipe, lambda: act() if pipe.is_main_process else None, fails)
    given: T = pipe.all_gather_object(value)[0]
    return given


def attempt(act: Callable[[], T]) -> Future[T]:
    """Call `act` now and keep its result, or the error it raised, for later."""
    future: Future[T] = Future()
    try:
        future.set_result(act())
    except (Exception, CheckpointException) as error:
        future.set_exception(error)
    return future


def in_words(error: BaseException, rank: int) -> tuple[type[PenstockError] | None, str]:
    """Return the class of an ArgumentError or CheckpointError, or None; and the text. Of several ranks' errors, the
    first's."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (error, _) = next(iter(error.failures.items()))
    for kind in (ArgumentError, CheckpointError):
        if isinstance(error, kind):
            return kind, str(error)
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return None, f"{type(error).__name__}: {text} (rank {rank})"
