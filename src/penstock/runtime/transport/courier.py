"""A thread that does one thing after another, so that the caller need not wait until each can be done."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any


@dataclass(slots=True)
class Operation:
    """Something that a courier is to do, as `torch.distributed` returns a `Work`."""

    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Waits until the operation has run. Raises what it raised."""
        self.ended.wait()
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()


class Courier:
    """Runs operations one after another, in the order in which they were issued.

    The thread is a daemon: one that waits for a rank that is gone keeps no process alive.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Operation, Callable[[], object]] | None] = SimpleQueue()
        self._last: Operation | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True, name=name)
        self._thread.start()

    def issue(self, run: Callable[[], object], operation: Operation | None = None) -> Operation:
        """Queues what `operation` stands for (by default a new one)."""
        self._last = operation or Operation()
        self._queue.put((self._last, run))
        return self._last

    def synchronize(self) -> None:
        """Waits for everything that was issued. Raises what the first operation that failed raised."""
        if self._last is not None:
            self._last.ended.wait()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Ends the thread once everything has run."""
        self._queue.put(None)

    def _serve(self) -> None:
        while (issued := self._queue.get()) is not None:
            operation, run = issued
            try:
                run()
            except BaseException as error:  # `wait` raises it
                operation.error = error
                self._error = self._error or error
            del issued, run  # with what it held
            operation.ended.set()
