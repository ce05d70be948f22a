"""What a message sends into `leaf_modules=` works there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chained import NoStreams, assert_same, run_chained, run_unsplit
from torch import Tensor, nn

from penstock import inspect
from penstock._base.errors import PartitionError
from penstock.partition import Partitioner
from scaffolding.models import Case, squared_error

WIDTH = 6


class Expands(nn.Module):
    """Takes and returns tensors, some strides of which are 0, and reads values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, token: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        if token.sum() > 1e9:
            x = x * 2
        return self.linear(x + token[:, :1]).expand(-1, 4, -1), token.expand(-1, 4, -1)


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), Expands(), nn.Linear(WIDTH, WIDTH)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        token = self.token.expand(len(x), 4, WIDTH)
        y, z = self.second(token, self.first(x))
        return self.last(y) + z + token


class Weighs(nn.Module):
    """Has a buffer that requires a gradient, and reads values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(WIDTH).requires_grad_())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight if x.sum() < 1e9 else x


class Overwrites(nn.Module):
    """Updates what it is given in place, and reads values."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2) if x.sum() < 1e9 else x


class Around(nn.Module):
    """Linear layers around something."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        return self.last(self.second(self.first(x), *more))


CASES = {
    "expanded": (Expanded, torch.zeros(3, 1, WIDTH), ()),
    "buffer with a gradient": (lambda: Around(Weighs()), torch.randn(3, WIDTH), ()),
    "update in place": (lambda: Around(Overwrites()), torch.randn(3, WIDTH), ()),
}


@pytest.mark.parametrize("name", CASES)
def test_the_remedy_that_the_message_gives_works(name: str) -> None:
    torch.manual_seed(0)
    make, x, more = CASES[name]
    model = make()
    target = torch.randn(3, 4, WIDTH) if name == "expanded" else torch.randn(x.shape)
    case = Case(model, (x, *more), {}, target, squared_error)
    with pytest.raises(PartitionError, match=r"leaf_modules=\['second'\]"):
        Partitioner(model, 3, streams=NoStreams())(case.args)
    partition = Partitioner(model, 3, ["second", "last"], ["second"], streams=NoStreams())(case.args)
    output = run_chained(partition, case)
    grads = {n: t.grad.clone() for n, t in (*model.named_parameters(), *model.named_buffers())}
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.grad = None
    assert_same(output, run_unsplit(model, case))
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert torch.equal(grads[name], tensor.grad), name


def test_a_buffer_with_a_gradient_on_two_stages_is_refused() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    scale = torch.randn(WIDTH).requires_grad_()
    for layer in model:
        layer.register_buffer("scale", scale)
        layer.forward = lambda x, layer=layer: nn.functional.linear(x, layer.weight) * layer.scale
    with pytest.raises(PartitionError, match=r"'0\.scale' is a buffer that requires a gradient, .* stages \[0, 1\]"):
        Partitioner(model, 2, streams=NoStreams())((torch.randn(3, WIDTH),))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return x + self.layer(x)


def test_a_leaf_is_not_opened_for_the_blocks_that_it_holds() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(Residual() for _ in range(4))))
    found = inspect(model, (torch.randn(2, 4),), stages=2, leaf_modules=["1"])
    assert [stage.modules for stage in found.stages] == [("0",), ("1",)]
    with pytest.raises(PartitionError, match="2 layers"):
        inspect(model, (torch.randn(2, 4),), stages=3, leaf_modules=["1"])
