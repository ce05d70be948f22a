"""For those who build on Penstock, the checks and the surroundings that its own tests use.

check_factory     conformance of a transport of your own, in one process
check_transport   likewise of made ones, in one process or in two
nccl_rules        NCCL's rules imposed on gloo: what GPUs would make of the messages that processes exchange
bad_network       hosts joined by links with delay, jitter, loss and stalls, to run jobs of torchrun over (no torch)

As pytest fixtures: `pytest_plugins = ["penstock.testing.fixtures"]`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.testing.nccl import nccl_rules as nccl_rules
    from penstock.testing.network import BadNetwork as BadNetwork
    from penstock.testing.network import Finished as Finished
    from penstock.testing.network import bad_network as bad_network
    from penstock.testing.network import why_no_bad_network as why_no_bad_network
    from penstock.testing.transports import check_factory as check_factory
    from penstock.testing.transports import check_transport as check_transport

_HOMES = {
    "check_factory": "transports",
    "check_transport": "transports",
    "nccl_rules": "nccl",
    "BadNetwork": "network",
    "Finished": "network",
    "bad_network": "network",
    "why_no_bad_network": "network",
}

__all__ = [*_HOMES]  # noqa: PLE0604  (one list of names, not two)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock.testing' has no attribute {name!r}")
    value = getattr(import_module(f"penstock.testing.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
