"""What a link is said to cost is what a message takes over it, and what depends on messages counts it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import ArgumentError, Profile
from penstock.costs import MeasuredLink, UnitCost
from penstock.costs.links import slowest_link
from penstock.partition.measure.clock import Clock
from penstock.pipe import links, profiling
from penstock.simulate import LinkCost
from scaffolding.ranks import Ranks
from scaffolding.refusals import refusal_of
from scaffolding.stand_in import DEVICE, on_the_device


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def profiled(rank: int) -> str:
    """The profile with links, as this rank got it."""
    found = penstock.profile(model(), (torch.randn(4, 8),), microbatches=2, budget_seconds=0.0, links=True)
    return json.dumps(found.to_dict())


def refused(rank: int) -> str:
    """What this rank raised."""
    with torch.device("meta"):
        layers = model()
    return refusal_of(penstock.profile, layers, (torch.randn(4, 8),), microbatches=2, budget_seconds=0.0, links=True)


def uneven() -> Profile:
    """A made-up profile of the model, whose middle cut sends most."""
    sizes = (0, 1_000, 10_000, 1_000)
    units = tuple(UnitCost(str(i), 1.0, 1.0, 1.0, boundary_bytes=size) for i, size in enumerate(sizes))
    parameters = {name: tuple(value.shape) for name, value in model().named_parameters()}
    return Profile(units, "cpu", "float32", parameters)


def profiled_on_device() -> tuple[str, int, float]:
    """A device of torch's, but not of CUDA: what the profile says of it."""
    layers = model().to(DEVICE)
    with mock.patch.object(profiling, "ACCELERATOR_FACTOR", 1):  # 8 takes it three seconds
        found = penstock.profile(layers, (torch.randn(4, 8).to(DEVICE),), microbatches=2, budget_seconds=0.05)
    return found.device, found.runs, found.units[1].forward_seconds


class Wire:
    """The sending rank's transport, over a link of known latency and bandwidth. Its clock goes on with each message.

    The first message of a kind takes far longer, and every third one a while.
    """

    rank, ranks = 0, 2

    def __init__(self, latency_seconds: float, bytes_per_second: float) -> None:
        self.link, self.now, self.numbers, self.busy = LinkCost(latency_seconds, bytes_per_second), 0.0, set[int](), 0

    def channel(self, number: int, *_: Any, **__: Any) -> Any:
        def send(microbatch: int, message: Sequence[Tensor]) -> None:
            self.now += self.link.seconds(sum(t.numel() * t.element_size() for t in message))
            self.busy += 1
            self.now += 9.0 * (number not in self.numbers) + 0.5 * (self.busy % 3 == 0)
            self.numbers.add(number)

        def receive(microbatch: int) -> list[Tensor]:
            self.now += self.link.seconds(links.SMALL_BYTES)
            return [torch.zeros(1)]

        return SimpleNamespace(send=send, receive=receive, post=lambda _: None)

    def end_step(self) -> None:
        """Nothing is left over."""

    def release(self, number: int) -> None:
        """Nothing is held."""

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize(("latency", "rate"), [(1e-3, 1e9), (0.05, 1e6), (0.0, 2e10)])
def test_latency_and_bandwidth_are_the_link_s(latency: float, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    wire: Any = Wire(latency, rate)
    monkeypatch.setattr(links, "time", wire)
    found = links._measure(wire, 0, 1, torch.device("cpu"), 0, 1_000_000)
    assert found is not None
    assert found.latency_seconds == pytest.approx(LinkCost(latency, rate).seconds(8), abs=1e-9)
    assert found.bytes_per_second == pytest.approx(rate, rel=1e-6)
    assert (found.source, found.target, found.message_bytes) == (0, 1, 1_000_000)


@pytest.mark.distributed
def test_ranks_get_one_profile_with_their_links(ranks2: Ranks) -> None:
    first, other = ranks2.run(profiled)
    assert first == other
    found = Profile.from_dict(json.loads(first))
    assert [(link.source, link.target) for link in found.links] == [(0, 1), (1, 0)]
    assert {link.message_bytes for link in found.links} == {found.units[1].boundary_bytes}
    assert all(0 < link.latency_seconds < 1 for link in found.links)


@pytest.mark.distributed
@pytest.mark.long  # two ranks show the rest; three have pairs in which one takes no part
def test_three_ranks_measure_a_ring(ranks3: Ranks) -> None:
    found = Profile.from_dict(json.loads(ranks3.run(profiled)[2]))
    assert [(one.source, one.target) for one in found.links] == [(0, 1), (1, 0), (1, 2), (2, 1), (2, 0), (0, 2)]


@pytest.mark.distributed
def test_a_model_that_cannot_be_measured_is_refused_on_all_ranks(ranks2: Ranks) -> None:
    first, other = ranks2.run(refused)
    assert "its weights are on the meta device" in first
    assert "its weights are on the meta device" in other


def test_a_single_process_has_no_links() -> None:
    with pytest.raises(ArgumentError, match="links are measured between ranks, but this is a single process"):
        penstock.profile(model(), (torch.randn(4, 8),), links=True)


def test_cuts_count_the_slowest_link_that_was_measured() -> None:
    """The middle cut sends ten times as much: with free messages it is best, over a slow link another one is."""
    profile = uneven()
    with_slow = replace(profile, links=(MeasuredLink(0, 1, 0.0, 1e3), MeasuredLink(1, 0, 1e-3, 1e6)))
    assert slowest_link(with_slow) == LinkCost(1e-3, 1e3)
    found = {}
    for name, balance in (("free", profile), ("slow", with_slow)):
        with penstock.pipeline(
            model(), (torch.randn(4, 8),), ranks=2, microbatches=2, loss_fn=lambda y: y.mean(), balance=balance
        ) as pipe:
            found[name] = pipe.cuts
    assert found == {"free": ("2",), "slow": ("3",)}


@pytest.mark.distributed
def test_units_are_timed_on_a_device_that_is_not_of_cuda(device_rank: Ranks) -> None:
    ((device, runs, seconds),) = device_rank.run(on_the_device, profiled_on_device)
    assert device == DEVICE
    assert runs > 0
    assert seconds > 0


def test_reading_the_clock_takes_no_time_that_counts() -> None:
    """Of units that take ten microseconds, say."""
    read = Clock(torch.device("cpu"))
    assert min(read.seconds(read.mark(), read.mark()) for _ in range(200)) < 8e-6
