"""What one rank cannot do, no rank does: all raise the same error, and none waits for another in vain."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from penstock.errors import ArgumentError, CheckpointError
from penstock.pipe import Pipeline

T = TypeVar("T")


def together(pipe: Pipeline, act: Callable[[], T], fails: str) -> T:
    """What `act` returns here, once it has succeeded on every rank. A collective; `act` must have none in it.

    Args:
        pipe: whose ranks.
        act: what each of them does.
        fails: what could not be done, for the error's text.

    Raises:
        ArgumentError: on every rank, if `act` raised one somewhere.
        CheckpointError: on every rank, if it raised anything else.
    """
    future = attempt(act)
    error = future.exception()
    for rank, said in enumerate(
        pipe.gather(None if error is None else (isinstance(error, ArgumentError), _words(error)))
    ):
        if said is not None:
            is_argument, text = said
            raise (ArgumentError(text) if is_argument else CheckpointError(f"{fails}: {text} (rank {rank})")) from error
    return future.result()


def on_first(pipe: Pipeline, act: Callable[[], T], fails: str) -> T:
    """What `act` returns on the first rank, which alone runs it, on every rank. Raises as `together` does."""
    value = together(pipe, lambda: act() if pipe.is_first else None, fails)
    given: T = pipe.gather(value)[0]
    return given


def attempt(act: Callable[[], T]) -> Future[T]:
    """Does something here and now, and keeps what it returned or raised for later."""
    future: Future[T] = Future()
    try:
        future.set_result(act())
    except (Exception, CheckpointException) as error:
        future.set_exception(error)
    return future


def _words(error: BaseException) -> str:
    """Type and text; of an error that torch has collected from several ranks, the first one's."""
    if isinstance(error, CheckpointException) and error.failures:
        return _words(next(iter(error.failures.values()))[0])
    if isinstance(error, ArgumentError):
        return str(error)
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"{type(error).__name__}: {text}"
