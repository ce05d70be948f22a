"""What would make a step faster, and by how much: each change is tried on the replay of the step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock._base.errors import ArgumentError
from penstock._base.formatting import pluralize
from penstock.costs import OPTIMIZER_VALUES
from penstock.plan.explain.factors import Factors, fit_factors
from penstock.plan.explain.predicted import Prediction
from penstock.plan.explain.replay import Change, Replay, build_replay
from penstock.plan.explain.schedules import NO_PRICE, Price, change_schedule, double_microbatches, other_schedules
from penstock.plan.explain.stragglers import slow_ranks
from penstock.schedule.describe import WORDS, Kind
from penstock.simulate.computations import COMPUTE, Floats
from penstock.simulate.memory_use import memory_after_actions
from penstock.trace.measured import Replica, Step
from penstock.trace.runs.about import RunInfo

LARGE_ERROR = 0.25
"""A prediction that is wrong by this fraction is reported in the first note, and its costs are not relied on."""
MIN_GAIN = 0.005
"""Changes that save a smaller fraction of a step than this are not listed."""
_MIN_SHARE = 1 / 3
"""A gain that rests on assumptions has a ± only if this fraction of it is certain. Without a ±, it is advice only if
the expected gain is at least this fraction of the maximum."""
_UNEVEN_FACTOR = 1.05
_OUTLIER_FACTOR = 1.3
"""An action is an outlier if it takes this many times what its stage, rank and microbatch explain."""
_MAX_RANKS = 3


@dataclass(frozen=True, slots=True)
class WhatIfContext:
    """A measured step, what explains its times, and its replay: what changes are tried on. `shared`: its ranks had
    fewer cores than they need, so that what one of them leaves idle another one uses: nothing is certain then. `about`:
    what is known of its run."""

    step: Step
    factors: Factors
    replay: Replay
    predicted: Prediction | None = None
    shared: bool = False
    about: RunInfo | None = None

    @classmethod
    def from_step(
        cls, step: Step, predicted: Prediction | None = None, *, rolled: int = 0, typical: bool = False
    ) -> WhatIfContext:
        """Build the trial of a step. `rolled`: as if its microbatches had come this many places later; `typical`: as if
        none of its actions had been an outlier."""
        factors = fit_factors(step.replicas)
        seconds = np.roll(factors.by_microbatch if typical else factors.seconds, rolled, axis=3)
        factors = replace(factors, seconds=seconds, microbatch=np.roll(factors.microbatch, rolled, axis=1))
        return cls(step, factors, build_replay(step, seconds), predicted)

    @property
    def slowest(self) -> Replica:
        return self.step.slowest

    def replica_suffix(self, index: int) -> str:
        """Return " of replica N" if there are several replicas, else nothing."""
        return f" of replica {self.step.replicas[index].number}" if len(self.step.replicas) > 1 else ""

    def gains(self, change: Change) -> tuple[float, ...]:
        """Return what a change saves, as shares of the step: as expected, and at the ends of its assumptions. For
        another order one of these is whether messages travel while their ranks compute."""
        pairs = [(self.replay.step_seconds, replay) for replay in change.cases]
        if change.cases[0].schedules != self.replay.schedules:
            pairs.insert(1, (self.replay.blocking_sends.step_seconds, change.cases[0].blocking_sends))
        return tuple((t - replay.step_seconds) / self.step.seconds if self.step.seconds else 0.0 for t, replay in pairs)

    def expected_gain(self, change: Change) -> float:
        """Return what a change usually brings, as a share of the step. If ranks share cores, added work costs its own
        time, since what one of them leaves idle another one uses; stages made even add a trifle by rounding."""
        gain, added = min(self.gains(change)[:2]), change.cases[0].work_seconds - self.replay.work_seconds
        return -added / self.step.seconds if self.shared and added > MIN_GAIN * self.step.seconds > 0 else gain

    def evaluate(self, change: Change, error: float, elsewhere: Sequence[float] = ()) -> Change:
        """Return the change with its claim: the expected saving, with the errors of the replay, of the assumptions and
        of other steps; or, if it was not measured or assumptions leave little of it certain, at most what it can save:
        no step is shorter than the work of its busiest rank."""
        gains, measured = self.gains(change), change.measured and not self.shared
        gain, width = gains[0], error + max(abs(value - gains[0]) for value in (*gains, *elsewhere))
        if measured and len(change.cases) > 1 and width > (1 - _MIN_SHARE) * abs(gain):
            change, measured = change.assuming(change.cases, "little of it is certain", measured=False), False
        if not measured:
            shortest = min(replay.busiest_seconds for replay in change.cases)
            max_gain = 1 - shortest / self.step.seconds if self.step.seconds else 1.0
            gain, width = min(max_gain, max((*gains, *elsewhere)) + error), 0.0
        seconds = self.step.seconds * (1 - gain)
        return replace(change, step_seconds=seconds, gain=gain, error=width, measured=measured)

    def fits_in_memory(self, change: Change) -> bool:
        """Whether another order keeps within the run's memory limit, by what it holds from forward to backward, and the
        parameters with Adam's two values; True if that is not known."""
        run, schedule = self.about, change.cases[0].schedules[0]
        if run is None or run.memory_limit is None:
            return True
        of_stages = (run.activation_bytes, run.parameter_bytes, run.gradient_bytes)
        if any(len(sizes) != schedule.placement.depth for sizes in of_stages):
            return True
        sizes = zip(run.parameter_bytes, run.gradient_bytes, strict=True)
        static = [kept + trained + OPTIMIZER_VALUES * min(kept, trained) for kept, trained in sizes]
        return max(map(max, memory_after_actions(schedule, run.activation_bytes, static))) <= run.memory_limit

    @property
    def price(self) -> tuple[Price, ...] | str:
        """What splitting a backward costs, by a profile whose stages take what they did; or why it is not known."""
        if self.predicted is None or self.predicted.price is None:
            return NO_PRICE
        took, expected = self.totals[: len(self.predicted.stage_seconds)].sum(), sum(self.predicted.stage_seconds)
        if abs(took - expected) < LARGE_ERROR * took:
            return self.predicted.price
        off = f" by a factor of {took / expected:.2f}" if expected else ""
        return f"the profile is not used, since its times are off{off}"

    @property
    def totals(self) -> Floats:
        """The seconds of a microbatch on each stage, on a rank that is not slow."""
        return np.asarray(np.nansum(self.factors.typical, axis=0))

    @property
    def outlier_seconds(self) -> Floats:
        """The excess of outlier actions over their typical time, in seconds; 0 for all others."""
        return np.asarray(np.nan_to_num(self.factors.seconds) * (1 - 1 / self.outlier_factors))

    @property
    def outlier_factors(self) -> Floats:
        """The factor by which each outlier action exceeds its typical time; 1 for all others."""
        factors = np.nan_to_num(self.factors.residual, nan=1.0)
        return np.where(factors >= _OUTLIER_FACTOR, factors, 1.0)

    def scale(self, replay: Replay, scale: Floats) -> Replay:
        """Scale the typical work. The excess of outliers has other causes, and so stays."""
        return replay.with_seconds((replay.seconds - self.outlier_seconds) * scale + self.outlier_seconds)

    def rescale_stages(self, replay: Replay, totals: Floats, before: Floats) -> Replay:
        """Scale each stage from one total to another, all ops alike."""
        scale = np.where(before > 0, totals / np.where(before > 0, before, 1.0), 1.0)
        return self.scale(replay, scale[None, None, :, None])

    def even_stages(self, replay: Replay) -> Replay:
        """Give all stages their mean time."""
        return self.rescale_stages(replay, np.full_like(self.totals, self.totals.mean()), self.totals)

    def equal_microbatches(self, replay: Replay) -> Replay:
        """Make all microbatches alike."""
        return self.scale(replay, 1 / self.factors.microbatch[:, None, None, :])

    def without_outliers(self, replay: Replay) -> Replay:
        """Give outlier actions their usual time."""
        return replay.with_seconds(replay.seconds - self.outlier_seconds)


def suggestions(trials: Sequence[WhatIfContext], error: float) -> tuple[Change, ...]:
    """Return the changes that save time, ordered by the saving that is certain.

    A gain counts as far as every one of the steps shows it, and the replay's error leaves it: what may be nothing is no
    advice. What nobody measured, or what assumptions leave little of, is advice only if it usually brings something,
    and comes after what is certain, last if it may be a loss.

    Args:
        trials: the step that is explained, and others of its run.
        error: of the replay.
    """
    first, entries = trials[0], []
    changes = [*_changes(first)]
    certain_keys = {(c.kind, c.key) for c in changes if c.measured and first.evaluate(c, error).certain > 0}
    confirming = [
        {(c.kind, c.key): c for c in _changes(trial) if (c.kind, c.key) in certain_keys} for trial in trials[1:]
    ]
    for candidate in changes:
        key = candidate.kind, candidate.key
        elsewhere = [
            trial.gains(by_key[key])[0] if key in by_key else 0.0
            for trial, by_key in zip(trials[1:], confirming, strict=True)
            if key in certain_keys
        ]
        change, expected = first.evaluate(candidate, error, elsewhere), first.expected_gain(candidate)
        if change.kind == "microbatches" and change.certain >= MIN_GAIN:  # but not that the cause can be taken away
            change = first.evaluate(replace(candidate, measured=False), error)
        threshold = max(MIN_GAIN, error, 0.0 if change.measured else _MIN_SHARE * (change.gain - error))
        if (change.certain >= MIN_GAIN or not change.measured) and expected >= threshold:
            loses = min(first.gains(candidate)) - error < 0
            entries.append((not change.measured, not change.measured and loses, -change.certain, -expected, change))
    entries.sort(key=lambda entry: entry[:4])
    best: list[Change] = []
    for *_, change in entries:  # of schedules, one that needs no more memory than those before
        before = (candidate.memory for candidate in best if candidate.kind == "schedule")
        if change.kind != "schedule" or all(change.memory < memory for memory in before):
            best.append(change)
    return tuple(best)


def _changes(trial: WhatIfContext) -> Iterator[Change]:
    yield from _suggest_cut(trial)
    yield from _suggest_ranks(trial)
    yield from _suggest_microbatches(trial)
    yield from _suggest_outliers(trial)
    yield from filter(trial.fits_in_memory, other_schedules(trial.replay, trial.factors.rank, trial.price))
    run = trial.about
    rows = None if run is None else run.rows // (run.replicas * run.microbatches)
    yield from double_microbatches(trial.replay, rows)


def _suggest_cut(trial: WhatIfContext) -> Iterator[Change]:
    totals, placement = trial.totals, trial.slowest.schedule.placement
    mean = float(totals.mean())
    stage = int(np.argmax(totals))
    if not mean or totals[stage] < _UNEVEN_FACTOR * mean:
        return
    finding = f"stage {stage} takes {totals[stage] / mean:.2f} times the mean (rank {placement.rank_of[stage]})"
    prediction = trial.predicted
    if prediction is None or not prediction.units:
        missing = "pass --profile to see which cuts exist"
    elif prediction.unlikely(list(totals)):
        missing = "pass --cuts to see which cuts exist"
    else:
        starts, *ends = prediction.recut([float(total) for total in totals])
        moves = [
            f"begin stage {index} at {prediction.units[after].name} instead of {prediction.units[before].name}"
            for index, (before, after) in enumerate(zip(prediction.starts, starts, strict=True))
            if before != after
        ]
        cases = tuple(trial.rescale_stages(trial.replay, np.array(new), totals) for new in ends)
        note = _add_doubt(trial, "units as profiled, scaled to what was measured")
        change = Change("cut", f"{finding}: {'; '.join(moves)}", cases, note)
        is_off = prediction.is_off(list(totals))
        if moves and not (is_off and trial.expected_gain(change) < MIN_GAIN):
            yield change
            return
        if not is_off:
            return
        ratios = "{:.2f} to {:.2f}".format(*prediction.ratios(list(totals)))
        missing = f"the profile knows no better cut, but stages took {ratios} times what it says"
    note = _add_doubt(trial, f"if stages were even; {missing}")
    cases = (trial.even_stages(trial.replay),)
    yield Change("cut", f"{finding}: move layers to other stages", cases, note, measured=False, key="even")


def _add_doubt(trial: WhatIfContext, note: str) -> str:
    """Extend a note by the doubt that applies if each op of a stage ran once: a single interruption explains as
    much."""
    single = trial.slowest.schedule.microbatches == 1
    return "; ".join(filter(None, [note, "of one microbatch, a single interruption looks the same" if single else ""]))


def _suggest_ranks(trial: WhatIfContext) -> Iterator[Change]:
    """Yield a change for the slow ranks that lose most."""
    factors, numbers = trial.factors, [replica.number for replica in trial.step.replicas]
    for slow_rank in slow_ranks(trial.step, factors)[:_MAX_RANKS]:
        scale, index = np.ones_like(factors.rank), numbers.index(slow_rank.replica)
        scale[index][slow_rank.slow] /= factors.rank[index][slow_rank.slow]
        ops = ", ".join(
            f"{WORDS[Kind.of(op)]}s {factors.rank[index][row][slow_rank.slow[row]].max():.1f}x"
            for row, op in enumerate(COMPUTE)
            if slow_rank.slow[row].any()
        )
        remedy = "give it less data, or check its host" if slow_rank.rank is None else "check or replace its device"
        text = f"{slow_rank.who} is slow ({ops} its replicas'): {remedy}"
        replay = trial.scale(trial.replay, scale[..., None])
        yield Change("rank", text, (replay,), _add_doubt(trial, ""), key=slow_rank.who)


def _suggest_microbatches(trial: WhatIfContext) -> Iterator[Change]:
    factor = trial.factors.microbatch
    if factor.max() == 1.0:
        return
    replica, microbatch = np.unravel_index(int(np.argmax(factor)), factor.shape)
    suffix = trial.replica_suffix(int(replica))
    text = (
        f"microbatches are unequal (microbatch {microbatch}{suffix} takes {factor.max():.2f} times the mean): if their "
        "data are, give each as much work"
    )
    note = "the same work in sum, and if the data are the cause: one step does not tell"
    yield Change("microbatches", text, (trial.equal_microbatches(trial.replay),), note)


def _suggest_outliers(trial: WhatIfContext) -> Iterator[Change]:
    factors = trial.outlier_factors
    slow = factors > 1.0
    if not slow.any():
        return
    excess = trial.outlier_seconds
    replica, op, stage, microbatch = (int(index) for index in np.unravel_index(int(np.argmax(excess)), excess.shape))
    name = f"{stage}{COMPUTE[op].value}{microbatch}{trial.replica_suffix(replica)}"
    text = (
        f"{pluralize(int(slow.sum()), 'action')} took {_OUTLIER_FACTOR} times what is usual or more, {name} most "
        f"({factors[replica, op, stage, microbatch]:.1f}x): check for a first use, compilation, data loading or other "
        "work then"
    )
    note = "none slower than is usual there; one step does not tell the cause"
    yield Change("actions", text, (trial.without_outliers(trial.replay),), note, measured=False)


# -- what if ----------------------------------------------------------------------------------------------------------

WHAT_IFS = (
    "schedule=NAME (or NAME/CHUNKS), cut=even, cut=2:0.1 (a tenth of stage 2 goes to stage 1; below 0, of 1 to 2), "
    "stragglers=none, rank=N (of any replica), microbatches=equal, actions=usual, link=0.5 (transfers take half "
    "as long), host=none; several with commas between them"
)


def what_if(trial: WhatIfContext, text: str, error: float = 0.0) -> Change:
    """Return the claim of a hypothetical change.

    Args:
        text: changes as in `WHAT_IFS`. Another schedule is made last, and before it slow actions become usual, once.
        error: of the replay.

    Raises:
        ArgumentError: it is none of them.
    """
    change = Change("what if", text, (trial.replay,))
    parts = [part.strip().partition("=") for part in text.split(",")]
    outliers = [part for part in parts if part[0] == "actions"]
    remaining = [part for part in parts if part[0] != "actions"]
    for name, _, value in sorted([*remaining, *dict.fromkeys(outliers)], key=lambda part: part[0] == "schedule"):
        change = _apply(trial, change, name, value)
    return trial.evaluate(change, error)


def _apply(trial: WhatIfContext, change: Change, name: str, value: str) -> Change:
    """Apply one more change, and note what it assumes."""
    (replay,), slow, placement = change.cases[:1], trial.factors.rank, trial.slowest.schedule.placement
    note, measured = "", True
    match name, value:
        case "schedule", _ if value:
            rescheduled = change_schedule(replay, value, slow, trial.price)
            return change.assuming(rescheduled.cases, rescheduled.note, measured=rescheduled.measured)
        case "cut", "even":
            changed, measured = trial.even_stages(replay), False
        case "cut", _ if (move := _CUT.fullmatch(value)) and 0 < int(move[1]) < placement.depth:
            changed, note = _move_cut(trial, replay, int(move[1]), float(move[2])), _PROPORTIONS
        case "stragglers", "none":
            changed = trial.scale(replay, 1 / slow[..., None])
        case "rank", _ if value.isdigit() and int(value) < placement.ranks:
            one_rank = np.ones_like(slow)
            stages = list(placement.by_rank[int(value)])
            one_rank[:, :, stages] = slow[:, :, stages]
            changed = trial.scale(replay, 1 / one_rank[..., None])
        case "microbatches", "equal":
            changed, note = trial.equal_microbatches(replay), "the same work in sum"
        case "actions", "usual":
            changed, measured = trial.without_outliers(replay), False
        case "link", _ if _is_factor(value):
            changed, measured = replay.with_links(float(value)), False
        case "host", "none":
            changed, measured = replay.without_host(), False
        case _:
            forms = {
                "cut": f"cut=even, or cut=2:0.1 with a stage of 1 to {placement.depth - 1} and a share of -1 to 1",
                "rank": f"a rank of 0 to {placement.ranks - 1}",
                "link": "a factor for transfer times, 0 or more",
            }
            size = f"this step has {pluralize(placement.depth, 'stage')} on {pluralize(placement.ranks, 'rank')}"
            expected = f"{forms[name]}; {size}" if value and name in forms else WHAT_IFS
            raise ArgumentError(f"what-if {name}{'=' if value else ''}{value}: expected {expected}")
    return change.assuming((changed,), note, measured=measured)


_CUT = re.compile(r"([0-9]{1,4}):(-?(?:0?\.[0-9]+|0|1))")
_PROPORTIONS = "moved work is forward and backward in the proportion of the stage that takes it"


def _move_cut(trial: WhatIfContext, replay: Replay, stage: int, fraction: float) -> Replay:
    """Move the cut before a stage: later, by a fraction of its work, or below 0 earlier, by that of the stage
    before."""
    current, replayed = (np.nansum(r.seconds - trial.outlier_seconds, axis=(0, 1, 3)) for r in (replay, trial.replay))
    totals = trial.totals * current / np.where(replayed > 0, replayed, 1.0)
    moved = totals.copy()
    for upper in range(stage, len(totals), trial.slowest.schedule.placement.depth):  # in each copy of the model
        amount = fraction * totals[upper if fraction > 0 else upper - 1]
        moved[upper - 1] += amount
        moved[upper] -= amount
    return trial.rescale_stages(replay, moved, totals)


def _is_factor(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False
