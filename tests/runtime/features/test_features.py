"""Features: hooks nest in the stated order; a kind of recomputation is one class and one line; a step is short."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar

import pytest

from penstock import verify
from penstock._base.errors import ArgumentError
from penstock.runtime.features import registry
from penstock.runtime.features.feature import Feature, StageContext, contexts, within
from penstock.runtime.features.recompute import RecomputedStage
from penstock.schedule import Op
from scaffolding.models import squared_error
from scaffolding.small import batch, mlp


class Notes(Feature):
    """Notes when it is entered and left."""

    def __init__(self, name: str, said: list[str]) -> None:
        self._name, self._said = name, said

    @contextmanager
    def forward(self, microbatch: int, *, runs_again: bool) -> Iterator[None]:
        self._said.append(f"+{self._name}")
        try:
            yield
        finally:
            self._said.append(f"-{self._name}")


class Idle(Feature):
    """Has no hooks."""


def test_the_first_feature_is_the_outermost() -> None:
    said: list[str] = []
    features = [Notes("a", said), Idle(), Notes("b", said)]
    within(contexts(features, "forward", 0, runs_again=False), lambda: said.append("code"))()
    assert said == ["+a", "+b", "code", "-b", "-a"]


def test_all_features_are_left_when_one_refuses() -> None:
    said: list[str] = []

    class Refuses(Feature):
        @contextmanager
        def forward(self, microbatch: int, *, runs_again: bool) -> Iterator[None]:
            raise ArgumentError("no")
            yield

    enter = contexts([Notes("a", said), Refuses(), Notes("b", said)], "forward", 0, runs_again=False)
    with pytest.raises(ArgumentError):
        within(enter, lambda: said.append("code"))()
    assert said == ["+a", "-a"]


class EverySecond(RecomputedStage):
    """A kind of recomputation that Penstock lacks: of each stage, the microbatches of odd numbers."""

    ran_again: ClassVar[list[int]] = []

    @classmethod
    def of(cls, stage: StageContext) -> EverySecond | None:
        odd = [microbatch for microbatch in stage.microbatches(Op.F) if microbatch % 2]
        return cls.rerunning(stage, odd)

    def again(self, microbatch: int) -> AbstractContextManager[None]:
        self.ran_again.append(microbatch)
        return nullcontext()


def test_a_kind_of_recomputation_is_a_class_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.RECOMPUTE, "every_second", EverySecond.of)  # type: ignore[arg-type]
    x, y = batch()
    EverySecond.ran_again.clear()
    report = verify(
        mlp(), (x,), target=y, loss_fn=squared_error, ranks=2, microbatches=4, schedule="1f1b", recompute="every_second"
    )
    assert report.ok
    said = "recompute='every_second': its own choice of forwards runs again in backward, out of those on stages 0-1"
    assert said in report.notes
    stages, steps = 2, 3
    assert sorted(EverySecond.ran_again) == sorted([1, 3] * stages * steps)


def test_a_hook_that_nothing_has_costs_no_context() -> None:
    assert contexts([Idle()], "forward", 0, runs_again=False) is None
    assert within(None, batch) is batch
