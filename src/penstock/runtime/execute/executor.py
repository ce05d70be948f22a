"""A schedule bound to the stages of a batch's partitions: for each action of a rank, what to wait for and what to run.

`bind_row` knows no schedule by name; `run_actions` is the only executor. If one process drives all ranks, it gets the
actions of all of them, in an order that respects dependencies; otherwise those of its own rank's row.

A profiler shows a range for each action, `penstock 2F3`, and for its wait, `penstock 2F3 waits`. Only steps that run
under one have them: torch's own, or `emit_nvtx`, which passes them to nsys.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler

from penstock._base.compat import is_accelerator
from penstock._base.errors import ScheduleError
from penstock._base.stages import MODEL_INPUT, StageMeta
from penstock.distributed.failure import OUTSIDE, Position, Watched
from penstock.distributed.world import World
from penstock.runtime.exact.streams import Streams
from penstock.runtime.execute.clock import Clock, Counter, Marks
from penstock.runtime.execute.stage import BoundStage
from penstock.runtime.features.feature import Binding, Feature, StageContext, calls, contexts, within
from penstock.runtime.front_end import Partition
from penstock.runtime.gradients.sharding import ShardedStage
from penstock.runtime.gradients.sums import GradientSum, Tied
from penstock.runtime.loss.loss import LossHead
from penstock.runtime.transport.protocol import Transport
from penstock.runtime.transport.routes import Route, TrafficBuilder, find_route
from penstock.schedule import Action, Op, Schedule


@dataclass(frozen=True, slots=True)
class BoundAction:
    """One action of one rank, run as `work(wait())`, or as `work()` if it waits for nothing. Only `wait` may block."""

    rank: int
    action: Action
    wait: Callable[[], Any] | None
    work: Callable[..., None]
    waiting: Position
    running: Position


def run_actions(actions: Sequence[BoundAction], watched: Watched) -> None:
    """Run actions in order."""
    for bound in actions:
        if bound.wait is None:
            watched.position = bound.running
            bound.work()
        else:
            watched.position = bound.waiting
            ready = bound.wait()
            watched.position = bound.running
            bound.work(ready)
    watched.position = OUTSIDE


def run_timed(
    actions: Sequence[BoundAction], watched: Watched, clocks: Mapping[int, Clock], counters: Mapping[int, Counter]
) -> tuple[dict[int, list[Marks]], dict[int, list[int]]]:
    """Run actions in order. Return, by rank, marks of when each action waited and ran, and what its device then had
    allocated.

    Args:
        clocks, counters: by rank; `counters` for those whose device can count.
    """
    marks: dict[int, list[Marks]] = {rank: [] for rank in clocks}
    allocated: dict[int, list[int]] = {rank: [] for rank in counters}
    for clock in clocks.values():
        clock.start()
    marking = {rank: clock.mark for rank, clock in clocks.items()}
    for bound in actions:
        mark = marking[bound.rank]
        began = mark()
        if bound.wait is None:
            was_ready = mark()
            watched.position = bound.running
            bound.work()
        else:
            watched.position = bound.waiting
            ready = bound.wait()
            was_ready = mark()
            watched.position = bound.running
            bound.work(ready)
        marks[bound.rank].append((bound.action, began, was_ready, mark()))
        if bound.rank in counters:
            allocated[bound.rank].append(counters[bound.rank]())
    watched.position = OUTSIDE
    return marks, allocated


class Mode(NamedTuple):
    """What a recording depends on besides inputs.

    Attributes:
        training: whether backward runs too.
        settings: each module's mode, which parameters are trained, and autocast: the same on all processes.
        attributes: the plain attributes of modules whose forwards were recorded call by call.
    """

    training: bool
    settings: tuple[Hashable, ...]
    attributes: Hashable


@dataclass(frozen=True, slots=True)
class BatchKind:
    """What tells batches of one kind, which one bound schedule runs, from all others.

    Attributes:
        sizes: the rows of each microbatch.
        signature: the input signature; None if this process does not look at inputs, or not at the announced ones.
        plain_values: the plain values of the batch, whose identity may be part of its signature.
    """

    sizes: tuple[int, ...]
    mode: Mode
    signature: Hashable
    plain_values: Sequence[Any]


@dataclass(frozen=True, slots=True)
class BoundSchedule:
    """A schedule bound to the partitions of one kind of batch, for the ranks of this process."""

    number: int
    """Tells it from other bound schedules of the pipeline; the same on every rank."""
    kind: BatchKind
    partitions: tuple[Partition, ...]
    """One per microbatch."""
    positions: tuple[Sequence[int], ...]
    """Those of the model's inputs among the first stage's, for each microbatch."""
    overwritten: Set[str]
    """The paths of the inputs that some microbatch's forward updates in place."""
    first_ranks: Sequence[int]
    """The rank of each microbatch's first stage."""
    last_ranks: Sequence[int]
    actions: tuple[BoundAction, ...]
    stages: tuple[BoundStage, ...]
    head: LossHead
    averages: Mapping[int, GradientSum]
    """Averages over replicas, by stage; empty without replicas."""
    updated: tuple[Tensor, ...]
    """This process's buffers, and parameters if any, that a forward updates."""
    tied: tuple[Tied, ...]
    """This process's parameters that several stages hold and train."""
    reducers: tuple[GradientSum, ...]
    """They sum the gradients of tied parameters that several ranks hold."""
    schedule: Schedule
    training: bool


@dataclass(frozen=True, slots=True)
class Feed:
    """The data of one step. Ranks without the first or the last stage leave that stage's part empty.

    Attributes:
        inputs: for each microbatch, the model's inputs by position among the first stage's inputs.
        targets: one per microbatch; None in an evaluation without a target.
        weights: the weight of each microbatch's loss.
        keep_outputs: whether to keep the model's output for each microbatch.
        loss_scale: the factor by which gradients are multiplied.
    """

    inputs: Sequence[Mapping[int, Tensor]] = ()
    targets: Sequence[Any] | None = None
    weights: Sequence[float] = ()
    keep_outputs: bool = False
    loss_scale: float = 1.0


def ranks_of_ends(schedule: Schedule, is_end: Callable[[int], bool]) -> list[int]:
    """Return the rank of each microbatch's first or last stage, of which each copy of the model has one."""
    ends = filter(is_end, range(schedule.placement.stages))
    ranks = {k: schedule.placement.rank_of[stage] for stage in ends for k in schedule.numbers_on(stage)}
    return [ranks[k] for k in range(schedule.microbatches)]


def bind_stages(
    number: int,
    binding: Binding,
    transport: Transport,
    head: LossHead,
    streams: Streams | None,
    device: torch.device,
    world: World,
) -> dict[int, BoundStage]:
    """Bind one rank's stages: return them by index.

    Args:
        number: tells bound schedules of one pipeline apart; the same on every rank.
        head: what follows the last stage.
    """
    placement, rank = binding.schedule.placement, transport.rank
    builder = TrafficBuilder(number, binding.kinds.metas, placement, transport, training=binding.training)
    bound: dict[int, BoundStage] = {}
    for index in placement.stages_on(rank):
        stages = [partition.stages[index] for partition in binding.partitions]
        stage_head = head if placement.is_last(index) else None
        row = binding.schedule.rows[rank]
        context = StageContext(binding, world.numbers[rank], index, stages, row, device, stage_head, streams)
        bound[index] = BoundStage(context, builder)
    return bound


def bind_row(
    rank: int,
    binding: Binding,
    stages: Mapping[int, BoundStage],
    reducers: Mapping[int, GradientSum],
    averages: Mapping[int, GradientSum],
    world: World,
) -> list[BoundAction]:
    """Bind one rank's actions to its stages.

    Args:
        reducers: one per tie group.
        averages: averages over replicas, by stage.
    """
    arriving: set[int] = set()  # stages that are being gathered, for whose parameters the next computation waits
    placement, actions = binding.schedule.placement, list[BoundAction]()

    def peers(routes: Sequence[Route]) -> tuple[int, ...]:
        """Return the numbers of the other ranks at the ends of these routes."""
        return tuple(sorted({world.numbers[placement.rank_of[route.stage]] for route in routes if route.remote}))

    for action in binding.schedule.rows[rank]:
        if action.op is Op.REDUCE_GRAD:
            summed = averages[action.stage] if action.microbatch is None else reducers[action.microbatch]
            bound = _at_once(rank, action, summed.start)
        elif action.op is Op.UNSHARD:
            arriving.add(action.stage)
            bound = _at_once(rank, action, binding.sharded[action.stage].unshard)
        elif action.op is Op.RESHARD:
            bound = _at_once(rank, action, binding.sharded[action.stage].reshard)
        else:
            bound = _bind_to_stage(rank, action, stages.get(action.stage), peers)
        if action.op.is_compute and action.stage in arriving:
            arriving.remove(action.stage)
            bound = _after_unshard(bound, binding.sharded[action.stage], world.partners)
        actions.append(bound)
    return with_neighbors(actions, {index: stage.features for index, stage in stages.items()})


def _at_once(rank: int, action: Action, work: Callable[[], None]) -> BoundAction:
    """Bind an action that waits for nothing and is not a stage's own."""
    position = Position(str(action))
    return BoundAction(rank, action, None, work, position, position)


def _bind_to_stage(
    rank: int, action: Action, stage: BoundStage | None, peers: Callable[[Sequence[Route]], tuple[int, ...]]
) -> BoundAction:
    """Bind an action to its stage. `peers`: returns the numbers of the other ranks at the ends of routes."""
    text = str(action)
    running = waiting = Position(text)
    wait: Callable[[], Any] | None = None
    work: Callable[..., None]
    match action.op, stage, action.microbatch:
        case Op.F, BoundStage() as stage, int(k):
            wait, work = stage.await_inputs(k), stage.forward(k)
            waiting = Position(f"{action.stage}RECV_F{k}", peers(stage.traffic(k).values_in))
        case Op.B | Op.I, BoundStage() as stage, int(k):
            wait, work = stage.await_grads(k), stage.backward(k)
            waiting = Position(f"{action.stage}RECV_B{k}", peers(stage.traffic(k).grads_in))
        case Op.W, BoundStage() as stage, int(k):
            work = stage.weight_backward(k)
        case Op.SEND_F | Op.SEND_B, BoundStage() as stage, int(k):
            traffic = stage.traffic(k)
            route = find_route(action, traffic.values_out if action.op is Op.SEND_F else traffic.grads_out)
            work, running = stage.send(k, route), Position(text, peers([route]))
        case Op.RECV_F | Op.RECV_B, BoundStage() as stage, int(k):
            traffic = stage.traffic(k)
            route = find_route(action, traffic.values_in if action.op is Op.RECV_F else traffic.grads_in)
            work = partial(route.channel.post, k)
        case _:
            raise ScheduleError(f"action {text} of rank {rank}: {action.op.value} cannot be run; leave it out")
    if action.op.is_compute:
        work = within(contexts(stage.features, "around", action), work)
    return BoundAction(rank, action, wait, work, waiting, running)


def _after_unshard(bound: BoundAction, sharded: ShardedStage, partners: Sequence[int]) -> BoundAction:
    """Return the first computation after a gather, which waits for the parameters too."""
    receive, work, waiting = bound.wait, bound.work, bound.waiting

    def wait() -> Any:
        sharded.wait()
        return None if receive is None else receive()

    unshard = str(Action(bound.action.stage, Op.UNSHARD))
    text = f"{unshard} and {waiting.action}" if waiting.peers else unshard
    position = Position(text, tuple(sorted({*waiting.peers, *partners})))
    return replace(bound, wait=wait, waiting=position, work=work if receive is not None else lambda _: work())


def with_neighbors(actions: Sequence[BoundAction], features: Mapping[int, Sequence[Feature]]) -> list[BoundAction]:
    """Return a row in which each computation's features are called around its neighbors (`Feature.upcoming`,
    `Feature.past`).

    Args:
        actions: of one rank, in order.
        features: by stage.
    """
    row = list(actions)
    for before, after in pairwise([index for index, bound in enumerate(actions) if bound.action.op.is_compute]):
        action, following = actions[before].action, actions[after].action
        row[before] = _surround(calls(features[following.stage], "upcoming", following), row[before], ())
        row[after] = _surround((), row[after], calls(features[action.stage], "past", action))
    return row


def _surround(
    first: Sequence[Callable[[], None]], bound: BoundAction, last: Sequence[Callable[[], None]]
) -> BoundAction:
    """Return an action with calls before and after its work."""

    def accompanied(*ready: Any) -> None:
        for call in first:
            call()
        bound.work(*ready)
        for call in last:
            call()

    return replace(bound, work=accompanied) if first or last else bound


def on_device(actions: Sequence[BoundAction], device: torch.device) -> list[BoundAction]:
    """Return one rank's row, whose actions make its device the current one, in a process that drives several ranks.

    Tensors carry their device, but `device="cuda"` in a forward, or a kernel written in Triton, means the current one.
    """
    if not is_accelerator(device):
        return list(actions)
    index = device.index
    return [within_context(bound, lambda _: torch.accelerator.device_index(index)) for bound in actions]


def within_context(bound: BoundAction, context: Callable[[str], AbstractContextManager[Any]]) -> BoundAction:
    """Return an action whose wait and work each run in what `context` returns for its text, such as `2F3` and `2F3
    waits`."""
    wait = None if bound.wait is None else within(partial(context, f"{bound.action} waits"), bound.wait)
    return replace(bound, wait=wait, work=within(partial(context, str(bound.action)), bound.work))


def model_inputs(meta: StageMeta) -> list[int]:
    """Return the positions of the model's own inputs among a stage's inputs, in order."""
    return [position for position, i in enumerate(meta.inputs) if i.source == MODEL_INPUT]


def is_profiling() -> bool:
    """Whether torch's profiler, or `emit_nvtx`, is on.

    Torch has no public query. Its own optimizers check `_is_profiler_enabled`; in a torch without it, every step
    has ranges, which cost about 15 microseconds per action.
    """
    return bool(getattr(profiler, "_is_profiler_enabled", True))


def with_profiler_ranges(actions: Sequence[BoundAction]) -> list[BoundAction]:
    """Return the actions, each wrapped in its ranges."""
    return [within_context(bound, lambda text: profiler.record_function(f"penstock {text}")) for bound in actions]
