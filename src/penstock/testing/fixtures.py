"""pytest fixtures. In your conftest.py: `pytest_plugins = ["penstock.testing.fixtures"]`.

def test_training_over_loss(bad_network):
    with bad_network(2, "100mbit delay 5ms loss 1%") as network:
        network.run("train.py").check()
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from penstock.testing import network


@pytest.fixture
def bad_network() -> Callable[..., AbstractContextManager[network.BadNetwork]]:
    """Return `penstock.testing.bad_network`. Skip the test, saying why, if this machine cannot make one."""
    reason = network.bad_network_unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    return network.bad_network
