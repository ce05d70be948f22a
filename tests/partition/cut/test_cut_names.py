"""Cuts anywhere in a forward: at later calls of a module, at lines, and at marks."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import pipe_split

import penstock
from penstock import PartitionError, Pipeline, pipeline
from scaffolding.by_hand import assert_same_gradients, step_by_hand
from scaffolding.models import squared_error
from scaffolding.small import WIDTH, batch, mlp

X, Y = batch()


class Bare(nn.Module):
    """Layers that are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 3) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for w in self.w:
            x = torch.relu(x @ w)
        return x


class Stacked(nn.Module):
    """Layers that are parts of two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 3), nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for w, b in zip(self.w, self.b, strict=True):
            x = torch.relu(F.linear(x, w, b))
        for layer in range(4):
            x = torch.relu(F.linear(x, self.w[layer], self.b[layer]))
        return x


class Shared(nn.Module):
    """A layer that is called four times, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.layers[0](x)
        return self.head(x)


class Marked(nn.Module):
    """Torch's example of `pipe_split`."""

    def __init__(self, mark: Callable[[], None] = penstock.cut) -> None:
        super().__init__()
        self.mm_param, self.lin, self.mark = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH), mark

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(torch.mm(x, self.mm_param))
        self.mark()
        return self.lin(x)


class Block(nn.Module):
    def __init__(self, marks: bool = True) -> None:
        super().__init__()
        self.a, self.b, self.marks = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), marks

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        if self.marks:
            penstock.cut()
        return x + F.relu(self.b(h))


class Loop(nn.Module):
    """A mark before and after each layer, torch's right behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(4)

    def forward(self, x: Tensor) -> Tensor:
        penstock.cut()
        for layer in self.layers:
            x = torch.relu(layer(x))
            penstock.cut()
            pipe_split()
        return x


def blocks(marks: bool = True) -> nn.Module:
    return nn.Sequential(Block(marks), Block(marks))


def made(model: nn.Module | list[nn.Module], ranks: int, cuts: list[str] | None = None, **options: object) -> Pipeline:
    return pipeline(model, (X,), loss_fn=squared_error, ranks=ranks, microbatches=3, cuts=cuts, **options)


@pytest.mark.parametrize(
    ("model", "ranks", "cuts", "expected"),
    [
        (Bare, 2, None, ["matmul#3"]),
        (Bare, 3, ["relu#1", "matmul#3"], ...),
        (Shared, 3, ["layers.0:2", "layers.0:4"], ...),
        (Shared, 5, None, ["layers.0:2", "layers.0:3", "layers.0:4", "head"]),
        (Marked, 2, None, ["cut#1"]),
        (lambda: Marked(pipe_split), 2, None, ["cut#1"]),
        (Marked, 2, ["lin"], ...),
        (blocks, 3, None, ["0.cut#1", "1.cut#1"]),
        (blocks, 2, None, ["1.cut#1"]),  # the more even of two
        (blocks, 4, None, ["0.cut#1", "1.a", "1.cut#1"]),  # too few marks: besides modules
        (lambda: blocks(marks=False), 3, ["0.relu#2", "1.relu#1"], ...),
        (Loop, 2, ["cut#3"], ...),
        (Loop, 4, None, ["cut#2", "cut#4", "cut#6"]),  # one without calls between is none
    ],
)
def test_a_stage_may_begin_anywhere(
    model: Callable[[], nn.Module], ranks: int, cuts: list[str] | None, expected: list[str]
) -> None:
    torch.manual_seed(1)
    whole = model()
    alone = copy.deepcopy(whole)
    by_hand = step_by_hand(alone, (X,), Y, squared_error, 3)
    with made(whole, ranks, cuts, balance="flops") as pipe:
        assert list(pipe.cuts) == (cuts if expected is ... else expected)
        assert len(pipe.stages) == ranks
        assert pipe.step(X, target=Y).loss == by_hand.total
        shared = [name for name, _ in whole.named_parameters() if name.startswith("layers.0")]
        assert_same_gradients(whole, alone, but=shared if model is Shared else ())


def test_parts_of_parameters_go_with_the_call_that_takes_them() -> None:
    """A slice of a weight does not cross a cut if its layer comes after it."""
    torch.manual_seed(1)
    model = Stacked()
    alone = copy.deepcopy(model)
    by_hand = step_by_hand(alone, (X,), Y, squared_error, 3)
    with made(model, 3, balance="flops") as pipe:
        assert pipe.cuts[1].startswith("getitem#")
        assert [len(stage.inputs) for stage in pipe.stages[2:]] == [1]
        assert pipe.step(X, target=Y).loss == by_hand.total
        assert_same_gradients(model, alone, but=("w", "b"))


def test_a_layer_that_a_list_holds_twice_has_a_name_for_each_call() -> None:
    first, second = mlp(2)
    with made([first, second, first], 3) as pipe:
        assert pipe.cuts == ("1", "2")
    with made(nn.Sequential(first, second, first), 2, ["2"]) as pipe:
        assert pipe.stage_code.count("_modules") == made(
            nn.Sequential(first, second, first), 2, ["0:2"]
        ).stage_code.count("_modules")
        assert [len(stage.parameters) for stage in pipe.stages] == [4, 2]


def test_the_names_round_trip_through_checkpoints_plans_and_inspect() -> None:
    def fresh(cuts: tuple[str, ...] | None) -> Pipeline:
        return made(Marked(), 2, None if cuts is None else list(cuts))

    profile = penstock.profile(Marked(), (X,), microbatches=3, budget_seconds=0)
    assert [unit.name for unit in profile.units] == ["mm#1", "cut#1"]
    assert made(Marked(), 2, balance=profile).cuts == ("cut#1",)
    assert [unit.name for unit in penstock.profile(Bare(), (X,), budget_seconds=0).units][1] == "matmul#2"
    found = penstock.inspect(Marked(), (X,), stages=2, microbatches=3)
    assert [stage.first_module for stage in found.stages] == ["", "cut#1"]
    with fresh(None) as pipe, tempfile.TemporaryDirectory() as folder:
        penstock.checkpoint.save(folder, pipe)
        with fresh(pipe.cuts) as other:
            assert other.cuts == pipe.cuts
            penstock.checkpoint.load(folder, other)
            for name, tensor in pipe.state_dict().items():
                assert torch.equal(tensor, other.state_dict()[name])


@pytest.mark.parametrize(
    ("model", "cuts", "match"),
    [
        (Shared, ["layers.0:5"], "'layers.0:5' never runs for these inputs"),
        (Bare, ["add#1"], "'add#1' never runs for these inputs. Name a call"),
        (Marked, ["cut#2"], "'cut#2' never runs"),
        (Marked, ["line.relu#1"], "no module named 'line'; the nearest is 'lin'"),
        (blocks, ["0.a.linear#2"], "'0.a.linear#2' never runs"),
    ],
)
def test_names_that_give_no_stage(model: Callable[[], nn.Module], cuts: list[str], match: str) -> None:
    with pytest.raises(PartitionError, match=match):
        made(model(), 2, cuts)


def test_a_leaf_with_a_mark_is_refused() -> None:
    with pytest.raises(PartitionError, match=r"test_cut_names.py:\d+, in '0', marks where a stage may begin; or leave"):
        made(blocks(), 2, leaf_modules=["0"])


def test_a_mark_is_nothing_outside_of_a_recording() -> None:
    model = Marked()
    expected = model(X)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(X), expected)
    assert torch.equal(torch.export.export(model, (X,), strict=False).module()(X), expected)
    assert torch.equal(torch.fx.symbolic_trace(model)(X), expected)
