"""Messages to and from a switch, a line each: orders on its standard input, answers in JSON on its output."""

from __future__ import annotations

import base64
import pickle
from dataclasses import dataclass, field
from typing import Any, Self

from penstock.network.topology import Topology


class _Line:
    """A value that is sent as a line."""

    __slots__ = ()

    def line(self) -> str:
        """As it is sent, by the process that has started the switch to that switch alone."""
        return base64.b64encode(pickle.dumps(self)).decode() + "\n"

    @classmethod
    def read(cls, line: str) -> Self:
        """What `line` wrote."""
        made: Any = pickle.loads(base64.b64decode(line))
        assert isinstance(made, cls), made
        return made


@dataclass(frozen=True, slots=True)
class Order(_Line):
    """One line to a switch.

    Attributes:
        topology: what holds from now on; None: as before.
        gone: hosts that nothing comes from or gets to from now on; None: as before.
        background: neighbours' traffic from now on, as texts (background.py); None: as before.
        tells: ask for what has been counted so far.
    """

    topology: Topology | None = None
    gone: tuple[int, ...] | None = None
    background: tuple[str, ...] | None = None
    tells: bool = False


@dataclass(frozen=True, slots=True)
class Setup(_Line):
    """The first line to a switch.

    Attributes:
        namespaces: files of the hosts' namespaces, by host.
        interface: the device's name in each.
        order: the network that it begins with.
    """

    namespaces: tuple[str, ...]
    interface: str
    order: Order = field(default_factory=Order)
