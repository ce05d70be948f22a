"""The ranks that this process drives: their transports and watchdog, and the running of programs on them."""

from __future__ import annotations

import atexit
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import PartitionError, PipelineFailure
from penstock.partition import Partition
from penstock.runtime.compiled import Compile, arguments_of
from penstock.runtime.distributed import DistributedTransport, Groups
from penstock.runtime.failure import OUTSIDE, Position
from penstock.runtime.local import LocalHub, LocalTransport
from penstock.runtime.loss import Loss, LossHead
from penstock.runtime.program import Entry, Feed, Moment, Program, run, run_timed
from penstock.runtime.ranges import is_profiling, ranged
from penstock.runtime.shared_memory import Neighbours, SharedMemoryTransport
from penstock.runtime.streams import Streams
from penstock.runtime.ties import TieGroup, TieReducer
from penstock.runtime.transport import Transport
from penstock.runtime.watchdog import Watchdog
from penstock.runtime.world import World, backend_of, exchange
from penstock.schedule import Schedule, linearize

T = TypeVar("T")

_OWN_ERROR_SECONDS = 1.5
"""How long an error outside of a wait is held back, in case another rank's failure caused it."""

TransportChoice = Literal["auto", "distributed"]
"""What carries values between processes: "auto" takes shared memory between CPU ranks of one machine."""


@dataclass(frozen=True, slots=True)
class Job:
    """A schedule bound to partitions, for the ranks of this process."""

    partitions: tuple[Partition, ...]
    """Of each microbatch."""
    entries: tuple[Entry, ...]
    programs: tuple[Program, ...]
    head: LossHead
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
        self.transports: dict[int, Transport]
        if world.rank is None:
            hub = LocalHub(devices)
            self.transports = {rank: LocalTransport(rank, hub) for rank in self.ranks}
            self.watchdog = Watchdog.connect(0, 1, lambda value: value)
        else:
            device = self.devices[world.rank]
            if device.type == "cuda":
                torch.cuda.set_device(device)  # NCCL and the random generators look at the current one
            self._groups = Groups(world.rank, world.members, backend_of(device), world.is_whole)
            give = exchange(self._groups.control)
            seed = give(seed)
            self.watchdog = Watchdog.connect(world.rank, world.ranks, give)
            self.transports = {world.rank: self._transport(world.rank, self._groups, device, transport)}
            atexit.register(self.close)  # what was sent must arrive, also from a script that does not close
        self.streams = Streams(seed)

    def _transport(
        self, rank: int, groups: Groups, device: torch.device, choice: TransportChoice
    ) -> DistributedTransport | SharedMemoryTransport:
        """Shared memory between CPU ranks of one machine, `torch.distributed` else."""
        plain = DistributedTransport(rank, groups, device)
        possible = device.type == "cpu" and Neighbours.supported()
        if not all(self.gather(possible and choice == "auto")):
            return plain
        neighbours = Neighbours(rank, self.gather)
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
                    self._reducers[rank][index] = TieReducer(index, group, held, self.transports[rank])
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
        *,
        training: bool,
        compile: Compile = False,
        check_finite: bool = False,
    ) -> Job:
        """Binds a schedule, communication included, to the partitions of its microbatches.

        Every rank binds the same jobs in the same order.
        """
        compiler = arguments_of(compile)
        placement = schedule.placement
        first = partitions[0]
        for other in partitions[1:]:
            _check_alike(first, other)
        drawing = {name for partition in partitions for name in partition.drawing_modules}
        draws = bool(drawing) or draws_in_glue(first)
        for partition in partitions:
            self.streams.watch(partition.drawing_modules)
        build = [partition.build_output for partition in partitions]
        head = LossHead(loss, build, self.streams, needed=training)
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
                training=training,
                compile=compiler,
                check_finite=check_finite,
            )
            for rank in self.ranks
        }
        self._jobs += 1
        self._agree(schedule, first)
        if self.world.rank is None:
            done = dict.fromkeys(self.ranks, 0)
            entries = []
            for rank, _ in linearize(schedule):
                entries.append(programs[rank].entries[done[rank]])
                done[rank] += 1
        else:
            entries = programs[self.world.rank].entries
        return Job(tuple(partitions), tuple(entries), tuple(programs.values()), head, schedule, training)

    def _agree(self, schedule: Schedule, partition: Partition) -> None:
        """Finds out before the first message whether all ranks split the same model in the same way."""
        mine = hashlib.sha256(repr((str(schedule), [stage.meta for stage in partition.stages])).encode()).hexdigest()
        differing = [rank for rank, other in enumerate(self.gather(mine)) if other != mine]
        if differing:
            raise PartitionError(
                f"rank {self.world.rank} has other stages or another schedule than rank {differing[0]}: "
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
            program.start(feed)
        job.head.start(feed.targets, feed.weights, feed.keep_outputs, feed.loss_scale)
        devices = tuple({self.devices[rank] for rank in self.ranks})
        reducers = [r for rank in self.ranks for r in self._reducers[rank].values()] if job.training else []
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
        for transport in self.transports.values():
            transport.end_step()
        self.watchdog.position = OUTSIDE
        return moments

    def _settle(self) -> None:
        for rank in self.ranks:
            if self.devices[rank].type == "cuda":
                torch.cuda.synchronize(self.devices[rank])

    def give(self, value: T) -> T:
        """Rank 0's object, on every rank; one call a process."""
        if self._groups is None:
            return value
        peers = () if self.world.rank == 0 else (0,)
        with self._waiting("broadcast", peers):
            given: T = exchange(self._groups.control)(value)
        return given

    def share(self, value: Tensor, source_rank: int) -> Callable[[], None]:
        """Starts to copy a small CPU tensor from one rank to all, in place. Returns what waits for it."""
        pending = [transport.share(value, source_rank) for transport in self.transports.values()]

        def wait() -> None:
            with self._waiting("the loss", () if source_rank in self.ranks else (source_rank,)):
                for one in pending:
                    one.wait()

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

    @property
    def control_group(self) -> dist.ProcessGroup | None:
        """A gloo group of all processes; None if there is one."""
        return None if self._groups is None else self._groups.control

    def gather(self, value: Any) -> list[Any]:
        """Every rank's object, on every rank; one call a process."""
        if self._groups is None:
            return [value]
        values: list[Any] = [None] * self.world.ranks
        peers = tuple(rank for rank in range(self.world.ranks) if rank != self.world.rank)
        with self._waiting("gather", peers):
            dist.all_gather_object(values, value, group=self._groups.control)
        return values

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
        error.add_note(f"penstock: on rank {self.world.rank}" + (f", in {position.action}" if position.action else ""))
        self.watchdog.report(position.action or None, error)
        return error

    def close(self) -> None:
        """Ends the watchdog, removes hooks, and gives the process groups back."""
        atexit.unregister(self.close)
        self.streams.close()
        if not self.failed:
            others = tuple(rank for rank in range(self.world.ranks) if rank not in self.ranks)
            with self._waiting("close", others):
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


def _check_alike(one: Partition, other: Partition) -> None:
    """Microbatches of different sizes must give the same stages but for shapes."""
    for a, b in zip(one.stages, other.stages, strict=True):
        same = [(i.name, i.source) for i in a.meta.inputs] == [(i.name, i.source) for i in b.meta.inputs]
        if not same or [o.name for o in a.meta.outputs] != [o.name for o in b.meta.outputs]:
            raise PartitionError(
                f"stage {a.meta.index} is not the same for all microbatches of the example: their sizes or values lead "
                "the model's forward along different branches; give an example that divides evenly by the number of "
                "microbatches and takes one branch, or have the model not branch (models of transformers with padding: "
                "attn_implementation='eager')"
            )
