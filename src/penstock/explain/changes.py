"""What would make a step faster, and by how much: each change is tried on the replay of the step."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.errors import ArgumentError
from penstock.explain.case import Case
from penstock.explain.factors import Factors
from penstock.explain.measured import Replica, Step
from penstock.explain.predicted import Predicted
from penstock.explain.schedules import another, best_schedules, twice_the_microbatches
from penstock.explain.stragglers import slow_ranks
from penstock.simulate.columns import COMPUTE, Floats
from penstock.words import counted

_WORDS = {"F": "forwards", "B": "backwards", "I": "input gradients", "W": "weight gradients"}
LEAST_GAIN = 0.005
"""Changes that bring less of a step than this are not worth a line."""
_UNEVEN = 1.05
_OWN = 1.3
"""An action is called slow by itself if it takes so many times what explains it."""
_MOST_RANKS = 3
_MENDS = ("cut", "rank", "microbatches", "actions")
_SAME_WORK = "the same work in sum"


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that could be different.

    Attributes:
        kind: "cut", "rank", "microbatches", "actions", "schedule", "pieces", "link", "host", or "what if".
        text: what is, and what to do.
        step_seconds: what the step would take.
        gain: how much less that is, as a share of the step; below 0 if it is more.
        note: what it assumes, or costs.
    """

    kind: str
    text: str
    step_seconds: float
    gain: float
    note: str = ""

    @property
    def mends(self) -> bool:
        """Whether it mends something that the trace shows to be uneven, rather than doing the work in another way."""
        return self.kind in _MENDS


@dataclass(frozen=True, slots=True)
class Trial:
    """A measured step, what explains its times, and its replay: what changes are tried on."""

    step: Step
    factors: Factors
    replay: Case
    replay_seconds: float
    predicted: Predicted | None = None

    @property
    def slowest(self) -> Replica:
        return self.step.slowest

    def change(self, kind: str, text: str, case: Case, note: str = "") -> Change:
        less = self.replay_seconds - case.step_seconds
        return Change(
            kind, text, self.step.seconds - less, less / self.step.seconds if self.step.seconds else 0.0, note
        )

    @property
    def totals(self) -> Floats:
        """What a microbatch takes on each stage, of a rank that is not slow."""
        return np.asarray(np.nansum(self.factors.typical, axis=0))

    @property
    def excess(self) -> Floats:
        """What actions that are slow by themselves take beyond what is usual, in seconds; 0 for all others."""
        return np.asarray(np.nan_to_num(self.factors.seconds) * (1 - 1 / _own(self)))

    def scaled(self, case: Case, scale: Floats) -> Case:
        """What work usually takes so many times as long. An action's excess has other causes, and so stays."""
        return case.with_seconds((case.seconds - self.excess) * scale + self.excess)


def suggestions(trial: Trial, error: float) -> tuple[Change, ...]:
    """The changes that bring something: those that mend what is uneven, then other ways; what brings most first.

    Each has to bring more than the replay's error: what may be nothing is no advice.
    """
    found = [
        *_cut(trial),
        *_ranks(trial),
        *_microbatches(trial),
        *_actions(trial),
        *_schedules(trial),
        *_between(trial),
    ]
    return tuple(
        sorted(
            (one for one in found if one.gain >= max(LEAST_GAIN, error)),
            key=lambda one: (not one.mends, -one.gain),
        )
    )


def _cut(trial: Trial) -> Iterator[Change]:
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
        yield trial.change("cut", f"{is_so}: move work off it", _even(trial, trial.replay), note)
        return
    starts, new = known.recut([float(total) for total in totals])
    moves = [
        f"begin stage {place} at {known.units[new_one]} instead of {known.units[old]}"
        for place, (old, new_one) in enumerate(zip(known.starts, starts, strict=True))
        if old != new_one
    ]
    if moves:
        case = trial.scaled(trial.replay, (np.array(new) / totals)[None, None, :, None])
        note = _doubted(trial, "units as profiled, scaled to what was measured")
        yield trial.change("cut", f"{is_so}: {'; '.join(moves)}", case, note)


def _doubted(trial: Trial, note: str) -> str:
    """A note that says if a single interruption explains as much: each op of a stage ran once."""
    once = trial.slowest.schedule.microbatches == 1
    return "; ".join(filter(None, [note, "of one microbatch, a single interruption looks the same" if once else ""]))


def _even(trial: Trial, case: Case) -> Case:
    """All stages as long as their mean, each op's share of its stage as it is."""
    totals = trial.totals
    scale = np.where(totals > 0, totals.mean() / np.where(totals > 0, totals, 1.0), 1.0)
    return trial.scaled(case, scale[None, None, :, None])


def _ranks(trial: Trial) -> Iterator[Change]:
    """The slow ranks by what they lose, the worst few."""
    factors, numbers = trial.factors, [one.number for one in trial.step.replicas]
    for one in slow_ranks(trial.step, factors)[:_MOST_RANKS]:
        scale, place = np.ones_like(factors.rank), numbers.index(one.replica)
        scale[place][one.slow] /= factors.rank[place][one.slow]
        ops = ", ".join(
            f"{_WORDS[op.value]} {factors.rank[place][row][one.slow[row]].max():.1f}x"
            for row, op in enumerate(COMPUTE)
            if one.slow[row].any()
        )
        than = "the other stages'" if one.alone else "its replicas'"
        text = f"{one.who} is slow ({ops} {than}): mend or replace it"
        note = "no replica tells; its other ops are not slow" if one.alone else ""
        yield trial.change("rank", text, trial.scaled(trial.replay, scale[..., None]), _doubted(trial, note))


def _microbatches(trial: Trial) -> Iterator[Change]:
    factor = trial.factors.microbatch
    if factor.max() == 1.0:
        return
    place, microbatch = np.unravel_index(int(np.argmax(factor)), factor.shape)
    of = f" of replica {trial.step.replicas[int(place)].number}" if len(trial.step.replicas) > 1 else ""
    text = (
        f"microbatches are unequal (microbatch {microbatch}{of} takes {factor.max():.2f} times the mean): give each as "
        "much work, such as sequences of the same length in sum"
    )
    yield trial.change("microbatches", text, _equal(trial, trial.replay), _SAME_WORK)


def _equal(trial: Trial, case: Case) -> Case:
    return trial.scaled(case, 1 / trial.factors.microbatch[:, None, None, :])


def _actions(trial: Trial) -> Iterator[Change]:
    own = _own(trial)
    slow = own > 1.0
    if not slow.any():
        return
    excess = trial.excess
    place, op, stage, microbatch = (int(index) for index in np.unravel_index(int(np.argmax(excess)), excess.shape))
    of = f" of replica {trial.step.replicas[place].number}" if len(trial.step.replicas) > 1 else ""
    name = f"{stage}{COMPUTE[op].value}{microbatch}"
    text = (
        f"{counted(int(slow.sum()), 'action')} took {_OWN} times what is usual or more, {name}{of} most "
        f"({own[place, op, stage, microbatch]:.1f}x): look for what else ran then"
    )
    yield trial.change("actions", text, _usual(trial, trial.replay), "none slower than is usual there")


def _usual(trial: Trial, case: Case) -> Case:
    return case.with_seconds(case.seconds - trial.excess)


def _own(trial: Trial) -> Floats:
    """By how much each action that is slow by itself is slower than is usual; 1 for all others."""
    own = np.nan_to_num(trial.factors.own, nan=1.0)
    return np.where(own >= _OWN, own, 1.0)


def _schedules(trial: Trial) -> Iterator[Change]:
    now = trial.slowest.schedule
    for found in best_schedules(trial.replay, trial.factors.rank):
        text = f"schedule {found.name} instead of {now.name}"
        yield trial.change("schedule", text, found.case, found.note)
    if more := twice_the_microbatches(trial.replay):
        text = f"cut the batch into {2 * now.microbatches} microbatches instead of {now.microbatches}"
        yield trial.change("pieces", text, more.case, more.note)


def _between(trial: Trial) -> Iterator[Change]:
    yield trial.change("link", "links twice as fast", trial.replay.with_links(0.5), "transfers take half as long")
    yield trial.change(
        "host", "no time lost between a rank's actions (host, launches, other work)", trial.replay.without_host()
    )


# -- what if ----------------------------------------------------------------------------------------------------------

WHAT_IFS = (
    "schedule=NAME (or NAME/CHUNKS), cut=even, cut=2:0.1 (a tenth of stage 2 goes to stage 1; below 0, of 1 to 2), "
    "stragglers=none, rank=N (of any replica), microbatches=equal, actions=usual, link=0.5 (so many times the "
    "transfer), host=none; several with commas between them"
)


def what_if(trial: Trial, text: str) -> Change:
    """The step if things were different.

    Args:
        text: changes as in `WHAT_IFS`. Another schedule is made last, and before it slow actions become usual, once.

    Raises:
        ArgumentError: it is none of them.
    """
    case, notes = trial.replay, []
    parts = [part.strip().partition("=") for part in text.split(",")]
    usual = [part for part in parts if part[0] == "actions"]
    rest = [part for part in parts if part[0] != "actions"]
    for name, _, value in sorted([*rest, *dict.fromkeys(usual)], key=lambda part: part[0] == "schedule"):
        case, note = _changed(trial, case, name, value)
        notes += [note] if note else []
    return trial.change("what if", text, case, "; ".join(notes))


def _changed(trial: Trial, case: Case, name: str, value: str) -> tuple[Case, str]:
    """One change, and what it assumes."""
    slow = trial.factors.rank
    match name, value:
        case "schedule", _ if value:
            found = another(case, value, slow)
            return found.case, found.note
        case "cut", "even":
            return _even(trial, case), ""
        case "cut", _ if (move := _CUT.fullmatch(value)) and 0 < int(move[1]) < trial.slowest.schedule.placement.depth:
            return _recut(trial, case, int(move[1]), float(move[2])), _PROPORTIONS
        case "stragglers", "none":
            return trial.scaled(case, 1 / slow[..., None]), ""
        case "rank", _ if value.isdigit() and int(value) < trial.slowest.schedule.ranks:
            of_rank = np.ones_like(slow)
            stages = list(trial.slowest.schedule.placement.by_rank[int(value)])
            of_rank[:, :, stages] = slow[:, :, stages]
            return trial.scaled(case, 1 / of_rank[..., None]), ""
        case "microbatches", "equal":
            return _equal(trial, case), _SAME_WORK
        case "actions", "usual":
            return _usual(trial, case), ""
        case "link", _ if _is_factor(value):
            return case.with_links(float(value)), ""
        case "host", "none":
            return case.without_host(), ""
    raise ArgumentError(f"what-if {name}{'=' if value else ''}{value}: expected {WHAT_IFS}")


_CUT = re.compile(r"([0-9]{1,4}):(-?(?:0?\.[0-9]+|0|1))")
_PROPORTIONS = "moved work is forward and backward in the proportion of the stage that takes it"


def _recut(trial: Trial, case: Case, stage: int, share: float) -> Case:
    """The cut before a stage moved: later, by a share of its work, or below 0 earlier, by a share of the one before."""
    now, replayed = (np.nansum(one.seconds - trial.excess, axis=(0, 1, 3)) for one in (case, trial.replay))
    totals = trial.totals * now / np.where(replayed > 0, replayed, 1.0)
    moved = totals.copy()
    for upper in range(stage, len(totals), trial.slowest.schedule.placement.depth):  # in each copy of the model
        amount = share * totals[upper if share > 0 else upper - 1]
        moved[upper - 1] += amount
        moved[upper] -= amount
    scale = np.where(totals > 0, moved / np.where(totals > 0, totals, 1.0), 1.0)
    return trial.scaled(case, scale[None, None, :, None])


def _is_factor(text: str) -> bool:
    try:
        return 0 <= float(text) < math.inf
    except ValueError:
        return False
