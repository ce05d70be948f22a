"""The live state of a run: its steps, its progress, and what each of its ranks does."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock._base.errors import ScheduleError
from penstock._base.formatting import pluralize
from penstock.report.walkthrough import WORK
from penstock.schedule import Action
from penstock.trace.runs import RankState, read_run
from penstock.trace.runs.folder import ABOUT, RANKS, STEPS
from penstock.trace.runs.reader import merge_steps
from penstock.trace.runs.records import with_text_loss
from penstock.trace.runs.summary import Health, RunSnapshot

_MAX_STEPS = 5_000
"""Maximum number of steps in one answer."""
PARTS = (ABOUT, STEPS, RANKS)
"""The parts of a run's folder that are read here; of timelines only the names."""


def live(path: Path, offset: int = 0) -> dict[str, Any]:
    """Return the state of a run: its steps from an offset in their file on, and what each of its ranks does now. Raise
    ArgumentError if it is not a run."""
    run = read_run(path)
    snapshot, about = RunSnapshot.of(run), run.about
    added, end = run.steps_after(offset)
    replicas = f" in each of {pluralize(about.replicas, 'replica')}" if about.replicas > 1 else ""
    counts = f"{pluralize(about.ranks, 'rank')}{replicas}", pluralize(about.microbatches, "microbatch")
    headline = about.model, about.schedule, *counts, about.device
    return {
        "id": about.id,
        "headline": ", ".join(headline),
        "ranks": about.ranks,
        "alone": about.processes == about.replicas,
        "steps": [with_text_loss(asdict(record)) for record in merge_steps([], added)[-_MAX_STEPS:]],
        "place": end,
        "recorded": max(run.traced_steps(), default=None),
        "progress": None if snapshot.progress is None else snapshot.progress.to_dict(),
        "states": [
            state.to_dict()
            | {
                "health": status,
                "doing": describe_state(state, status),
                "action_seconds": max(0.0, state.written - state.since) if state.action else 0.0,
                "silent_seconds": max(0.0, snapshot.now - state.written),
            }
            for state, status in snapshot.ranks
        ],
    }


def describe_state(state: RankState, status: Health) -> str:
    """Describe what a rank does, in plain words."""
    match status:
        case "failed":
            return f"failed: {state.failure}"
        case "interrupted":
            return "was interrupted"
        case "ended":
            return "has ended"
        case "gone":
            return "process exited unexpectedly"
        case "silent":
            return f"no heartbeat; last action: {state.action}" if state.action else "no heartbeat"
        case "waits":
            return f"waits for a message of rank {' and '.join(map(str, state.waits_for))} ({state.action})"
        case "computes":
            return _describe_action(state.action)
    return "is between steps"


def _describe_action(text: str) -> str:
    with contextlib.suppress(ScheduleError):  # other activities have texts: building the pipeline, say
        action = Action.parse(text)
        if action.op.is_compute:
            return f"{WORK[action.op]} microbatch {action.microbatch} on stage {action.stage}"
    return f"runs {text}"
