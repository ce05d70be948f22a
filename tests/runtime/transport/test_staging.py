"""A device's tensors leave for the host, and come back, and only a thread waits. Each rule is broken on purpose."""

from __future__ import annotations

import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from penstock._base.stages import Link
from penstock.runtime.transport.staging import HOST, StagedChannel, Staging
from scaffolding.ranks import Ranks
from scaffolding.stand_in import DEVICE, on_the_device
from scaffolding.stand_in_streams import Event, Stream

RULES: dict[str, tuple[type, str, Any]] = {
    "the thread waits for the copy": (Event, "synchronize", None),
    "a copy waits for computation": (Stream, "wait_stream", None),
    "computation waits for the copy": (Stream, "wait_event", None),
    "memory is told of its other stream": (torch.Tensor, "record_stream", None),
}
"""What is left out where each is broken."""


def there_and_back(rule: str) -> str:
    """What is found where a rule is broken, in tensors that leave for the host and come back."""
    staging = Staging(torch.device(DEVICE, 0))
    owner, name, nothing = RULES.get(rule, (Event, "elapsed_time", None))
    left: list[Any] = []
    with mock.patch.object(owner, name, return_value=nothing):
        try:
            staging.copy_to_host([torch.arange(6.0).to(DEVICE), None], left.extend)  # nothing else holds it
            staging.synchronize()
            back = staging.copy_to_device([torch.arange(6.0), None])
            said = str((left, [None if tensor is None else (tensor * 2).cpu() for tensor in back]))
        except RuntimeError as error:
            said = str(error)
    staging.close()
    return said.replace("\n", "")


class Inner:
    """A channel whose sends wait until they may go."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.sent: list[tuple[int, list[Tensor | None]]] = []

    def send(self, microbatch: int, message: Any) -> None:
        self.may_go.wait(10)
        if microbatch == 4:
            raise OSError("the other rank is gone")
        self.sent.append((microbatch, list(message)))

    def post(self, microbatch: int) -> None: ...

    def receive(self, microbatch: int) -> list[Tensor | None]:
        return []


def sends_do_not_wait() -> None:
    """Two sends return before anything has left, the third waits; errors of the thread are raised by the caller."""
    staging, inner = Staging(torch.device(DEVICE, 0)), Inner()
    channel = StagedChannel(inner, Link(0, 1, ((0, "a"), (0, "b"))), staging)
    given = [torch.full((3,), float(k)).to(DEVICE) for k in range(5)]
    for k in (0, 1):
        channel.send(k, [given[k], None])
    assert inner.sent == []
    release = threading.Timer(0.2, inner.may_go.set)
    release.start()
    channel.send(2, [given[2], None])
    assert [k for k, _ in inner.sent][:1] == [0]
    channel.send(3, [given[3], None])
    staging.synchronize()
    for k, message in inner.sent:
        assert message[0] is not None
        assert message[0].device == HOST
        assert message[0].tolist() == [k] * 3
        assert message[1] is None
    channel.send(4, [given[4], None])
    for _ in range(2):
        try:
            staging.synchronize()
        except OSError as error:
            assert str(error) == "the other rank is gone"  # noqa: PT017  (a job, which runs elsewhere)
        else:
            raise AssertionError("nothing was raised")
    staging.close()


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        ("", "([tensor([0., 1., 2., 3., 4., 5.]), None], [tensor([ 0.,  2.,  4.,  6.,  8., 10.]), None])"),
        ("the thread waits for the copy", "([tensor([77., 77., 77., 77., 77., 77.]), None]"),
        ("a copy waits for computation", "a side stream reads what the default stream may not have computed yet"),
        ("computation waits for the copy", "[tensor([154., 154., 154., 154., 154., 154.]), None]"),
        ("memory is told of its other stream", "is used on 0 without record_stream"),
    ],
)
def test_a_broken_rule_is_seen(device_rank: Ranks, rule: str, found: str) -> None:
    (said,) = device_rank.run(on_the_device, there_and_back, rule)
    assert found in said


def test_sends_do_not_wait(device_rank: Ranks) -> None:
    device_rank.run(on_the_device, sends_do_not_wait)
