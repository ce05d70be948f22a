"""What to make of what a rank last said: a process that is gone cannot say so."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Literal

from penstock._base.process import lives
from penstock.distributed.launch.endings import stopped_by, was_interrupted
from penstock.trace.runs.records import RankState

Health = Literal["computes", "waits", "between steps", "ended", "interrupted", "failed", "silent", "gone"]

SILENT_SECONDS = 5.0
"""A process says several times in this that it lives."""


def health(
    state: RankState, now: float | None = None, host: str | None = None, is_there: Callable[[int], bool] = lives
) -> Health:
    """How a rank is.

    `interrupted`: Ctrl-C ended it, or a signal to the launcher.
    `gone`: its process is not there any more, without having closed the pipeline; known of this host's processes only.
    `silent`: it has said nothing for `SILENT_SECONDS`: gone, stopped, or out of reach.

    Args:
        now: in seconds since 1970.
        host: this one's name.
        is_there: whether a process of this host is there.
    """
    now = time.time() if now is None else now
    if state.failure is not None:
        return "interrupted" if was_interrupted(state.failure) else "failed"
    if state.ended:
        return "ended"
    here = bool(state.pid) and state.host == (socket.gethostname() if host is None else host)
    if here and not is_there(state.pid):
        return "gone"
    if now - state.written > SILENT_SECONDS:
        return "silent"
    if not state.action:
        return "between steps"
    return "waits" if state.waits_for else "computes"


_MAX_TOLD = 4
"""Ranks that are told one by one."""


def troubles(ranks: Sequence[tuple[RankState, Health]]) -> list[str]:
    """What ended a run, or seems to have, a sentence each: failures, then ranks that are gone or silent."""
    found = []
    for failure in dict.fromkeys(state.failure for state, _ in ranks if state.failure is not None):
        is_key = was_interrupted(failure) and "KeyboardInterrupt" in failure
        why = stopped_by(signal.SIGINT) if is_key else failure
        found.append(f"ended{_at([state for state, _ in ranks if state.failure == failure])}: {why}")
    for how, words in (("gone", "process exited without closing the pipeline"), ("silent", "silent")):
        if those := [state for state, judged in ranks if judged == how]:
            found += [
                f"rank {state.number}: {words}; last heard of{_at([state], within=True)}" for state in those[:_MAX_TOLD]
            ]
            if len(those) > _MAX_TOLD:
                found.append(f"and {len(those) - _MAX_TOLD} more that are {how}")
    return found


def _at(states: Sequence[RankState], *, within: bool = False) -> str:
    """The step that they had come to, if they have said; and if asked, the first one's action."""
    steps = [state.step for state in states if state.step is not None]
    action = f", in {states[0].action}" if within and states[0].action else ""
    return f" at step {max(steps):,}{action}" if steps else ""
