"""Run work in a network namespace without a separate process: a thread joins the namespace, works, and ends.

Each thread has its own network namespace, which the processes that it starts inherit.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_NETWORK = 0x40000000  # CLONE_NEWNET


def within(namespace: Path | None, work: Callable[[], T]) -> T:
    """Runs `work` in the namespace with this file, or in a temporary one; returns or raises what it does. Raises
    OSError: the namespace cannot be joined or created."""

    done: Future[T] = Future()

    def run() -> None:
        try:
            _join(namespace)
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, name="penstock in a namespace")
    thread.start()
    thread.join()
    return done.result()


def _join(namespace: Path | None) -> None:
    # Python has os.setns and os.unshare only from 3.12 on.
    libc = ctypes.CDLL(None, use_errno=True)
    if namespace is None:
        failed = libc.unshare(_NETWORK)
    else:
        descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            failed = libc.setns(descriptor, _NETWORK)
        finally:
            os.close(descriptor)
    if failed:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), None if namespace is None else str(namespace))
