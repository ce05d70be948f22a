"""Replay: the pipelines and whole steps of three production traces, and what their stragglers cost."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from result import DATA, Result

from penstock.plan.explain import Event, load_trace
from penstock.plan.explain.replay import replay_traced
from penstock.plan.explain.stragglers import compute_slowdowns
from penstock.schedule import Op, Schedule, generate
from penstock.simulate import LinkCost, StageCost, simulate
from penstock.trace.outside_pipeline import OutsidePipeline, measure_ops

TRACES = {"AR": ("0.18", "0.2"), "SE": ("0.8", "0.6"), "ST": ("0.07", "0.1")}
"""The median error with each op's own duration and the median transfer, as published with the traces, and our aim."""

STEPS = {"AR": "0.55", "SE": "0.48", "ST": "1.89"}
"""The median error of the source's own replay on its steps."""

Ops = dict[tuple[Op, int, int], tuple[float, float]]
"""When each op of one step and replica started and ended, in seconds: by op, rank and microbatch."""


def traces() -> list[Result]:
    """The pipeline's span of each step and replica: 1F1B with each op's own duration."""
    found = []
    for name, (theirs, aim) in TRACES.items():
        runs = pipelines(DATA / f"trace_{name}.csv.gz")
        transfer = statistics.median(seconds for ops in runs for seconds in transfers(ops).values())
        published = f"{theirs} (median)"
        for how, sends in (
            ("median transfer", Sends(transfer)),
            ("median transfer, sends block", Sends(transfer, block=True)),
            ("own transfers, sends block", Sends(None, block=True)),
        ):
            errors = tuple(replay_trace(ops, sends) for ops in runs)
            found.append(Result(f"trace {name}, {how}", "pipeline span", errors, published, f"median {aim}"))
        means = stage_means(runs)
        errors = tuple(replay_trace(ops, Sends(transfer), means) for ops in runs)
        found.append(Result(f"trace {name}, stages' means", "pipeline span", errors, "", ""))
    return found


@cache
def read(path: Path) -> dict[int, list[Event]]:
    """The events of each step."""
    found: dict[int, list[Event]] = {}
    for event in load_trace([path]).events:
        found.setdefault(event.step or 0, []).append(event)
    return found


def pipelines(path: Path) -> list[Ops]:
    """What the pipeline did in each step and replica."""
    runs: dict[tuple[int, int | None], Ops] = {}
    for step, events in read(path).items():
        for event in events:
            if (action := event.action) is not None:
                ops = runs.setdefault((step, event.replica), {})
                ops[action.op, action.stage, action.microbatch or 0] = event.start_seconds, event.end_seconds
    return list(runs.values())


RECEIVE = {Op.SEND_F: (Op.RECV_F, 1), Op.SEND_B: (Op.RECV_B, -1)}
"""The other end of a message: its op, and by how many ranks it is further on."""


def transfers(ops: Ops) -> dict[tuple[Op, int, int], float]:
    """How long each message took, by its send: from when both sides were there until both were done."""
    found = {}
    for (op, rank, number), (start, end) in ops.items():
        if op in RECEIVE:
            receive, on = RECEIVE[op]
            other = receive, rank + on, number
            if other in ops:
                found[op, rank, number] = max(end, ops[other][1]) - max(start, ops[other][0])
    return found


def stage_means(runs: Sequence[Ops]) -> dict[tuple[Op, int], float]:
    """The mean duration of each stage's forward and backward over all runs."""
    every: dict[tuple[Op, int], list[float]] = {}
    for ops in runs:
        for (op, rank, _), (start, end) in ops.items():
            if op.is_compute:
                every.setdefault((op, rank), []).append(end - start)
    return {key: statistics.fmean(values) for key, values in every.items()}


@dataclass(frozen=True)
class Sends:
    """What is said of messages: how long each takes (None: as long as it took), and whether a rank that sends waits."""

    seconds: float | None
    block: bool = False


def replay_trace(ops: Ops, sends: Sends, means: Mapping[tuple[Op, int], float] | None = None) -> float:
    """The error of the span of one step and replica. A send that blocks its rank counts as part of the op before it."""
    compute = {key: times for key, times in ops.items() if key[0].is_compute}
    ranks, numbers = 1 + max(rank for _, rank, _ in compute), 1 + max(number for *_, number in compute)
    own = transfers(ops)

    def took(op: Op, send: Op, rank: int, number: int) -> float:
        start, end = ops[op, rank, number]
        seconds = end - start if means is None else means[op, rank]
        sent = own.get((send, rank, number))
        if sent is None or not sends.block:
            return seconds
        return seconds + (sent if sends.seconds is None else sends.seconds)

    costs = [
        [StageCost(took(Op.F, Op.SEND_F, rank, k), took(Op.B, Op.SEND_B, rank, k), 0) for k in range(numbers)]
        for rank in range(ranks)
    ]
    link = LinkCost(0.0 if sends.block else sends.seconds or 0.0)
    predicted = simulate(generate("1f1b", ranks, numbers), costs, link).makespan_seconds
    span = max(end for _, end in compute.values()) - min(start for start, _ in compute.values())
    return predicted / span - 1


# -- whole steps ------------------------------------------------------------------------------------------------------

PIPELINE_NAMES = {
    "forward-compute": "forward", "backward-compute": "backward", "forward-recv": "forward-message",
    "backward-recv": "backward-message", "forward-pp-comm": "forward-message", "backward-pp-comm": "backward-message",
}  # fmt: skip
"""What the source calls the ops of a pipeline: a message's balanced duration is that of its receive."""


def published(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "trace_published.json").read_text())[name]
    return found


@cache
def steps(name: str) -> tuple[Schedule, dict[str, OutsidePipeline]]:
    """The steps of a trace by their number, and the schedule of all."""
    job = published(name)
    schedule = generate(job["schedule"], job["ranks"], job["microbatches"])
    events = read(DATA / f"trace_{name}.csv.gz")
    return schedule, {str(step): measure_ops(schedule, found) for step, found in events.items()}


def whole_steps() -> list[Result]:
    """The measured time of each step with its collectives and optimizers, all replicas together."""
    found = []
    for name, theirs in STEPS.items():
        measured = {step: row["step_s"] for step, row in published(name)["steps"].items()}
        replays = [published(name)["steps"][step]["replay_s"] / seconds - 1 for step, seconds in measured.items()]
        here = f"{theirs} (median), {100 * statistics.median(map(abs, replays)):.2f} on these steps"
        schedule, ours = steps(name)
        errors = tuple(replay_traced(schedule, one).step_seconds / measured[step] - 1 for step, one in ours.items())
        found.append(Result(f"trace {name}, own durations", "whole step", errors, here, f"median {theirs}"))
    return found


def stragglers() -> list[Result]:
    """What stragglers cost, against what the source's own tool says: a step over the balanced one, and by whose
    durations are real.
    """
    found = []
    for name in STEPS:
        errors: dict[str, list[float]] = {}
        even = {PIPELINE_NAMES.get(op, op): one["seconds"] for op, one in published(name)["balanced_durations"].items()}
        schedule, every = steps(name)
        for step, one in every.items():
            theirs = published(name)["steps"][step]
            ours = compute_slowdowns(schedule, one, even)
            errors.setdefault("of the step", []).append(ours.step / theirs["straggler_slowdown"] - 1)
            errors.setdefault("by stage", []).extend(
                ours.by_rank[int(rank)] / value - 1 for rank, value in theirs["slowdown_by_stage"].items()
            )
            errors.setdefault("by replica", []).extend(
                ours.by_replica[int(replica)] / value - 1 for replica, value in theirs["slowdown_by_replica"].items()
            )
            errors.setdefault("by op", []).extend(
                ours.by_op[PIPELINE_NAMES.get(op, op)] / value - 1
                for op, value in theirs["slowdown_by_op"].items()
                if op != "gc"  # which takes no time
            )
        found += [
            Result(f"trace {name}, stragglers", f"slowdown {what}", tuple(values), "", "worst 2")
            for what, values in errors.items()
        ]
    return found
