"""What a message between neighboring ranks takes, over the transport that carries a pipeline's.

A schedule waits for whole messages, so whole messages are timed: one there, and a small one back. (The pace of a stream
is another thing: the copies at both ends overlap in it, and it may be twice as fast.) They are as large as the model's,
since no one number is true of all sizes: what fits into a cache travels several times as fast as what needs fresh
memory. The first trips do not count: connections are made and memory mapped in them, and TCP sends slowly at first. Of
the others the shortest counts, since any other activity only adds to it.
"""

from __future__ import annotations

import time

import torch

from penstock._base.stages import Link
from penstock.costs import MeasuredLink
from penstock.partition.measure.clock import synchronize
from penstock.runtime.execute.control import Control
from penstock.runtime.execute.transport_choice import TransportChoice, make_transport
from penstock.runtime.transport.protocol import Transport

WARM_UP_TRIPS, TIMED_TRIPS = 3, 12
"""The number of trips of each size. In the first one, ranks agree on layouts."""

SMALL_BYTES = 8

MIN_TRIP_RATIO = 1.1
"""Bandwidth is measured only if a message's trip takes at least this many times as long as a small one's."""

_LINK, _BACK = Link(0, 1, ((0, "probe"),)), Link(1, 0, ((0, "probe"),))


def measure_links(
    control: Control, device: torch.device, message_bytes: int, transport: TransportChoice = "auto"
) -> tuple[MeasuredLink, ...]:
    """Measure both directions between neighbors on a ring of ranks, pair by pair. All ranks call it, and get the same.

    Args:
        device: this rank's.
        message_bytes: how large messages are.

    Raises:
        ArgumentError: ranks share an accelerator.
    """
    world, groups = control.world, control.groups
    assert world.rank is not None
    assert groups is not None
    carrier = make_transport(transport, world.rank, device, control, groups)
    pairs = [(rank, (rank + 1) % world.ranks) for rank in range(world.ranks if world.ranks > 2 else 1)]
    directions = [direction for pair in pairs for direction in (pair, pair[::-1])]
    if groups.paired:
        groups.pair(directions)
    for direction in directions:
        if world.rank in direction:
            carrier.connect(*direction)
    measured: list[MeasuredLink] = []
    for number, (source, target) in enumerate(directions):
        local_link = None
        if world.rank in (source, target):
            with control.working("the measuring of links"):
                local_link = _measure(carrier, source, target, device, 3 * number, message_bytes)
        measured += [link for link in control.gather(local_link, "its links") if link is not None]
    carrier.close()
    return tuple(measured)


def _measure(
    transport: Transport, source: int, target: int, device: torch.device, first: int, message_bytes: int
) -> MeasuredLink | None:
    """Measure one direction of a link; return the result on the sending rank. `first`: of three numbers of its own."""
    sends = transport.rank == source
    reply_channel = transport.channel(first, _BACK, target, source, backward=True)

    def trip_seconds(number: int, size: int) -> float:
        """Return the seconds of the shortest trip: a message of this many bytes, and a small one back."""
        channel = transport.channel(number, _LINK, source, target, backward=False)
        message, answer = (torch.zeros(length, dtype=torch.uint8, device=device) for length in (size, SMALL_BYTES))
        seconds = []
        for _ in range(WARM_UP_TRIPS + TIMED_TRIPS):
            started = time.perf_counter()
            (reply_channel if sends else channel).post(0)
            if sends:
                channel.send(0, [message])
            (reply_channel if sends else channel).receive(0)
            synchronize(device)
            if not sends:
                reply_channel.send(0, [answer])
            seconds.append(time.perf_counter() - started)
            transport.end_step()
        transport.release(number)
        return min(seconds[WARM_UP_TRIPS:])

    small, large = trip_seconds(first + 1, SMALL_BYTES), trip_seconds(first + 2, message_bytes)
    transport.release(first)
    if not sends:
        return None
    rate = (message_bytes - SMALL_BYTES) / (large - small) if large > MIN_TRIP_RATIO * small else None
    return MeasuredLink(source, target, small / 2, rate, message_bytes)
