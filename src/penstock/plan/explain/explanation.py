"""Explains a run: where the time of a step went, why, and what to change first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock._base.errors import ArgumentError
from penstock.plan.explain.breakdown import Bubble, TimeBreakdown, breakdown_of, bubble_of
from penstock.plan.explain.changes import LEAST_GAIN, WhatIfContext, suggestions, what_if
from penstock.plan.explain.factors import seconds_of
from penstock.plan.explain.predicted import Prediction
from penstock.plan.explain.replay import Change, case_of
from penstock.plan.explain.schedules import MAX_ACTIONS
from penstock.plan.explain.stragglers import Slowdowns, StepSummary, in_words, slowdowns_of, summaries
from penstock.schedule.timeline import Timeline
from penstock.trace.event import TraceData
from penstock.trace.measured import Step, TraceSteps, steps_of_trace

_CROWDED = (
    "ranks had fewer cores than they compute with: what one of them leaves idle another one uses, so a better order or "
    "cut may bring nothing"
)
_TURNS = (
    "no two ranks compute at once, though their order would let them: if one process ran them in turns, the waits "
    "below are no pipeline's; record a run with a process per rank"
)
_EXACT = 1e-7
"""What was measured is never replayed so well."""
_FAR = 0.25
"""A prediction that is wrong by such a share is said to be, first of all."""
_MAX_ADVICE = 6
_APART, _IN_TURNS_AT = 0.01, 0.8
_STEPS = 5
"""A gain has to show in so many steps, if there are as many."""
_UNKNOWN = "nobody knows which ranks do {!r} together: what-ifs leave everything outside the pipeline as it was"


@dataclass(frozen=True, slots=True)
class StageTime:
    """What a microbatch takes on one stage: a rank that is not slow, the mean microbatch.

    Attributes:
        seconds: F + B.
        of_mean: how many times the mean of all stages that is.
        predicted_seconds: what the plan or profile said; None if there is none.
    """

    stage: int
    rank: int
    seconds: float
    of_mean: float
    predicted_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a step took as long as it did.

    Attributes:
        run: all steps; `step` is the one that is explained.
        replay_error: the replay's time of the step less the measured one, as a share of it: what is to be expected of
            the predictions in `changes`.
        worst_error: the largest of that, over all replicas, and the steps that took nearly as long.
        stages: what each takes.
        predicted_seconds: the pipeline by the plan's or profile's costs; None if there is none.
        where: where the time went.
        bubble: the longest wait of the slowest replica.
        changes: what would bring something, ordered by what is certain.
        what_ifs: what was asked for.
        whole_error: by how much the replay of the whole step is wrong, with what ranks do before and after their
            pipelines; 0 if they do nothing, or nobody knows with whom.
        slowdowns: what stragglers cost; None where that cannot be told.
        steps: each step of the run in short.
        even: the slowest replica's schedule if stages, ranks and microbatches were alike and nothing between actions.
        predicted: the same schedule by the plan's or profile's costs; None if there is none.
        origin: "simulated" if the replay is exact and no rank loses any time between actions, else "measured".
    """

    run: TraceSteps
    step: Step
    replay_error: float
    worst_error: float
    stages: tuple[StageTime, ...]
    predicted_seconds: float | None
    where: TimeBreakdown
    bubble: Bubble | None
    changes: tuple[Change, ...]
    what_ifs: tuple[Change, ...]
    whole_error: float
    slowdowns: Slowdowns | None
    steps: tuple[StepSummary, ...]
    even: Timeline
    predicted: Timeline | None
    origin: str

    @property
    def error(self) -> float:
        """The worst that the replay of a pipeline was, as a share of the step."""
        return max(abs(self.replay_error), self.worst_error)

    @property
    def change_error(self) -> float:
        """By how much of the step a predicted gain may be wrong: the worst that any replay was."""
        return max(self.error, self.whole_error)

    @property
    def advice(self) -> tuple[Change, ...]:
        """The first of the changes, as every page and screen lists them."""
        return self.changes[:_MAX_ADVICE]

    @property
    def nothing(self) -> str:
        """What is said where there is no advice."""
        if self.change_error > LEAST_GAIN:
            return f"no significant improvement: every change is within the replay's error, {self.change_error:.1%}"
        return f"no imbalance above {LEAST_GAIN:.1%} of a step"

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics, for JSON."""
        slowest, bubble = self.step.slowest, None if self.bubble is None else asdict(self.bubble)
        if self.bubble is not None and bubble is not None:
            blocked_by = self.bubble.blocked_by
            bubble |= {"before": str(self.bubble.before), "blocked_by": None if blocked_by is None else str(blocked_by)}
        each = [asdict(replace(one, slowest=None)) for one in self.steps]
        for one, slow in zip(each, (one.slowest for one in self.steps), strict=True):
            if slow is not None:
                one["slowest"] = {"replica": slow.replica, "rank": slow.rank, "times": slow.times}
        schedule = slowest.schedule
        return {
            "schedule": schedule.name,
            "ranks": schedule.ranks,
            "stages": [asdict(one) for one in self.stages],
            "microbatches": schedule.microbatches,
            "replicas": len(self.step.replicas),
            "step": self.step.number,
            "steps": {step.number: step.seconds for step in self.run.steps},
            "origin": self.origin,
            "step_seconds": self.step.seconds,
            "pipeline_seconds": self.step.pipeline_seconds,
            "others_seconds": dict(self.step.others),
            "predicted_seconds": self.predicted_seconds,
            "replay_error": self.replay_error,
            "worst_replay_error": self.worst_error,
            "even_seconds": self.where.even_seconds,
            "added_seconds": dict(self.where.added_seconds),
            "slowest_replica": slowest.number,
            "by_rank": [asdict(one) for one in self.where.ranks],
            "largest_bubble": bubble,
            "changes": [one.to_dict() for one in self.advice],
            "what_ifs": [one.to_dict() for one in self.what_ifs],
            "whole_replay_error": self.whole_error,
            "slowdowns": None if self.slowdowns is None else asdict(self.slowdowns),
            "steps_in_words": list(in_words(self.steps)),
            "each_step": each,
            "nothing": "" if self.advice else self.nothing,
            "notes": list(self.run.notes),
        }


def explain(
    recording: TraceData | TraceSteps,
    *,
    step: int | None = None,
    predicted: Prediction | None = None,
    what_ifs: Sequence[str] = (),
) -> Explanation:
    """Explain one step of a run.

    Args:
        recording: what `load_trace` read, or the steps that `steps_of_trace` made of it.
        step: which one; None: the one whose time is the median.
        predicted: what the stages should have taken.
        what_ifs: more to try, as in `schedule=zb-h1`.

    Raises:
        ArgumentError: the trace has no complete step (says what is missing), not this one, or a what-if is unknown.
    """
    run = steps_of_trace(recording) if isinstance(recording, TraceData) else recording
    chosen = run.typical if step is None else next((one for one in run.steps if one.number == step), None)
    if chosen is None:
        known = ", ".join(str(one.number) for one in run.steps)
        raise ArgumentError(f"step={step}: the trace has complete steps {known}")
    if predicted is not None and len(predicted.stage_seconds) != chosen.slowest.schedule.placement.depth:
        raise ArgumentError(
            f"the prediction is for {len(predicted.stage_seconds)} stages, and the run has "
            f"{chosen.slowest.schedule.placement.depth}"
        )
    trial = WhatIfContext.of(chosen, predicted)
    factors, replay, slowest = trial.factors, trial.replay, chosen.slowest
    # Whether no two ranks compute at once, though their order would let them.
    in_turns = chosen.overlap < _APART and replay.free.pipeline_seconds < _IN_TURNS_AT * chosen.pipeline_seconds
    trial = replace(trial, shared=in_turns if run.crowded is None else run.crowded)
    even = replay.free.timeline(slowest.schedule, factors.even[chosen.replicas.index(slowest)])
    planned = None if predicted is None else predicted.timeline(replay.schedules[0])
    ahead = None if planned is None or predicted is None else predicted.pipeline_seconds or planned.makespan_seconds
    replay_error = (replay.pipeline_seconds - chosen.pipeline_seconds) / chosen.seconds if chosen.seconds else 0.0
    alike = [one for one in run.steps if one is not chosen and one.slowest.schedule == slowest.schedule]
    like = sorted(alike, key=lambda one: abs(one.seconds - chosen.seconds))[: _STEPS - 1]
    worst = 0.0
    for one in (chosen, *like):
        pairs = zip(case_of(one, seconds_of(one.replicas)).spans, one.replicas, strict=True)
        worst = max([worst, *(abs(span - own.span_seconds) / one.seconds for span, own in pairs if one.seconds)])
    outside = 0.0 if replay.around is None else abs(replay.step_seconds - chosen.seconds) / chosen.seconds
    error = max(abs(replay_error), worst, outside)
    shared = _CROWDED if run.crowded else _TURNS if trial.shared else ""
    doubts = [] if predicted is None or ahead is None else _doubts(predicted, trial, ahead)
    unknown = _UNKNOWN.format(chosen.unknown[0]) if chosen.unknown else ""
    return Explanation(
        replace(run, notes=tuple(filter(None, [shared, *doubts, *run.notes, unknown]))),
        chosen,
        replay_error,
        worst,
        _stages(trial),
        ahead,
        breakdown_of(chosen, factors, replay),
        bubble_of(slowest, even),
        suggestions([trial, *_others(trial, like)], error),
        tuple(what_if(trial, text, error) for text in what_ifs),
        outside,
        slowdowns_of(run, chosen),
        summaries(run),
        even,
        planned,
        "measured" if error > _EXACT or replay.host.any() else "simulated",
    )


def _others(trial: WhatIfContext, like: Sequence[Step]) -> list[WhatIfContext]:
    """Return the trials in which a certain change must save time, too: the step without outliers, and the steps like
    it, or if there are none its own microbatches in other orders."""
    step, schedule, predicted = trial.step, trial.slowest.schedule, trial.predicted
    if sum(map(len, schedule.rows)) * len(step.replicas) > MAX_ACTIONS // _STEPS:
        return []
    rolls = [] if like else [schedule.microbatches * part // _STEPS for part in range(1, _STEPS)]
    return [
        WhatIfContext.of(step, predicted, usual=True),
        *(WhatIfContext.of(one, predicted) for one in like),
        *(WhatIfContext.of(step, predicted, rolled=rolled) for rolled in rolls),
    ]


def _doubts(predicted: Prediction, trial: WhatIfContext, seconds: float) -> list[str]:
    """Return the notes on how far off the prediction is, or why it may be of another run."""
    took, found = trial.step.pipeline_seconds, [predicted.note] if predicted.note else []
    if seconds and took and abs(seconds / took - 1) >= _FAR:
        why = "" if found else ": it was made with other threads, rows or devices, or other work ran on the machine"
        found.insert(0, f"the pipeline took {took / seconds:.2f} times what was predicted{why}")
    if not predicted.guessed:
        return found
    names = ", ".join(predicted.units[start].name for start in predicted.starts[1:])
    guess = f"the run's cuts are taken to be the profile's own best ({names}); --cuts says otherwise"
    measured = [float(total) for total in trial.totals]
    if predicted.unlikely(measured):
        ratios = [real / was for real, was in zip(measured, predicted.stage_seconds, strict=False) if was]
        wrong = f"{min(ratios):.2f} to {max(ratios):.2f} times what was predicted"
        guess += f". They were probably others: stages take {wrong}, so the prediction below is not of this run"
    return [*found, guess]


def _stages(trial: WhatIfContext) -> tuple[StageTime, ...]:
    totals, known = trial.totals, trial.predicted
    mean, placement = float(totals.mean()), trial.slowest.schedule.placement
    return tuple(
        StageTime(
            stage,
            placement.rank_of[stage],
            float(total),
            float(total) / mean if mean else 1.0,
            None if known is None else known.stage_seconds[stage % placement.depth],
        )
        for stage, total in enumerate(totals)
    )
