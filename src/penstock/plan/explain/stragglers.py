"""Who slows steps down: what each rank's, replica's and op's slowness costs, and whether it is always the same."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock._base.errors import ArgumentError
from penstock._base.formatting import pluralize
from penstock.plan.explain.factors import SLOW_FACTOR, Factors, fit_factors
from penstock.plan.explain.replay import replay_traced
from penstock.schedule import Schedule
from penstock.simulate.computations import Floats
from penstock.trace.measured import Step, TraceSteps
from penstock.trace.outside_pipeline import BACKWARD, FORWARD, Among, Durations, OutsidePipeline, measure_ops

_MIN_SLOWDOWN = 1.01
_MAX_SIMULATED = 5_000_000
"""The maximum number of actions to simulate for slowdowns."""


def find_slowdowns(run: TraceSteps, step: Step) -> Slowdowns | None:
    """Return what stragglers cost a step, if every op usually takes what it does in all steps of the run.

    None where that cannot be told: a single replica, whose stages may be unlike each other; several stages a rank,
    split backwards, clocks or waits that had to be set right.
    """
    schedule, replicas = step.slowest.schedule, len(step.replicas)
    plain = schedule.placement.stages == schedule.ranks
    simulated = sum(map(len, schedule.rows)) * replicas * (schedule.ranks + replicas + 8)
    if replicas == 1 or not plain or schedule.splits or step.unknown or simulated > _MAX_SIMULATED:
        return None
    traced_step = _traced(step)
    if traced_step is None:
        return None
    joints = traced_step.before, traced_step.after
    traces = [_traced(s) for s in run.steps if s.slowest.schedule == schedule]
    alike = [trace.durations for trace in traces if trace is not None and (trace.before, trace.after) == joints]
    return compute_slowdowns(schedule, traced_step, typical_seconds(alike, traced_step))


def _traced(step: Step) -> OutsidePipeline | None:
    if not step.events:
        return None
    try:
        return measure_ops(step.slowest.schedule, step.numbered)
    except ArgumentError:
        return None


def typical_seconds(steps: Sequence[Durations], joints: OutsidePipeline) -> dict[str, float]:
    """Return the usual seconds of each op: the mean of a rank's own work, the median of the others."""
    alone = {FORWARD, BACKWARD, *(j.name for j in (*joints.before, *joints.after) if j.among is Among.NOBODY)}
    all_values = {name: np.concatenate([step[name].ravel() for step in steps]) for name in steps[0]}
    measured = {name: values[~np.isnan(values)] for name, values in all_values.items()}
    return {
        name: float((np.mean if name in alone else np.median)(values)) if len(values) else 0.0
        for name, values in measured.items()
    }


@dataclass(frozen=True, slots=True)
class Slowdowns:
    """By how much stragglers slow a step down: its time over that of the step in which each op takes what is usual.

    Attributes:
        step: the step with its real durations.
        by_rank, by_replica, by_op: usual durations, but for this rank's, replica's or op's real ones.
    """

    step: float
    by_rank: tuple[float, ...]
    by_replica: tuple[float, ...]
    by_op: Mapping[str, float]

    def describe(self) -> str:
        """Return a sentence: of ranks, replicas and ops the two that cost most; empty if they cost nothing."""
        if self.step < _MIN_SLOWDOWN:
            return ""
        replicas = enumerate(self.by_replica) if len(self.by_replica) > 1 else ()
        parts = []
        for kind, factors in (("rank ", enumerate(self.by_rank)), ("replica ", replicas), ("", self.by_op.items())):
            worst: list[tuple[Any, float]] = sorted(factors, key=lambda pair: -pair[1])[:2]
            parts.append(", ".join(f"{kind}{name} {times:.2f}x" for name, times in worst if times >= _MIN_SLOWDOWN))
        alone = "; ".join(filter(None, parts))
        return f"straggler slowdown {self.step:.2f}x (vs. typical op times){alone and '; each alone: '}{alone}"


def compute_slowdowns(schedule: Schedule, outside: OutsidePipeline, seconds: Mapping[str, float]) -> Slowdowns:
    """Compute whose slowness costs how much. `seconds`: the usual time of each op."""
    replicas, ranks, _ = outside.durations[FORWARD].shape
    replica_index, rank_index = np.indices((replicas, ranks))

    def took(real: NDArray[np.bool_], only: str = "") -> float:
        """Return the step with real durations on some ranks, of one op or of all."""

        def mix(name: str, values: Floats) -> Floats:
            chosen = real & (only in ("", name))
            typical = np.where(np.isnan(values), np.nan, seconds[name])
            return np.where(chosen[..., None] if values.ndim == 3 else chosen, values, typical)

        durations = {name: mix(name, values) for name, values in outside.durations.items()}
        return replay_traced(schedule, replace(outside, durations=durations)).step_seconds

    everywhere, baseline = rank_index >= 0, took(rank_index < 0)
    return Slowdowns(
        took(everywhere) / baseline,
        tuple(took(rank_index == rank) / baseline for rank in range(ranks)),
        tuple(took(replica_index == replica) / baseline for replica in range(replicas)),
        {name: took(everywhere, name) / baseline for name in outside.durations},
    )


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that is slow in a step, or a replica whose ranks all are, by as much.

    Attributes:
        rank: None: all of the replica's. More data make them slow, too.
        times: by how much its slowest op is slower than is typical of the stage.
        lost_seconds: what its actions take longer for that.
        slow: which ops of which stages, [O, S].
    """

    replica: int
    rank: int | None
    times: float
    lost_seconds: float
    slow: NDArray[np.bool_]

    @property
    def who(self) -> str:
        return f"replica {self.replica}" if self.rank is None else f"rank {self.rank} of replica {self.replica}"


def slow_ranks(step: Step, factors: Factors) -> list[SlowRank]:
    """Return the slow ranks of a step, by lost time. Ranks are compared with their replicas, since a stage alone may be
    long."""
    lost_seconds = np.nan_to_num(factors.seconds * (1 - 1 / factors.rank[..., None])).sum(axis=3)  # [R, O, S]
    ranks: list[SlowRank] = []
    for index, replica in enumerate(step.replicas):
        own: list[SlowRank] = []
        for rank, stages in enumerate(replica.schedule.placement.by_rank):
            slow = np.zeros_like(factors.typical, bool)
            slow[:, list(stages)] = factors.rank[index][:, list(stages)] >= SLOW_FACTOR
            if slow.any():
                times = float(factors.rank[index][slow].max())
                seconds = float(lost_seconds[index][slow].sum())
                own.append(SlowRank(replica.number, rank, times, seconds, slow))
        slowness = [entry.times for entry in own]
        if len(own) == replica.schedule.ranks and max(slowness) < SLOW_FACTOR * min(slowness):
            lost, slow = sum(entry.lost_seconds for entry in own), np.logical_or.reduce([entry.slow for entry in own])
            own = [SlowRank(replica.number, None, max(slowness), lost, slow)]
        ranks += own
    return sorted(ranks, key=lambda entry: -entry.lost_seconds)


@dataclass(frozen=True, slots=True)
class StepSummary:
    """One step in a line.

    Attributes:
        of_median: its time over the median of all steps.
        slowest: the rank that loses most, if any is slow.
        stage, of_mean: the heaviest stage, and how many times the mean of all stages it takes.
        longest: how many times the mean the longest microbatch takes.
    """

    number: int
    seconds: float
    of_median: float
    slowest: SlowRank | None
    stage: int
    of_mean: float
    longest: float


def summarize_steps(run: TraceSteps) -> tuple[StepSummary, ...]:
    """Summarize all steps of a run."""
    median = run.typical.seconds or 1.0
    summaries = []
    for step in run.steps:
        factors = fit_factors(step.replicas)
        totals = np.nansum(factors.typical, axis=0)
        stage = int(np.argmax(totals))
        slow = slow_ranks(step, factors)
        of_mean = float(totals[stage] / totals.mean()) if totals.mean() else 1.0
        summaries.append(
            StepSummary(
                step.number, step.seconds, step.seconds / median, slow[0] if slow else None, stage, of_mean,
                float(factors.microbatch.max()),
            )
        )  # fmt: skip
    return tuple(summaries)


_STEADY_SHARE = 0.8
"""A rank that is slow in this fraction of the steps is always slow."""
_HEAVY_FACTOR = 1.05
"""A stage that takes this many times the mean is reported."""
_ODD = 1.1
"""A step that takes this many times the median is reported."""


def describe(summaries: Sequence[StepSummary]) -> tuple[str, ...]:
    """Whether it is always the same rank, and which steps are unlike the others; a sentence each."""
    slow: defaultdict[str, list[StepSummary]] = defaultdict(list)
    for summary in summaries:
        if summary.slowest is not None:
            slow[summary.slowest.who].append(summary)
    sentences = []
    for name, steps in sorted(slow.items(), key=lambda item: -len(item[1]))[:1]:
        times = sorted(summary.slowest.times for summary in steps if summary.slowest is not None)
        spread = f"{times[0]:.1f}x" if times[-1] - times[0] < 0.1 else f"{times[0]:.1f} to {times[-1]:.1f}x"
        if len(steps) >= _STEADY_SHARE * len(summaries):
            sentences.append(f"steady: {name} is the slowest in {_count(steps, summaries)} ({spread})")
        elif len(steps) > 1:
            sentences.append(f"not steady: {name} is the slowest most often, in {_count(steps, summaries)} ({spread})")
        else:
            sentences.append(
                f"not steady: no rank is the slowest twice; {name} is in step {steps[0].number} ({spread})"
            )
    stage, count = Counter(summary.stage for summary in summaries).most_common(1)[0]
    heavy = [summary for summary in summaries if summary.stage == stage and summary.of_mean >= _HEAVY_FACTOR]
    if count >= _STEADY_SHARE * len(summaries) and len(heavy) == count:
        sentences.append(
            f"stage {stage} is the heaviest in {_count(heavy, summaries)} ({max(s.of_mean for s in heavy):.2f}x)"
        )
    odd = [summary for summary in summaries if summary.of_median >= _ODD]
    if odd:
        worst = max(odd, key=lambda summary: summary.of_median)
        reason = f", where {worst.slowest.who} is slow ({worst.slowest.times:.1f}x)" if worst.slowest else ""
        extreme = f"step {worst.number} most ({worst.of_median:.2f}x{reason})"
        sentences.append(f"{len(odd)} of {pluralize(len(summaries), 'step')} over {_ODD} times the median, {extreme}")
    return tuple(sentences)


def _count(matching: Sequence[StepSummary], summaries: Sequence[StepSummary]) -> str:
    return (
        "every step" if len(matching) == len(summaries) else f"{len(matching)} of {pluralize(len(summaries), 'step')}"
    )
