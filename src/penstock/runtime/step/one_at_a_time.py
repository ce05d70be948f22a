"""Refuses steps that would overlap: one within another of the same pipeline, or in two threads of a process.

A step sets torch's generators and the state of its stages, and recording a model replaces its tensors for a while: all
of that is shared within a process.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from penstock.errors import ArgumentError

_running: list[tuple[int, Hashable]] = []
_lock = threading.Lock()


@contextmanager
def one_at_a_time(what: Hashable) -> Iterator[None]:
    """Wraps a step, or the making of a pipeline.

    Args:
        what: tells it from others that may run within it, such as a step of another pipeline.

    Raises:
        ArgumentError: another thread is within one, or this thread is within the same.
    """
    mine = threading.get_ident(), what
    with _lock:
        if any(thread != mine[0] for thread, _ in _running):
            raise ArgumentError(
                "another thread of this process is making a pipeline or running a step, which share torch's random "
                "generators and the model: use pipelines from one thread at a time, or in processes of their own"
            )
        if mine in _running:
            raise ArgumentError(
                "this pipeline was asked for a step within its own step (in the loss, in a hook or in the model's "
                "forward): wait until the step has returned"
            )
        _running.append(mine)
    try:
        yield
    finally:
        with _lock:
            _running.remove(mine)
