"""Who slows steps down: what each rank's, replica's and op's slowness costs, and whether it is always the same."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock._base.errors import ArgumentError
from penstock._base.words import counted
from penstock.plan.explain.case import case_of_traced
from penstock.plan.explain.factors import SLOW, Factors, factors_of
from penstock.schedule import Schedule
from penstock.simulate.computations import Floats
from penstock.trace.measured import Step, TraceSteps
from penstock.trace.outside_pipeline import BACKWARD, FORWARD, Among, Durations, OutsidePipeline, measure_ops

_MAX_SIMULATED = 5_000_000
"""Actions that are simulated to tell slowdowns, at most."""


def slowdowns_of(run: TraceSteps, step: Step) -> Slowdowns | None:
    """Return what stragglers cost a step, if every op usually takes what it does in all steps of the run.

    None where that cannot be told: a single replica, whose stages may be unlike each other; several stages a rank,
    split backwards, clocks or waits that had to be set right.
    """
    schedule, replicas = step.slowest.schedule, len(step.replicas)
    plain = schedule.placement.stages == schedule.ranks
    simulated = sum(map(len, schedule.rows)) * replicas * (schedule.ranks + replicas + 8)
    if replicas == 1 or not plain or schedule.splits or step.unknown or simulated > _MAX_SIMULATED:
        return None
    own = _traced(step)
    if own is None:
        return None
    joints = own.before, own.after
    others = [_traced(one) for one in run.steps if one.slowest.schedule == schedule]
    alike = [one.durations for one in others if one is not None and (one.before, one.after) == joints]
    return slowdowns(schedule, own, usual(alike, own))


def _traced(step: Step) -> OutsidePipeline | None:
    if not step.events:
        return None
    try:
        return measure_ops(step.slowest.schedule, step.numbered)
    except ArgumentError:
        return None


def usual(steps: Sequence[Durations], joints: OutsidePipeline) -> dict[str, float]:
    """Return the usual seconds of each op: the mean of a rank's own work, the median of the others."""
    alone = {FORWARD, BACKWARD, *(one.name for one in (*joints.before, *joints.after) if one.among is Among.NOBODY)}
    every = {name: np.concatenate([step[name].ravel() for step in steps]) for name in steps[0]}
    known = {name: given[~np.isnan(given)] for name, given in every.items()}
    return {
        name: float((np.mean if name in alone else np.median)(given)) if len(given) else 0.0
        for name, given in known.items()
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


def slowdowns(schedule: Schedule, own: OutsidePipeline, seconds: Mapping[str, float]) -> Slowdowns:
    """Compute whose slowness costs how much. `seconds`: the usual time of each op."""
    replicas, ranks, _ = own.durations[FORWARD].shape
    replica_of, rank_of = np.indices((replicas, ranks))

    def took(real: NDArray[np.bool_], only: str = "") -> float:
        """Return the step with real durations on some ranks, of one op or of all."""

        def mixed(name: str, given: Floats) -> Floats:
            chosen = real & (only in ("", name))
            even = np.where(np.isnan(given), np.nan, seconds[name])
            return np.where(chosen[..., None] if given.ndim == 3 else chosen, given, even)

        durations = {name: mixed(name, given) for name, given in own.durations.items()}
        return case_of_traced(schedule, replace(own, durations=durations)).step_seconds

    everywhere, least = rank_of >= 0, took(rank_of < 0)
    return Slowdowns(
        took(everywhere) / least,
        tuple(took(rank_of == rank) / least for rank in range(ranks)),
        tuple(took(replica_of == replica) / least for replica in range(replicas)),
        {name: took(everywhere, name) / least for name in own.durations},
    )


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that is slow in a step.

    Attributes:
        times: by how much its slowest op is slower than is typical of the stage.
        lost_seconds: what its actions take longer for that.
        slow: which ops of which stages, [O, S].
    """

    replica: int
    rank: int
    times: float
    lost_seconds: float
    slow: NDArray[np.bool_]

    @property
    def who(self) -> str:
        return f"rank {self.rank} of replica {self.replica}"


def slow_ranks(step: Step, factors: Factors) -> list[SlowRank]:
    """Return the slow ranks of a step, by lost time. Ranks are compared with their replicas, since a stage alone may be
    long."""
    lost = np.nan_to_num(factors.seconds * (1 - 1 / factors.rank[..., None])).sum(axis=3)  # [R, O, S]
    found = []
    for place, replica in enumerate(step.replicas):
        for rank, stages in enumerate(replica.schedule.placement.by_rank):
            slow = np.zeros_like(factors.typical, bool)
            slow[:, list(stages)] = factors.rank[place][:, list(stages)] >= SLOW
            if slow.any():
                times = float(factors.rank[place][slow].max())
                seconds = float(lost[place][slow].sum())
                found.append(SlowRank(replica.number, rank, times, seconds, slow))
    return sorted(found, key=lambda one: -one.lost_seconds)


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


def summaries(run: TraceSteps) -> tuple[StepSummary, ...]:
    """Summarize all steps of a run."""
    median = run.typical.seconds or 1.0
    found = []
    for step in run.steps:
        factors = factors_of(step.replicas)
        totals = np.nansum(factors.typical, axis=0)
        stage = int(np.argmax(totals))
        slow = slow_ranks(step, factors)
        of_mean = float(totals[stage] / totals.mean()) if totals.mean() else 1.0
        found.append(
            StepSummary(
                step.number, step.seconds, step.seconds / median, slow[0] if slow else None, stage, of_mean,
                float(factors.microbatch.max()),
            )
        )  # fmt: skip
    return tuple(found)


_OFTEN = 0.8
"""Who is slow in such a share of the steps is slow always."""
_HEAVY = 1.05
"""A stage that takes so many times the mean is worth a word."""
_ODD = 1.1
"""A step that takes so many times the median is told apart."""


def in_words(found: Sequence[StepSummary]) -> tuple[str, ...]:
    """Whether it is always the same rank, and which steps are unlike the others; a sentence each."""
    slow: defaultdict[str, list[StepSummary]] = defaultdict(list)
    for one in found:
        if one.slowest is not None:
            slow[one.slowest.who].append(one)
    said = []
    for who, steps in sorted(slow.items(), key=lambda item: -len(item[1]))[:1]:
        times = sorted(one.slowest.times for one in steps if one.slowest is not None)
        spread = f"{times[0]:.1f}x" if times[-1] - times[0] < 0.1 else f"{times[0]:.1f} to {times[-1]:.1f}x"
        if len(steps) >= _OFTEN * len(found):
            said.append(f"steady: {who} is the slowest in {_often(steps, found)} ({spread})")
        elif len(steps) > 1:
            said.append(f"not steady: {who} is the slowest most often, in {_often(steps, found)} ({spread})")
        else:
            said.append(f"not steady: no rank is the slowest twice; {who} is in step {steps[0].number} ({spread})")
    stage, count = Counter(one.stage for one in found).most_common(1)[0]
    heavy = [one for one in found if one.stage == stage and one.of_mean >= _HEAVY]
    if count >= _OFTEN * len(found) and len(heavy) == count:
        said.append(
            f"stage {stage} is the heaviest in {_often(heavy, found)} ({max(one.of_mean for one in heavy):.2f}x)"
        )
    odd = [one for one in found if one.of_median >= _ODD]
    if odd:
        worst = max(odd, key=lambda one: one.of_median)
        why = f", where {worst.slowest.who} is slow ({worst.slowest.times:.1f}x)" if worst.slowest else ""
        most = f"step {worst.number} most ({worst.of_median:.2f}x{why})"
        said.append(f"{len(odd)} of {counted(len(found), 'step')} over {_ODD} times the median, {most}")
    return tuple(said)


def _often(some: Sequence[StepSummary], found: Sequence[StepSummary]) -> str:
    return "every step" if len(some) == len(found) else f"{len(some)} of {counted(len(found), 'step')}"
