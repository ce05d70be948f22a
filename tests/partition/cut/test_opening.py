"""Modules that hold repeated blocks are opened where balance or a cut needs it; nothing that is drawn changes by it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from penstock import PartitionError, inspect, pipeline
from scaffolding.models import squared_error
from scaffolding.proofs import proven

WIDTH = 6


class DropPath(nn.Module):
    """Leaves whole rows out, as timm's does: draws in its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.new_empty((x.shape[0], 1)).bernoulli_(0.5) if self.training else x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.path = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), DropPath()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.path(F.dropout(self.drop(self.layer(x)), 0.2, self.training))


class Stage(nn.Module):
    """As those of ConvNeXt and Swin: something of its own, and then blocks."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return x


class Whole(nn.Module):
    """Draws outside of any unit too, before and after what may be opened."""

    def __init__(self, depths: Sequence[int] = (1, 6, 1), make: Callable[[int], nn.Module] = Stage) -> None:
        super().__init__()
        self.stages, self.head = nn.ModuleList(make(depth) for depth in depths), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.1, self.training)
        for stage in self.stages:
            x = stage(x)
        return self.head(F.dropout(x, 0.1, self.training))


def cuts_of(model: nn.Module, stages: int, **options: Any) -> list[str]:
    return [
        stage.first_module
        for stage in inspect(model, (torch.randn(4, WIDTH),), stages=stages, microbatches=1, **options).stages[1:]
    ]


def losses(ranks: int, make: Callable[[int], nn.Module] = Stage, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Of two steps from the same seeds, and the gradients after them."""
    torch.manual_seed(0)
    model, x, y = Whole(make=make), torch.randn(8, WIDTH), torch.randn(8, 2)
    given = {"schedule": "1f1b", "microbatches": 2, "loss": squared_error, "seed": 3, **options}
    with pipeline(model, (x,), ranks=ranks, **given) as pipe:
        found = [pipe.step(x, target=y).loss for _ in range(2)]
        return found, [p.grad for _, p in pipe.session.model_parts.all_parameters() if p.grad is not None]


def assert_equal(one: tuple[list[Tensor], list[Tensor]], other: tuple[list[Tensor], list[Tensor]]) -> None:
    for these, those in zip(one, other, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


def test_what_would_hold_more_than_its_share_is_opened() -> None:
    assert cuts_of(Whole(), 1) == []
    assert [name.rpartition(".")[0] for name in cuts_of(Whole(), 4)[:-1]] == ["stages.1.blocks"] * 2
    assert cuts_of(Whole((2, 2, 2)), 3) == ["stages.1", "stages.2"]  # balanced as it is
    assert len(set(cuts_of(Whole(), 8))) == 7  # more stages than there are modules in the list


@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 4, "schedule": "zb-h1"},
        {"ranks": 2, "cuts": ["stages.1.blocks.3"]},
        {"ranks": 1, "split_inside": ["stages.1"]},
        {"ranks": 2, "split_inside": ["stages.0", "stages.2"], "balance": "parameters"},
    ],
)
def test_masks_are_the_same_whatever_is_opened(options: dict[str, Any]) -> None:
    assert_equal(losses(**options), losses(1))


def test_the_unsplit_model_draws_the_same() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Stage(depth) for depth in (1, 6, 1)))
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    proven(model, x, y, ranks=4, microbatches=2, exact=True)
    assert any(".blocks." in name for name in cuts_of(model, 4))


class Draws(Stage):
    """Draws in its own forward, between its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(F.dropout(x, 0.5, self.training))
        return self.before(x)


def test_a_module_that_draws_itself_is_opened_only_if_it_is_asked_for() -> None:
    assert not any(".blocks." in name for name in cuts_of(Whole(make=Draws), 4))
    assert_equal(losses(4, Draws), losses(1, Draws))
    with pytest.raises(
        PartitionError, match=r"inside 'stages\.1', which .* but it draws random.*Pass split_inside=\['stages\.1'\]"
    ):
        losses(2, Draws, cuts=["stages.1.blocks.2"])
    opened = losses(2, Draws, split_inside=["stages.1"], cuts=["stages.1.blocks.2"])
    assert_equal(opened, losses(1, Draws, split_inside=["stages.1"]))


class Chooses(Stage):
    """Cannot be recorded call by call: what it does depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if x.sum() > 0 else -block(x)
        return self.before(x)


def hooked(depth: int) -> nn.Module:
    made = Stage(depth)
    made.register_forward_hook(lambda *_: None)
    return made


@pytest.mark.parametrize("make", [Chooses, hooked])
def test_what_cannot_be_recorded_call_by_call_stays_whole(make: Callable[[int], nn.Module]) -> None:
    assert cuts_of(Whole(make=make), 4) == ["stages.1", "stages.2", "head"]
    assert_equal(losses(4, make), losses(1, make))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"split_inside": ["stages.7"]}, r"split_inside: the model has no .*'stages\.7'.*nearest"),
        (
            {"split_inside": ["stages.1"], "leaf_modules": ["stages.1"]},
            r"split_inside: 'stages\.1' .* leaf_modules=\['stages\.1'\]",
        ),
        ({"cuts": ["stages.1.blocks.2"], "leaf_modules": ["stages.1"]}, r"cuts: .*'stages\.1\.blocks'.* leaf_modules="),
        ({"cuts": ["stages.1.blocks.2"], "make": Chooses}, r"inside 'stages\.1'.*depends on the values.*cut at"),
    ],
)
def test_what_cannot_be_opened_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    make = options.pop("make", Stage)
    with pytest.raises(PartitionError, match=words):
        cuts_of(Whole(make=make), 2, **options)


def test_opens_gives_more_places_to_cut() -> None:
    plain = nn.Sequential(Block(), Block())
    with pytest.raises(PartitionError, match=r"only 2 layers.*split_inside="):
        cuts_of(plain, 3)
    assert len(cuts_of(plain.eval(), 3, split_inside=["0", "1"])) == 2


def test_stages_of_a_hierarchical_model_share_the_work() -> None:
    with torch.device("meta"):
        model = transformers.SwinForImageClassification(transformers.SwinConfig(depths=[1, 1, 4, 1]))
    stages = inspect(model, (torch.zeros(1, 3, 224, 224),), stages=4).stages
    assert 4 * max(stage.work_fraction for stage in stages) < 1.2
