"""The links of each stage, as the stage sees them: which channel carries which of its values and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from penstock.runtime.transport.protocol import Channel, Message, Transport
from penstock.schedule import Action, Placement
from penstock.stages import Link, StageMeta, backward_links, forward_links, gradient_routes


class Mailbox:
    """The channel between two stages of one rank."""

    def __init__(self) -> None:
        self._mail: dict[int, list[Tensor | None]] = {}

    def send(self, microbatch: int, message: Message) -> None:
        self._mail[microbatch] = list(message)

    def post(self, microbatch: int) -> None:
        """Nothing to do: what was sent is already there."""

    def receive(self, microbatch: int) -> list[Tensor | None]:
        return self._mail.pop(microbatch)


@dataclass(frozen=True, slots=True)
class Route:
    """A link as one of its stages sees it.

    Attributes:
        stage: the stage at the other end.
        positions: the position of each of the link's values among the stage's inputs, outputs or roots.
        remote: whether the other stage is on another rank, so that the schedule decides when to send and receive.
    """

    stage: int
    channel: Channel
    positions: tuple[int, ...]
    remote: bool


@dataclass(frozen=True, slots=True)
class Routes:
    """All links of one stage."""

    values_in: tuple[Route, ...]
    values_out: tuple[Route, ...]
    grads_in: tuple[Route, ...]
    grads_out: tuple[Route, ...]


class Root(NamedTuple):
    """Where a gradient comes in: an output of the stage, or an input that later stages use too."""

    is_output: bool
    position: int


class RouteBuilder:
    """Builds the routes of all stages of one rank within one program."""

    def __init__(
        self, program: int, metas: Sequence[StageMeta], placement: Placement, transport: Transport, *, training: bool
    ) -> None:
        self._program = program
        self._metas = metas
        self._placement = placement
        self._transport = transport
        self._training = training
        self._forward = forward_links(metas)
        self._backward = backward_links(metas) if training else ()
        self._mailboxes: dict[tuple[Link, bool], Mailbox] = {}

    def roots(self, stage: int) -> list[Root]:
        """Where gradients come in: first all outputs that take one, then inputs that later stages use too."""
        if not self._training:
            return []
        outputs, inputs = [], []
        for (source, name), holders in gradient_routes(self._metas).items():
            if source == stage:
                outputs.append(Root(True, self._output(stage, name)))
            elif stage in holders[:-1]:
                inputs.append(Root(False, self._input(stage, source, name)))
        return outputs + inputs

    def routes(self, stage: int) -> Routes:
        """The links that begin or end on a stage."""
        roots = {root: index for index, root in enumerate(self.roots(stage))}

        def root(source: int, name: str) -> int:
            is_output = source == stage
            return roots[Root(is_output, self._output(stage, name) if is_output else self._input(stage, source, name))]

        return Routes(
            tuple(
                self._route(link, link.source, (self._input(stage, *v) for v in link.values), backward=False)
                for link in self._forward
                if link.target == stage
            ),
            tuple(
                self._route(link, link.target, (self._output(stage, name) for _, name in link.values), backward=False)
                for link in self._forward
                if link.source == stage
            ),
            tuple(
                self._route(link, link.source, (root(*v) for v in link.values), backward=True)
                for link in self._backward
                if link.target == stage
            ),
            tuple(
                self._route(link, link.target, (self._input(stage, *v) for v in link.values), backward=True)
                for link in self._backward
                if link.source == stage
            ),
        )

    def _route(self, link: Link, other: int, positions: Iterable[int], *, backward: bool) -> Route:
        source, target = self._placement.rank_of[link.source], self._placement.rank_of[link.target]
        channel: Channel
        if source == target:
            channel = self._mailboxes.setdefault((link, backward), Mailbox())
        else:
            channel = self._transport.channel(self._program, link, source, target, backward=backward)
        return Route(other, channel, tuple(positions), source != target)

    def _input(self, stage: int, source: int, name: str) -> int:
        return next(p for p, i in enumerate(self._metas[stage].inputs) if (i.source, i.name) == (source, name))

    def _output(self, stage: int, name: str) -> int:
        return next(p for p, o in enumerate(self._metas[stage].outputs) if o.name == name)


def between_ranks(metas: Sequence[StageMeta], placement: Placement) -> set[tuple[int, int]]:
    """Which rank may send to which."""
    links = (*forward_links(metas), *backward_links(metas))
    found = {(placement.rank_of[link.source], placement.rank_of[link.target]) for link in links}
    return {(source, target) for source, target in found if source != target}


def route_of(action: Action, routes: Sequence[Route]) -> Route:
    """The route that a communication action uses."""
    return next(route for route in routes if route.stage == action.peer)
