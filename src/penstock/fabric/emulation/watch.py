"""An observer of a run in progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Watch(Protocol):
    """Is notified on host 0, or wherever the hosts are started."""

    def trial(self, number: int, longest_ns: Sequence[int]) -> None:
        """A trial has ended; `longest_ns` has the longest duration of any rank for each transfer, in nanoseconds."""

    def tick(self) -> None:
        """Called regularly while the run goes on."""
