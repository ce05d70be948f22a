"""Who looks at a run while it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Watch(Protocol):
    """Told on host 0, or where the hosts are started."""

    def trial(self, number: int, longest_ns: Sequence[int]) -> None:
        """A trial has ended; for each transfer the largest duration of a rank, in nanoseconds."""

    def tick(self) -> None:
        """Time goes by."""
