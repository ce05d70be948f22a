"""One rank's part in a transfer: the engine's own collective, or a step list over messages between two hosts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from penstock._base.errors import ArgumentError
from penstock.network.fabric.emulation import payload
from penstock.network.fabric.emulation.payload import Participant
from penstock.network.fabric.emulation.rendezvous import wait_for
from penstock.network.fabric.steps import IN_PLACE, Collective, Move, RankRound, StepList, rank_rounds
from penstock.network.fabric.workload import Op

# -- messages between two hosts ----------------------------------------------------------------------------------------


class Message(NamedTuple):
    """A contiguous tensor to or from another rank; one at a time in each direction between the same two ranks."""

    tensor: Tensor
    peer: int


class Wire:
    """Exchanges the messages of one round."""

    def __init__(self) -> None:
        self._early: dict[int, list[dist.Work | None]] = {}

    def expect(self, receives: Sequence[Message]) -> None:
        """Post the receives of a later `exchange`, which gets the same object. Call in the order of the exchanges."""
        if not _on_cuda(receives):  # NCCL's receives are posted together with their sends
            self._early[id(receives)] = [dist.irecv(m.tensor, m.peer) for m in receives]

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive messages; return when all sends have left and all receives have arrived."""
        if _on_cuda((*sends, *receives)):
            operations = [dist.P2POp(dist.irecv, m.tensor, m.peer) for m in receives]
            operations += [dist.P2POp(dist.isend, m.tensor, m.peer) for m in sends]
            for batched in dist.batch_isend_irecv(operations):  # unbatched, NCCL's would wait for each other
                batched.wait()
            torch.cuda.synchronize()
            return
        works = self._early.pop(id(receives), None) or [dist.irecv(m.tensor, m.peer) for m in receives]
        wait_for([*works, *(dist.isend(m.tensor, m.peer) for m in sends)])


def _on_cuda(messages: Sequence[Message]) -> bool:
    return any(message.tensor.is_cuda for message in messages)


# -- a rank's part -----------------------------------------------------------------------------------------------------

Stamp = tuple[int, int, int]
"""A round, and its start and end in nanoseconds on this host's clock."""


_PARTS = ("reduce_scatter", "scatter")
"""Collectives of which a rank gets its own part only."""


class _Copy(NamedTuple):
    target: Tensor
    source: Tensor
    adds: bool


class _Round(NamedTuple):
    number: int
    leaving: list[Message]
    arriving: list[Message]
    before: list[_Copy]
    after: list[_Copy]


class Stepwise:
    """Executes a step list. Everything between the same two ranks in one round goes in one message."""

    def __init__(self, participant: Participant, steps: StepList, wire: Wire, device: torch.device) -> None:
        self.participant, self._steps, self._wire, self._rank = participant, steps, wire, participant.rank
        self._op: Op = participant.op
        slot = -(-participant.elements // steps.chunks)
        self.elements = slot * steps.chunks
        self._memory = torch.empty(slot * (steps.chunks + steps.more_slots), dtype=participant.dtype, device=device)
        self._initial = participant.initial_buffer(self.elements).to(device)
        self._slot = slot
        self._rounds: list[_Round] = []
        touched: set[int] = set()
        for rank_round in rank_rounds(steps, participant.rank):
            sent = {slot for move in rank_round.sends for slot in range(move.first, move.first + move.count)}
            self._rounds.append(self._round(rank_round, sent | touched))
            touched = sent | {slot for move in rank_round.receives for slot in range(move.into, move.into + move.count)}
        self._stamps: list[Stamp] = []

    def _round(self, rank_round: RankRound, busy: Set[int]) -> _Round:
        """Return the messages of a round, one per peer, and the copies to make before sending and after receiving.

        Receives are posted when the previous round begins; `busy` are the slots that are in use from then on.
        """
        result, members = _Round(rank_round.number, [], [], [], []), self.participant.members
        for peer in dict.fromkeys(move.target for move in rank_round.sends):
            moves = [move for move in rank_round.sends if move.target == peer]
            buffer = self._slots(moves[0].first, moves[0].count)
            if len(moves) > 1:
                buffer, pieces = self._pack(moves)
                result.before.extend(_Copy(piece, self._slots(m.first, m.count), False) for m, piece in pieces)
            result.leaving.append(Message(buffer, members[peer]))
        for peer in dict.fromkeys(move.source for move in rank_round.receives):
            move, *remaining = moves = [move for move in rank_round.receives if move.source == peer]
            buffer = self._slots(move.into, move.count)
            if remaining or move.adds or not busy.isdisjoint(range(move.into, move.into + move.count)):
                buffer, pieces = self._pack(moves)
                result.after.extend(_Copy(self._slots(m.into, m.count), piece, m.adds) for m, piece in pieces)
            result.arriving.append(Message(buffer, members[peer]))
        return result

    def _slots(self, first: int, count: int) -> Tensor:
        return self._memory[first * self._slot : (first + count) * self._slot]

    def _pack(self, moves: Sequence[Move]) -> tuple[Tensor, Iterator[tuple[Move, Tensor]]]:
        """Return a buffer for all moves, and each one's piece of it."""
        sizes = [move.count * self._slot for move in moves]
        packed = self._memory.new_empty(sum(sizes))
        return packed, zip(moves, torch.split(packed, sizes), strict=True)

    def reset(self) -> None:
        self._memory[: len(self._initial)].copy_(self._initial)
        if self.participant.collective == "all_to_all":  # a rank's part for itself never crosses the network
            own_part = self._initial[self.participant.part(self.elements)]
            self._output()[self._rank * len(own_part) : (self._rank + 1) * len(own_part)].copy_(own_part)

    def run(self) -> None:
        self._stamps = stamps = []
        if self._rounds:
            self._wire.expect(self._rounds[0].arriving)
        for current, following in zip_longest(self._rounds, self._rounds[1:]):
            start = time.monotonic_ns()
            if following is not None:  # gloo sends at once if the receive is already posted
                self._wire.expect(following.arriving)
            for copy in current.before:
                copy.target.copy_(copy.source)
            self._wire.exchange(current.leaving, current.arriving)
            for copy in current.after:
                if copy.adds:
                    payload.reduce_into(copy.target, copy.source, self._op)
                else:
                    copy.target.copy_(copy.source)
            stamps.append((current.number, start, time.monotonic_ns()))
        if self._op == "avg":
            self._output().div_(self._steps.ranks)

    def result(self) -> Tensor | None:
        if not self.participant.has_result:
            return None
        output = self._output()
        return output[self.participant.part(self.elements)] if self.participant.collective in _PARTS else output

    def stamps(self) -> Sequence[Stamp]:
        return self._stamps

    def _output(self) -> Tensor:
        first = self._slot * self._steps.output
        count = self.elements
        if self._steps.shares:
            count = self._steps.ranks * self._slot * self._steps.shares[self._rank]
        return self._memory[first : first + count]


# torch 2.13 has renamed these, and warns about the old names.
_ALL_GATHER: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_REDUCE_SCATTER: Callable[..., object] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


_OPS: Mapping[Op, Any] = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}


class Engine:
    """Calls torch.distributed's own collective."""

    def __init__(self, participant: Participant, group: dist.ProcessGroup | None, device: torch.device) -> None:
        ranks = len(participant.members)
        shares = participant.transfer.shares
        unit = sum(shares) if shares else 1
        self.elements = unit * participant.padded(-(-participant.elements // unit))
        self._initial = participant.initial_buffer(self.elements).to(device)
        self._buffer = self._initial.clone()
        self._part = self.elements // ranks
        self.participant = participant
        self._group = group
        self._out_sizes = [shares[rank] * self.elements // unit for rank in range(ranks)] if shares else None
        received = self._out_sizes[participant.rank] if self._out_sizes else self._part
        self._in_sizes = [received] * ranks if self._out_sizes else None
        self._output = self._buffer.new_empty(received * ranks if self._out_sizes else self.elements)
        self._call = self._calls()[participant.collective]

    def _calls(self) -> Mapping[Collective, Callable[[], object]]:
        buffer, output, group, members = self._buffer, self._output, self._group, self.participant.members
        op = _OPS[self.participant.op]
        own_part = slice(self.participant.rank * self._part, (self.participant.rank + 1) * self._part)
        is_root = self.participant.rank == 0
        outputs = list(output.chunk(len(members))) if is_root else None
        inputs = list(buffer.chunk(len(members))) if is_root else None

        def sendrecv() -> None:
            rank, ranks = self.participant.rank, len(members)
            wait_for((dist.irecv(output, members[rank - 1]), dist.isend(buffer, members[(rank + 1) % ranks])))

        return {
            "all_reduce": lambda: dist.all_reduce(buffer, op, group=group),
            "all_gather": lambda: _ALL_GATHER(output, buffer[own_part], group=group),
            "reduce_scatter": lambda: _REDUCE_SCATTER(output[: self._part], buffer, op, group=group),
            "all_to_all": lambda: dist.all_to_all_single(output, buffer, self._in_sizes, self._out_sizes, group=group),
            "broadcast": lambda: dist.broadcast(buffer, members[0], group=group),
            "reduce": lambda: dist.reduce(buffer, members[0], op, group=group),
            "scatter": lambda: dist.scatter(output[: self._part], inputs, src=members[0], group=group),
            "sendrecv": sendrecv,
            "gather": lambda: dist.gather(buffer[own_part], outputs, dst=members[0], group=group),
            "send": lambda: dist.send(buffer, members[1]) if is_root else dist.recv(output, members[0]),
        }

    def reset(self) -> None:
        self._buffer.copy_(self._initial)

    def run(self) -> None:
        self._call()
        if self._buffer.is_cuda:
            torch.cuda.synchronize()

    def result(self) -> Tensor | None:
        if not self.participant.has_result:
            return None
        if self.participant.collective in IN_PLACE:
            return self._buffer
        return self._output[: self._part] if self.participant.collective in _PARTS else self._output

    def stamps(self) -> Sequence[Stamp]:
        return ()


Part = Stepwise | Engine
"""A rank's part in a transfer, whose `participant` says which."""


def check_result(part: Part) -> str | None:
    """Run a transfer once and describe what is wrong with its result; None if it is right."""
    participant = part.participant
    if (before := part.result()) is not None:
        before.fill_(payload.NOTHING)  # a correct result left by an earlier run must not count
    part.reset()
    part.run()
    result, expected = part.result(), participant.expected(part.elements)
    if expected is None or result is None:
        return None
    result = result.cpu()
    differing = int((result != expected).sum())
    if not differing:
        return None
    first = int((result != expected).nonzero()[0])
    return (
        f"{participant.transfer.name}: {differing} of {len(expected)} numbers of rank "
        f"{participant.members[participant.rank]} are wrong after {participant.collective}; number {first} is "
        f"{float(result[first])}, not {float(expected[first])}"
    )


def check_backend(backend: str) -> None:
    """Raise ArgumentError if torch does not have this backend here."""
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available() and torch.cuda.is_available()}
    if not backends.get(backend, False):
        names = ", ".join(name for name, available in backends.items() if available)
        raise ArgumentError(f"backend {backend!r} is not available: this torch has {names}")
