"""A run in a few metrics, by which runs are listed and compared."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock._base.errors import PenstockError
from penstock._base.files import MAX_QUOTED
from penstock._base.formatting import one_line, printable_line
from penstock._base.process import is_alive
from penstock.distributed.launch.endings import describe_signal, was_interrupted
from penstock.trace.runs.about import RunInfo
from penstock.trace.runs.progress import Progress
from penstock.trace.runs.reader import RecordedRun, read_run
from penstock.trace.runs.records import RankState, StepRecord

Health = Literal["computes", "waits", "between steps", "ended", "interrupted", "failed", "silent", "gone"]

SILENT_SECONDS = 5.0
"""A process writes its state several times in this interval."""


def health(
    state: RankState, now: float | None = None, host: str | None = None, is_there: Callable[[int], bool] = is_alive
) -> Health:
    """Return the health of a rank.

    `interrupted`: Ctrl-C ended it, or a signal to the launcher.
    `gone`: its process is not there any more, without having closed the pipeline; known of this host's processes only.
    `silent`: its state was not written for `SILENT_SECONDS`: gone, stopped, or out of reach.

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
    is_local = bool(state.pid) and state.host == (socket.gethostname() if host is None else host)
    if is_local and not is_there(state.pid):
        return "gone"
    if now - state.written > SILENT_SECONDS:
        return "silent"
    if not state.action:
        return "between steps"
    return "waits" if state.waits_for else "computes"


_MAX_LISTED = 4
"""Ranks that are listed one by one."""


def failure_messages(ranks: Sequence[tuple[RankState, Health]]) -> list[str]:
    """Return one message per failed, dead or unresponsive rank, failures first."""
    messages = []
    for failure in dict.fromkeys(state.failure for state, _ in ranks if state.failure is not None):
        is_key = was_interrupted(failure) and "KeyboardInterrupt" in failure
        reason = describe_signal(signal.SIGINT) if is_key else failure
        messages.append(f"ended{_describe_step([state for state, _ in ranks if state.failure == failure])}: {reason}")
    for status, words in (("gone", "process exited without closing the pipeline"), ("silent", "silent")):
        if affected := [state for state, rank_health in ranks if rank_health == status]:
            messages += [
                f"rank {state.number}: {words}; last heard of{_describe_step([state], with_action=True)}"
                for state in affected[:_MAX_LISTED]
            ]
            if len(affected) > _MAX_LISTED:
                messages.append(f"and {len(affected) - _MAX_LISTED} more that are {status}")
    return messages


def _describe_step(states: Sequence[RankState], *, with_action: bool = False) -> str:
    """Describe the step that ranks had reached, if known; with `with_action`, also the first rank's action."""
    steps = [state.step for state in states if state.step is not None]
    action = f", in {states[0].action}" if with_action and states[0].action else ""
    return f" at step {max(steps):,}{action}" if steps else ""


State = Literal["training", "ended", "interrupted", "failed", "silent", "unknown"]

SETTINGS = (
    "model", "device", "schedule", "ranks", "replicas", "chunks", "microbatches", "rows", "processes", "cuts",
    "memory_limit", "verified", "torch", "penstock", "host",
)  # fmt: skip
"""The fields of `RunInfo` by which two runs may differ in what they compute, and on what."""


@dataclass(frozen=True, slots=True)
class Summary:
    """A run at one moment.

    Attributes:
        path: its folder.
        about: what does not change.
        state: "training" while a rank does; "interrupted" if Ctrl-C or a signal ended it; "failed" if one raised or
            its process is gone; "silent" if none writes its state; "unknown" if none ever did.
        progress: the last step, its loss, and the speed; None before the first step's end.
        steps: by number.
        peak_bytes: the most that a process has held so far; None if unknown.
    """

    path: Path
    about: RunInfo
    state: State
    progress: Progress | None
    steps: tuple[StepRecord, ...]
    peak_bytes: int | None

    @classmethod
    def from_run(cls, run: RecordedRun, most_bytes: int | None = None) -> Summary:
        """Read it. `most_bytes`: of its steps' file, read the end only, and so the last steps. Raise ArgumentError if a
        file is damaged in a way that leaves no answer."""
        steps, ranks = run.steps(most_bytes), run.ranks()
        peaks = [state.rss_bytes for state in ranks if state.rss_bytes is not None]
        progress = Progress.of(steps, run.about.total_steps)
        return cls(run.path, run.about, _state(ranks), progress, tuple(steps), max(peaks, default=None))

    @classmethod
    def from_folder(cls, folder: Path) -> Summary | str:
        """Summarize the run in a folder by its last steps, for a list of runs; or return one line on why it cannot be
        read: one damaged run does not hide the others."""
        try:
            return cls.from_run(read_run(folder), LAST_STEPS_BYTES)
        except PenstockError as error:
            return str(error)
        except Exception as error:
            return f"run {str(folder)!r} cannot be read: {printable_line(one_line(error), MAX_QUOTED)}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, without the path and the steps."""
        settings = {name: getattr(self.about, name) for name in SETTINGS}
        progress = None if self.progress is None else self.progress.to_dict()
        return {
            "name": self.about.name, "started": self.about.started, "state": self.state,
            "settings": settings, "progress": progress, "peak_bytes": self.peak_bytes,
        }  # fmt: skip


LAST_STEPS_BYTES = 64 << 10
"""How much of the end of a run's steps a list of runs reads."""


def differences(runs: Sequence[Summary]) -> dict[str, list[Any]]:
    """Return the settings in which runs differ, each with every run's value."""
    values_by_name = {name: [getattr(run.about, name) for run in runs] for name in SETTINGS}
    return {name: values for name, values in values_by_name.items() if any(value != values[0] for value in values)}


def common_steps(runs: Sequence[Summary], max_count: int = 8) -> list[int]:
    """Numbers of steps that all runs have taken, evenly apart, the last one included."""
    common = sorted(set.intersection(*({record.step for record in run.steps} for run in runs)))
    stride = max(1, -(-len(common) // max_count))
    return common[::-1][::stride][::-1]


def _state(ranks: Sequence[RankState]) -> State:
    statuses = {health(state) for state in ranks}
    if not statuses:
        return "unknown"
    if "failed" not in statuses and "interrupted" in statuses:
        return "interrupted"
    if statuses & {"failed", "gone"}:
        return "failed"
    if statuses <= {"ended"}:
        return "ended"
    return "silent" if statuses <= {"silent", "ended"} else "training"
