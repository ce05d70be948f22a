"""Drives this process's ranks: holds their transports and watchdog, and runs bound schedules on them."""

from __future__ import annotations

import atexit
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
from torch import Tensor, nn

from penstock._base.compat import autocast_kinds, is_accelerator
from penstock._base.errors import PartitionError
from penstock._base.marks import computing
from penstock.distributed.failure import OUTSIDE, Position, Watched
from penstock.distributed.failure_detector import Timeouts
from penstock.distributed.groups import GroupOptions
from penstock.distributed.world import World
from penstock.runtime.exact.streams import Streams
from penstock.runtime.execute.clock import (
    Marks,
    Moment,
    Progress,
    counter,
    has_events,
    make_clock,
    noting_messages,
    shifted,
)
from penstock.runtime.execute.control import Arrival, Control
from penstock.runtime.execute.executor import (
    BatchKind,
    BoundAction,
    BoundSchedule,
    Feed,
    bind_row,
    bind_stages,
    is_profiling,
    model_inputs,
    on_device,
    ranks_of_ends,
    run_actions,
    run_timed,
    with_profiler_ranges,
)
from penstock.runtime.execute.stage import BoundStage
from penstock.runtime.execute.transport_choice import (
    NOTHING_STAGED,
    TransportChoice,
    find_transport,
    make_transport,
    staged_note,
)
from penstock.runtime.features.feature import Binding, Start
from penstock.runtime.front_end import Partition, Stage
from penstock.runtime.gradients.replicas import Replicas
from penstock.runtime.gradients.sums import GradientSum, TieGroup, check_no_hooks, find_tied, tie_sum
from penstock.runtime.loss.loss import LossHead
from penstock.runtime.microbatch_kinds import MicrobatchKinds, distinct, merge_stages
from penstock.runtime.transport.protocol import Pending, Transport
from penstock.runtime.transport.routes import LocalHub, LocalTransport, between_ranks
from penstock.schedule import Placement, Schedule, linearize
from penstock.schedule.communication import rank_pairs


class Engine:
    """Runs bound schedules on this process's ranks: all of them (one process), or one of `world.ranks`.

    Attributes:
        ranks: those of this process; `devices`: of all ranks.
        control: what all processes agree on; `replicas`: what averages gradients over them, if there are any.
        transports: by rank of this process.
        streams: the random streams.
        allocated: by rank, the bytes that its device had allocated after each action of the last timed step; empty on
            a CPU.
        held_tensors: the model's tensors on this rank of several processes, by id. (A weak reference could not be
            swapped by torch.)
    """

    def __init__(
        self,
        world: World,
        devices: Sequence[torch.device],
        seed: int,
        transport: TransportChoice = "auto",
        timeouts: Timeouts | None = None,
        group_options: GroupOptions | None = None,
    ) -> None:
        self.world = world
        self.devices = tuple(devices)
        self.ranks: tuple[int, ...] = tuple(range(world.ranks)) if world.rank is None else (world.rank,)
        self._reducers: dict[int, dict[int, GradientSum]] = {rank: {} for rank in self.ranks}
        self._num_bound = 0
        self._connected: set[tuple[int, int]] = set()
        self.allocated: Mapping[int, Sequence[int]] = {}
        self.held_tensors: dict[int, Tensor] = {}
        self._clocks = {rank: make_clock(self.devices[rank]) for rank in self.ranks}
        device = self.devices[self.ranks[0]]
        if not world.is_local and device.type == "cuda":
            torch.cuda.set_device(device)  # NCCL and the random generators use the current device
        self.control = Control(world, device, timeouts, group_options, staged=find_transport(transport).staged)
        self._choice = transport
        watchdog = self.control.watchdog
        follows = not world.is_local and has_events(device)  # how far the device has come
        self._watched: Watched = Progress(device, watchdog) if follows else watchdog
        self._sending = Position("its last sends", self.control.pipeline_peers)  # a first step waits for them
        self.streams = Streams(self.control.share(seed, role="everyone"))
        groups = self.control.groups
        self.transports: dict[int, Transport] = {}
        if groups is None:
            hub = LocalHub(devices)
            self.transports = {rank: cast(Transport, LocalTransport(rank, hub)) for rank in self.ranks}
        else:
            with self.control.reporting(close=self.close):
                self.transports = {r: make_transport(transport, r, device, self.control, groups) for r in self.ranks}
            atexit.register(self._close_at_exit)
        self.replicas = None
        if groups is not None and len(world.replicas) > 1:
            self.replicas = Replicas(world, groups, self.control.staging)

    @property
    def notes(self) -> tuple[str, ...]:
        """What users should know of how the ranks of other processes are reached."""
        if self.control.staging is None:
            return (NOTHING_STAGED,) if find_transport(self._choice).staged else ()
        return (staged_note(self._choice, self.control.staging.device),)

    @property
    def recording_device(self) -> torch.device:
        """The device for which this process records forwards: that of its first rank on an accelerator, or the CPU.

        A forward may ask where it runs (`torch.autocast(x.device.type)`). So a process that drives a CPU and an
        accelerator records all stages as if on the accelerator.
        """
        devices = (self.devices[rank] for rank in self.ranks)
        return next((device for device in devices if is_accelerator(device)), torch.device("cpu"))

    def tie(self, groups: Sequence[TieGroup], parameter: Callable[[str], nn.Parameter]) -> None:
        """Make the copies of tied parameters equal, and prepare to reduce their gradients."""
        for index, group in enumerate(groups):
            if self.control.groups is not None:
                with self.control.waiting("process groups"):
                    self.control.groups.make(group.ranks)
            for rank in self.ranks:
                if rank in group.ranks:
                    parameters = [parameter(name) for name in group.names]
                    transport, numbers = self.transports[rank], self.world.numbers
                    self._reducers[rank][index] = tie_sum(index, group, parameters, transport, numbers)
        reducers = [(index, rank, r) for rank in self.ranks for index, r in self._reducers[rank].items()]
        pending: list[Pending] = []
        for index, rank, reducer in reducers:
            with self.control.waiting_for("equal tied parameters", reducer.position.peers):
                pending.append(reducer.start_copies(is_first=rank == groups[index].ranks[0]))
        for (_, _, reducer), copies in zip(reducers, pending, strict=True):
            with self.control.waiting_for("equal tied parameters", reducer.position.peers):
                copies.wait()

    def bind(self, binding: Binding, kind: BatchKind) -> BoundSchedule:
        """Bind a schedule to the partitions of its microbatches, those of a kind of batch.

        Every rank binds the same ones in the same order.
        """
        partitions, schedule, training = binding.partitions, binding.schedule, binding.training
        stages = merge_stages(partitions)
        with self.agreed_at_first():
            for partition in partitions:
                self.streams.watch(partition.drawing_modules)
                self.streams.seeds_foreign |= partition.is_foreign
            pipelines = schedule.placement.pipelines
            rank_of = schedule.placement.rank_of
            head = LossHead(binding.loss, partitions, self.streams, required=training, pipelines=pipelines)
            local = [stage for stage in stages if rank_of[stage.meta.index] in self.ranks]
            tied = find_tied(stages, local, pipelines) if training else ()
            check_no_hooks(tied)
            averages = self._averages(local) if training else {}
            draws = any(part.drawing_modules or draws_outside_modules(part) for part in distinct(partitions))
            streams = self.streams if draws else None
            number, bound_stages, rows = self._num_bound, list[BoundStage](), dict[int, list[BoundAction]]()
            for rank in self.ranks:
                transport, device = self.transports[rank], self.devices[rank]
                by_index = bind_stages(number, binding, transport, head, streams, device, self.world)
                bound_stages += by_index.values()
                rows[rank] = bind_row(rank, binding, by_index, self._reducers[rank], averages, self.world)
        self._num_bound += 1
        self._check_same_stages(schedule, binding.kinds)
        self._make_pair_groups(schedule.placement, binding.kinds)
        self._connect(schedule)
        return BoundSchedule(
            number=number,
            kind=kind,
            partitions=tuple(partitions),
            positions=tuple(model_inputs(partition.stages[0].meta) for partition in partitions),
            overwritten=frozenset().union(*(partition.overwritten for partition in partitions)),
            first_ranks=ranks_of_ends(schedule, schedule.placement.is_first),
            last_ranks=ranks_of_ends(schedule, schedule.placement.is_last),
            actions=tuple(self._in_order(schedule, rows)),
            stages=tuple(bound_stages),
            head=head,
            averages=averages,
            updated=tuple({**s.parameters, **s.buffers}[name] for s in local for name in s.meta.updated),
            tied=tied,
            reducers=tuple(r for rank in self.ranks for r in self._reducers[rank].values()) if training else (),
            schedule=schedule,
            training=training,
        )

    def agreed_at_first(self) -> AbstractContextManager[None]:
        """`Control.agreed` until a schedule is bound: replicas bind the first together, later ones independently."""
        return nullcontext() if self._num_bound else self.control.agreed()

    def _in_order(self, schedule: Schedule, rows: Mapping[int, Sequence[BoundAction]]) -> Iterator[BoundAction]:
        """Yield the actions of all rows: for one rank, its row; for several, an order that respects dependencies."""
        if not self.world.is_local:
            for row in rows.values():
                yield from row
            return
        remaining = {rank: iter(on_device(row, self.devices[rank])) for rank, row in rows.items()}
        for rank, _ in linearize(schedule):
            yield next(remaining[rank])

    def _averages(self, local_stages: Sequence[Stage]) -> dict[int, GradientSum]:
        """Return the averages of gradients over the replicas, by stage of this process."""
        if self.replicas is None:
            return {}
        tied = [p for rank in self.ranks for reducer in self._reducers[rank].values() for p in reducer.parameters]
        return self.replicas.averages(local_stages, tied)

    def _check_same_stages(self, schedule: Schedule, kinds: MicrobatchKinds) -> None:
        """Check before the first message that all ranks split the same model in the same way. Which microbatches are of
        which kind, and schedules bound later, concern only their own pipeline."""
        if self.control.groups is None:
            return
        digests = tuple(hashlib.sha256(repr(item).encode()).hexdigest() for item in (str(schedule), kinds))
        if self._num_bound == 1:
            gathered = self.control.gather(digests, "its stages")
            numbers = self.world.numbers
            differing = [r for r, d in enumerate(gathered) if d != digests and (r in numbers or d[0] != digests[0])]
        else:
            numbered = zip(self.world.numbers, self.control.gather_pipeline(digests), strict=True)
            differing = [rank for rank, d in numbered if d != digests]
        if differing:
            raise PartitionError(
                f"rank {self.world.number} has other stages or another schedule than rank {differing[0]}: "
                "every rank must call penstock.pipeline with the same model, example and arguments"
            )

    def _make_pair_groups(self, placement: Placement, kinds: MicrobatchKinds) -> None:
        """Make the groups of pairs of ranks, for forwards and backwards alike, where each way is to have its own.

        Replicas bind later programs independently, so what only those exchange stays in the groups of all ranks.
        """
        groups = self.control.groups
        if groups is not None and groups.paired and (self._num_bound == 1 or len(self.world.lines) == 1):
            with self.control.waiting("process groups"):
                groups.pair(between_ranks(kinds.metas, placement))

    def _connect(self, schedule: Schedule) -> None:
        """Connect the pairs of ranks that exchange messages, in the same order on all ranks, so none waits forever.

        In the middle of a schedule, a pair's first message might hold up a rank that others wait for.
        """
        for source, target in rank_pairs(schedule) if not self.world.is_local else ():
            if (source, target) in self._connected:
                continue
            self._connected.add((source, target))
            for rank in self.ranks:
                if rank in (source, target):
                    peer = target if rank == source else source
                    with self.control.waiting_for("a connection", (self.world.numbers[peer],)):
                        self.transports[rank].connect(source, target)

    def run_step(self, bound: BoundSchedule, feed: Feed, step: int, *, timed: bool = False) -> dict[int, list[Moment]]:
        """Run one step of a bound schedule. If `timed`, returns what each of this process's ranks did and when.

        Raises:
            RankFailedError: another rank failed.
            Exception: whatever the model or the loss raised, with a note that names the rank and the action.
        """
        devices = tuple({self.devices[rank] for rank in self.ranks})
        with self._dropping_on_error(), computing(None, None):
            self._begin(bound, feed)
            actions: Sequence[BoundAction] = with_profiler_ranges(bound.actions) if is_profiling() else bound.actions
            with torch.set_grad_enabled(bound.training), self.streams.drawing(step, devices):
                marks: dict[int, list[Marks]] = {}
                if timed:
                    counters = {r: count for r in self.ranks if (count := counter(self.devices[r])) is not None}
                    with noting_messages(self.transports, self._clocks):
                        marks, self.allocated = run_timed(actions, self._watched, self._clocks, counters)
                else:
                    run_actions(actions, self._watched)
            self._end(bound)
            shift = self.control.watchdog.offset.nanoseconds
            return {rank: shifted(self._clocks[rank].read(row), shift) for rank, row in marks.items()}

    @contextmanager
    def _dropping_on_error(self) -> Iterator[None]:
        """Wrap a step: if it raises, none of its work is left pending, and autocast is what it was: a recorded forward
        that raises cannot leave the autocast that it entered."""
        before = {kind: torch.is_autocast_enabled(kind) for kind in autocast_kinds()}
        try:
            yield
        except BaseException:
            for kind, enabled in before.items():
                torch.set_autocast_enabled(kind, enabled)
            for transport in self.transports.values():
                transport.drop_step()
            raise

    def _begin(self, bound: BoundSchedule, feed: Feed) -> None:
        """Run before a step's first action."""
        check_no_hooks(bound.tied)
        self.control.watchdog.step += 1
        self.control.watchdog.check()
        start = Start(self.replicas is None or self.replicas.active, feed.loss_scale)
        for stage in bound.stages:
            stage.begin_step(feed.inputs if stage.is_first else (), start)
        bound.head.begin_step(feed.targets, feed.weights, feed.keep_outputs, feed.loss_scale)
        if bound.averages and self.replicas is not None:
            self.replicas.begin_step(bound.averages)
        for reducer in bound.reducers:
            reducer.begin_step()

    def _end(self, bound: BoundSchedule) -> None:
        """Run after a step's last action: waits for sums, and until everything sent has arrived."""
        for reducer in bound.reducers:
            self._watched.position = reducer.position
            reducer.end_step()
        if bound.averages and self.replicas is not None:
            self.replicas.end_step(bound.averages, bound.updated, self._watched)
        self._watched.position = self._sending
        for transport in self.transports.values():
            transport.end_step()
        self._watched.position = OUTSIDE

    def announce(self, numbers: Sequence[int], source_rank: int) -> list[int]:
        """Return one rank's numbers on every rank of the pipeline, each of which passes as many. That rank does not
        wait for the others."""
        if self.control.groups is None:
            return list(numbers)
        buffer = torch.tensor(numbers, dtype=torch.float64)
        wait = self.broadcast(buffer, source_rank, "the step's announcement")
        if source_rank not in self.ranks:
            wait()
        return [int(number) for number in buffer.tolist()]

    def broadcast(self, value: Tensor, source_rank: int, activity: str = "the loss") -> Arrival:
        """Start to copy a small CPU tensor from one rank to all, in place."""
        source = () if source_rank in self.ranks else (self.world.numbers[source_rank],)
        with self.control.waiting_for(activity, source or self.control.pipeline_peers):  # earlier ones, if many run
            pending = [transport.broadcast(value, source_rank) for transport in self.transports.values()]
        return Arrival(self.control, activity, source, pending)

    def _close_at_exit(self) -> None:
        """Close the engine: what was sent must arrive even if a script does not call `close`. If it raised, report
        that to the others."""
        error = getattr(sys, "last_value", None)
        if isinstance(error, BaseException) and not self.control.failed:
            self.control.fail(error)
        self.close()

    def close(self) -> None:
        """End the watchdog, remove hooks, and release the process groups."""
        self.held_tensors = {}
        atexit.unregister(self._close_at_exit)
        self.streams.close()
        if not self.control.failed:
            self.control.end_losses()
            with self.control.waiting("close"):
                for transport in self.transports.values():
                    transport.close()
        self.control.close()


def draws_outside_modules(partition: Partition) -> bool:
    """Whether the model draws random numbers outside all called modules."""
    return any(stage.draws_outside_modules for stage in partition.stages)
