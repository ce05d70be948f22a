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

from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from penstock._base.errors import ArgumentError, ScheduleError
from penstock.schedule.action import SENDS, Action, Op, Overlap
from penstock.schedule.dependencies import Dependencies, stages_with_backward
from penstock.schedule.order import runnable_order
from penstock.schedule.receives import postpone_receives
from penstock.schedule.schedule import Schedule

BUFFERS_PER_LINK = 2
"""How many receives per link may be posted and not yet used."""


class LinkLike(Protocol):
    """A link from stage `source` to stage `target`; what it carries does not matter here."""

    @property
    def source(self) -> int: ...
    @property
    def target(self) -> int: ...


@dataclass(slots=True, eq=False)
class _Message:
    """`producer` is the node of the action that produces it; the receive is posted before item `due` at the latest."""

    send: Action
    producer: int
    due: int
    posted: bool = False
    sent: bool = False

    @property
    def link(self) -> tuple[Op, int, int | None]:
        return self.send.op, self.send.stage, self.send.peer


_Queue = deque[_Message]
"""The messages from one rank to another, in travel order, that are still to be posted, or to be sent."""


def add_communication(
    schedule: Schedule,
    forward: Iterable[LinkLike] | None = None,
    backward: Iterable[LinkLike] | None = None,
) -> Schedule:
    """Add a SEND and a RECV for each microbatch of each link whose two stages are on different ranks.

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


def rank_pairs(schedule: Schedule) -> list[tuple[int, int]]:
    """Return the (source, target) pairs of ranks that exchange messages, without duplicates, in ascending order."""
    rank_of = schedule.placement.rank_of
    pairs = {
        (rank, rank_of[peer])
        for rank, row in enumerate(schedule.rows)
        for peer, op in set(zip(row.peer, row.op, strict=True))
        if op in SENDS
    }
    return sorted(pairs)


def _check_links(schedule: Schedule, down: list[tuple[int, int]], up: list[tuple[int, int]]) -> None:
    links = [("forward", *link, link) for link in down] + [("backward", *link, link[::-1]) for link in up]
    for name, source, target, (low, high) in links:
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
        runnable_order(self._dependencies)  # raises if the schedule cannot be run
        self._items = [list(row.items()) for row in schedule.rows]
        self._rows: list[list[Action | Overlap]] = [[] for _ in schedule.rows]
        self._position = [0] * schedule.ranks
        self._node = self._dependencies.first[:-1]
        self._done = bytearray(len(self._dependencies.actions))
        self._arriving: defaultdict[int, list[_Message]] = defaultdict(list)  # by the node that needs them
        self._in_use: Counter[tuple[Op, int, int | None]] = Counter()
        self._channels: list[tuple[int, _Queue, _Queue]] = []  # the receiving rank, to be posted, to be sent
        self._unsent: list[list[_Queue]] = [[] for _ in schedule.rows]
        self._unposted: list[list[_Queue]] = [[] for _ in schedule.rows]
        self._open_channels(down, up)

    def _open_channels(self, down: list[tuple[int, int]], up: list[tuple[int, int]]) -> None:
        rank_of, with_backward = self._schedule.placement.rank_of, stages_with_backward(self._schedule)
        sources: defaultdict[tuple[bool, int], set[int]] = defaultdict(set)
        for forward, links in ((True, down), (False, up)):
            for source, target in links:
                if rank_of[source] != rank_of[target] and (forward or source in with_backward):
                    sources[forward, target].add(source)
        by_pair: defaultdict[tuple[int, int], list[_Message]] = defaultdict(list)
        for rank, items in enumerate(self._items):
            node, due = self._dependencies.first[rank], 0
            for index, item in enumerate(items):
                for part in item.parts:
                    for message in self._messages(part, due, sources[part.op is Op.F, part.stage]):
                        by_pair[rank_of[message.send.stage], rank].append(message)
                        self._arriving[node].append(message)
                    node += 1
                if item.parts[0].op.is_compute:
                    due = index
        for (source, target), messages in sorted(by_pair.items()):
            unposted, unsent = deque(messages), deque(messages)
            self._channels.append((target, unposted, unsent))
            self._unsent[source].append(unsent)
            self._unposted[target].append(unposted)

    def _messages(self, consumer: Action, due: int, sources: set[int]) -> list[_Message]:
        """Return the messages that an action needs, in the order in which they are produced."""
        if consumer.op not in (Op.F, Op.B, Op.I):
            return []
        send, producer_ops = (Op.SEND_F, [Op.F]) if consumer.op is Op.F else (Op.SEND_B, [Op.B, Op.I])
        messages = []
        for source in sources:
            nodes = (self._dependencies.node(Action(source, op, consumer.microbatch)) for op in producer_ops)
            producer = next(node for node in nodes if node is not None)
            messages.append(_Message(Action(source, send, consumer.microbatch, consumer.stage), producer, due))
        return sorted(messages, key=lambda message: message.producer)

    def write(self) -> Schedule:
        ranks = range(self._schedule.ranks)
        while any(map(self._remaining, ranks)) or any(unsent for _, _, unsent in self._channels):
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

    def _remaining(self, rank: int) -> int:
        """Return the number of items that the rank has yet to run."""
        return len(self._items[rank]) - self._position[rank]

    def _run(self, rank: int) -> bool:
        """Run a rank as far as it can go. Return whether it did anything."""
        start = len(self._rows[rank])
        while not self._send(rank):
            self._post_due(rank)
            if not self._is_ready(rank):
                break
            self._compute(rank)
        return len(self._rows[rank]) > start

    def _send(self, rank: int) -> bool:
        """Send what can be sent. Return whether a SEND blocks the rank."""
        blocked = False
        for unsent in self._unsent[rank]:
            while unsent and self._done[unsent[0].producer] and unsent[0].posted:
                self._rows[rank].append(unsent[0].send)
                unsent.popleft().sent = True
            blocked |= bool(unsent and self._done[unsent[0].producer])
        return blocked

    def _post_due(self, rank: int) -> None:
        for unposted in self._unposted[rank]:
            while unposted and unposted[0].due <= self._position[rank]:
                self._post(rank, unposted.popleft())

    def _post(self, rank: int, message: _Message) -> None:
        self._rows[rank].append(message.send.other_end)
        self._in_use[message.link] += 1
        message.posted = True

    def _post_early(self) -> bool:
        """Post the first receive that a SEND waits for and whose link has a free buffer."""
        for target, unposted, unsent in self._channels:
            if unsent and self._done[unsent[0].producer] and self._in_use[unsent[0].link] < BUFFERS_PER_LINK:
                self._post(target, unposted.popleft())
                return True
        return False

    def _is_ready(self, rank: int) -> bool:
        """Whether everything that the rank's next item waits for is there."""
        if not self._remaining(rank):
            return False
        first = self._node[rank]
        nodes = range(first, first + len(self._items[rank][self._position[rank]].parts))
        needed = (need for node in nodes for need in self._dependencies.before(node) if need not in nodes)
        arrived = (message.sent for node in nodes for message in self._arriving.get(node, ()))
        return all(self._done[need] for need in needed) and all(arrived)

    def _compute(self, rank: int) -> None:
        item = self._items[rank][self._position[rank]]
        self._rows[rank].append(item)
        for node in range(self._node[rank], self._node[rank] + len(item.parts)):
            self._done[node] = True
            self._in_use.subtract(message.link for message in self._arriving.get(node, ()))
        self._node[rank] += len(item.parts)
        self._position[rank] += 1
