"""Sums of gradients over processes: the host waits only where it must, and what was summed is not copied again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.runtime.gradients.sums import GradientSum
from scaffolding import stand_in
from scaffolding.ranks import Ranks
from scaffolding.stand_in import on_the_device

aten = torch.ops.aten

LINE = 16
"""Floats of a cache line, at which each gradient begins."""


class Others:
    """Other processes, which add a gradient of ones for every parameter of which they have one."""

    def __init__(self, sizes: Sequence[int], having: Sequence[bool]) -> None:
        pieces = [F.pad(torch.full((n,), float(has)), (0, -n % LINE)) for n, has in zip(sizes, having, strict=True)]
        self._theirs = torch.cat([*pieces, torch.tensor(having, dtype=torch.float32)])
        self.buffers: list[Tensor] = []

    def __call__(self, tensors: Sequence[Tensor]) -> Others:
        (buffer,) = tensors
        self.buffers.append(buffer)
        buffer += self._theirs.to(buffer.device, non_blocking=True)
        return self

    def adding_nothing(self, tensors: Sequence[Tensor]) -> Others:
        self.buffers.extend(tensors)
        return self

    def wait(self) -> None: ...


SHAPES = (2, 3), (4,)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]


def step(sums: GradientSum, held: Sequence[nn.Parameter], values: Sequence[float | None]) -> None:
    sums.begin_step()
    for parameter, value in zip(held, values, strict=True):
        parameter.grad = None if value is None else torch.full_like(parameter, value)
    sums.start()
    sums.end_step()


class Copies(TorchDispatchMode):
    """Counts the gradients that are copied: all but the flags of presence, and single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in (aten.cat, aten.copy_, aten.clone, aten._to_copy) and made.numel() > len(SHAPES):
            self.elements += made.numel()
        return made


def backwards(sums: GradientSum, held: Sequence[nn.Parameter], terms: Sequence[Sequence[Tensor | None]]) -> int:
    """One step in which autograd adds a term for each microbatch. Returns how many elements were copied."""
    with Copies() as copies:
        sums.begin_step()
        for microbatch in terms:
            used = [(p * term).sum().real for p, term in zip(held, microbatch, strict=True) if term is not None]
            torch.autograd.backward(used)
        sums.start()
        sums.end_step()
    return copies.elements


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
    assert all(p.grad is not None and p.grad.data_ptr() % 64 == 0 for p in held)  # kernels are those of the first step
    assert held[2].grad is not None
    assert held[2].grad.stride() == held[2].stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_gradients_accumulate_where_they_are_summed(dtype: torch.dtype) -> None:
    """From the second step on nothing is copied, and the bits are those of gradients outside: signs of zero, too."""
    held = [nn.Parameter(parameter.detach().to(dtype)) for parameter in parameters()]
    alone = [nn.Parameter(parameter.detach().clone()) for parameter in held]
    sums = GradientSum(held, Others([6, 4], [False, False]).adding_nothing)
    copied = []
    for number in range(3):
        generator = torch.Generator().manual_seed(number)
        terms = [[torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES] for _ in range(3)]
        for microbatch in terms:
            microbatch[0][0] = -0.0
        for parameter in (*held, *alone):
            parameter.grad = None
        copied.append(backwards(sums, held, terms))
        for microbatch in terms:
            torch.autograd.backward([(p * term).sum().real for p, term in zip(alone, microbatch, strict=True)])
        for one, other in zip(held, alone, strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert one.grad.view(torch.uint8).tolist() == other.grad.view(torch.uint8).tolist()
    assert copied[0] >= sum(parameter.numel() for parameter in held)
    assert copied[1:] == [0, 0] or dtype.is_complex  # whose products autograd conjugates


def test_gradients_come_and_go_and_kept_ones_are_not_written_to() -> None:
    """Those of earlier steps stay as they were, wherever the next ones accumulate."""
    held = parameters()
    sums = GradientSum(held, Others([6, 4], [False, False]).adding_nothing)
    kept: list[tuple[Tensor, float]] = []
    for value, here in enumerate(([1, 0], [1, 1], [0, 1], [1, 0], [1, 1], [0, 0]), 1):
        for parameter in held:
            parameter.grad = None
        terms = [torch.full(shape, float(value)) if had else None for shape, had in zip(SHAPES, here, strict=True)]
        backwards(sums, held, [terms] * 2)
        assert [p.grad is not None for p in held] == [bool(had) for had in here]
        kept += [(p.grad, 2.0 * value) for p in held if p.grad is not None]
        assert all(grad.unique().tolist() == [total] for grad, total in kept)
