"""Which channel carries which of a stage's values and gradients, and the channels within a process.

One process may drive all ranks, in an order that respects dependencies: for notebooks, tests, and several devices in
one process. A message between two ranks is then copied, as it would be between processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from penstock._base.stages import (
    MODEL_INPUT,
    Link,
    StageMeta,
    backward_links,
    forward_links,
    gradient_routes,
    merge_links,
)
from penstock.runtime.exact import rules as exact
from penstock.runtime.transport.agreement import Agreement
from penstock.runtime.transport.protocol import Channel, Message, Transport
from penstock.schedule import Action, Placement

Value = tuple[int, str]
"""A value, as its producing stage and its name."""


class Mailbox:
    """The channel between two stages of one rank."""

    def __init__(self) -> None:
        self._mail: dict[int, list[Tensor | None]] = {}

    def send(self, microbatch: int, message: Message) -> None:
        self._mail[microbatch] = list(message)

    def post(self, microbatch: int) -> None:
        """Do nothing: what was sent is already there."""

    def receive(self, microbatch: int) -> list[Tensor | None]:
        return self._mail.pop(microbatch)


@dataclass(frozen=True, slots=True)
class Route:
    """A link as one of its stages sees it, for one kind of microbatch.

    Attributes:
        stage: the stage at the other end.
        positions: the position of each of the link's values among the stage's inputs, outputs or roots; None for a
            value that microbatches of this kind do not have.
        remote: whether the other stage is on another rank, so that the schedule decides when to send and receive.
    """

    stage: int
    channel: Channel
    positions: tuple[int | None, ...]
    remote: bool


@dataclass(frozen=True, slots=True)
class StageTraffic:
    """What passes through a stage with microbatches of one kind.

    Attributes:
        meta: the stage's, for this kind.
        values_in, values_out, grads_in, grads_out: its links.
        tracked: the positions of the inputs that take a gradient; `model_inputs`: of those, the model's own inputs.
        untracked_outputs: the positions of the outputs that take none.
        root_outputs: the positions of the outputs to which gradients come in.
        root_inputs: the positions of the inputs to which they do, too, since later stages use them as well. `grads_in`
            has those of the outputs first.
    """

    meta: StageMeta
    values_in: tuple[Route, ...]
    values_out: tuple[Route, ...]
    grads_in: tuple[Route, ...]
    grads_out: tuple[Route, ...]
    tracked: tuple[int, ...]
    model_inputs: tuple[int, ...]
    untracked_outputs: tuple[int, ...]
    root_outputs: tuple[int, ...]
    root_inputs: tuple[int, ...]


class TrafficBuilder:
    """Builds the traffic of all stages of one rank within one bound schedule, the `number`-th.

    Args:
        kinds: all stages, as each kind of microbatch goes through them. A link has one channel for all kinds.
    """

    def __init__(
        self,
        number: int,
        kinds: Sequence[Sequence[StageMeta]],
        placement: Placement,
        transport: Transport,
        *,
        training: bool,
    ) -> None:
        self._number = number
        self._kinds = kinds
        self._placement = placement
        self._transport = transport
        self._training = training
        self._links = merge_links(kinds, forward_links), merge_links(kinds, backward_links) if training else ()
        self._carried = [
            tuple({(link.source, link.target): link.values for link in links(metas)} for links in _LINK_FUNCTIONS)
            for metas in kinds
        ]
        self._gradients = [gradient_routes(metas) if training else {} for metas in kinds]
        self._channels: dict[tuple[Link, bool], Channel] = {}

    def traffic(self, stage: int, kind: int) -> StageTraffic:
        """Return what passes through a stage."""
        meta, gradients, training = self._kinds[kind][stage], self._gradients[kind], self._training
        inputs = {(i.source, i.name): position for position, i in enumerate(meta.inputs)}
        outputs = {(meta.index, o.name): position for position, o in enumerate(meta.outputs)}
        root_outputs = {value: outputs[value] for value in gradients if value[0] == stage}
        root_inputs = {value: inputs[value] for value, holders in gradients.items() if stage in holders[1:-1]}
        roots = {value: index for index, value in enumerate((*root_outputs, *root_inputs))}

        def routes(ends: Mapping[Value, int], *, backward: bool, arriving: bool) -> Iterator[Route]:
            for link in self._links[backward]:
                local, peer = (link.target, link.source) if arriving else (link.source, link.target)
                if local == stage:
                    values = self._carried[kind][backward].get((link.source, link.target), ())
                    positions = tuple(ends[value] if value in values else None for value in link.values)
                    yield self._route(link, peer, positions, backward=backward)

        tracked = [position for position, i in enumerate(meta.inputs) if training and i.meta.requires_grad]
        return StageTraffic(
            meta,
            values_in=tuple(routes(inputs, backward=False, arriving=True)),
            values_out=tuple(routes(outputs, backward=False, arriving=False)),
            grads_in=tuple(routes(roots, backward=True, arriving=True)),
            grads_out=tuple(routes(inputs, backward=True, arriving=False)),
            tracked=tuple(tracked),
            model_inputs=tuple(position for position in tracked if meta.inputs[position].source == MODEL_INPUT),
            untracked_outputs=tuple(p for p, o in enumerate(meta.outputs) if training and not o.meta.requires_grad),
            root_outputs=tuple(root_outputs.values()),
            root_inputs=tuple(root_inputs.values()),
        )

    def _route(self, link: Link, peer: int, positions: tuple[int | None, ...], *, backward: bool) -> Route:
        source, target = self._placement.rank_of[link.source], self._placement.rank_of[link.target]
        channel = self._channels.get((link, backward))
        if channel is None:
            remote = partial(self._transport.channel, self._number, link, source, target, backward=backward)
            channel = self._channels[link, backward] = Mailbox() if source == target else remote()
        return Route(peer, channel, positions, source != target)


_LINK_FUNCTIONS = (forward_links, backward_links)


def between_ranks(kinds: Sequence[Sequence[StageMeta]], placement: Placement) -> set[tuple[int, int]]:
    """Return which rank may send to which."""
    links = (*merge_links(kinds, forward_links), *merge_links(kinds, backward_links))
    pairs = {(placement.rank_of[link.source], placement.rank_of[link.target]) for link in links}
    return {(source, target) for source, target in pairs if source != target}


def find_route(action: Action, routes: Sequence[Route]) -> Route:
    """Return the route that a communication action uses."""
    return next(route for route in routes if route.stage == action.peer)


class LocalHub:
    """What the local transports of one pipeline share: the channels."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = tuple(devices)
        self.channels: dict[tuple[int, Link, bool], LocalChannel] = {}


class LocalChannel(Mailbox):
    """One link's mailbox, into which copies go; sender and receiver hold the same object."""

    def __init__(self, link: Link, device: torch.device) -> None:
        super().__init__()
        self.agreement = Agreement(link)
        self._device = device

    def send(self, microbatch: int, message: Message) -> None:
        copies: list[Tensor | None] = [*message]
        for index, layout in enumerate(self.agreement.check(microbatch, message)):
            if layout is not None and (tensor := message[index]) is not None:
                copies[index] = exact.copy_as(layout, tensor, self._device)
        self._mail[microbatch] = copies

    def drop_step(self) -> None:
        self.agreement.drop_step()
        self._mail.clear()


class LocalTransport:
    """One rank's side of a `LocalHub`. Within a process nothing is summed or sent to all."""

    def __init__(self, rank: int, hub: LocalHub) -> None:
        self.rank = rank
        self.ranks = len(hub.devices)
        self._hub = hub

    def connect(self, source_rank: int, target_rank: int) -> None:
        """Do nothing: no rank waits."""

    def channel(self, number: int, link: Link, source_rank: int, target_rank: int, *, backward: bool) -> LocalChannel:
        key = (number, link, backward)
        if key not in self._hub.channels:
            self._hub.channels[key] = LocalChannel(link, self._hub.devices[target_rank])
        return self._hub.channels[key]

    def release(self, number: int) -> None:
        for key in [key for key in self._hub.channels if key[0] == number]:
            del self._hub.channels[key]

    def end_step(self) -> None:
        for channel in self._hub.channels.values():
            channel.agreement.end_step()

    def drop_step(self) -> None:
        for channel in self._hub.channels.values():
            channel.drop_step()

    def close(self) -> None:
        self._hub.channels.clear()
