"""Names for what a profiler shows: a range for each action, `penstock 2F3`, and for its wait, `penstock 2F3 waits`.

Only steps that run under a profiler have them: torch's own, or `emit_nvtx`, which passes them to nsys.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.autograd import profiler

from penstock.runtime.execute.program import BoundAction, within_context


def is_profiling() -> bool:
    """Whether torch's profiler, or `emit_nvtx`, is on.

    Torch has no public way to ask. Its own optimizers check `_is_profiler_enabled`; in a torch without it, every step
    has ranges, which cost about 15 microseconds per action.
    """
    return bool(getattr(profiler, "_is_profiler_enabled", True))


def ranged(actions: Sequence[BoundAction]) -> list[BoundAction]:
    """The actions, each wrapped in its ranges."""
    return [within_context(each, lambda text: profiler.record_function(f"penstock {text}")) for each in actions]
