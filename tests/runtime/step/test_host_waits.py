"""In a steady step the host waits for no device: it reads values before they travel, and results when asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.runtime.batch.cut import move_to
from runtime.step.waiting_jobs import odd_devices, steady_step, tokens_that_count
from scaffolding.ranks import Ranks
from scaffolding.stand_in import on_the_device


@pytest.mark.parametrize(
    "given",
    [
        {"schedule": "zb-h1"},
        {"schedule": "dualpipe"},
        {"reduction": tokens_that_count},
        {"schedule": "gpipe", "offload": True, "recompute": "always"},
        {"deferred_batch_norm": True},
    ],
    ids=",".join,
)
def test_a_steady_step_waits_for_nothing(device_rank: Ranks, given: dict[str, Any]) -> None:
    assert device_rank.run(on_the_device, steady_step, given, "") == [{}]


@pytest.mark.parametrize("also", ["clip", "read"])
def test_clipping_and_the_loss_take_one_wait(device_rank: Ranks, also: str) -> None:
    assert device_rank.run(on_the_device, steady_step, {}, also) == [{"to host": 1}]


def test_a_wait_would_be_seen(device_rank: Ranks) -> None:
    (waits,) = device_rank.run(on_the_device, steady_step, {"check_finite": True}, "")
    assert waits["aten._local_scalar_dense.default"] > 0


def test_what_can_be_read_on_the_device_only_is_read_there(device_rank: Ranks) -> None:
    device_rank.run(on_the_device, odd_devices)


def test_only_what_leaves_the_host_is_not_waited_for() -> None:
    """Copied to the host without waiting, a tensor would be read before it is there."""
    asked: list[bool] = []

    class Spied(torch.Tensor):
        def to(self, *args: Any, non_blocking: bool = False, **given: Any) -> torch.Tensor:
            asked.append(non_blocking)
            return super().to(*args, **given)

    move_to({"x": torch.ones(2).as_subclass(Spied)}, torch.device("meta"))
    move_to({"x": torch.ones(2, device="meta").as_subclass(Spied)}, torch.device("meta", 1))
    assert asked == [True, False]
