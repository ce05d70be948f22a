"""NCCL's rules over gloo: how a GPU cluster would treat the messages that ranks exchange here, on CPUs.

    with nccl_rules():
        train()  # torch.distributed.isend and irecv follow NCCL's rules

The rules are those of torch's ProcessGroupNCCL without `device_id=`:

- Each pair of ranks in a process group has its own communicator. The first operation of either rank creates it, and
  blocks the calling thread until the other rank issues its first one.
- Tags are ignored. A communicator runs its operations, sends and receives alike, one after another in the order in
  which they were issued. One that waits for its peer holds up all those behind it.
- So the k-th send of one rank meets the k-th receive of the other. It is an error if their sizes differ.
- `wait` makes the caller's stream wait for an operation. The CPU is its own stream: what is computed after `wait` sees
  what arrived, and where NCCL would make only the stream wait, here the thread waits.
- Synchronizing a device waits for all operations that were issued, including receives that have no send yet.
- Some dtypes, such as int16, have no NCCL type.

With `eager=True` the rules are those with `device_id=`: each process group has a single communicator, created up
front, which runs its operations with all ranks one after another. The default group has a device, and what `new_group`
makes is split from it, which takes every process of the job: where torch would wait forever, an error is raised.

These rules show neither time nor a device's limits, such as how many kernels it runs at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock._base.compat import binding_to, is_bound
from penstock._base.errors import ArgumentError
from penstock.runtime.execute import clock
from penstock.runtime.transport.staging import Operation, SerialWorker

NCCL_DTYPES = frozenset({
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.complex64, torch.complex128, torch.complex32,
})  # fmt: skip
"""The dtypes that ProcessGroupNCCL sends; complex numbers go as pairs of real ones."""

_RENDEZVOUS, _SIZES, _PAYLOAD = 901, 902, 903
"""Tags of the messages that go over gloo."""


@dataclass(slots=True)
class Message(Operation):
    """A send or receive that was issued, as `isend` and `irecv` return it."""

    waiting: ClassVar[list[Stream]] = []
    """The streams that are current; by default the CPU's own."""
    ended_at: int = 0

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the message has been exchanged; on a stream, only the stream does. Raise what went wrong."""
        if self.waiting:
            self.waiting[-1].waits.append(self)
            return True
        return Operation.wait(self, timeout)


class NcclRules:
    """`isend`, `irecv` and the synchronization of a device under NCCL's rules."""

    def __init__(self, *, eager: bool = False) -> None:
        self._eager = eager
        self._isend, self._irecv, self._new_group, self._barrier = dist.isend, dist.irecv, dist.new_group, dist.barrier
        self._communicators: dict[tuple[dist.ProcessGroup, int], SerialWorker] = {}
        self.receives: list[Message] = []
        self.issued: list[tuple[str, int, int]] = []
        """Every operation: "isend" or "irecv", the other rank's number in the group, and the size in bytes."""

    def isend(
        self,
        tensor: Tensor,
        dst: int | None = None,
        group: dist.ProcessGroup | None = None,
        tag: int = 0,
        group_dst: int | None = None,
    ) -> Message:
        """`torch.distributed.isend`."""
        group, peer = _peer(group, dst, group_dst)
        size = torch.tensor([tensor.nbytes])

        def run() -> None:
            for part, part_tag in ((size, _SIZES), (tensor, _PAYLOAD)):
                _wait(self._isend(part, group=group, group_dst=peer, tag=part_tag))

        return self._issue("isend", tensor, group, peer, run)

    def irecv(
        self,
        tensor: Tensor,
        src: int | None = None,
        group: dist.ProcessGroup | None = None,
        tag: int = 0,
        group_src: int | None = None,
    ) -> Message:
        """`torch.distributed.irecv`."""
        group, peer = _peer(group, src, group_src)

        def run() -> None:
            size = torch.empty(1, dtype=torch.int64)
            _wait(self._irecv(size, group=group, group_src=peer, tag=_SIZES))
            if int(size) != tensor.nbytes:
                raise RuntimeError(
                    f"a receive of {tensor.nbytes} bytes met a send of {int(size)} bytes: ranks {dist.get_rank(group)} "
                    f"and {peer} do not issue their operations in the same order"
                )
            _wait(self._irecv(tensor, group=group, group_src=peer, tag=_PAYLOAD))

        self.receives.append(self._issue("irecv", tensor, group, peer, run))
        return self.receives[-1]

    def new_group(self, ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        """`torch.distributed.new_group`."""
        is_gloo = kwargs.get("backend") == "gloo"
        is_global = ranks is None or len(ranks) == dist.get_world_size()
        if is_bound() and not is_global and is_gloo != kwargs.get("use_local_synchronization", False):
            raise RuntimeError(
                f"new_group({ranks}) would wait forever: the default group has a device, so torch splits groups from "
                f"it, but {'members of a group over gloo' if is_gloo else 'ranks outside this one'} do not take part"
            )
        return self._new_group(ranks, *args, **kwargs)

    def barrier(self, *args: Any, **kwargs: Any) -> Any:
        """`torch.distributed.barrier`, which would use the device that the default group has."""
        with binding_to(None):
            return self._barrier(*args, **kwargs)

    def synchronize(self, device: Any = None) -> None:
        """`torch.cuda.synchronize`: waits for everything that was issued."""
        for communicator in self._communicators.values():
            communicator.synchronize()

    def end(self) -> None:
        """End each thread once everything issued to it has run."""
        for communicator in self._communicators.values():
            communicator.end()

    def _issue(
        self, operation: str, tensor: Tensor, group: dist.ProcessGroup, peer: int, run: Callable[[], None]
    ) -> Message:
        if tensor.dtype not in NCCL_DTYPES:
            raise TypeError(f"Input tensor data type is not supported for NCCL process group: {tensor.dtype}")
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        self.issued.append((operation, peer, tensor.nbytes))
        key = group, -1 if self._eager else peer
        if key not in self._communicators:
            if not self._eager:
                self._meet(group, peer)
            self._communicators[key] = SerialWorker("nccl-rules")
        message = Message()

        def run_timed() -> None:
            try:
                run()
            finally:
                message.ended_at = perf_counter_ns()

        self._communicators[key].issue(run_timed, message)
        return message

    def _meet(self, group: dist.ProcessGroup, peer: int) -> None:
        """Wait until the other rank issues its first operation with this one."""
        sent, received = torch.zeros(1), torch.zeros(1)
        works = (
            self._isend(sent, group=group, group_dst=peer, tag=_RENDEZVOUS),
            self._irecv(received, group=group, group_src=peer, tag=_RENDEZVOUS),
        )
        for work in works:
            _wait(work)


class LazyLoading(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """CUDA loads a kernel when it first runs, once all that run have ended: here, all receives."""

    def __init__(self, rules: NcclRules) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rules, self._loaded = rules, set[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [value for value in args if isinstance(value, Tensor)]
        kernel = func, *((t.dtype, t.is_contiguous(), t.data_ptr() % 16 == 0) for t in tensors)
        if not (func.is_view or func.overloadpacket is torch.ops.aten.set_ or kernel in self._loaded):
            self._loaded.add(kernel)
            for receive in self._rules.receives:
                receive.ended.wait()
        return func(*args, **(kwargs or {}))


@contextmanager
def nccl_rules(*, eager: bool = False, lazy_loading: bool = False) -> Iterator[NcclRules]:
    """Impose NCCL's rules on this process's `torch.distributed.isend` and `irecv` for a `with` block.

    Every process of the group must enter such a block, and leave it too. Inside it a CPU is timed like a GPU: by
    events, and `torch.cuda.synchronize` waits for everything that was issued.

    Args:
        eager: apply the rules with `device_id=`.
        lazy_loading: load kernels as CUDA does; see `LazyLoading`.

    Raises:
        ArgumentError: `eager`, but there is no default process group.
    """
    if eager and not dist.is_initialized():
        raise ArgumentError(
            "nccl_rules(eager=True) needs the default process group, which it treats as bound to a device; call "
            "torch.distributed.init_process_group before, or omit eager"
        )
    rules = NcclRules(eager=eager)
    with (
        mock.patch.object(dist, "isend", rules.isend),
        mock.patch.object(dist, "irecv", rules.irecv),
        mock.patch.object(torch.cuda, "synchronize", rules.synchronize),
        mock.patch.object(clock, "HostClock", return_value=clock.StreamClock(torch.device("cpu"), Device())),
        binding_to(torch.device("cuda", 0)) if eager else nullcontext(),
        mock.patch.object(dist, "new_group", rules.new_group),
        mock.patch.object(dist, "barrier", rules.barrier),
        LazyLoading(rules) if lazy_loading else nullcontext(),
    ):
        yield rules
    rules.end()


class Stream:
    """The CPU's stream, which is always done; or a side stream, which waits for operations."""

    def __init__(self, device: Any = None) -> None:
        self.waits: list[Message] = []

    def wait_stream(self, other: Stream) -> None:
        """Wait for what another stream waits for."""
        for operation in other.waits:
            operation.ended.wait()


class Event:
    """An event of a `Stream`."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at = 0
        self._after: list[Message] = []

    def record(self, stream: Stream) -> None:
        self._at, self._after = perf_counter_ns(), [*stream.waits]

    def synchronize(self) -> None:
        """Wait for the operations that the stream waited for."""
        for operation in self._after:
            operation.ended.wait()

    def elapsed_time(self, later: Event) -> float:
        """Return the time until a later event, in milliseconds as in torch."""
        return (later._done_at() - self._done_at()) / 1e6

    def _done_at(self) -> int:
        assert all(operation.is_completed() for operation in self._after), "an event that is not complete has no time"
        return max([self._at, *(operation.ended_at for operation in self._after)])


class Device:
    """`torch.cuda`'s streams and events, for a CPU."""

    def __init__(self) -> None:
        self.Stream, self.Event = Stream, Event
        self._current = Stream()

    def current_stream(self, device: Any = None) -> Stream:
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Let `stream`, and not the thread, wait for operations in the block."""
        Message.waiting.append(stream)
        try:
            yield
        finally:
            Message.waiting.pop()


def _peer(group: dist.ProcessGroup | None, rank: int | None, group_rank: int | None) -> tuple[dist.ProcessGroup, int]:
    """Return the group, and the other rank's number in it."""
    group = dist.group.WORLD if group is None else group
    assert group is not None
    if group_rank is None:
        assert rank is not None, "NCCL receives from no unnamed rank"
        group_rank = dist.get_group_rank(group, rank)
    return group, group_rank


def _wait(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
