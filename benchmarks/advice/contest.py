"""What the ranks do: record a run, have it explained, follow every piece of advice, and measure it against the run."""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from models import MODELS

import penstock
from penstock.plan.explain import Change, Prediction, explain
from penstock.schedule import schedule_spec
from penstock.trace.formats import recording_from_timelines

SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-v")
MICROBATCHES = (4, 8, 16, 32)
WARM_UP, RECORDED = 4, 7
LEAST_ROUNDS, MAX_SECONDS = 15, 40.0
"""At least so many rounds of a run; more while they fit into these seconds."""


@dataclass(frozen=True)
class Run:
    """One way to train a model: what is recorded, or what an advice makes of it."""

    model: str
    ranks: int
    schedule: str
    microbatches: int
    cuts: tuple[str, ...] | None = None

    @property
    def rows(self) -> int:
        return MODELS[self.model].rows * self.microbatches


def runs(ranks: int, models: Sequence[str] = tuple(MODELS)) -> Iterator[Run]:
    """Four of each model, so that all models together have every schedule with every number of microbatches."""
    for place, model in enumerate(models):
        for turn, microbatches in enumerate(MICROBATCHES):
            yield Run(model, ranks, SCHEDULES[(place + turn + ranks // 2) % len(SCHEDULES)], microbatches)


def followed(run: Run, change: Change, starts: Sequence[str]) -> Run | None:
    """The run as an advice says; None if the advice is not for a script, such as to mend a rank.

    Args:
        starts: the unit with which each stage but the first begins.
    """
    same = replace(run, cuts=tuple(starts))
    if found := re.match(r"schedule (\S+) instead of", change.text):
        return replace(same, schedule=found[1])
    if found := re.match(r"cut the batch into (\d+) microbatches", change.text):
        return replace(same, microbatches=int(found[1]))
    if moves := re.findall(r"begin stage (\d+) at (\S+?) instead of", change.text):
        new = {int(stage): unit for stage, unit in moves}
        return replace(run, cuts=tuple(new.get(stage, unit) for stage, unit in enumerate(starts, 1)))
    return None


class Contestant:
    """A pipeline of its own, and what its steps took."""

    def __init__(self, run: Run, rows: int, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        case = MODELS[run.model]
        torch.manual_seed(0)
        options: dict[str, Any] = {} if run.cuts is None else {"cuts": list(run.cuts)}
        schedule, _, chunks = run.schedule.partition("/")
        if chunks:
            options["stages_per_rank"] = int(chunks)
        self.batch, self.seconds = batch, list[float]()
        self.pipe = penstock.pipeline(
            case.make(), batch[:1], loss_fn=case.loss, schedule=schedule, microbatches=run.microbatches, **options
        )

    def step(self) -> float:
        """The seconds of a step on this rank, from when all ranks were there."""
        dist.barrier()
        begin = time.perf_counter()
        self.pipe.step(self.batch[0], target=self.batch[1])
        taken = time.perf_counter() - begin
        for parameter in self.pipe.parameters():
            parameter.grad = None
        return taken

    def timelines(self) -> list[penstock.Timeline]:
        """Of a few steps, after some that warm up."""
        for _ in range(WARM_UP):
            self.step()
        found = [self.pipe.step(self.batch[0], target=self.batch[1], timeline=True).timeline for _ in range(RECORDED)]
        return [one for one in found if one is not None]


def profiled(model: str) -> penstock.Profile:
    """What a model's units take, for one of its microbatches; measured by all ranks at once, as they will work."""
    case = MODELS[model]
    torch.manual_seed(0)
    return penstock.profile(case.make(), case.batch(case.rows)[:1], microbatch_sizes=[case.rows], links=True)


def compete(run: Run, profile: penstock.Profile, rounds: int) -> dict[str, Any]:
    """A run, what is advised, and what became of it. Every rank calls it, and gets all of it."""
    batch = MODELS[run.model].batch(run.rows)
    with ExitStack() as stack:
        original = Contestant(run, run.rows, batch)
        stack.enter_context(original.pipe)
        timelines = original.timelines()
        starts = tuple(original.pipe.cuts)
        advice = _from_first(lambda: advised(run, timelines, profile, starts))
        others: dict[Run, Contestant] = {}
        failed: dict[Run, str] = {}
        for _, _, other in advice:
            if other is not None and other not in others and other not in failed:
                try:
                    others[other] = Contestant(other, run.rows, batch)
                    stack.enter_context(others[other].pipe)
                except penstock.ArgumentError as error:
                    failed[other] = str(error)
        times = in_turns([original, *others.values()], rounds if others else RECORDED)
    found = [
        {"source": source, **change.to_dict(), "followed": other and _named(run, other)}
        | (outcome(times[0], times[1 + [*others].index(other)]) if other in others else {})
        | ({"failed": failed[other]} if other in failed else {})
        for source, change, other in advice
    ]
    return {**asdict(run), "step_seconds": statistics.median(times[0]), "advice": found}


def advised(
    run: Run, timelines: Sequence[penstock.Timeline], profile: penstock.Profile, starts: Sequence[str]
) -> list[tuple[str, Change, Run | None]]:
    """What explain says to change, of the timelines alone and with a profile."""
    splits = schedule_spec(run.schedule).splits_backward
    known = {"timeline": None, "profile": Prediction.of_profile(profile, 1 + len(starts), starts, splits=splits)}
    return [
        (source, change, followed(run, change, starts))
        for source, predicted in known.items()
        for change in explain(recording_from_timelines(timelines), predicted=predicted).changes
    ]


def in_turns(contestants: Sequence[Contestant], rounds: int) -> list[list[float]]:
    """The seconds of each one's steps, those of the slowest rank; who begins a round changes."""
    slowest = max(sum(one.step() for one in contestants) for _ in range(3))
    rounds = _from_first(lambda: min(rounds, max(LEAST_ROUNDS, int(MAX_SECONDS / slowest))))
    gc.collect()
    gc.disable()
    for number in range(rounds):
        first = number % len(contestants)
        for one in [*contestants[first:], *contestants[:first]]:
            one.seconds.append(one.step())
    gc.enable()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [one.seconds for one in contestants])
    return [[max(times) for times in zip(*of_ranks, strict=True)] for of_ranks in zip(*every, strict=True)]


def outcome(before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    """How much less a step took, as a share, and between which values the middle half of the rounds' quotients are
    on average: two standard errors of their median."""
    gains = [1 - new / old for old, new in zip(before, after, strict=True)]
    lower, _, upper = statistics.quantiles(gains, n=4)
    return {"happened": statistics.median(gains), "noise": 2 * 1.25 * (upper - lower) / 1.35 / len(gains) ** 0.5}


def _named(run: Run, other: Run) -> str:
    return ", ".join(f"{key}={value}" for key, value in asdict(other).items() if value != getattr(run, key))


def _from_first(make: Any) -> Any:
    """What rank 0 makes, on every rank."""
    made = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return made[0]
