"""Explains a run: where the time of a step went, why, and what to change first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock._base.errors import ArgumentError
from penstock.plan.explain.breakdown import Bubble, TimeBreakdown, break_down, find_largest_bubble
from penstock.plan.explain.changes import LARGE_ERROR, MIN_GAIN, WhatIfContext, suggestions, what_if
from penstock.plan.explain.factors import action_seconds
from penstock.plan.explain.predicted import Prediction
from penstock.plan.explain.replay import Change, build_replay
from penstock.plan.explain.schedules import MAX_ACTIONS
from penstock.plan.explain.stragglers import Slowdowns, StepSummary, describe, find_slowdowns, summarize_steps
from penstock.schedule.timeline import Timeline
from penstock.trace.event import TraceData
from penstock.trace.measured import Step, TraceSteps, steps_of_trace

_CROWDED = (
    "ranks had fewer cores than they compute with: what one of them leaves idle another one uses, so a better order or "
    "cut may bring nothing"
)
_SERIALIZED = (
    "no two ranks compute at once, though their order would let them: if one process ran them in turns, the waits "
    "below are not the pipeline's; record a run with a process per rank"
)
_EXACT_ERROR = 1e-7
"""Measured steps are never replayed with a smaller error."""
_MAX_ADVICE = 6
_MIN_OVERLAP, _SERIAL = 0.01, 0.8
_MAX_STEPS = 5
"""A gain is confirmed in up to this many steps."""
_UNKNOWN_GROUP = "it is unknown which ranks do {!r} together: what-ifs leave everything outside the pipeline as it was"


@dataclass(frozen=True, slots=True)
class StageTime:
    """What a microbatch takes on one stage: a rank that is not slow, the mean microbatch.

    Attributes:
        seconds: F + B.
        of_mean: how many times the mean of all stages that is.
        predicted_seconds: what the plan or profile predicted; None if there is none.
    """

    stage: int
    rank: int
    seconds: float
    of_mean: float
    predicted_seconds: float | None = None

    @property
    def of_predicted(self) -> float:
        """How many times the predicted time it takes; infinite if that is 0."""
        if self.predicted_seconds:
            return self.seconds / self.predicted_seconds
        return math.inf if self.seconds else 1.0


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
        """The largest error of a replayed pipeline, as a fraction of the step."""
        return max(abs(self.replay_error), self.worst_error)

    @property
    def change_error(self) -> float:
        """The largest error of any replay, as a fraction of the step: predicted gains may be wrong by this much."""
        return max(self.error, self.whole_error)

    @property
    def advice(self) -> tuple[Change, ...]:
        """The first of the changes, as every page and screen lists them."""
        return self.changes[:_MAX_ADVICE]

    @property
    def nothing(self) -> str:
        """The text to show where there is no advice."""
        if self.change_error > MIN_GAIN:
            return f"no significant improvement: every change is within the replay's error, {self.change_error:.1%}"
        return f"no change was found that saves {MIN_GAIN:.1%} of a step or more"

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics, for JSON."""
        slowest, bubble = self.step.slowest, None if self.bubble is None else asdict(self.bubble)
        if self.bubble is not None and bubble is not None:
            blocked_by = self.bubble.blocked_by
            bubble |= {"before": str(self.bubble.before), "blocked_by": None if blocked_by is None else str(blocked_by)}
        steps = [asdict(replace(summary, slowest=None)) for summary in self.steps]
        for entry, slow in zip(steps, (summary.slowest for summary in self.steps), strict=True):
            if slow is not None:
                entry["slowest"] = {"replica": slow.replica, "rank": slow.rank, "times": slow.times}
        schedule = slowest.schedule
        return {
            "schedule": schedule.name,
            "ranks": schedule.ranks,
            "stages": [asdict(stage) for stage in self.stages],
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
            "by_rank": [asdict(rank) for rank in self.where.ranks],
            "largest_bubble": bubble,
            "changes": [change.to_dict() for change in self.advice],
            "what_ifs": [change.to_dict() for change in self.what_ifs],
            "whole_replay_error": self.whole_error,
            "slowdowns": None if self.slowdowns is None else asdict(self.slowdowns),
            "steps_in_words": list(describe(self.steps)),
            "each_step": steps,
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
    chosen = run.typical if step is None else next((s for s in run.steps if s.number == step), None)
    if chosen is None:
        numbers = ", ".join(str(s.number) for s in run.steps)
        raise ArgumentError(f"step={step}: the trace has complete steps {numbers}")
    if predicted is not None and len(predicted.stage_seconds) != chosen.slowest.schedule.placement.depth:
        raise ArgumentError(
            f"the prediction is for {len(predicted.stage_seconds)} stages, and the run has "
            f"{chosen.slowest.schedule.placement.depth}"
        )
    trial = WhatIfContext.from_step(chosen, predicted)
    factors, replay, slowest = trial.factors, trial.replay, chosen.slowest
    # Whether no two ranks compute at once, though their order would let them.
    serialized = (
        chosen.overlap < _MIN_OVERLAP and replay.without_gaps.pipeline_seconds < _SERIAL * chosen.pipeline_seconds
    )
    trial = replace(trial, shared=serialized if run.crowded is None else run.crowded, about=run.about)
    even = replay.without_gaps.timeline(slowest.schedule, factors.even[chosen.replicas.index(slowest)])
    planned = None if predicted is None else predicted.timeline(replay.schedules[0])
    forecast = None if planned is None or predicted is None else predicted.pipeline_seconds or planned.makespan_seconds
    replay_error = (replay.pipeline_seconds - chosen.pipeline_seconds) / chosen.seconds if chosen.seconds else 0.0
    alike = [s for s in run.steps if s is not chosen and s.slowest.schedule == slowest.schedule]
    similar = sorted(alike, key=lambda s: abs(s.seconds - chosen.seconds))[: _MAX_STEPS - 1]
    worst = 0.0
    for other in (chosen, *similar):
        pairs = zip(build_replay(other, action_seconds(other.replicas)).spans, other.replicas, strict=True)
        worst = max([worst, *(abs(span - r.span_seconds) / other.seconds for span, r in pairs if other.seconds)])
    whole_error = 0.0 if replay.around is None else abs(replay.step_seconds - chosen.seconds) / chosen.seconds
    error = max(abs(replay_error), worst, whole_error)
    shared = _CROWDED if run.crowded else _SERIALIZED if trial.shared else ""
    warnings = [] if predicted is None or forecast is None else _prediction_notes(predicted, trial, forecast)
    unknown = _UNKNOWN_GROUP.format(chosen.unknown[0]) if chosen.unknown else ""
    return Explanation(
        replace(run, notes=tuple(filter(None, [shared, *warnings, *run.notes, unknown]))),
        chosen,
        replay_error,
        worst,
        _stage_times(trial),
        forecast,
        break_down(chosen, factors, replay),
        find_largest_bubble(slowest, even),
        suggestions([trial, *_confirming_trials(trial, similar)], error),
        tuple(what_if(trial, text, error) for text in what_ifs),
        whole_error,
        find_slowdowns(run, chosen),
        summarize_steps(run),
        even,
        planned,
        "measured" if error > _EXACT_ERROR or replay.host.any() else "simulated",
    )


def _confirming_trials(trial: WhatIfContext, similar: Sequence[Step]) -> list[WhatIfContext]:
    """Return the trials in which a certain change must save time, too: the step without outliers, and the steps like
    it, or if there are none its own microbatches in other orders."""
    step, schedule, predicted = trial.step, trial.slowest.schedule, trial.predicted
    if sum(map(len, schedule.rows)) * len(step.replicas) > MAX_ACTIONS // _MAX_STEPS:
        return []
    rolls = [] if similar else [schedule.microbatches * part // _MAX_STEPS for part in range(1, _MAX_STEPS)]
    return [
        WhatIfContext.from_step(step, predicted, typical=True),
        *(WhatIfContext.from_step(other, predicted) for other in similar),
        *(WhatIfContext.from_step(step, predicted, rolled=rolled) for rolled in rolls),
    ]


def _prediction_notes(predicted: Prediction, trial: WhatIfContext, seconds: float) -> list[str]:
    """Return the notes on how far off the prediction is, or why it may be of another run."""
    measured_seconds, notes = trial.step.pipeline_seconds, [predicted.note] if predicted.note else []
    if seconds and measured_seconds and abs(seconds / measured_seconds - 1) >= LARGE_ERROR:
        unchecked = f"it may be of other {predicted.unchecked}, or " if predicted.unchecked else ""
        reason = "" if notes else f": {unchecked}other work may have run on the machine"
        notes.insert(0, f"the pipeline took {measured_seconds / seconds:.2f} times what was predicted{reason}")
    if not predicted.guessed:
        return notes
    names = ", ".join(predicted.units[start].name for start in predicted.starts[1:])
    guess = f"the run's cuts are taken to be the profile's own best ({names}); --cuts says otherwise"
    if predicted.unlikely(list(trial.totals)):
        wrong = "{:.2f} to {:.2f} times what was predicted".format(*predicted.ratios(list(trial.totals)))
        guess += f". They were probably others: stages take {wrong}, so the prediction below is not of this run"
    return [*notes, guess]


def _stage_times(trial: WhatIfContext) -> tuple[StageTime, ...]:
    totals, prediction = trial.totals, trial.predicted
    mean, placement = float(totals.mean()), trial.slowest.schedule.placement
    return tuple(
        StageTime(
            stage,
            placement.rank_of[stage],
            float(total),
            float(total) / mean if mean else 1.0,
            None if prediction is None else prediction.stage_seconds[stage % placement.depth],
        )
        for stage, total in enumerate(totals)
    )
