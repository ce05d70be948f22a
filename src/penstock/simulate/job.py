"""A job's whole step: replicas of a pipeline, what their ranks do together before and after it; what slowness costs.

What-ifs are arithmetic on durations: take some from a run, the others from a balanced one, and time the step again.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ArgumentError
from penstock.schedule import Schedule
from penstock.simulate.columns import Floats
from penstock.simulate.costs import OfStage, StageCost
from penstock.simulate.simulator import simulate

FORWARD, BACKWARD = "forward", "backward"
FORWARD_MESSAGE, BACKWARD_MESSAGE = "forward-message", "backward-message"
PIPELINE = (FORWARD, BACKWARD, FORWARD_MESSAGE, BACKWARD_MESSAGE)
"""The names of what a pipeline does: a message is its sender's, which waits until it has arrived."""

Durations = Mapping[str, Floats]
"""How long each op takes, in seconds, by name: those of `PIPELINE` by replica, rank and microbatch, those of a `Joint`
by replica and rank. NaN where there is none: a message from the first or last rank, a rank that takes no part.
"""


class Among(Enum):
    """Which ranks wait for each other before they begin a `Joint`."""

    NOBODY = "each rank for itself"
    REPLICAS = "the same rank of all replicas"
    PIPELINE = "the ranks of a replica"
    ALL = "all ranks of all replicas"


@dataclass(frozen=True, slots=True)
class Joint:
    """What ranks do before or after their pipeline's actions: a collective, or an optimizer's step."""

    name: str
    among: Among = Among.NOBODY


@dataclass(frozen=True, slots=True)
class Job:
    """What a step consists of, whatever its parts take.

    Attributes:
        schedule: the order of every replica's pipeline; one stage a rank, backwards not split.
        before, after: what each rank does before its first action, and after its last one, in order.
    """

    schedule: Schedule
    before: tuple[Joint, ...] = ()
    after: tuple[Joint, ...] = ()

    def seconds(self, durations: Durations) -> float:
        """How long a step takes.

        Raises:
            ArgumentError: an op has no durations, or not for each replica, rank and microbatch.
        """
        self._check(durations)
        replicas, ranks, _ = durations[FORWARD].shape
        begin = done(self.before, durations, np.zeros((replicas, ranks)))
        ends: dict[bytes, Floats] = {}
        now = []
        for replica in range(replicas):
            alike = b"".join(
                each.tobytes() for each in (begin[replica], *(durations[name][replica] for name in PIPELINE))
            )
            if alike not in ends:
                ends[alike] = self._ends(durations, replica, begin[replica])
            now.append(ends[alike])
        return float(done(self.after, durations, np.array(now)).max())

    def spans(self, durations: Durations) -> Floats:
        """How long each replica's pipeline takes, from its first action to its last, if all ranks begin at once."""
        self._check(durations)
        replicas, ranks, _ = durations[FORWARD].shape
        return np.array([self._ends(durations, replica, np.zeros(ranks)).max() for replica in range(replicas)])

    def _ends(self, durations: Durations, replica: int, begin: Floats) -> Floats:
        """When each rank of a replica ends its last action."""
        forward, backward, sent_forward, sent_backward = (np.nan_to_num(durations[name][replica]) for name in PIPELINE)
        costs: list[OfStage] = [
            [StageCost(f, b, 0.0) for f, b in zip(fs.tolist(), bs.tolist(), strict=True)]
            for fs, bs in zip(forward + sent_forward, backward + sent_backward, strict=True)
        ]
        timeline = simulate(self.schedule, costs, begin=begin.tolist())
        return np.array([track.end[-1] for track in timeline.tracks])

    def _check(self, durations: Durations) -> None:
        for name in (*PIPELINE, *(joint.name for joint in (*self.before, *self.after))):
            if name not in durations:
                raise ArgumentError(f"durations have no {name!r}, which the job's step has; pass an array for each op")
        shape = durations[FORWARD].shape
        expected = (shape[0], self.schedule.ranks, self.schedule.numbers)
        for name, given in durations.items():
            wanted = expected if name in PIPELINE else expected[:2]
            if given.shape != wanted:
                dimensions = ("replicas", "ranks", "microbatches")[: len(wanted)]
                raise ArgumentError(
                    f"durations of {name!r} have the shape {given.shape}; expected {wanted}: {', '.join(dimensions)}"
                )


def together(among: Among, reached: Floats) -> Floats:
    """When each rank begins what it does with others, if they reach it then; NaN where a rank takes no part."""
    latest = np.where(np.isnan(reached), -np.inf, reached)
    match among:
        case Among.NOBODY:
            return reached
        case Among.REPLICAS:
            latest = np.broadcast_to(latest.max(axis=0, keepdims=True), reached.shape)
        case Among.PIPELINE:
            latest = np.broadcast_to(latest.max(axis=1, keepdims=True), reached.shape)
        case Among.ALL:
            latest = np.full(reached.shape, latest.max())
    return np.where(np.isnan(reached), np.nan, latest)


def done(joints: Sequence[Joint], durations: Durations, now: Floats) -> Floats:
    """When each rank has done one joint after the other, the first of which it reaches `now`; by replica and rank."""
    for joint in joints:
        seconds = durations[joint.name]
        begun = together(joint.among, np.where(np.isnan(seconds), np.nan, now))
        now = np.where(np.isnan(begun), now, begun + seconds)
    return now


def mixed(
    real: Durations, balanced: Durations, ranks: NDArray[np.bool_], ops: Container[str] | None = None
) -> dict[str, Floats]:
    """The balanced durations, but real ones on `ranks` (by replica and rank), of some ops or of all."""
    found = {}
    for name, seconds in balanced.items():
        chosen = ranks & (ops is None or name in ops)
        found[name] = np.where(chosen[..., None] if seconds.ndim == 3 else chosen, real[name], seconds)
    return found


def usual(steps: Sequence[Durations], job: Job) -> dict[str, float]:
    """How long each op of a job usually takes: the mean of what a rank does for itself, the median of the others."""
    alone = {FORWARD, BACKWARD, *(one.name for one in (*job.before, *job.after) if one.among is Among.NOBODY)}
    every = {name: np.concatenate([step[name].ravel() for step in steps]) for name in steps[0]}
    known = {name: given[~np.isnan(given)] for name, given in every.items()}
    return {
        name: float((np.mean if name in alone else np.median)(given)) if len(given) else 0.0
        for name, given in known.items()
    }


def balanced(real: Durations, seconds: Mapping[str, float]) -> dict[str, Floats]:
    """Each op as long on every rank, for every microbatch, as `seconds` says, as from `usual`."""
    return {name: np.where(np.isnan(given), np.nan, seconds[name]) for name, given in real.items()}


@dataclass(frozen=True, slots=True)
class Slowdowns:
    """By how much stragglers slow a step down: its time over that of the balanced step.

    Attributes:
        step: the step with its real durations.
        by_rank, by_replica, by_op: balanced, but for this rank's, replica's or op's real durations.
    """

    step: float
    by_rank: tuple[float, ...]
    by_replica: tuple[float, ...]
    by_op: Mapping[str, float]


def slowdowns(job: Job, real: Durations, even: Durations) -> Slowdowns:
    """Whose slowness costs how much; `even` are the durations without stragglers, as from `balanced`."""
    least = job.seconds(even)
    replicas, ranks, _ = real[FORWARD].shape
    everywhere = np.ones((replicas, ranks), bool)
    replica_of, rank_of = np.indices(everywhere.shape)

    def slower(where: NDArray[np.bool_], *ops: str) -> float:
        return job.seconds(mixed(real, even, where, ops or None)) / least

    return Slowdowns(
        job.seconds(real) / least,
        tuple(slower(rank_of == rank) for rank in range(ranks)),
        tuple(slower(replica_of == replica) for replica in range(replicas)),
        {name: slower(everywhere, name) for name in real},
    )
