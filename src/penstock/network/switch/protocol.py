"""Messages to and from a switch, one per line: orders on its standard input, answers in JSON on its output."""

from __future__ import annotations

import base64
import pickle
from dataclasses import dataclass, field
from typing import Any, Self

from penstock.network.topology import Topology


class _Line:
    """A value that is sent as one line."""

    __slots__ = ()

    def line(self) -> str:
        """Encodes the value. Only the process that started the switch sends it, and only to that switch."""
        return base64.b64encode(pickle.dumps(self)).decode() + "\n"

    @classmethod
    def read(cls, line: str) -> Self:
        """Decodes what `line` encoded."""
        made: Any = pickle.loads(base64.b64decode(line))
        assert isinstance(made, cls), made
        return made


@dataclass(frozen=True, slots=True)
class Order(_Line):
    """One line to a switch.

    Attributes:
        topology: the links from now on; None to keep them.
        gone: the hosts that are cut off from now on; None for no change.
        background: neighbors' traffic from now on, as texts (background.py); None to keep it.
        tells: True to ask for the counters.
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
        interface: the name of the device in each.
        order: the network to start with.
    """

    namespaces: tuple[str, ...]
    interface: str
    order: Order = field(default_factory=Order)
