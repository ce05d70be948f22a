"""A step as the simulator replays it, so that parts of it can be changed, and such a change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.plan.explain.factors import OP_INDEX
from penstock.schedule import Op, Schedule
from penstock.schedule.timeline import Timeline
from penstock.simulate import LinkCost
from penstock.simulate.computations import COMPUTE, Columns, Floats, Ints, column
from penstock.simulate.simulator import CostColumns, simulate_columns
from penstock.trace.measured import Replica, Step
from penstock.trace.outside_pipeline import PIPELINE, OutsidePipeline, finish_times, measure_outside

_F, _B, _I, _W = (COMPUTE.index(op) for op in (Op.F, Op.B, Op.I, Op.W))
_MIN_WAITS = 3
"""The fewest waits between two ranks from which the time of their messages is estimated."""


@dataclass(frozen=True)
class Replay:
    """Everything that the time of a step depends on.

    Attributes:
        schedules: of each replica.
        begins: when each replica begins, in seconds.
        seconds: what each action takes, [R, O, S, M] as in `Factors`.
        host: what its rank does after an action before it can begin another, in seconds, [O, S].
        latency: what a message takes beyond that, in seconds, by (source, target) rank.
        around: what ranks do before and after; None if that is not known, and so stays as it is.
    """

    schedules: tuple[Schedule, ...]
    begins: tuple[float, ...]
    seconds: Floats
    host: Floats
    latency: Mapping[tuple[int, int], float]
    around: OutsidePipeline | None = None

    @property
    def work_seconds(self) -> float:
        """The total time of all actions, in seconds."""
        return float(np.nansum(self.seconds))

    @property
    def busiest_seconds(self) -> float:
        """The longest total time of one rank's actions, in seconds."""
        by_stage = np.nansum(self.seconds, axis=(1, 3))  # [R, S]
        placements = (schedule.placement.by_rank for schedule in self.schedules)
        pairs = zip(by_stage, placements, strict=True)
        return max(float(seconds[list(stages)].sum()) for seconds, ranks in pairs for stages in ranks)

    def with_seconds(self, seconds: Floats) -> Replay:
        return replace(self, seconds=seconds)

    def with_links(self, factor: float) -> Replay:
        """Scale the time of messages, and what ranks take longer after actions that send."""
        sends = _sending_ops(self.schedules[0])
        quiet = float(np.median(self.host[~sends])) if not sends.all() else 0.0
        base = np.minimum(self.host, quiet)
        host = np.where(sends, base + factor * (self.host - base), self.host)
        return replace(self, host=host, latency={pair: factor * seconds for pair, seconds in self.latency.items()})

    @cached_property
    def blocking_sends(self) -> Replay:
        """The replay with sends that block their rank, so that no order hides them."""
        typical = median(self.latency.values()) if self.latency else 0.0
        host = np.where(_sending_ops(self.schedules[0]), self.host + typical, self.host)
        return replace(self, host=host, latency=dict.fromkeys(self.latency, 0.0))

    def without_host(self) -> Replay:
        return replace(self, host=np.zeros_like(self.host))

    @property
    def without_gaps(self) -> Replay:
        """The replay with nothing between actions."""
        return self.with_links(0.0).without_host()

    @property
    def pipeline_seconds(self) -> float:
        """From the first action's start to the last one's end, over all replicas."""
        ends = [begin + end for begin, end in zip(self.begins, self.spans, strict=True)]
        return max(ends) - min(self.begins)

    @cached_property
    def step_seconds(self) -> float:
        """With what ranks do before and after their pipelines, as far as it is known."""
        if self.around is None:
            return self.pipeline_seconds
        begins = np.repeat(np.array(self.begins)[:, None], self.schedules[0].ranks, axis=1)
        if self.around.before:
            begins = finish_times(self.around.before, self.around.durations, np.zeros_like(begins))
        return float(finish_times(self.around.after, self.around.durations, np.array(self._ends(begins))).max())

    @cached_property
    def spans(self) -> list[float]:
        """The seconds from each replica's first start to its last end."""
        return [max(ends) for ends in self._ends()]

    def _ends(self, begins: Floats | None = None) -> list[list[float]]:
        """Return when each rank of each replica finishes its last action, without the host time after it."""
        cached: dict[tuple[Schedule, bytes, bytes], list[float]] = {}
        ends = []
        for index, (schedule, seconds) in enumerate(zip(self.schedules, self.seconds, strict=True)):
            begin = None if begins is None else begins[index]
            key = schedule, seconds.tobytes(), b"" if begin is None else begin.tobytes()
            if key not in cached:
                timeline = self.timeline(schedule, seconds, None if begin is None else begin.tolist())
                lasts = [track.actions[len(track) - 1] for track in timeline.tracks]
                cached[key] = [
                    track.end[-1] - float(self.host[COMPUTE.index(last.op), last.stage])
                    for track, last in zip(timeline.tracks, lasts, strict=True)
                ]
            ends.append(cached[key])
        return ends

    def timeline(self, schedule: Schedule, seconds: Floats, begin: Sequence[float] | None = None) -> Timeline:
        """Return one replica's timeline, with the host time after an action as part of it."""
        costs, links = _cost_columns(seconds, self.host), self._links(schedule.ranks)
        return simulate_columns(schedule, _columns(schedule), costs, links, begin=begin)

    def _links(self, ranks: int) -> dict[tuple[int, int], LinkCost]:
        typical = median(self.latency.values()) if self.latency else 0.0
        pairs = ((source, target) for source in range(ranks) for target in range(ranks))
        return {pair: LinkCost(self.latency.get(pair, typical)) for pair in pairs}


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that could be different, and once it was tried what is claimed of it.

    Attributes:
        kind: "cut", "rank", "microbatches", "actions", "schedule", "pieces", or "what if".
        text: what is, and what to do.
        cases: what the step becomes as usual, and at the ends of what is assumed; one, if nothing is.
        note: what it assumes, or costs.
        measured: whether the gain rests on nothing but what was measured, or bounds that hold anyway.
        key: which change of its kind it is, in any step of a run.
        memory: the most activations that a rank holds, in those of one microbatch on all of its stages.
        step_seconds: what the step would take.
        gain: how much less that is, as a share of the step; below 0 if it is more. If not `measured`, it is no more.
        error: by how much the gain may be wrong: the replay's error, and the widths of all that is assumed.
    """

    kind: str
    text: str
    cases: tuple[Replay, ...] = field(repr=False, compare=False)
    note: str = ""
    measured: bool = True
    key: str = ""
    memory: float = 0.0
    step_seconds: float = math.nan
    gain: float = 0.0
    error: float = 0.0

    @property
    def certain(self) -> float:
        """The gain that is certain: what changes are ordered by."""
        return self.gain - self.error if self.measured else min(0.0, self.gain)

    @property
    def claim(self) -> str:
        """By how much the step changes, in words: `-12.3% ± 1.0%`, or `at most -12.3%`."""
        if not self.measured:
            return f"at {'most' if self.gain >= 0 else 'least'} {-self.gain:+.1%}"
        return f"{-self.gain:+.1%} ± {f'{self.error:.1%}' if self.error >= 0.001 else '<0.1%'}"

    def assuming(self, cases: tuple[Replay, ...], note: str, *, measured: bool) -> Change:
        """Return the same change with other cases, which make one more assumption."""
        notes = "; ".join(filter(None, [self.note, note]))
        return replace(self, cases=cases, note=notes, measured=self.measured and measured)

    def to_dict(self) -> dict[str, Any]:
        """Return the claim, for JSON."""
        names = ("kind", "text", "step_seconds", "gain", "note", "error", "measured", "claim")
        return {name: getattr(self, name) for name in names}


def _sending_ops(schedule: Schedule) -> NDArray[np.bool_]:
    """Return which op of which stage has an output that another rank needs, [O, S]."""
    placement, sends = schedule.placement, np.zeros((len(COMPUTE), schedule.stages), bool)
    for stage in range(schedule.stages):
        if not placement.is_last(stage) and placement.rank_of[stage + 1] != placement.rank_of[stage]:
            sends[_F, stage] = True
        if not placement.is_first(stage) and placement.rank_of[stage - 1] != placement.rank_of[stage]:
            sends[[_B, _I], stage] = True
    return sends


_columns = lru_cache(maxsize=4)(Columns.from_schedule)
"""One schedule is replayed a dozen times."""


def _cost_columns(seconds: Floats, host: Floats) -> CostColumns:
    """[O, S, M] as costs by stage and microbatch, of messages without bytes. A backward that is not split counts as
    I."""
    with_host = np.nan_to_num(seconds + host[:, :, None])
    backward = np.where(np.isnan(seconds[_B]), with_host[_I], with_host[_B])
    costs = np.zeros((len(Op), *seconds.shape[1:]))
    costs[Op.F.code], costs[Op.B.code] = with_host[_F], backward + with_host[_W]
    costs[Op.I.code], costs[Op.W.code] = backward, with_host[_W]
    return CostColumns(costs, np.zeros(costs.shape[1:]), np.full(costs.shape[1:], np.nan))


def build_replay(step: Step, seconds: Floats) -> Replay:
    """Build the replay of a step: its own order and durations, with the typical time between actions and of
    messages."""
    columns = zip(*map(_measure_gaps, step.replicas), strict=True)
    source, target, producer, produced, op, stage, before, starts = [np.concatenate(parts) for parts in columns]
    waited = (source >= 0) & ~(before > produced)  # for a message: what tells how long it took
    typical = float(np.median(starts[waited] - produced[waited])) if waited.any() else 0.0
    unblocked = before >= np.where(np.isnan(produced), -np.inf, produced + typical)  # did not wait
    host_times = np.maximum(0.0, starts[unblocked] - before[unblocked])
    host = _host_seconds(op[unblocked], stage[unblocked], host_times, step.replicas[0].schedule.stages)
    pairs = np.stack([source, target], axis=1)[waited]
    message_seconds = np.maximum(0.0, (starts - produced)[waited] - host.ravel()[producer[waited]])
    latency = {}
    for start, end in np.unique(pairs, axis=0).tolist():
        samples = message_seconds[(pairs == (start, end)).all(axis=1)]
        latency[start, end] = float(np.median(samples if len(samples) >= _MIN_WAITS else message_seconds))
    schedules = tuple(replica.schedule for replica in step.replicas)
    begins = tuple(replica.begin_seconds for replica in step.replicas)
    return Replay(schedules, begins, seconds, host, latency, find_outside_work(step))


def _measure_gaps(replica: Replica) -> tuple[NDArray[Any], ...]:
    """Return, for each action: the rank from which it needs something (-1: none) and its own; where in [O, S] that was
    produced, and when; the op and stage that its rank ran before, and their end; and its own start."""
    columns = Columns.from_schedule(replica.schedule)
    starts, ends = start_end_times(replica.timeline)
    need, rank, op, stage = columns.need, columns.rank, OP_INDEX[columns.op], columns.stage
    source, produced = np.where(need >= 0, rank[need], -1), np.where(need >= 0, ends[need], np.nan)
    producer = op[need] * replica.schedule.stages + stage[need]
    return source, rank, producer, produced, np.roll(op, 1), np.roll(stage, 1), columns.previous_ends(ends), starts


def _host_seconds(op: Ints, stage: Ints, host_times: Floats, stages: int) -> Floats:
    """Return the median host time after each op on each stage; of the op on any stage, or of any op, where there is no
    sample."""
    medians = np.zeros((len(COMPUTE), stages))
    for row in range(len(COMPUTE)):
        op_times, op_stages = host_times[op == row], stage[op == row]
        for number in range(stages):
            samples = next((v for v in (op_times[op_stages == number], op_times, host_times) if len(v)), np.zeros(1))
            medians[row, number] = np.median(samples)
    return medians


def replay_traced(schedule: Schedule, outside: OutsidePipeline) -> Replay:
    """Build the replay of a step as `measure_ops` reads it: no time is lost between ops, and a message keeps its sender
    busy. `schedule`: what every replica ran; one stage per rank, backwards not split."""
    forward, backward, sent_forward, sent_backward = (np.nan_to_num(outside.durations[name]) for name in PIPELINE)
    seconds = np.full((len(forward), len(COMPUTE), *forward.shape[1:]), np.nan)
    seconds[:, _F], seconds[:, _B] = forward + sent_forward, backward + sent_backward
    replicas, host = len(forward), np.zeros((len(COMPUTE), schedule.stages))
    return Replay((schedule,) * replicas, (0.0,) * replicas, seconds, host, {}, outside)


def find_outside_work(step: Step) -> OutsidePipeline | None:
    """Return what ranks did around the pipelines of a step; None if they did nothing, or the participants are
    unknown."""
    if not step.others or step.unknown:
        return None
    return measure_outside((len(step.replicas), step.slowest.schedule.ranks), step.numbered)


def start_end_times(timeline: Timeline) -> tuple[Floats, Floats]:
    """Starts and ends of all computations."""
    tracks = timeline.tracks
    return np.concatenate([column(t.start) for t in tracks]), np.concatenate([column(t.end) for t in tracks])
