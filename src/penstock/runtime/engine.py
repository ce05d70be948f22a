"""The ranks that this process drives: their transports and watchdog, and the running of programs on them."""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import PartitionError, PipelineFailure
from penstock.partition import Partition, check_alike
from penstock.runtime.assembly import Choices
from penstock.runtime.distributed import DistributedTransport, Groups, all_reduce
from penstock.runtime.failure import OUTSIDE, Position
from penstock.runtime.local import LocalHub, LocalTransport
from penstock.runtime.loss import Loss, LossHead
from penstock.runtime.program import Entry, Feed, Moment, Program, run, run_timed
from penstock.runtime.ranges import is_profiling, ranged
from penstock.runtime.replicas import Average, Replicas, copy_from_first
from penstock.runtime.shared_memory import Neighbours, SharedMemoryTransport
from penstock.runtime.streams import Streams
from penstock.runtime.ties import TieGroup, TieReducer
from penstock.runtime.transport import Transport
from penstock.runtime.watchdog import Watchdog
from penstock.runtime.world import World, backend_of, exchange
from penstock.schedule import Placement, Schedule, linearize

T = TypeVar("T")

_OWN_ERROR_SECONDS = 1.5
"""How long an error outside of a wait is held back, in case another rank's failure caused it."""

TransportChoice = Literal["auto", "distributed"]
"""What carries values between processes: "auto" takes shared memory between CPU ranks of one machine."""


@dataclass(frozen=True, slots=True)
class Job:
    """A schedule bound to partitions, for the ranks of this process."""

    number: int
    """Of its programs; the same on every rank."""
    partitions: tuple[Partition, ...]
    """Of each microbatch."""
    entries: tuple[Entry, ...]
    programs: tuple[Program, ...]
    head: LossHead
    averages: Mapping[int, Average]
    """Over replicas, by stage; empty where there are none."""
    updated: tuple[Tensor, ...]
    """The buffers, and parameters if any, of this process that a forward updates."""
    schedule: Schedule
    training: bool


class Engine:
    """Runs jobs on this process's ranks: all of them (one process), or one of `world.ranks`."""

    def __init__(
        self, world: World, devices: Sequence[torch.device], seed: int, transport: TransportChoice = "auto"
    ) -> None:
        self.world = world
        self.devices = tuple(devices)
        self.ranks: tuple[int, ...] = tuple(range(world.ranks)) if world.rank is None else (world.rank,)
        self._groups: Groups | None = None
        self._reducers: dict[int, dict[int, TieReducer]] = {rank: {} for rank in self.ranks}
        self._jobs = 0
        self._line = tuple(name for name in world.names if name != world.name)
        self._sending = Position("its last sends", self._line)  # a first step's are waited for
        self.transports: dict[int, Transport]
        if world.rank is None:
            hub = LocalHub(devices)
            self.transports = {rank: LocalTransport(rank, hub) for rank in self.ranks}
            self.watchdog = Watchdog.connect(0, 1, lambda value: value)
        else:
            device = self.devices[world.rank]
            if device.type == "cuda":
                torch.cuda.set_device(device)  # NCCL and the random generators look at the current one
            self._groups = Groups(world, backend_of(device))
            give = exchange(self._groups.everyone)
            seed = give(seed)
            self.watchdog = Watchdog.connect(world.name, len(world.everyone), give)
            self.transports = {world.rank: self._transport(world.rank, self._groups, device, transport)}
            atexit.register(self.close)  # what was sent must arrive, also from a script that does not close
        self.streams = Streams(seed)
        replicated = self._groups is not None and self._groups.replicas is not None
        self.replicas = Replicas(world, self._groups) if self._groups is not None and replicated else None

    def _transport(
        self, rank: int, groups: Groups, device: torch.device, choice: TransportChoice
    ) -> DistributedTransport | SharedMemoryTransport:
        """Shared memory between CPU ranks of one machine, `torch.distributed` else."""
        plain = DistributedTransport(rank, groups, device)
        possible = device.type == "cpu" and Neighbours.supported()
        if not all(self.gather_line(possible and choice == "auto")):
            return plain
        neighbours = Neighbours(rank, self.gather_line)
        return SharedMemoryTransport(plain, neighbours) if neighbours.ranks else plain

    @property
    def failed(self) -> bool:
        """Whether this or another rank has failed, so that nothing can be run any more."""
        return self.watchdog.failure is not None

    def tie(self, groups: Sequence[TieGroup], parameter: Callable[[str], nn.Parameter]) -> None:
        """Makes the copies of tied parameters equal, and ready to be reduced."""
        for index, group in enumerate(groups):
            if self._groups is not None:
                self._groups.make(group.ranks)
            for rank in self.ranks:
                if rank in group.ranks:
                    held = [parameter(name) for name in group.names]
                    transport, names = self.transports[rank], self.world.names
                    self._reducers[rank][index] = TieReducer(index, group, held, transport, names)
        reducers = [reducer for rank in self.ranks for reducer in self._reducers[rank].values()]
        for reducer in reducers:
            reducer.start_equal()
        for reducer in reducers:
            reducer.end_equal()

    def bind(
        self,
        partitions: Sequence[Partition],
        schedule: Schedule,
        loss: Loss | None,
        choices: Choices,
        *,
        training: bool,
    ) -> Job:
        """Binds a schedule, communication included, to the partitions of its microbatches.

        Every rank binds the same jobs in the same order.
        """
        placement = schedule.placement
        first = partitions[0]
        for other in partitions[1:]:
            check_alike(first, other)
        drawing = {name for partition in partitions for name in partition.drawing_modules}
        draws = bool(drawing) or draws_in_glue(first)
        for partition in partitions:
            self.streams.watch(partition.drawing_modules)
        build = [partition.build_output for partition in partitions]
        head = LossHead(loss, build, self.streams, needed=training)
        averages = self._averages(first, placement) if training else {}
        updated = tuple(
            {**stage.parameters, **stage.buffers}[name]
            for stage in first.stages
            if placement.rank_of[stage.meta.index] in self.ranks
            for name in stage.meta.updated
        )
        programs = {
            rank: Program(
                self._jobs,
                partitions,
                placement,
                schedule.rows[rank],
                self.transports[rank],
                head,
                self._reducers[rank],
                self.streams if draws else None,
                self.devices[rank],
                self.world.names,
                averages,
                choices,
                training=training,
            )
            for rank in self.ranks
        }
        number, self._jobs = self._jobs, self._jobs + 1
        self._agree(schedule, first)
        if self.world.rank is None:
            done = dict.fromkeys(self.ranks, 0)
            entries = []
            for rank, _ in linearize(schedule):
                entries.append(programs[rank].entries[done[rank]])
                done[rank] += 1
        else:
            entries = programs[self.world.rank].entries
        return Job(
            number,
            tuple(partitions),
            tuple(entries),
            tuple(programs.values()),
            head,
            averages,
            updated,
            schedule,
            training,
        )

    def release(self, job: Job) -> None:
        """Gives back what a job holds that will not be run any more. Every rank calls it between the same two steps."""
        for transport in self.transports.values():
            transport.release(job.number)

    def _averages(self, partition: Partition, placement: Placement) -> dict[int, Average]:
        """What averages gradients over the replicas, by stage."""
        if self.replicas is None:
            return {}
        here = [stage for stage in partition.stages if placement.rank_of[stage.meta.index] in self.ranks]
        tied = [p for rank in self.ranks for reducer in self._reducers[rank].values() for p in reducer.parameters]
        return self.replicas.averages(here, tied)

    def _agree(self, schedule: Schedule, partition: Partition) -> None:
        """Finds out before the first message whether all ranks split the same model in the same way. Later jobs are
        each pipeline's own business."""
        if self._groups is None:
            return
        mine = hashlib.sha256(repr((str(schedule), [stage.meta for stage in partition.stages])).encode()).hexdigest()
        if self._jobs == 1:
            differing = [rank for rank, other in enumerate(self.gather(mine)) if other != mine]
        else:
            line = zip(self.world.names, self.gather_line(mine), strict=True)
            differing = [rank for rank, other in line if other != mine]
        if differing:
            raise PartitionError(
                f"rank {self.world.name} has other stages or another schedule than rank {differing[0]}: "
                "every rank must call penstock.pipeline with the same model, example and arguments"
            )

    def run(self, job: Job, feed: Feed, step: int, *, timed: bool = False) -> dict[int, list[Moment]]:
        """Runs one step of a job. Returns, if `timed`, what each of this process's ranks did when.

        Raises:
            PipelineFailure: another rank failed.
            Exception: whatever the model or the loss raised, with a note that names rank and action.
        """
        moments: dict[int, list[Moment]] = {rank: [] for rank in self.ranks}
        self.watchdog.step += 1
        self.watchdog.check()
        for program in job.programs:
            program.start(feed, reduces=self.replicas is None or self.replicas.active)
        job.head.start(feed.targets, feed.weights, feed.keep_outputs, feed.loss_scale)
        devices = tuple({self.devices[rank] for rank in self.ranks})
        reducers = [r for rank in self.ranks for r in self._reducers[rank].values()] if job.training else []
        if job.averages and self.replicas is not None:
            self.replicas.begin_step(job.averages)
        for reducer in reducers:
            reducer.begin_step()
        entries = ranged(job.entries) if is_profiling() else job.entries
        with torch.set_grad_enabled(job.training), self.streams.drawing(step, devices), _same_autocast_after():
            if timed:
                run_timed(entries, self.watchdog, moments, self._settle)
            else:
                run(entries, self.watchdog)
        for reducer in reducers:
            self.watchdog.position = reducer.position
            reducer.end_step()
        if job.averages and self.replicas is not None:
            self.replicas.end_step(job.averages, job.updated, self.watchdog)
        self.watchdog.position = self._sending
        for transport in self.transports.values():
            transport.end_step()
        self.watchdog.position = OUTSIDE
        return moments

    def _settle(self) -> None:
        for rank in self.ranks:
            if self.devices[rank].type == "cuda":
                torch.cuda.synchronize(self.devices[rank])

    def start_equal(self, tensors: Iterable[Tensor]) -> None:
        """Gives all that run the same stages the first one's values, in place."""
        if self._groups is not None and self._groups.column is not None:
            numbers = [self.world.everyone.index(rank) for rank in self.world.column]
            with self._waiting("equal parameters", tuple(n for n in numbers if n != self.world.name)):
                copy_from_first(tensors, self._groups.column)

    def give(self, value: T, source_rank: int = 0) -> T:
        """One rank's object, on every rank of the pipeline; one call a process."""
        if self._groups is None:
            return value
        peers = () if self.world.rank == source_rank else (self.world.names[source_rank],)
        with self._waiting("broadcast", peers):
            given: T = exchange(self._groups.control, source_rank)(value)
        return given

    def announce(self, numbers: Sequence[int], source_rank: int) -> list[int]:
        """One rank's numbers, on every rank of the pipeline; each gives as many. That rank does not wait for the
        others."""
        if self._groups is None:
            return list(numbers)
        buffer = torch.tensor(numbers, dtype=torch.float64)
        wait = self.share(buffer, source_rank, "the step's announcement")
        if source_rank not in self.ranks:
            wait()
        return [int(number) for number in buffer.tolist()]

    def bring(self, buffer: Tensor, source_rank: int, target_ranks: Sequence[int]) -> None:
        """Copies a CPU tensor, in place, from one rank to others. All of these ranks call it, and none else."""
        if self._groups is None:
            return
        group, here = self._groups.control, self.world.rank
        targets = [rank for rank in target_ranks if rank != source_rank]
        waited = targets if here == source_rank else [source_rank]
        with self._waiting("the outputs", tuple(self.world.names[rank] for rank in waited)):
            if here != source_rank:
                dist.recv(buffer, group=group, group_src=source_rank)
            else:
                for target in targets:
                    dist.send(buffer, group=group, group_dst=target)

    def share(self, value: Tensor, source_rank: int, what: str = "the loss") -> Callable[[], None]:
        """Starts to copy a small CPU tensor from one rank to all, in place. Returns what waits for it."""
        pending = [transport.share(value, source_rank) for transport in self.transports.values()]

        def wait() -> None:
            source = () if source_rank in self.ranks else (self.world.names[source_rank],)
            with self._waiting(what, source):
                for one in pending:
                    one.wait()

        return wait

    def share_sum(self, value: Tensor) -> Callable[[], None]:
        """Starts to sum a small CPU tensor, in place, over all processes. Returns what waits for it."""
        assert self._groups is not None
        pending = all_reduce([value], self._groups.everyone)

        def wait() -> None:
            with self._waiting("the loss", self._others):
                pending.wait()

        return wait

    @contextmanager
    def _waiting(self, what: str, peers: tuple[int, ...]) -> Iterator[None]:
        """Around a wait outside of a program: the watchdog knows of it, and an error names the first cause."""
        self.watchdog.position = Position(what, peers)
        try:
            yield
        except (RuntimeError, OSError) as error:
            cause = self.fail(error)
            if cause is error:
                raise
            raise cause from None
        self.watchdog.position = OUTSIDE

    def waiting(self, what: str) -> AbstractContextManager[None]:
        """Around a wait for all other ranks outside of a step: if one is lost, this rank says so and ends."""
        return self._waiting(what, self._others)

    @property
    def control_group(self) -> dist.ProcessGroup | None:
        """A gloo group of all processes; None if there is one."""
        return None if self._groups is None else self._groups.everyone

    def gather(self, value: Any) -> list[Any]:
        """Every process's object, on all of them; each of them calls it."""
        if self._groups is None:
            return [value]
        values: list[Any] = [None] * len(self.world.everyone)
        with self._waiting("gather", self._others):
            dist.all_gather_object(values, value, group=self._groups.everyone)
        return values

    def gather_line(self, value: Any) -> list[Any]:
        """As `gather`, of the ranks of this pipeline."""
        if self._groups is None:
            return [value]
        values: list[Any] = [None] * self.world.ranks
        with self._waiting("gather", self._line):
            dist.all_gather_object(values, value, group=self._groups.control)
        return values

    @property
    def _others(self) -> tuple[int, ...]:
        return tuple(number for number in range(len(self.world.everyone)) if number != self.world.name)

    def fail(self, error: BaseException) -> BaseException:
        """Tells the others that this rank raised; returns what is to be raised here: the first cause."""
        position = self.watchdog.position
        if isinstance(error, PipelineFailure) or self._groups is None:
            self.watchdog.position = OUTSIDE
            if position.action and not isinstance(error, PipelineFailure):
                error.add_note(f"penstock: in action {position.action}")
            return error
        if isinstance(error, (RuntimeError, OSError)):
            # Most likely a neighbour that left; where nothing was waited for it may as well be the model's own error.
            patience = None if position.peers else _OWN_ERROR_SECONDS
            if self.watchdog.cause(patience) is not None:
                return _failure_of(self.watchdog, error)
        error.add_note(f"penstock: on rank {self.world.name}" + (f", in {position.action}" if position.action else ""))
        self.watchdog.report(position.action or None, error)
        return error

    def close(self) -> None:
        """Ends the watchdog, removes hooks, and gives the process groups back."""
        atexit.unregister(self.close)
        self.streams.close()
        if not self.failed:
            with self._waiting("close", self._others):
                for transport in self.transports.values():
                    transport.close()
        self.watchdog.close()
        if self._groups is not None and not self.failed:
            self._groups.close()


@contextmanager
def _same_autocast_after() -> Iterator[None]:
    """A recorded forward that raises cannot leave the autocast that it entered."""
    before = {kind: torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")}
    try:
        yield
    except BaseException:
        for kind, enabled in before.items():
            torch.set_autocast_enabled(kind, enabled)
        raise


def draws_in_glue(partition: Partition) -> bool:
    """Whether the model draws random numbers outside of any module that is called."""
    nodes = (node for stage in partition.stages for node in stage.module.graph.nodes)
    return any(node.op == "call_method" and node.target == "enter" for node in nodes)


def _failure_of(watchdog: Watchdog, error: BaseException) -> BaseException:
    try:
        watchdog.check()
    except PipelineFailure as failure:
        return failure
    return error
