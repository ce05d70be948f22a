"""Refuses steps that would overlap: one within another of the same pipeline, or in two threads of a process.

A step sets torch's generators and the state of its stages, and recording a model replaces its tensors for a while: all
of that is shared within a process.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from penstock._base.errors import ArgumentError

_running: list[Hashable] = []
_lock = threading.RLock()


@contextmanager
def one_at_a_time(key: Hashable) -> Iterator[None]:
    """Wrap a step, or the making of a pipeline.

    Args:
        key: distinguishes it from others that may run within it, such as a step of another pipeline.

    Raises:
        ArgumentError: another thread is within one, or this thread is within the same.
    """
    if not _lock.acquire(blocking=False):
        raise ArgumentError(
            "another thread of this process is making a pipeline or running a step, which share torch's random "
            "generators and the model: use pipelines from one thread at a time, or in processes of their own"
        )
    try:
        if key in _running:
            raise ArgumentError(
                "this pipeline was asked for a step within its own step (in the loss, in a hook or in the model's "
                "forward): wait until the step has returned"
            )
        _running.append(key)
        try:
            yield
        finally:
            _running.remove(key)
    finally:
        _lock.release()
