"""Times and calls of steps and messages."""

from __future__ import annotations

import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any

import torch
import torch.distributed as dist
from common.ranks import Step, gathered, transport_of
from contest import DIM, MICROBATCHES, ROWS, Contest, OneProcess

from penstock._base.stages import Link

MESSAGES = 2000
WARMUP_STEPS = 12


@dataclass
class Times:
    """What one step took on one rank, in microseconds."""

    wall: float
    thread: float
    """Of the processor, by the thread that calls `step`, which runs forwards and backwards too."""
    process: float
    """Of the processor, by all threads: gloo's too."""


def timed(step: Step) -> Times:
    """Runs a step and measures it."""
    clocks = (time.perf_counter_ns, time.thread_time_ns, time.process_time_ns)
    began = [clock() for clock in clocks]
    step()
    return Times(*((clock() - start) / 1000 for clock, start in zip(clocks, began, strict=True)))


def measure(contest: Contest, rounds: int) -> dict[str, list[list[Times]]]:
    """By contestant, each round's times on every rank."""
    orders = list(permutations(contest.steps))
    mine: dict[str, list[Times]] = {name: [] for name in contest.steps}
    for number in range(rounds):
        for name in orders[number % len(orders)]:
            contest.weights.zero()
            dist.barrier()
            mine[name].append(timed(contest.steps[name]))
    of_ranks = gathered(mine)
    return {name: [list(one) for one in zip(*(m[name] for m in of_ranks), strict=True)] for name in contest.steps}


def measure_one_process(contest: OneProcess, rounds: int) -> list[float]:
    """Microseconds per action beyond the bare calls: quartiles over rounds, the first of which warm up."""
    found = []
    for _ in range(WARMUP_STEPS + rounds):
        times = {}
        for name, step in contest.steps.items():
            contest.weights.zero()
            times[name] = timed(step).thread
        found.append((times["penstock"] - times["bare"]) / contest.actions)
    return quartiles(found[WARMUP_STEPS:])


def calls(step: Step) -> int:
    """How many functions, Python's and C's, the calling thread calls in a step."""
    found = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


def messages(rank: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds of the processor that a message of one microbatch takes its sender's and its receiver's thread."""
    engine, transport = transport_of(rank)
    channel = transport.channel(0, Link(0, 1, ((0, "a"),)), 0, 1, backward=False)
    value, into = torch.randn(ROWS, DIM), torch.empty(ROWS, DIM)
    begun: deque[list[dist.Work]] = deque()

    def ours() -> None:
        if rank == 0:
            channel.send(0, [value])
        else:
            channel.post(0)
            channel.receive(0)

    def torch_does() -> None:  # as its runtime: one batch a message; a sender waits at the step's end
        kind = dist.isend if rank == 0 else dist.irecv
        begun.append(dist.batch_isend_irecv([dist.P2POp(kind, value if rank == 0 else into, 1 - rank)]))
        if rank == 1 or len(begun) > MICROBATCHES:
            for work in begun.popleft():
                work.wait()

    ours()
    transport.end_step()
    found = {}
    for name, once in (("penstock", ours), ("torch", torch_does)):
        seconds: list[Times] = []
        for _ in range(MESSAGES // MICROBATCHES):
            dist.barrier()
            seconds.append(timed(partial(_times, once)))
        while begun:
            for work in begun.popleft():
                work.wait()
        found[name] = quartiles([one.thread / MICROBATCHES for one in seconds])
    dist.barrier()
    engine.close()
    both = gathered(found)
    return {name: {"sender": both[0][name], "receiver": both[1][name]} for name in found}


def _times(once: Step) -> None:
    for _ in range(MICROBATCHES):
        once()


def summary(times: dict[str, list[list[Times]]], of_ranks: Sequence[Any]) -> dict[str, Any]:
    """Microseconds per action beyond the bare calls and the floor, of both ranks together: quartiles over rounds."""
    found: dict[str, Any] = {}

    def total(name: str, clock: str) -> list[float]:
        return [sum(getattr(one, clock) for one in ranks) for ranks in times[name]]

    counted = {name: sum(counts[name] for _, counts in of_ranks) for name in times}
    for name in times:
        actions = sum(counts[name] for counts, _ in of_ranks)
        one: dict[str, Any] = {"actions": actions, "calls_per_action": round(counted[name] / actions, 1)}
        for clock in ("thread", "process"):
            one[f"{clock}_microseconds_per_action"] = quartiles([step / actions for step in total(name, clock)])
            for other in {"bare", "floor"} - {name} if name != "bare" else ():
                pairs = zip(total(name, clock), total(other, clock), strict=True)
                one[f"{clock}_microseconds_beyond_{other}"] = quartiles([(a - b) / actions for a, b in pairs])
        if name != "bare":
            one["calls_beyond_bare"] = round((counted[name] - counted["bare"]) / actions, 1)
        slower = [max(r.wall for r in ranks) / 1000 for ranks in times[name]]
        found[name] = {**one, "step_milliseconds": quartiles(slower)}
    return found


def quartiles(values: Sequence[float]) -> list[float]:
    """Least, lower quartile, median, upper quartile."""
    return [round(v, 2) for v in (min(values), *statistics.quantiles(values, n=4, method="inclusive"))]
