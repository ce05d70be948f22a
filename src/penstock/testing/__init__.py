"""The checks and environments of Penstock's own tests, for code built on it.

check_factory     checks that your own transport conforms, in one process
check_transport   the same for transports already made, in one process or in two
nccl_rules        imposes NCCL's rules on gloo, to show how GPUs would treat the messages that processes exchange
assert_same_training  runs a pipeline, written with anything, and compares it with the unsplit model
bad_network       hosts joined by links with delay, jitter, loss and stalls, for torchrun jobs (does not import torch)

As pytest fixtures: `pytest_plugins = ["penstock.testing.fixtures"]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock._base.lazy import lazy_exports

if TYPE_CHECKING:
    from penstock.testing.nccl import nccl_rules as nccl_rules
    from penstock.testing.network import BadNetwork as BadNetwork
    from penstock.testing.network import JobResult as JobResult
    from penstock.testing.network import bad_network as bad_network
    from penstock.testing.network import bad_network_unavailable_reason as bad_network_unavailable_reason
    from penstock.testing.training import assert_same_training as assert_same_training
    from penstock.testing.transports import check_factory as check_factory
    from penstock.testing.transports import check_transport as check_transport

_HOMES = {
    "transports": "check_factory check_transport",
    "nccl": "nccl_rules",
    "network": "BadNetwork JobResult bad_network bad_network_unavailable_reason",
    "training": "assert_same_training",
}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
