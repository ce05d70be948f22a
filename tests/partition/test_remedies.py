"""A message that says what helps has tried it, has all that is in the way, and offers nothing that does not apply."""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import inspect
from penstock._base.errors import PartitionError
from penstock.partition import NoStreams, Partitioner
from scaffolding.models import OneLayer
from scaffolding.proofs import proven

WIDTH = 4


class Reads(nn.Module):
    """Branches on values."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, width)
        self.back = nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.linear(x)) if x.sum() < 1e9 else x


class ReadsOtherwise(Reads):
    def forward(self, x: Tensor) -> Tensor:
        x.retain_grad()
        return self.linear(x)


class Model(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.part = nn.Module()
        for index, module in enumerate(inner):
            setattr(self.part, f"m{index}", module)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for module in self.part.children():
            x = module(x)
        return self.last(x)


def refusal(model: nn.Module, stages: int = 2, kwargs: Any = None, **options: Any) -> str:
    with pytest.raises(PartitionError) as caught:
        Partitioner(model, stages, streams=NoStreams(), **options)((torch.randn(2, WIDTH),), kwargs)
    return str(caught.value)


def leaves_of(said: str) -> list[str]:
    """The leaves that a message gives."""
    found = re.search(r"leaf_modules=(\[.*?\])", said)
    assert found is not None, said
    leaves: list[str] = ast.literal_eval(found[1])
    return leaves


def follow(model: nn.Module, said: str) -> None:
    """Does what a message says."""
    made = Partitioner(model, 2, None, leaves_of(said), streams=NoStreams())((torch.randn(2, WIDTH),))
    assert len(made.stages) == 2


def test_one_thing_in_the_way_and_what_is_left_to_split() -> None:
    said = refusal(Model(Reads(width=20)))
    assert re.search(r"test_remedies\.py:\d+: .* in module 'part\.m0', which a recording cannot follow\. Pass", said)
    assert (
        "leaf_modules=['part.m0'], so that it runs as a whole (tried: 'part.m0' is 81% of the work, all of it on"
        in said
    )
    assert "eval" not in said
    assert "labels" not in said
    follow(Model(Reads()), said)


def test_all_that_is_in_the_way_at_once() -> None:
    model = Model(Reads(), nn.Linear(WIDTH, WIDTH), ReadsOtherwise(WIDTH))
    said = refusal(model)
    assert said.startswith("2 things are in the way: (1) the forward depends on the values")
    assert "(2) " in said
    assert "retains the gradient of an activation" in said
    assert leaves_of(said) == ["part.m0", "part.m2"]
    assert "so that they run as wholes (tried: 'part.m0' is 40% of the work" in said
    follow(model, said)


def test_what_helps_with_a_block_is_said_where_the_model_itself_is_in_the_way() -> None:
    class Checks(Model):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            if y.isnan().any():
                raise ValueError
            return y

    said = refusal(Checks(Reads()))
    assert (
        "With leaf_modules=['part.m0'] the last one remains. Do it outside of the model, or in a module of its own"
        in said
    )


def test_many_of_one_kind_are_named_together() -> None:
    model = Model(*(Reads() for _ in range(20)))
    said = refusal(model)
    assert "leaf_modules=[n for n, m in model.named_modules() if type(m).__name__ == 'Reads']" in said
    leaves = [n for n, m in model.named_modules() if type(m).__name__ == "Reads"]
    Partitioner(model, 4, None, leaves, streams=NoStreams())((torch.randn(2, WIDTH),))


def test_leaves_that_were_given_already_are_kept() -> None:
    said = refusal(Model(Reads(), ReadsOtherwise(WIDTH)), leaves=["part.m1"])
    assert sorted(leaves_of(said)) == ["part.m0", "part.m1"]


def test_too_few_modules_are_left() -> None:
    assert "(tried: only 3 modules are left to share among 4 stages)" in refusal(Model(Reads()), stages=4)


def test_a_module_that_does_nearly_all_the_work_is_not_offered() -> None:
    said = refusal(Model(Reads(100 * WIDTH)))
    assert re.search(
        r"Tried: leaf_modules=\['part.m0'\], which leaves nothing to split: 'part.m0' is 9\d% of the work", said
    )
    assert said.endswith("Do it outside of the model")


def test_what_runs_as_a_whole_and_fails_is_not_offered() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert x.sum() != x.sum()
            return x

    said = refusal(Model(Fails()))
    assert "Tried: leaf_modules=['part.m0'] does not help: 'part.m0' fails" in said
    assert said.endswith("Do it outside of the model")


def test_labels_are_named_where_they_are_in_the_way() -> None:
    class Own(Model):
        def forward(self, x: Tensor, labels: Tensor | None = None, scale: int = 1) -> Tensor:
            x = super().forward(x) * scale
            return x if labels is None or (x - labels).sum() > 0 else -x

    said = refusal(Own(), kwargs={"labels": torch.randn(2, WIDTH)})
    assert said.endswith("Leave out labels and pass loss_fn=... (tried)")
    with_value = Own()
    with_value.forward = lambda x: x if x.sum() > 0 else -x
    assert refusal(with_value).endswith("module of its own that leaf_modules=[...] names, so that it runs as a whole")


class Chain(nn.Sequential):
    """Containers of one class with the blocks that they contain, as are nested nn.Sequential."""

    def __init__(self, *inner: nn.Module, reads: bool = False) -> None:
        super().__init__(*inner)
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return -x if self.reads and x.sum() > 1e9 else x


def test_what_contains_a_block_in_the_way_is_not_run_whole_with_it() -> None:
    def block(*, reads: bool) -> Chain:
        return Chain(nn.Linear(WIDTH, WIDTH), nn.Tanh(), reads=reads)

    inner = Chain(block(reads=True), block(reads=True), block(reads=False))
    model = Chain(nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, WIDTH))
    said = refusal(model)
    assert leaves_of(said) == ["1.0", "1.1", "1.2"]
    follow(model, said)


class Expands(OneLayer):
    """Takes and returns tensors, some strides of which are 0, updates one in place, and reads values."""

    def forward(self, token: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        if token.sum() < 1e9:
            x.mul_(2)
        return self.layer(x + token[:, :1]).expand(-1, 4, -1), token.expand(-1, 4, -1)


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(WIDTH, WIDTH), Expands(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        token, x = self.token.expand(len(x), 4, WIDTH), self.first(x)
        y, z = self.second(token, x)
        return self.last(y) + z + token + x


def test_what_the_message_names_in_leaf_modules_trains_as_on_one_device() -> None:
    torch.manual_seed(0)
    model, x, y = Expanded(), torch.zeros(3, 1, WIDTH), torch.randn(3, 4, WIDTH)
    with pytest.raises(PartitionError, match=r"leaf_modules=\['second'\]"):
        inspect(model, (x,), stages=3)
    options = {"ranks": 3, "microbatches": 3, "cuts": ["second", "last"], "leaf_modules": ["second"]}
    proven(model, x, y, exact=True, **options)


def test_a_buffer_with_a_gradient_on_two_stages_is_refused() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
    scale = torch.randn(WIDTH).requires_grad_()
    for layer in model:
        layer.register_buffer("scale", scale)
        layer.forward = lambda x, layer=layer: nn.functional.linear(x, layer.weight) * layer.scale
    with pytest.raises(PartitionError, match=r"'0\.scale' is a buffer that requires a gradient, .* stages \[0, 1\]"):
        inspect(model, (torch.randn(3, WIDTH),), stages=2)


class Residual(OneLayer):
    def forward(self, x: Tensor) -> Any:
        return x + self.layer(x)


def test_a_leaf_is_not_opened_for_the_blocks_that_it_holds() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(Residual(4) for _ in range(4))))
    found = inspect(model, (torch.randn(2, 4),), stages=2, leaf_modules=["1"])
    assert [stage.modules for stage in found.stages] == [("0",), ("1",)]
    with pytest.raises(PartitionError, match="2 layers"):
        inspect(model, (torch.randn(2, 4),), stages=3, leaf_modules=["1"])
