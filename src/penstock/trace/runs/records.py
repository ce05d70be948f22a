"""The records that a run adds: a line for each step, and what each process does."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

from penstock._base.errors import ArgumentError
from penstock._base.files import STRICT, validate
from penstock._base.formatting import strip_control_chars

_MAX_LINE = 1000  # `to_line` writes fewer than 200 characters


def with_text_loss(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with a non-finite loss as text: JSON has no such numbers."""
    loss = values["loss"]
    return values if loss is None or math.isfinite(loss) else values | {"loss": str(loss)}


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training step.

    Attributes:
        step: its number, counted from 1, as `Pipeline.step_count` after it.
        loss: None where no loss reaches the process that writes (`broadcast_loss=False`), or if it was not read.
        seconds: from the call of `Pipeline.step` to its return; on a device, which follows later, between two returns.
        rows: of the batch, over all replicas.
        at_seconds: when it ended, since the run started.
        bubble: the share of the pipeline's time in which ranks did not compute; None unless this step was timed.
    """

    step: int
    loss: float | None
    seconds: float
    rows: int
    at_seconds: float
    bubble: float | None = None

    def to_line(self) -> str:
        """Return a line of steps.jsonl. A non-finite loss is written as text ("nan"): JSON has no such numbers."""
        values = {name: getattr(self, name) for name in self.__slots__}  # `asdict` takes ten times as long
        return json.dumps(with_text_loss(values)) + "\n"

    @classmethod
    def from_line(cls, line: str | bytes) -> StepRecord | None:
        """Parse what `to_line` wrote; None for anything else, such as half a line after a crash."""
        if len(line) > _MAX_LINE:
            return None
        try:
            data = json.loads(line)
            loss = None if data["loss"] is None else float(data["loss"])
            bubble = None if data["bubble"] is None else float(data["bubble"])
            step = cls(
                int(data["step"]), loss, float(data["seconds"]), int(data["rows"]), float(data["at_seconds"]), bubble
            )
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None
        times = (step.seconds, step.at_seconds, step.bubble or 0.0)
        counts = (step.step, step.rows)
        return step if all(abs(t) < 1e15 for t in times) and all(0 <= n < 1 << 53 for n in counts) else None


@dataclass(frozen=True, slots=True)
class RankState:
    """The state of one rank, as its process last wrote it, or as rank 0's process last received from it.

    Attributes:
        number: of the process in the whole mesh, as messages call it.
        replica: which pipeline it belongs to.
        ranks: of the pipeline that the process drives; usually one.
        host, pid: of the process; empty and 0 if relayed by rank 0.
        written: when this was written, in seconds since 1970, by the clock of the host that wrote it.
        step: the training step under way, or the last one.
        action: such as 2F3 or 1RECV_F0; empty outside a step.
        waits_for: the numbers of the processes from which it waits for a message.
        since: when the action began, or was first seen, on the same clock as `written`.
        rss_bytes: what the process has in memory.
        device_bytes: what is allocated on its device; None on a CPU.
        ended: whether it has closed its pipeline.
        failure: why the run failed, if it did, as this rank knows it.
        heard: whether rank 0 relayed this: the process does not write into this folder.
    """

    __pydantic_config__ = STRICT
    number: int
    replica: int
    ranks: tuple[int, ...]
    host: str = ""
    pid: int = 0
    written: float = 0.0
    step: int | None = None
    action: str = ""
    waits_for: tuple[int, ...] = ()
    since: float = 0.0
    rss_bytes: int | None = None
    device_bytes: int | None = None
    ended: bool = False
    failure: str | None = None
    heard: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, without the fields that the file has once: `written` and `heard`."""
        return {name: getattr(self, name) for name in self.__slots__ if name not in ("written", "heard")}

    @classmethod
    def from_dict(cls, data: Any, written: Any, what: str) -> RankState:
        """Read what `to_dict` wrote. Raise ArgumentError if it is something else."""
        values = {**data, "written": written} if isinstance(data, dict) else data
        state = validate(cls, values, what)
        if not 0 <= state.pid < 1 << 31:
            raise ArgumentError(f"{what}: pid={state.pid}: expected the number of a process")
        failure = None if state.failure is None else strip_control_chars(state.failure)
        return replace(
            state, host=strip_control_chars(state.host), action=strip_control_chars(state.action), failure=failure
        )
