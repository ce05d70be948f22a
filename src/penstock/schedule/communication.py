"""Adds messages to a schedule of computations: where each send and receive goes.

A RECV posts a receive and does not wait; the compute action that needs the data does. A SEND starts a send. So:

- a SEND comes right after the action that produces the data;
- a RECV comes one compute action before the one that needs the data, so that they travel while the rank computes, but
  after every action of its own rank that the message depends on (`receives.py`);
- messages from one rank to another travel in the order in which the receiver needs them, so the sends and receives of a
  pair of ranks match in order, which NCCL relies on;
- at most two receives per link are posted and not yet used: two buffers per link, however many microbatches there are.

If sends are not buffered (gloo, NCCL), a SEND blocks its rank until the receive has been posted, and with messages that
are needed much later (skip connections) ranks could wait for each other in a circle. So the rows are written by running
the ranks with such sends. When all ranks are stuck, a RECV that a SEND waits for is posted early; if both of its link's
buffers are taken, the sender goes on computing and the SEND follows once the receive is there. The rows are a record of
that run, so they are free of deadlock by construction, with or without buffered sends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from penstock.errors import ArgumentError, ScheduleError
from penstock.schedule.action import Action, Op, Overlap
from penstock.schedule.dependencies import Dependencies, stages_with_backward
from penstock.schedule.order import runnable_order
from penstock.schedule.receives import postpone_receives
from penstock.schedule.schedule import Schedule

BUFFERS_PER_LINK = 2
"""How many receives per link may be posted and not yet used."""


_SENDS = frozenset(op.code for op in Op if op.is_send)


class LinkLike(Protocol):
    """A link from stage `source` to stage `target`; what it carries does not matter here."""

    @property
    def source(self) -> int: ...
    @property
    def target(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Message:
    """`made` and `used` are the nodes of the compute actions at its two ends; the receive is posted before item `due`
    at the latest.
    """

    send: Action
    made: int
    used: int
    due: int

    @property
    def link(self) -> tuple[Op, int, int | None]:
        return self.send.op, self.send.stage, self.send.peer


@dataclass(slots=True)
class _Channel:
    """The messages from one rank to another, in travel order, and how many have been posted and sent."""

    messages: list[_Message] = field(default_factory=list)
    posted: int = 0
    sent: int = 0


def add_communication(
    schedule: Schedule,
    forward: Iterable[LinkLike] | None = None,
    backward: Iterable[LinkLike] | None = None,
) -> Schedule:
    """Adds a SEND and a RECV for each microbatch of each link whose two stages are on different ranks.

    >>> from penstock.schedule import generate
    >>> print(add_communication(generate("gpipe", ranks=2, microbatches=1)))
    gpipe: 1 microbatch, stages on ranks 0 1
    rank 0: 0F0 0SEND_F0 0RECV_B0 0B0
    rank 1: 1RECV_F0 1F0 1B0 1SEND_B0

    Args:
        schedule: without messages.
        forward: links from lower to higher stages, for what F produces; by default from each stage to the next.
        backward: links from higher to lower stages, for what B or I produces; by default from each stage to the one
            before. A link carries nothing if one of its stages has no backward in this schedule.

    Raises:
        ArgumentError: a link names an unknown stage or goes the wrong way.
        ScheduleError: the schedule already has messages, or cannot be run.
    """
    if any(action.op.is_communication for row in schedule.rows for action in row):
        raise ScheduleError("the schedule has messages already; take them away first with drop_communication")
    chain = [(stage, stage + 1) for stage in range(schedule.stages) if not schedule.placement.is_last(stage)]
    down = chain if forward is None else [(link.source, link.target) for link in forward]
    up = [(b, a) for a, b in chain] if backward is None else [(link.source, link.target) for link in backward]
    _check_links(schedule, down, up)
    return postpone_receives(_Writer(schedule, down, up).write())


def ways(schedule: Schedule) -> list[tuple[int, int]]:
    """Which rank sends to which: each (source, target) once, in ascending order."""
    rank_of = schedule.placement.rank_of
    found = {
        (rank, rank_of[peer])
        for rank, row in enumerate(schedule.rows)
        for peer, op in set(zip(row.peer, row.op, strict=True))
        if op in _SENDS
    }
    return sorted(found)


def _check_links(schedule: Schedule, down: list[tuple[int, int]], up: list[tuple[int, int]]) -> None:
    ways = [("forward", *link, link) for link in down] + [("backward", *link, link[::-1]) for link in up]
    for name, source, target, (low, high) in ways:
        if not 0 <= low < high < schedule.stages:
            raise ArgumentError(
                f"{name} link from stage {source} to stage {target}: expected two of the stages "
                f"0..{schedule.stages - 1}, {'ascending' if name == 'forward' else 'descending'}"
            )
        if schedule.placement.pipeline_of(low) != schedule.placement.pipeline_of(high):
            raise ArgumentError(
                f"{name} link from stage {source} to stage {target}: these belong to two copies of the model, between "
                "which nothing is sent"
            )


class _Writer:
    """Runs the ranks and writes down what each does; see the module docstring."""

    def __init__(self, schedule: Schedule, down: list[tuple[int, int]], up: list[tuple[int, int]]) -> None:
        self._schedule = schedule
        self._dependencies = Dependencies(schedule)
        runnable_order(self._dependencies)  # refuses a schedule that cannot be run
        self._items = [list(row.items()) for row in schedule.rows]
        self._rows: list[list[Action | Overlap]] = [[] for _ in schedule.rows]
        self._at = [0] * schedule.ranks
        self._node = self._dependencies.first[:-1]
        self._done = bytearray(len(self._dependencies.actions))
        self._arriving: defaultdict[int, list[tuple[_Channel, int]]] = defaultdict(list)
        self._in_use: defaultdict[tuple[Op, int, int | None], int] = defaultdict(int)
        self._channels: list[tuple[int, _Channel]] = []  # each with the receiving rank
        self._out: list[list[_Channel]] = [[] for _ in schedule.rows]
        self._into: list[list[_Channel]] = [[] for _ in schedule.rows]
        self._open_channels(down, up)

    def _open_channels(self, down: list[tuple[int, int]], up: list[tuple[int, int]]) -> None:
        rank_of, with_backward = self._schedule.placement.rank_of, stages_with_backward(self._schedule)
        sources: defaultdict[tuple[bool, int], set[int]] = defaultdict(set)
        for source, target in down:
            if rank_of[source] != rank_of[target]:
                sources[True, target].add(source)
        for source, target in up:
            if rank_of[source] != rank_of[target] and source in with_backward:
                sources[False, target].add(source)
        channels: defaultdict[tuple[int, int], _Channel] = defaultdict(_Channel)
        for rank, items in enumerate(self._items):
            node, due = self._dependencies.first[rank], 0
            for index, item in enumerate(items):
                for part in item.parts:
                    if part.op in (Op.F, Op.B, Op.I):
                        messages = self._messages(part, node, due, sources[part.op is Op.F, part.stage])
                        for message in sorted(messages, key=lambda message: message.made):
                            channel = channels[rank_of[message.send.stage], rank]
                            self._arriving[node].append((channel, len(channel.messages)))
                            channel.messages.append(message)
                    node += 1
                if item.parts[0].op.is_compute:
                    due = index
        for (source, target), channel in sorted(channels.items()):
            self._channels.append((target, channel))
            self._out[source].append(channel)
            self._into[target].append(channel)

    def _messages(self, used: Action, node: int, due: int, sources: set[int]) -> list[_Message]:
        """The messages that a compute action needs."""
        send, makers = (Op.SEND_F, [Op.F]) if used.op is Op.F else (Op.SEND_B, [Op.B, Op.I])
        messages = []
        for source in sources:
            found = (self._dependencies.node(Action(source, maker, used.microbatch)) for maker in makers)
            made = next(made for made in found if made is not None)
            messages.append(_Message(Action(source, send, used.microbatch, used.stage), made, node, due))
        return messages

    def write(self) -> Schedule:
        ranks = range(self._schedule.ranks)
        while any(at < len(items) for at, items in zip(self._at, self._items, strict=True)) or self._unsent():
            advanced = [self._run(rank) for rank in ranks]
            if not any(advanced) and not self._post_early():
                # Of the actions not yet run, the first in a linear order waits for nothing: what it needs exists, so
                # its messages have been sent, or their receives would just have been posted. Its rank is stuck at a
                # SEND.
                rank = next((rank for rank in ranks if self._is_ready(rank)), None)
                if rank is None:
                    raise ScheduleError(
                        "an overlap's backward waits for a message that its forward must be followed by; "
                        "write the two as separate actions"
                    )
                self._post_due(rank)
                self._compute(rank)
        return self._schedule.with_rows(self._rows)

    def _unsent(self) -> bool:
        return any(channel.sent < len(channel.messages) for _, channel in self._channels)

    def _run(self, rank: int) -> bool:
        """Runs a rank as far as it can go. Returns whether it did anything."""
        start = len(self._rows[rank])
        while not self._send(rank):
            self._post_due(rank)
            if not self._is_ready(rank):
                break
            self._compute(rank)
        return len(self._rows[rank]) > start

    def _send(self, rank: int) -> bool:
        """Sends what can be sent. Returns whether a SEND blocks the rank."""
        held_up = False
        for channel in self._out[rank]:
            while (message := self._next_to_send(channel)) and channel.sent < channel.posted:
                self._rows[rank].append(message.send)
                channel.sent += 1
            held_up |= message is not None
        return held_up

    def _post_due(self, rank: int) -> None:
        for channel in self._into[rank]:
            while channel.posted < len(channel.messages) and channel.messages[channel.posted].due <= self._at[rank]:
                self._post(rank, channel)

    def _next_to_send(self, channel: _Channel) -> _Message | None:
        """The channel's next message, if its data is there."""
        message = channel.messages[channel.sent] if channel.sent < len(channel.messages) else None
        return message if message is not None and self._done[message.made] else None

    def _post(self, rank: int, channel: _Channel) -> None:
        message = channel.messages[channel.posted]
        self._rows[rank].append(message.send.other_end)
        self._in_use[message.link] += 1
        channel.posted += 1

    def _post_early(self) -> bool:
        """Posts the first receive that a SEND waits for and whose link has a free buffer."""
        for target, channel in self._channels:
            message = self._next_to_send(channel)
            if message is not None and self._in_use[message.link] < BUFFERS_PER_LINK:
                self._post(target, channel)
                return True
        return False

    def _is_ready(self, rank: int) -> bool:
        """Whether everything that the rank's next item waits for is there."""
        if self._at[rank] == len(self._items[rank]):
            return False
        first = self._node[rank]
        nodes = range(first, first + len(self._items[rank][self._at[rank]].parts))
        needed = (need for node in nodes for need in self._dependencies.before(node) if need not in nodes)
        arriving = (arrival for node in nodes for arrival in self._arriving.get(node, ()))
        return all(self._done[need] for need in needed) and all(place < channel.sent for channel, place in arriving)

    def _compute(self, rank: int) -> None:
        item = self._items[rank][self._at[rank]]
        self._rows[rank].append(item)
        for node in range(self._node[rank], self._node[rank] + len(item.parts)):
            self._done[node] = True
            for channel, place in self._arriving.get(node, ()):
                self._in_use[channel.messages[place].link] -= 1
        self._node[rank] += len(item.parts)
        self._at[rank] += 1
