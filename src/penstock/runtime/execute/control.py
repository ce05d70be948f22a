"""What the processes of a mesh exchange besides the messages of a schedule, and how a process reports its failure.

The watchdog has every wait: if another process is lost or has failed, the wait ends with the first cause.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from penstock._base.compat import default_store, is_accelerator
from penstock._base.errors import RankFailedError
from penstock.distributed.failure import OUTSIDE, Failure, Position
from penstock.distributed.failure_detector import Timeouts
from penstock.distributed.groups import GroupOptions, Groups, Role
from penstock.distributed.joining import meeting_store
from penstock.distributed.launch.endings import is_doubtful
from penstock.distributed.watchdog import Watchdog
from penstock.distributed.world import World, backend_for, check_same_backend
from penstock.runtime.gradients.replicas import copy_from_first
from penstock.runtime.transport.distributed import all_reduce
from penstock.runtime.transport.protocol import BROADCASTS_IN_FLIGHT, Message, Pending
from penstock.runtime.transport.staging import HostOperation, Staging

T = TypeVar("T")

_OWN_ERROR_SECONDS = 1.5
"""How long an error outside a wait is held back, in case another rank's failure caused it."""


class Control:
    """This process's side. All calls but `fail` and `failed` are collectives; in a single process they do nothing.

    Attributes:
        groups: the process groups; None if this process is alone.
        staging: where the device's tensors leave for the host, and come back from; None if their groups take them.
        watchdog: the whole mesh's watchdog.
        pipeline_peers, mesh_peers: the other processes of the pipeline, and of the mesh, by their numbers in messages.
    """

    def __init__(
        self,
        world: World,
        device: torch.device,
        timeouts: Timeouts | None = None,
        group_options: GroupOptions | None = None,
        *,
        staged: bool = False,
    ) -> None:
        self.world = world
        self.groups: Groups | None = None
        self.staging: Staging | None = None
        self._departures: Staging | None = None
        self._losses: deque[Arrival] = deque()
        self._agreed = False
        self.pipeline_peers = tuple(number for number in world.numbers if number != world.number)
        self.mesh_peers = tuple(number for number in range(len(world.everyone)) if number != world.number)
        if world.rank is None:
            self.watchdog = Watchdog()
            return
        store = meeting_store(default_store(), world.everyone)
        self.watchdog = Watchdog.connect(world.number, len(world.everyone), store, timeouts)
        self.watchdog.partners, self.watchdog.members = world.partners, world.everyone
        with self.reporting(close=self.watchdog.close):
            with self.waiting_for("process groups", self.mesh_peers):
                backend = "gloo" if staged else backend_for(device)
                self.groups = Groups(world, backend, group_options)
                backends = self.gather((device.type, backend), "its backend")
            with self.agreed():
                check_same_backend([backends[number] for number in world.numbers])
                (group_options or GroupOptions()).check(backend)
            with self.waiting_for("process groups", self.mesh_peers):
                self.groups.open(late=is_accelerator(device))
            if is_accelerator(device):
                self._departures = Staging(device)
                self.staging = self._departures if backend == "gloo" else None

    @property
    def failed(self) -> bool:
        """Whether this or another rank has failed, so that nothing can run any more."""
        return self.watchdog.failure is not None

    def copy_from_first_process(self, tensors: Iterable[Tensor]) -> None:
        """Give all processes that run the same stages the first one's values, in place."""
        if self.groups is not None and len(self.world.column) > 1:
            with self.waiting_for("equal parameters", self.world.partners):
                copy_from_first(tensors, self.groups["column"], self.staging)

    def share(self, value: T, source_rank: int = 0, role: Role = "pipeline") -> T:
        """Return one rank's object on every rank of the pipeline; or of the mesh ("everyone"), by numbers there."""
        if self.groups is None:
            return value
        box, source = [value], source_rank if role == "everyone" else self.world.numbers[source_rank]
        with self.waiting_for("broadcast", self._peers(role) if self.world.number == source else (source,)):
            dist.broadcast_object_list(box, group=self.groups[role], group_src=source_rank)
        return box[0]

    def _peers(self, role: Role) -> tuple[int, ...]:
        return self.mesh_peers if role == "everyone" else self.pipeline_peers

    def transfer(self, value: T, source_rank: int, target_ranks: Sequence[int]) -> T:
        """Return one rank's object on some others, in several processes. Exactly these ranks call it."""
        assert self.groups is not None
        group, local_rank, box = self.groups["pipeline"], self.world.rank, [value]
        targets = [rank for rank in target_ranks if rank != source_rank]
        peers = targets if local_rank == source_rank else [source_rank]
        with self.waiting_for("the outputs", tuple(self.world.numbers[rank] for rank in peers)):
            if local_rank != source_rank:
                dist.recv_object_list(box, group=group, group_src=source_rank)
            for target in targets if local_rank == source_rank else ():
                dist.send_object_list(box, group=group, group_dst=target)
        return box[0]

    @property
    def sums_losses(self) -> bool:
        """Whether a loss has terms on several replicas, or on a device: it comes to all ranks by `sum_loss`."""
        return self._departures is not None or self.world.data_parallel > 1

    def sum_loss(self, terms: Message, fill: Callable[[Message], Tensor]) -> Arrival:
        """Start to sum what `fill` makes of a loss's terms on the host, over all processes that share the loss. The
        host does not wait for terms on the device: a thread does."""
        self.end_losses(BROADCASTS_IN_FLIGHT - 1)

        def start(on_host: Message) -> Pending:
            assert self.groups is not None
            return all_reduce([fill(on_host)], self.groups["losses"])

        pending = start(terms) if self._departures is None else HostOperation(self._departures, terms, start)
        peers = self.mesh_peers if self.world.data_parallel > 1 else self.pipeline_peers
        self._losses.append(Arrival(self, "the loss", peers, (pending,)))
        return self._losses[-1]

    def end_losses(self, remaining: int = 0) -> None:
        """Wait for the losses that are under way, but for the last ones: pending work must not be dropped."""
        while len(self._losses) > remaining:
            self._losses.popleft()()

    @contextmanager
    def agreed(self, kind: type[Exception] = Exception) -> Iterator[None]:
        """Wrap work that every process does by itself in the same way: if one refuses, all raise, once all are done.

        Otherwise a process that is ahead would report its refusal while another, about to refuse the same, seems to
        wait for it and ends as if the run had failed. Nothing inside may wait for another process, unless a process
        that raises a `kind` has taken part in the same waits as the others.

        Args:
            kind: what counts as a refusal; anything else ends the run immediately.

        Raises:
            kind: what was raised inside.
            RankFailedError: only other processes raised; it has the first one's message.
        """
        if self.groups is None:
            yield
            return
        refusal: Exception | None = None
        try:
            yield
        except kind as error:
            refusal = error
        failures = self.gather(None if refusal is None else Failure.of(self.world.number, None, refusal), "agreement")
        first = next((failure for failure in failures if failure is not None), None)
        self._agreed = first is not None  # an earlier refusal may have led to another attempt
        if first is None:
            return
        if refusal is None:
            raise RankFailedError(f"rank {self.world.number} stops: {first}")
        refusal.add_note(f"penstock: on rank {self.world.number}")
        raise refusal

    @contextmanager
    def waiting_for(self, activity: str, peers: tuple[int, ...]) -> Iterator[None]:
        """Wrap a wait outside the actions: register it with the watchdog, so that an error names the first cause."""
        before, self.watchdog.position = self.watchdog.position, Position(activity, peers)
        with self.reporting((RuntimeError, OSError)):
            yield
        self.watchdog.position = before

    def waiting(self, activity: str) -> AbstractContextManager[None]:
        """Wrap a wait for all other ranks outside a step: if one is lost, this rank reports it and ends."""
        return self.waiting_for(activity, self.mesh_peers)

    @contextmanager
    def working(self, activity: str) -> Iterator[None]:
        """Wrap this rank's own work, which may be inside a wait: ranks that wait meanwhile name this rank."""
        if self.world.is_local:
            yield
            return
        before, self.watchdog.position = self.watchdog.position, Position(activity)
        try:
            yield
        finally:
            self.watchdog.position = before

    @property
    def mesh_group(self) -> dist.ProcessGroup | None:
        """A gloo group of all processes; None if there is only one."""
        return None if self.groups is None else self.groups["everyone"]

    def gather(self, value: Any, activity: str = "gather", role: Role = "everyone") -> list[Any]:
        """Return every process's object on all of them, in the mesh or in the pipeline. All of these call it.

        Args:
            activity: the name of the wait, for reports of a rank that hangs.
        """
        if self.groups is None:
            return [value]
        peers = self._peers(role)
        values: list[Any] = [None] * (len(peers) + 1)
        with self.waiting_for(activity, peers):
            dist.all_gather_object(values, value, group=self.groups[role])
        return values

    def gather_pipeline(self, value: Any, activity: str = "a connection") -> list[Any]:
        """Like `gather`, for the ranks of this pipeline."""
        return self.gather(value, activity, "pipeline")

    @contextmanager
    def reporting(
        self,
        kinds: type[BaseException] | tuple[type[BaseException], ...] = BaseException,
        *,
        close: Callable[[], None] | None = None,
    ) -> Iterator[None]:
        """Wrap this rank's own work: if it raises one of these, report it to the others, and raise the first cause.

        Args:
            close: called before that, to release what is held.
        """
        try:
            yield
        except kinds as error:
            cause = self.fail(error)
            if close is not None:
                close()
            if cause is error:
                raise
            raise cause from None  # the cause is on another rank; its effect on this one would only hide it

    def fail(self, error: BaseException) -> BaseException:
        """Report to the others that this rank raised, unless they know; return the error to raise: the first cause."""
        position, failed_before = self.watchdog.position, isinstance(error, RankFailedError)
        failure = Failure.of(self.world.number, position.action or None, error)
        in_doubt = is_doubtful(error) and not self.world.is_local
        self.watchdog.on_raise(None if in_doubt else failure)
        if self._agreed:  # a refusal, which every rank raises
            return error
        if failed_before or self.world.is_local:  # there is no one to tell
            self.watchdog.position = OUTSIDE
            if position.action and not failed_before:
                error.add_note(f"penstock: in action {position.action}")
            return error
        if in_doubt:  # another's failure, known soon, may be the cause
            if (cause := self.watchdog.cause(None if position.peers else _OWN_ERROR_SECONDS)) is not None:
                return cause
            self.watchdog.on_raise(failure)
        where = f"in {position.action}" if position.action else ""
        context = [f"on rank {self.world.number}", where, str(self.watchdog.device_lag or "")]
        error.add_note(f"penstock: {', '.join(filter(None, context))}")
        self.watchdog.report(position.action or None, error)
        return error

    def close(self) -> None:
        """End the watchdog and release the process groups."""
        if self.groups is not None and not self.failed:
            with self.waiting("close"):  # NCCL may wait for the other ranks
                self.groups.close()
        if self._departures is not None:
            self._departures.close()
        self.watchdog.close()


@dataclass(frozen=True, slots=True)
class Arrival:
    """What other ranks send. A call waits for it, registered with the watchdog.

    Attributes:
        activity, sources: for the watchdog.
        pending: waits for it without the watchdog.
    """

    control: Control
    activity: str
    sources: tuple[int, ...]
    pending: Sequence[Pending]

    def __call__(self) -> None:
        with self.control.waiting_for(self.activity, self.sources):
            for pending in self.pending:
                pending.wait()
