"""What a block begins to carry from one microbatch to the next, after a flag was switched or for some values only, is
refused where a stage's forwards do not see the microbatches in order. What only looks like it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import PartitionError, pipeline
from penstock.partition.state.names_in_classes import names_read
from penstock.runtime.features.forward_order import LOOKS
from penstock.schedule import Schedule
from scaffolding.by_hand import assert_same_gradients, step_by_hand
from scaffolding.representatives import representatives
from scaffolding.small import WIDTH

ORDER = Schedule.parse(
    "mine: 4 microbatches, stages on ranks 0 1\n"
    "rank 0: 0F1 0F0 0F2 0F3 0B0 0B1 0B2 0B3\n"
    "rank 1: 1F1 1F0 1F2 1F3 1B0 1B1 1B2 1B3"
)
SCHEDULES: dict[str, tuple[str | Schedule, int, int]] = {
    "dualpipe": ("dualpipe", 2, 4),
    "one microbatch for each copy": ("dualpipe", 2, 2),
    "chimera": ("chimera", 4, 4),
    "order": (ORDER, 2, 4),
    "1f1b": ("1f1b", 2, 4),
}
LARGE = 1000.0
"""Inputs this many times as large make blocks branch that ask for values."""


class Block(nn.Module):
    """Does something else once it is switched on, or for large values only."""

    asks_values = False

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.flag = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.use(x) if self.is_on(x) else self.off(x)

    def is_on(self, x: Tensor) -> bool:
        return bool(x.abs().max() > LARGE / 10) if self.asks_values else self.flag

    def off(self, x: Tensor) -> Tensor:
        return x

    def use(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def mean(x: Tensor) -> Tensor:
    return x.detach().mean(0)


# -- what is carried over ---------------------------------------------------------------------------------------------


class Averages(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.zeros(WIDTH))

    def use(self, x: Tensor) -> Tensor:
        self.held.lerp_(mean(x), 0.5)
        return x - self.held.clone()


class Replaces(Averages):
    def use(self, x: Tensor) -> Tensor:
        self.held = self.held.lerp(mean(x), 0.5)
        return x - self.held


class WritesUnseen(Averages):
    def use(self, x: Tensor) -> Tensor:
        self.held.data.lerp_(mean(x), 0.5)
        return x - self.held.clone()


class WritesPlain(Block):
    def __init__(self) -> None:
        super().__init__()
        self.held = torch.zeros(WIDTH)

    use = Averages.use


class Follows(Block):
    held: Tensor | None = None

    def use(self, x: Tensor) -> Tensor:
        last, self.held = self.held, mean(x)
        return x if last is None else x - last


class FollowsInPlace(Follows):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.relu_())


class TakesTheFirst(Block):
    held: Tensor | None = None

    def use(self, x: Tensor) -> Tensor:
        if self.held is None:
            self.held = mean(x)
        return x - self.held


class Counts(Block):
    held = 0

    def use(self, x: Tensor) -> Tensor:
        self.held += 1
        return x * self.held


class AddsUp(Block):
    held = 0.0

    def use(self, x: Tensor) -> Tensor:
        self.held = 0.5 * self.held + float(mean(x).mean())
        return x - self.held


class Queues(Block):
    def __init__(self) -> None:
        super().__init__()
        self.held: list[Tensor] = []

    def use(self, x: Tensor) -> Tensor:
        held = sum(self.held, torch.zeros(WIDTH))
        self.held.append(mean(x))
        return x - held


class Memory:
    __slots__ = ("held",)

    def __init__(self) -> None:
        self.held = torch.zeros(WIDTH)


class InSlot(Block):
    def __init__(self) -> None:
        super().__init__()
        self.memory = Memory()

    def use(self, x: Tensor) -> Tensor:
        last, self.memory.held = self.memory.held, mean(x)
        return x - last


class InClass(Block):
    held: Tensor | None = None

    def use(self, x: Tensor) -> Tensor:
        last, InClass.held = InClass.held, mean(x)
        return x if last is None else x - last


class InHook(Block):
    def __init__(self) -> None:
        super().__init__()
        held: list[Tensor] = []

        def hook(_: nn.Module, args: Any, result: Tensor) -> Tensor:
            if not self.is_on(args[0]):
                return result
            held.append(mean(result))
            return result - held[0]

        self.linear.register_forward_hook(hook)

    def use(self, x: Tensor) -> Tensor:
        return x


class ReadsLater(Block):
    """Sets it in every forward; what begins is that it is read."""

    held: Tensor | None = None

    def use(self, x: Tensor) -> Tensor:
        last, self.held = self.held, mean(x)
        return x if last is None else x - last

    def off(self, x: Tensor) -> Tensor:
        self.held = mean(x)
        return x


class CountsAlways(Block):
    held = 0

    def use(self, x: Tensor) -> Tensor:
        self.held += 1
        return x * self.held

    def off(self, x: Tensor) -> Tensor:
        self.held += 1
        return x


CARRIES = [
    Averages,
    Replaces,
    WritesPlain,
    Follows,
    FollowsInPlace,
    TakesTheFirst,
    Counts,
    AddsUp,
    Queues,
    InSlot,
    InClass,
    InHook,
    ReadsLater,
    CountsAlways,
]


# -- what only looks like it ------------------------------------------------------------------------------------------


class Notes(Block):
    """For others to look at, with a mask that a second run must draw again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.drop = 0, list[Tensor](), nn.Dropout(0.5)

    def use(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = mean(x)
        self.seen.append(self.last)
        return x + self.drop(x) * 0


class SetsFirst(Block):
    def __init__(self) -> None:
        super().__init__()
        self.held: list[Tensor] = []

    def use(self, x: Tensor) -> Tensor:
        self.held.clear()
        self.held.append(mean(x))
        return x - self.held[0]


class MakesOnce(Block):
    table: Tensor | None = None

    def use(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(WIDTH) / WIDTH
        return x * self.table


class UpdatesItsInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.last = [mean(x)]
        return super().forward(x.relu_())

    def use(self, x: Tensor) -> Tensor:
        self.other = self.last
        return x


class Adds(Block):
    total: Tensor | float = 0.0

    def use(self, x: Tensor) -> Tensor:
        self.total = self.total + x.detach().sum()
        return x


HARMLESS = [Notes, SetsFirst, MakesOnce, UpdatesItsInput, Adds]


# -- runs -------------------------------------------------------------------------------------------------------------


def model(kind: type[Block], ranks: int, *, asks_values: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    block = kind()
    block.asks_values = asks_values
    others = [nn.Linear(WIDTH, WIDTH) for _ in range(2 * ranks - 2)]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), block, *others)


def train(
    kind: type[Block],
    schedule: str,
    *,
    asks_values: bool,
    begins: int = 1,
    steps: int = 2,
    between: Callable[..., object] = lambda step, mine, its: None,
    **options: Any,
) -> nn.Sequential:
    """Steps, from number `begins` on with the flag on or with large values, all with the gradients of plain torch."""
    order, ranks, microbatches = SCHEDULES[schedule]
    mine, its = (model(kind, ranks, asks_values=asks_values) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(2 * microbatches, WIDTH, generator=generator) for _ in range(2))
    with pipeline(
        mine, (x,), loss=F.mse_loss, ranks=ranks, microbatches=microbatches, schedule=order, **options
    ) as pipe:
        for step in range(steps):
            InClass.held = None
            mine[1].flag = its[1].flag = step >= begins and not asks_values
            given = x * LARGE if step >= begins and asks_values else x
            for one in (mine, its):
                one.zero_grad()
            between(step, mine[1], its[1])
            pipe.step(given, target=y)
            step_by_hand(its, (given,), y, F.mse_loss, microbatches)
            tied = [name for name, _ in mine.named_parameters()] if schedule != "order" else []
            assert_same_gradients(mine, its, but=tied)
    return mine


WHEN = pytest.mark.parametrize("asks_values", [False, True], ids=["flag", "values"])


def refused(kind: type[Block], schedule: str, *, asks_values: bool, begins: int = 1) -> None:
    """The run is right until the state begins, and then refused at once."""
    reached: list[int] = []
    why = "runs its forwards in the order 1, 0, 2, 3" if schedule == "order" else "runs several copies of the stage"
    wanted = (
        rf"the forward of stage \d carries '(1\.)?held'.* over from one microbatch to the next, but this sch.* {why}"
    )
    with pytest.raises(PartitionError, match=wanted):
        train(
            kind,
            schedule,
            asks_values=asks_values,
            begins=begins,
            steps=begins + 3,
            between=lambda step, *_: reached.append(step),
        )
    assert reached[-1] == begins


@pytest.mark.parametrize(
    ("kind", "schedule", "asks_values"), representatives(2, CARRIES, ["dualpipe", "order"], [False, True])
)
def test_what_begins_to_be_carried_over_is_refused(kind: type[Block], schedule: str, asks_values: bool) -> None:
    refused(kind, schedule, asks_values=asks_values)


@pytest.mark.parametrize("schedule", ["one microbatch for each copy", "chimera"])
@pytest.mark.parametrize("kind", [Averages, WritesUnseen, Follows, FollowsInPlace, TakesTheFirst, Queues])
def test_in_the_first_forward_that_leaves_something(kind: type[Block], schedule: str) -> None:
    refused(kind, schedule, asks_values=False)


class InBand(Follows):
    """Asks for values that twice as large ones are not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Identity()

    def is_on(self, x: Tensor) -> bool:
        return self.flag and bool(x.max() < 10)


def test_where_other_values_take_another_branch() -> None:
    torch.manual_seed(0)
    block = InBand()
    one = nn.Sequential(block, *(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    x = torch.full((2, WIDTH), 6.0)
    with pipeline(one, (x,), loss=F.mse_loss, ranks=2, microbatches=2, schedule="dualpipe") as pipe:
        pipe.step(x, target=x)
        block.flag = True
        with pytest.raises(PartitionError, match=r"carries '0\.held' over"):
            pipe.step(x, target=x)


class BeginsByItself(Block):
    """A count decides from which forward on it does something, and notes it."""

    held = 0

    def is_on(self, x: Tensor) -> bool:
        self.held += 1
        return self.held > 2

    def use(self, x: Tensor) -> Tensor:
        self.last = mean(x)
        return x * 2


def test_a_count_that_comes_to_matter_where_something_new_is_set() -> None:
    with pytest.raises(PartitionError, match=r"carries '1\.held' over"):
        train(BeginsByItself, "order", asks_values=False)


@WHEN
@pytest.mark.parametrize("kind", [Averages, Follows, AddsUp, Queues, ReadsLater, CountsAlways])
def test_in_any_later_step(kind: type[Block], asks_values: bool) -> None:
    refused(kind, "dualpipe", asks_values=asks_values, begins=LOOKS)


@pytest.mark.parametrize(
    ("kind", "schedule", "asks_values"), representatives(2, HARMLESS, ["dualpipe", "order"], [False, True])
)
def test_what_is_noted_or_made_once_is_not(kind: type[Block], schedule: str, asks_values: bool) -> None:
    train(kind, schedule, asks_values=asks_values, begins=2, steps=4)


def test_forwards_that_run_again_leave_nothing() -> None:
    block = train(Notes, "dualpipe", asks_values=False, steps=4)[1]
    assert isinstance(block, Notes)
    assert (block.calls, len(block.seen)) == (12, 12)


@pytest.mark.parametrize(
    "options", [{"recompute": "always"}, {"recompute": 1}, {"offload": True}, {"check_finite": True}]
)
def test_with_features_around(options: dict[str, Any]) -> None:
    train(Notes, "order", asks_values=False, **options)
    with pytest.raises(PartitionError, match=r"carries '1\.held' over"):
        train(Follows, "order", asks_values=False, **options)


def test_evaluation_is_refused_too() -> None:
    one = model(Follows, 2)
    x = torch.randn(8, WIDTH)
    with pipeline(one, (x,), loss=F.mse_loss, ranks=2, microbatches=4, schedule="dualpipe") as pipe:
        pipe.evaluate(x, target=x)
        one[1].flag = True
        with pytest.raises(PartitionError, match=r"carries '1\.held' over"):
            pipe.evaluate(x, target=x)


@pytest.mark.parametrize("kind", [Averages, Follows, Counts, Queues])
def test_in_order_it_is_right(kind: type[Block]) -> None:
    train(kind, "1f1b", asks_values=False, steps=3)


class Scales(Block):
    """Sets an attribute that a user sets, too."""

    factor = 1.0

    def is_on(self, x: Tensor) -> bool:
        return True

    def use(self, x: Tensor) -> Tensor:
        self.factor = min(2 * self.factor / 2, 10.0)
        return x * self.factor


def test_what_is_set_from_outside_is_no_state() -> None:
    def warm_up(step: int, *blocks: Any) -> None:
        for block in blocks:
            block.factor = float(step)

    train(Scales, "order", asks_values=False, steps=4, between=warm_up)


def test_names_that_code_reads() -> None:
    class Some(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.only_set = x
            return x if getattr(self, "in_text", None) is None else x + self.is_read

    found = names_read(Some())
    assert {"is_read", "in_text"} <= found
    assert "only" + "_set" not in found
