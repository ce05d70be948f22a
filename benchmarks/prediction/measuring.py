"""What the ranks measure: a profile, steps of every configuration, and in the same rounds each rank's work alone.

Ranks go before other processes. A measurement notes how long its ranks waited for a core and what other processes took.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from calibration import Host
from models import MODELS, Case
from torch import Tensor, nn

import penstock
from penstock import Profile
from penstock._base.pytree import flatten
from penstock._base.stages import MODEL_INPUT, Link
from penstock.distributed.world import join
from penstock.network.fabric.traffic.layers import record
from penstock.partition import Stage
from penstock.plan import Cluster, FixedNumbers, ParallelConfig, Plan, Sizes, make_plans
from penstock.runtime.execute.engine import Engine

SCHEDULES = (("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("zb-h1", 1))
MICROBATCHES = (4, 8)
WARM_UP = 2
REPETITIONS = 2
"""How often a rank runs its stages alone in a round."""

NICE = -20

SPACE_ROWS = (1, 2, 4, 8)
SPACE_BATCH = 16
"""The small space: every way to train 16 rows on two ranks, in microbatches of these many rows."""


def measure_model(name: str, rank: int, ranks: int, rounds: int, runtime: Host) -> dict[str, Any]:
    """Steps of each schedule and number of microbatches."""
    case = MODELS[name]
    profile = _profile(case, [case.rows], rank, ranks)
    plans = [
        plan_of(profile, runtime, ParallelConfig(1, ranks, v, schedule, m, case.rows))
        for schedule, v in SCHEDULES
        for m in MICROBATCHES
    ]
    return _measure(case, profile, plans, rank, ranks, rounds)


def measure_space(name: str, rank: int, ranks: int, rounds: int, runtime: Host) -> dict[str, Any]:
    """Steps of each plan of the small space."""
    case = MODELS[name]
    profile = _profile(case, SPACE_ROWS, rank, ranks)
    return _measure(case, profile, space(profile, runtime, ranks), rank, ranks, rounds)


def space(profile: Profile, runtime: Host, ranks: int) -> list[Plan]:
    """Every plan of one pipeline, the fastest first by prediction; rows that were measured only."""
    found = make_plans(
        Sizes.of([profile]),
        _cluster(ranks, runtime),
        SPACE_BATCH,
        FixedNumbers([name for name, _ in SCHEDULES]),
        best=1000,
    ).best
    return [plan for plan in found if plan.choice.replicas == 1 and plan.choice.rows in SPACE_ROWS]


def plan_of(profile: Profile, runtime: Host, choice: ParallelConfig) -> Plan:
    """The plan that `penstock plan` makes for this choice."""
    batch = choice.rows * choice.microbatches
    made = make_plans(
        Sizes.of([profile]), _cluster(choice.ranks, runtime), batch, FixedNumbers([choice.schedule]), best=1000
    )
    return next(plan for plan in made.best if plan.choice == choice)


def _cluster(ranks: int, runtime: Host) -> Cluster:
    return Cluster(ranks, link=runtime.link, action_seconds=runtime.action)


def host(rank: int, ranks: int) -> Host:
    """What the runtime takes: from steps of 1F1B on stages with next to nothing to do, and from messages.

    With more microbatches, a step grows by the F and B of one stage for each, and the runtime's part of both.
    """
    few, many = 4, 20
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(ranks)))
    units = _of_first(lambda: penstock.profile(layers, (torch.zeros(1, 8),), microbatches=1), rank).units
    bare = max(unit.seconds for unit in units)
    small, large = (_step_of_nothing(layers, count, rank, ranks) for count in (few, many))
    action = max(0.0, ((large - small) / (many - few) - bare) / 2)
    step = max(0.0, small - (few + ranks - 1) * (bare + 2 * action))
    return Host(action, step, *_link(rank, ranks))


def _step_of_nothing(layers: nn.Module, microbatches: int, rank: int, ranks: int) -> float:
    x = torch.zeros(microbatches, 8)
    options = {"schedule": "1f1b", "microbatches": microbatches, "balance": "layers"}
    with penstock.pipeline(layers, (x,), loss_fn=nn.functional.mse_loss, **options) as pipe, first(rank, ranks):
        runs = [_gathered(_timed(lambda: pipe.step(x, target=x)), ranks) for _ in range(40)]
    return statistics.median(max(took.wall for took in each) for each in runs[WARM_UP:])


MESSAGES = {1 << 10: 200, 1 << 20: 40}
"""Sizes of messages in bytes, and how many there and back."""


def _link(rank: int, ranks: int) -> tuple[float, float]:
    """The latency in seconds and the bytes per second of a message between ranks 0 and 1."""
    engine = Engine(join(None, None, "cpu"), [torch.device("cpu")] * ranks, seed=0)
    seconds = []
    if rank < 2:
        transport = engine.transports[rank]
        links = [transport.channel(0, Link(a, 1 - a, ((0, "a"),)), a, 1 - a, backward=bool(a)) for a in (0, 1)]
        with first(rank, ranks):
            seconds = [_one_way(links[rank], links[1 - rank], rank, *size) for size in MESSAGES.items()]
    dist.barrier()
    engine.close()
    (small, large), (few, many) = _gathered(seconds, ranks)[0], MESSAGES
    rate = (many - few) / max(large - small, 1e-9)
    return small, rate


def _one_way(out: Any, into: Any, rank: int, size: int, count: int) -> float:
    """Half the median time there and back."""
    value, trips = torch.zeros(size // 4), []
    for _ in range(count):
        began = time.perf_counter()
        into.post(0)
        if rank == 0:
            out.send(0, [value])
            into.receive(0)
        else:
            into.receive(0)
            out.send(0, [value])
        trips.append(time.perf_counter() - began)
    return statistics.median(trips) / 2


def _profile(case: Case, rows: Sequence[int], rank: int, ranks: int) -> Profile:
    """As many ranks as there are cores measure at the same time, since cores that all compute are slower."""
    args, target = _batch(case, max(rows))
    made = None
    dist.barrier()
    if rank < len(os.sched_getaffinity(0)):
        with first(rank, ranks):
            made = penstock.profile(_made(case), args, microbatch_sizes=[*rows], budget_seconds=2.0, target=target)
    dist.barrier()
    return _gathered(made, ranks)[0]


def _measure(case: Case, profile: Profile, plans: Sequence[Plan], rank: int, ranks: int, rounds: int) -> dict[str, Any]:
    """What the plans took in each round, and what each rank's stages took alone in the same rounds."""
    found = [_Configuration(case, plan, rank) for plan in plans]
    work = {one.stages: one for one in found}
    alone = {key: _Alone(case, one.plan.choice.rows, one.plan.cuts, one.own) for key, one in work.items()}
    gc.collect()
    gc.freeze()
    for one in found:
        for _ in range(WARM_UP):
            one.run()
    with first(rank, ranks):
        times = [_round(found, n, alone, ranks) for n in range(rounds)]
        loss = _gathered({rows: _loss_seconds(case, rows) for rows in {one.plan.choice.rows for one in found}}, ranks)
    memory = [_gathered(one.peak_bytes(), ranks) for one in found]
    for one in found:
        one.pipe.close()
    plain = [plan.to_dict() for plan in plans]
    return {"profile": profile.to_dict(), "plans": plain, "rounds": times, "loss": loss[0], "memory": memory}


def _loss_seconds(case: Case, rows: int) -> tuple[float, float]:
    """Forward and backward of the loss, of which a profile knows nothing."""
    args, target = _batch(case, rows)
    with torch.no_grad():
        output = _made(case)(*args)
    runs = []
    for _ in range(10):
        leaves = [leaf.detach().requires_grad_() for leaf in flatten(output).leaves if isinstance(leaf, Tensor)]
        given = {"logits": leaves[0]} if isinstance(output, dict) else leaves[0]
        began = time.perf_counter()
        loss = case.loss(given, target)
        middle = time.perf_counter()
        loss.backward()
        runs.append((middle - began, time.perf_counter() - middle))
    forward, backward = (statistics.median(each) for each in zip(*runs, strict=True))
    return forward, backward


def _round(
    found: Sequence[_Configuration], number: int, work: Mapping[Any, _Alone], ranks: int
) -> list[dict[str, list[Any]]]:
    """For each configuration, what each rank took: for its own stages without the others' results, then for a step.

    Each round begins with another configuration.
    """
    took: list[Any] = [None] * len(found)
    for place in (*range(number % len(found), len(found)), *range(number % len(found))):
        own = work[found[place].stages]
        dist.barrier()
        alone = _gathered(_timed(own.run), ranks)
        dist.barrier()
        step = _gathered(_timed(found[place].run), ranks)
        took[place] = {"alone": [asdict(one) for one in alone], "step": [asdict(one) for one in step]}
    return took


def _made(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return case.make()


def _batch(case: Case, rows: int) -> tuple[tuple[Tensor], Tensor]:
    torch.manual_seed(1)
    given, target = case.batch(rows)
    return (given,), target


class _Configuration:
    """A pipeline that follows a plan."""

    def __init__(self, case: Case, plan: Plan, rank: int) -> None:
        self.plan = plan
        self._args, self._target = _batch(case, plan.choice.rows * plan.choice.microbatches)
        self.pipe = penstock.pipeline(_made(case), self._args, plan=plan, loss_fn=case.loss)
        self.own = self.pipe.schedule.placement.stages_on(rank)
        self.stages = (plan.cuts, plan.choice.rows, self.own)

    def run(self) -> None:
        """One step, of new gradients."""
        for parameter in self.pipe.parameters():
            parameter.grad = None
        self.pipe.step(*self._args, target=self._target)

    def peak_bytes(self) -> int:
        """The most that this rank's parameters, and what a step makes, take at once."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
            self.run()
        events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
        sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        return sum(one.nbytes for one in self.pipe.parameters()) + max(0, *accumulate(sizes))


@dataclass(frozen=True)
class _Ready:
    """A stage with what enters it, and the gradients of what leaves it."""

    stage: Stage
    inputs: Sequence[tuple[Tensor, bool]]

    def run(self) -> Sequence[Tensor]:
        entering = [value.detach().requires_grad_(needs) for value, needs in self.inputs]
        made = self.stage.forward(*[value.clone() for value in entering])
        roots = [one for one in made if one.requires_grad]
        torch.autograd.backward(roots, [torch.ones_like(one) for one in roots])
        return made


class _Alone:
    """A rank's stages, forward and backward of one microbatch, without messages, loss or runtime."""

    def __init__(self, case: Case, rows: int, cuts: Sequence[str], own: Sequence[int]) -> None:
        args, _ = _batch(case, rows)
        partition = record(_made(case), args, {}, len(cuts) + 1, cuts=list(cuts)).partition
        values = {(MODEL_INPUT, i.name): x for i, x in _inputs(partition, args)}
        self._ready = []
        for stage in partition.stages:
            metas = stage.meta
            ready = _Ready(stage, [(values[i.source, i.name], i.meta.requires_grad) for i in metas.inputs])
            made = ready.run()
            values |= {(metas.index, o.name): x.detach() for o, x in zip(metas.outputs, made, strict=True)}
            if metas.index in own:
                self._ready.append(ready)

    def run(self) -> None:
        for _ in range(REPETITIONS):
            for ready in self._ready:
                ready.run()


def _inputs(partition: Any, args: tuple[Tensor]) -> Any:
    return zip(partition.stages[0].meta.inputs, partition.arrange(flatten((args, {})).leaves), strict=True)


@dataclass(frozen=True)
class Took:
    """One rank's part of a measurement, in seconds.

    Attributes:
        wall: by the clock.
        delayed: how much of it this rank could have run, but had no core.
        own: the processor's time that this process used.
        busy: the processors' time that all processes used.
    """

    wall: float
    delayed: float
    own: float
    busy: float


def _timed(run: Callable[[], object]) -> Took:
    before = _clocks()
    run()
    return Took(*(after - start for after, start in zip(_clocks(), before, strict=True)))


def _clocks() -> tuple[float, float, float, float]:
    _, delayed, _ = Path("/proc/self/schedstat").read_text().split()
    user, nice, system, _, _, *interrupts = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    busy = sum(map(int, (user, nice, system, *interrupts))) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), int(delayed) / 1e9, time.process_time(), busy


@contextmanager
def first(rank: int, ranks: int) -> Iterator[None]:
    """Lets this process go before others: `Took.delayed` shows what is left of those.

    Not with real-time priority: a thread that waits by asking again and again would starve those that it waits for. If
    there are more ranks than cores, each stays on one, and neighbors have different ones.
    """
    cores = sorted(os.sched_getaffinity(0))
    _schedule({cores[rank % len(cores)]} if ranks > len(cores) else cores, NICE)
    try:
        yield
    finally:
        _schedule(cores, 0)


def _schedule(cores: Collection[int], nice: int) -> None:
    """For all threads; against other sessions, whose share Linux weighs as a whole."""
    for thread in map(int, os.listdir("/proc/self/task")):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(thread, cores)
            os.setpriority(os.PRIO_PROCESS, thread, nice)
    with suppress(FileNotFoundError):  # without groups of sessions, the priority is enough
        Path("/proc/self/autogroup").write_text(str(nice))


def _gathered(value: Any, ranks: int) -> list[Any]:
    values: list[Any] = [None] * ranks
    dist.all_gather_object(values, value)
    return values


def _of_first(make: Callable[[], Any], rank: int) -> Any:
    """What rank 0 makes, on all ranks; the others wait meanwhile."""
    made = [make() if rank == 0 else None]
    dist.broadcast_object_list(made, 0)
    return made[0]
