"""What would make a step faster, and by how much: each change is tried on the replay of the step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock._base.errors import ArgumentError
from penstock._base.words import counted
from penstock.plan.explain.factors import Factors, factors_of
from penstock.plan.explain.predicted import Prediction
from penstock.plan.explain.replay import Case, Change, case_of
from penstock.plan.explain.schedules import Price, another, other_schedules, twice_the_microbatches
from penstock.plan.explain.stragglers import slow_ranks
from penstock.schedule.describe import WORDS, Kind
from penstock.simulate.computations import COMPUTE, Floats
from penstock.trace.measured import Replica, Step

LEAST_GAIN = 0.005
"""Changes that bring less of a step than this are not worth a line."""
_LEAST_SHARE = 1 / 3
"""A gain that rests on assumptions has a ± only if so much of it is certain. Without a ±, it is advice only if it
usually brings so much of what it brings at most."""
_UNEVEN = 1.05
_OWN = 1.3
"""An action is called slow by itself if it takes so many times what explains it."""
_MAX_RANKS = 3
_SAME_WORK = "the same work in sum"


@dataclass(frozen=True, slots=True)
class WhatIfContext:
    """A measured step, what explains its times, and its replay: what changes are tried on. `shared`: its ranks had
    fewer cores than they need, so that what one of them leaves idle another one uses: nothing is certain then.
    """

    step: Step
    factors: Factors
    replay: Case
    predicted: Prediction | None = None
    shared: bool = False

    @classmethod
    def of(
        cls,
        step: Step,
        predicted: Prediction | None = None,
        *,
        shared: bool = False,
        rolled: int = 0,
        usual: bool = False,
    ) -> WhatIfContext:
        """Build the trial of a step. `rolled`: as if its microbatches had come this many places later; `usual`: as if
        none of its actions had been an outlier."""
        factors = factors_of(step.replicas)
        seconds = np.roll(factors.by_microbatch if usual else factors.seconds, rolled, axis=3)
        factors = replace(factors, seconds=seconds, microbatch=np.roll(factors.microbatch, rolled, axis=1))
        return cls(step, factors, case_of(step, seconds), predicted, shared)

    @property
    def slowest(self) -> Replica:
        return self.step.slowest

    def of_replica(self, place: int) -> str:
        """Return " of replica N" if there are several replicas, else nothing."""
        return f" of replica {self.step.replicas[place].number}" if len(self.step.replicas) > 1 else ""

    def gains(self, change: Change) -> tuple[float, ...]:
        """Return what a change saves, as shares of the step: as expected, and at the ends of its assumptions. For
        another order one of these is whether messages travel while their ranks compute."""
        pairs = [(self.replay.step_seconds, case) for case in change.cases]
        if change.cases[0].schedules != self.replay.schedules:
            pairs.insert(1, (self.replay.sending.step_seconds, change.cases[0].sending))
        return tuple((now - case.step_seconds) / self.step.seconds if self.step.seconds else 0.0 for now, case in pairs)

    def expected_gain(self, change: Change) -> float:
        """Return what a change usually brings, as a share of the step. If ranks share cores, added work costs its own
        time, since what one of them leaves idle another one uses."""
        gain, added = min(self.gains(change)[:2]), change.cases[0].work_seconds - self.replay.work_seconds
        return -added / self.step.seconds if self.shared and added > 0 and self.step.seconds else gain

    def tried(self, change: Change, error: float, elsewhere: Sequence[float] = ()) -> Change:
        """Return the change with its claim: the expected saving, with the errors of the replay, of the assumptions and
        of other steps; or, if it was not measured or assumptions leave little of it certain, at most what it can save:
        no step is shorter than the work of its busiest rank."""
        gains, measured = self.gains(change), change.measured and not self.shared
        gain, width = gains[0], error + max(abs(one - gains[0]) for one in (*gains, *elsewhere))
        if measured and len(change.cases) > 1 and width > (1 - _LEAST_SHARE) * abs(gain):
            change, measured = change.assuming(change.cases, "little of it is certain", measured=False), False
        if not measured:
            least = min(case.busiest_seconds for case in change.cases)
            most = 1 - least / self.step.seconds if self.step.seconds else 1.0
            gain, width = min(most, max((*gains, *elsewhere)) + error), 0.0
        seconds = self.step.seconds * (1 - gain)
        return replace(change, step_seconds=seconds, gain=gain, error=width, measured=measured)

    @property
    def price(self) -> tuple[Price, ...] | None:
        """What the profile says that splitting a backward costs."""
        return self.predicted.price if self.predicted else None

    @property
    def totals(self) -> Floats:
        """What a microbatch takes on each stage, of a rank that is not slow."""
        return np.asarray(np.nansum(self.factors.typical, axis=0))

    @property
    def excess(self) -> Floats:
        """What actions that are slow by themselves take beyond what is usual, in seconds; 0 for all others."""
        return np.asarray(np.nan_to_num(self.factors.seconds) * (1 - 1 / self.own))

    @property
    def own(self) -> Floats:
        """By how much each action that is slow by itself is slower than is usual; 1 for all others."""
        own = np.nan_to_num(self.factors.own, nan=1.0)
        return np.where(own >= _OWN, own, 1.0)

    def scaled(self, case: Case, scale: Floats) -> Case:
        """Scale the typical work. The excess of outliers has other causes, and so stays."""
        return case.with_seconds((case.seconds - self.excess) * scale + self.excess)

    def moved(self, case: Case, totals: Floats, before: Floats) -> Case:
        """Scale each stage from one total to another, all ops alike."""
        scale = np.where(before > 0, totals / np.where(before > 0, before, 1.0), 1.0)
        return self.scaled(case, scale[None, None, :, None])

    def even(self, case: Case) -> Case:
        """Give all stages their mean time."""
        return self.moved(case, np.full_like(self.totals, self.totals.mean()), self.totals)

    def equal(self, case: Case) -> Case:
        """Make all microbatches alike."""
        return self.scaled(case, 1 / self.factors.microbatch[:, None, None, :])

    def usual(self, case: Case) -> Case:
        """Give outlier actions their usual time."""
        return case.with_seconds(case.seconds - self.excess)


def suggestions(trials: Sequence[WhatIfContext], error: float) -> tuple[Change, ...]:
    """Return the changes that save time, ordered by the saving that is certain.

    A gain counts as far as every one of the steps shows it, and the replay's error leaves it: what may be nothing is no
    advice. What nobody measured, or what assumptions leave little of, is advice only if it usually brings something,
    and comes after what is certain, last if it may be a loss.

    Args:
        trials: the step that is explained, and others of its run.
        error: of the replay.
    """
    first, found = trials[0], []
    changes = [*_changes(first)]
    wanted = {(one.kind, one.key) for one in changes if one.measured and first.tried(one, error).certain > 0}
    others = [
        {(one.kind, one.key): one for one in _changes(trial) if (one.kind, one.key) in wanted} for trial in trials[1:]
    ]
    for one in changes:
        key = one.kind, one.key
        elsewhere = [
            trial.gains(known[key])[0] if key in known else 0.0
            for trial, known in zip(trials[1:], others, strict=True)
            if key in wanted
        ]
        change, usual = first.tried(one, error, elsewhere), first.expected_gain(one)
        least = max(LEAST_GAIN, error, 0.0 if change.measured else _LEAST_SHARE * (change.gain - error))
        if (change.certain >= LEAST_GAIN or not change.measured) and usual >= least:
            loses = min(first.gains(one)) - error < 0
            found.append((not change.measured, not change.measured and loses, -change.certain, -usual, change))
    found.sort(key=lambda entry: entry[:4])
    best: list[Change] = []
    for *_, change in found:  # of schedules, one that needs no more memory than those before
        before = (one.memory for one in best if one.kind == "schedule")
        if change.kind != "schedule" or all(change.memory < memory for memory in before):
            best.append(change)
    return tuple(best)


def _changes(trial: WhatIfContext) -> Iterator[Change]:
    yield from _cut(trial)
    yield from _ranks(trial)
    yield from _microbatches(trial)
    yield from _actions(trial)
    yield from other_schedules(trial.replay, trial.factors.rank, trial.price)
    yield from twice_the_microbatches(trial.replay)


def _cut(trial: WhatIfContext) -> Iterator[Change]:
    totals, placement = trial.totals, trial.slowest.schedule.placement
    mean = float(totals.mean())
    stage = int(np.argmax(totals))
    if not mean or totals[stage] < _UNEVEN * mean:
        return
    rank = placement.rank_of[stage]
    is_so = f"stage {stage} takes {totals[stage] / mean:.2f} times the mean (rank {rank})"
    known = trial.predicted
    if known is None or not known.units or known.unlikely(list(totals)):
        needed = "a profile (--profile) tells" if known is None or not known.units else "the run's cuts (--cuts) tell"
        note = _doubted(trial, f"if stages were even; {needed} which cuts there are")
        yield Change("cut", f"{is_so}: move layers to other stages", (trial.even(trial.replay),), note, measured=False)
        return
    starts, *ends = known.recut([float(total) for total in totals])
    moves = [
        f"begin stage {place} at {known.units[new_one].name} instead of {known.units[old].name}"
        for place, (old, new_one) in enumerate(zip(known.starts, starts, strict=True))
        if old != new_one
    ]
    if moves:
        cases = tuple(trial.moved(trial.replay, np.array(new), totals) for new in ends)
        note = _doubted(trial, "units as profiled, scaled to what was measured")
        yield Change("cut", f"{is_so}: {'; '.join(moves)}", cases, note)


def _doubted(trial: WhatIfContext, note: str) -> str:
    """Extend a note by the doubt that applies if each op of a stage ran once: a single interruption explains as
    much."""
    once = trial.slowest.schedule.microbatches == 1
    return "; ".join(filter(None, [note, "of one microbatch, a single interruption looks the same" if once else ""]))


def _ranks(trial: WhatIfContext) -> Iterator[Change]:
    """Yield a change for the slow ranks that lose most."""
    factors, numbers = trial.factors, [one.number for one in trial.step.replicas]
    for one in slow_ranks(trial.step, factors)[:_MAX_RANKS]:
        scale, place = np.ones_like(factors.rank), numbers.index(one.replica)
        scale[place][one.slow] /= factors.rank[place][one.slow]
        ops = ", ".join(
            f"{WORDS[Kind.of(op)]}s {factors.rank[place][row][one.slow[row]].max():.1f}x"
            for row, op in enumerate(COMPUTE)
            if one.slow[row].any()
        )
        text = f"{one.who} is slow ({ops} its replicas'): check or replace its device"
        case = trial.scaled(trial.replay, scale[..., None])
        yield Change("rank", text, (case,), _doubted(trial, ""), key=one.who)


def _microbatches(trial: WhatIfContext) -> Iterator[Change]:
    factor = trial.factors.microbatch
    if factor.max() == 1.0:
        return
    place, microbatch = np.unravel_index(int(np.argmax(factor)), factor.shape)
    of = trial.of_replica(int(place))
    text = (
        f"microbatches are unequal (microbatch {microbatch}{of} takes {factor.max():.2f} times the mean): give each as "
        "much work, such as sequences of the same length in sum"
    )
    yield Change("microbatches", text, (trial.equal(trial.replay),), _SAME_WORK)


def _actions(trial: WhatIfContext) -> Iterator[Change]:
    own = trial.own
    slow = own > 1.0
    if not slow.any():
        return
    excess = trial.excess
    place, op, stage, microbatch = (int(index) for index in np.unravel_index(int(np.argmax(excess)), excess.shape))
    name = f"{stage}{COMPUTE[op].value}{microbatch}{trial.of_replica(place)}"
    text = (
        f"{counted(int(slow.sum()), 'action')} took {_OWN} times what is usual or more, {name} most "
        f"({own[place, op, stage, microbatch]:.1f}x): check what else ran then"
    )
    note = "none slower than is usual there"
    yield Change("actions", text, (trial.usual(trial.replay),), note, measured=False)


# -- what if ----------------------------------------------------------------------------------------------------------

WHAT_IFS = (
    "schedule=NAME (or NAME/CHUNKS), cut=even, cut=2:0.1 (a tenth of stage 2 goes to stage 1; below 0, of 1 to 2), "
    "stragglers=none, rank=N (of any replica), microbatches=equal, actions=usual, link=0.5 (so many times the "
    "transfer), host=none; several with commas between them"
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
    usual = [part for part in parts if part[0] == "actions"]
    rest = [part for part in parts if part[0] != "actions"]
    for name, _, value in sorted([*rest, *dict.fromkeys(usual)], key=lambda part: part[0] == "schedule"):
        change = _changed(trial, change, name, value)
    return trial.tried(change, error)


def _changed(trial: WhatIfContext, change: Change, name: str, value: str) -> Change:
    """Apply one more change, and note what it assumes."""
    (case,), slow, placement = change.cases[:1], trial.factors.rank, trial.slowest.schedule.placement
    note, measured = "", True
    match name, value:
        case "schedule", _ if value:
            found = another(case, value, slow, trial.price)
            return change.assuming(found.cases, found.note, measured=found.measured)
        case "cut", "even":
            made, measured = trial.even(case), False
        case "cut", _ if (move := _CUT.fullmatch(value)) and 0 < int(move[1]) < placement.depth:
            made, note = _recut(trial, case, int(move[1]), float(move[2])), _PROPORTIONS
        case "stragglers", "none":
            made = trial.scaled(case, 1 / slow[..., None])
        case "rank", _ if value.isdigit() and int(value) < placement.ranks:
            of_rank = np.ones_like(slow)
            stages = list(placement.by_rank[int(value)])
            of_rank[:, :, stages] = slow[:, :, stages]
            made = trial.scaled(case, 1 / of_rank[..., None])
        case "microbatches", "equal":
            made, note = trial.equal(case), _SAME_WORK
        case "actions", "usual":
            made, measured = trial.usual(case), False
        case "link", _ if _is_factor(value):
            made, measured = case.with_links(float(value)), False
        case "host", "none":
            made, measured = case.without_host(), False
        case _:
            forms = {
                "cut": f"cut=even, or cut=2:0.1 with a stage of 1 to {placement.depth - 1} and a share of -1 to 1",
                "rank": f"a rank of 0 to {placement.ranks - 1}",
                "link": "how many times the transfer, 0 or more",
            }
            size = f"this step has {counted(placement.depth, 'stage')} on {counted(placement.ranks, 'rank')}"
            expected = f"{forms[name]}; {size}" if value and name in forms else WHAT_IFS
            raise ArgumentError(f"what-if {name}{'=' if value else ''}{value}: expected {expected}")
    return change.assuming((made,), note, measured=measured)


_CUT = re.compile(r"([0-9]{1,4}):(-?(?:0?\.[0-9]+|0|1))")
_PROPORTIONS = "moved work is forward and backward in the proportion of the stage that takes it"


def _recut(trial: WhatIfContext, case: Case, stage: int, share: float) -> Case:
    """Move the cut before a stage: later, by a share of its work, or below 0 earlier, by a share of the stage
    before."""
    now, replayed = (np.nansum(one.seconds - trial.excess, axis=(0, 1, 3)) for one in (case, trial.replay))
    totals = trial.totals * now / np.where(replayed > 0, replayed, 1.0)
    moved = totals.copy()
    for upper in range(stage, len(totals), trial.slowest.schedule.placement.depth):  # in each copy of the model
        amount = share * totals[upper if share > 0 else upper - 1]
        moved[upper - 1] += amount
        moved[upper] -= amount
    return trial.moved(case, moved, totals)


def _is_factor(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False
