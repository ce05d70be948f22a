"""The in-process transport: one process drives all ranks, in an order that respects dependencies.

For notebooks, tests, and several devices in one process. A message is copied, as it would be between processes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock._base.stages import Link
from penstock.runtime.exact import rules as exact
from penstock.runtime.transport.agreement import Agreement
from penstock.runtime.transport.protocol import Message
from penstock.runtime.transport.routes import Mailbox


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
        for place, layout in enumerate(self.agreement.check(microbatch, message)):
            if layout is not None and (tensor := message[place]) is not None:
                copies[place] = exact.copy_as(layout, tensor, self._device)
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
        """Nothing to do: no rank waits."""

    def channel(self, program: int, link: Link, source_rank: int, target_rank: int, *, backward: bool) -> LocalChannel:
        key = (program, link, backward)
        if key not in self._hub.channels:
            self._hub.channels[key] = LocalChannel(link, self._hub.devices[target_rank])
        return self._hub.channels[key]

    def release(self, program: int) -> None:
        for key in [key for key in self._hub.channels if key[0] == program]:
            del self._hub.channels[key]

    def end_step(self) -> None:
        for channel in self._hub.channels.values():
            channel.agreement.end_step()

    def drop_step(self) -> None:
        for channel in self._hub.channels.values():
            channel.drop_step()

    def close(self) -> None:
        self._hub.channels.clear()
