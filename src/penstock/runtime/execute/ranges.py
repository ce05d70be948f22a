"""Names for what a profiler shows: a range for each action, `penstock 2F3`, and for its wait, `penstock 2F3 waits`.

Only a step that runs under a profiler has them: torch's, or `emit_nvtx`, which hands them to nsys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch.autograd import profiler

from penstock.runtime.execute.program import Entry


def is_profiling() -> bool:
    """Whether torch's profiler, or `emit_nvtx`, is on.

    Torch has no public way to ask. `_is_profiler_enabled` is what its own optimizers look at; where it is not there,
    every step has its ranges, at some 15 microseconds an action.
    """
    return bool(getattr(profiler, "_is_profiler_enabled", True))


def ranged(entries: Sequence[Entry]) -> list[Entry]:
    """The entries, each in its ranges."""
    return [_ranged(entry, f"penstock {entry.action}") for entry in entries]


def _ranged(entry: Entry, name: str) -> Entry:
    wait = None if entry.wait is None else _named(f"{name} waits", entry.wait)
    return replace(entry, run=_named(name, entry.run), wait=wait)


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def named(*args: Any) -> Any:
        with profiler.record_function(name):
            return function(*args)

    return named
