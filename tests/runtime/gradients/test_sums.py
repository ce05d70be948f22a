"""Sums of gradients over processes: the host waits only where it must, and what was summed is not copied again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.runtime.gradients.sums import GradientSum
from scaffolding import stand_in
from scaffolding.ranks import Ranks
from scaffolding.stand_in import on_the_device


class Others:
    """Other processes, which add a gradient of ones for every parameter of which they have one."""

    def __init__(self, sizes: Sequence[int], having: Sequence[bool]) -> None:
        pieces = [torch.full((size,), float(has)) for size, has in zip(sizes, having, strict=True)]
        self._theirs = torch.cat([*pieces, torch.tensor(having, dtype=torch.float32)])
        self.buffers: list[Tensor] = []

    def __call__(self, tensors: Sequence[Tensor]) -> Others:
        (buffer,) = tensors
        self.buffers.append(buffer)
        buffer += self._theirs.to(buffer.device, non_blocking=True)
        return self

    def wait(self) -> None: ...


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(4))]


def step(sums: GradientSum, held: Sequence[nn.Parameter], values: Sequence[float | None]) -> None:
    sums.set_aside()
    for parameter, value in zip(held, values, strict=True):
        parameter.grad = None if value is None else torch.full_like(parameter, value)
    sums.start()
    sums.finish()


def waits_of_steps() -> list[int]:
    """How often the host waits in steps with all gradients, the first and a later one, and without one of them."""
    held = [nn.Parameter(parameter.detach().to(stand_in.DEVICE)) for parameter in parameters()]
    sums = GradientSum(held, Others([6, 4], [True, False]), divisor=2)
    found = []
    for values in ([1.0, 2.0], [1.0, 2.0], [None, 2.0], [1.0, None]):
        for parameter in held:
            parameter.grad = None
        stand_in.waits.clear()
        step(sums, held, values)
        found.append(sum(stand_in.waits.values()))
    first, second = (parameter.grad for parameter in held)
    assert first is not None
    assert first.cpu().tolist() == [[1.0] * 3] * 2
    assert second is None  # no process had one
    return found


def test_the_host_waits_only_for_gradients_that_are_not_here(device_rank: Ranks) -> None:
    assert device_rank.run(on_the_device, waits_of_steps) == [[0, 0, 1, 1]]


def test_gradients_are_views_of_what_was_summed() -> None:
    held = [*parameters(), nn.Parameter(torch.zeros(2, 3).t())]
    others = Others([6, 4, 6], [True, False, True])
    step(GradientSum(held, others, divisor=2), held, [1.0, 2.0, 3.0])
    assert [parameter.grad is not None and parameter.grad.unique().tolist() for parameter in held] == [[1], [1], [2]]
    (buffer,) = others.buffers
    memory = [p.grad is not None and p.grad.untyped_storage().data_ptr() for p in held]
    assert memory[:2] == [buffer.untyped_storage().data_ptr()] * 2
    assert memory[2] != memory[0]  # it is laid out otherwise
    assert held[2].grad is not None
    assert held[2].grad.stride() == held[2].stride()


def test_a_gradient_may_be_taken_away_between_steps() -> None:
    held = parameters()
    others = Others([6, 4], [True, True])
    sums = GradientSum(held, others)
    step(sums, held, [1.0, 2.0])
    kept = held[0].grad
    held[1].grad = None
    sums.set_aside()
    for parameter, value in zip(held, (5.0, 6.0), strict=True):
        parameter.grad = torch.full_like(parameter, value)
    sums.start()
    sums.finish()
    assert kept is held[0].grad
    assert [parameter.grad is not None and parameter.grad.unique().tolist() for parameter in held] == [[8], [7]]
