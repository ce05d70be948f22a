"""Functions that succeed on every rank or fail on every rank: all raise the same error, and no rank is left waiting."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from penstock._base.errors import ArgumentError, CheckpointError, PenstockError
from penstock.pipe.pipeline import Pipeline

T = TypeVar("T")

CHECKPOINT_IO = "its part of a checkpoint"
"""A rank's activity while it reads or writes files, as the ranks that wait for it report it."""


def run_on_all_ranks(pipe: Pipeline, act: Callable[[], T], failure: str) -> T:
    """Run `act` on every rank and return this rank's result. A collective; `act` itself must not contain one.

    Args:
        pipe: the pipeline whose ranks act.
        act: called on each rank.
        failure: what could not be done, for the error message.

    Raises:
        ArgumentError: on every rank, if `act` raised one on any rank.
        CheckpointError: on every rank, if `act` raised one or anything else.
    """
    with pipe.session.control.working(CHECKPOINT_IO):
        future = attempt(act)
    error = future.exception()
    for described in pipe.all_gather_object(error and describe_error(error, pipe.world.number)):
        if described is not None:
            kind, text = described
            raise (kind(text) if kind else CheckpointError(f"{failure}: {text}")) from error
    return future.result()


def run_on_rank0(pipe: Pipeline, act: Callable[[], T], failure: str) -> T:
    """Run `act` on the first rank only and return its result on every rank. Raise the same errors."""
    value = run_on_all_ranks(pipe, lambda: act() if pipe.is_main_process else None, failure)
    result: T = pipe.all_gather_object(value)[0]
    return result


def attempt(act: Callable[[], T]) -> Future[T]:
    """Call `act` now and keep its result, or the error it raised, for later."""
    future: Future[T] = Future()
    try:
        future.set_result(act())
    except (Exception, CheckpointException) as error:
        future.set_exception(error)
    return future


def describe_error(error: BaseException, rank: int) -> tuple[type[PenstockError] | None, str]:
    """Return the class of an ArgumentError or CheckpointError, or None; and the text. If several ranks failed, describe
    the first error."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (error, _) = next(iter(error.failures.items()))
    for kind in (ArgumentError, CheckpointError):
        if isinstance(error, kind):
            return kind, str(error)
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return None, f"{type(error).__name__}: {text} (rank {rank})"
