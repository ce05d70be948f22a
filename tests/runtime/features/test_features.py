"""Features: hooks nest in the stated order; a kind of recomputation is one class and one line; a step is short."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import Tensor, nn

from penstock import pipeline, verify
from penstock.errors import ArgumentError
from penstock.runtime.execute import assembly
from penstock.runtime.features.context import StageContext
from penstock.runtime.features.feature import Feature, Features, Start
from penstock.runtime.features.recompute import RecomputedStage
from penstock.schedule import Op
from scaffolding.small import batch, mlp

ROOT = Path(__file__).parents[3]


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


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
    features = Features([Notes("a", said), Idle(), Notes("b", said)])
    features.begin_step(Start())
    with features.forward(0, runs_again=False), features.autograd(0):
        assert said == ["+a", "+b"]
    assert said == ["+a", "+b", "-b", "-a"]


def test_all_features_are_left_when_one_refuses() -> None:
    said: list[str] = []

    class Refuses(Feature):
        @contextmanager
        def forward(self, microbatch: int, *, runs_again: bool) -> Iterator[None]:
            raise ArgumentError("no")
            yield

    features = Features([Notes("a", said), Refuses(), Notes("b", said)])
    with pytest.raises(ArgumentError), features.forward(0, runs_again=False):
        pass
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
    monkeypatch.setitem(assembly.RECOMPUTE, "every_second", EverySecond.of)  # type: ignore[arg-type]
    x, y = batch()
    EverySecond.ran_again.clear()
    report = verify(
        mlp(), (x,), target=y, loss_fn=squared_error, ranks=2, microbatches=4, schedule="1f1b", recompute="every_second"
    )
    assert report.ok
    said = "recompute='every_second': its own choice of forwards runs again in backward, out of those on stages 0-1"
    assert said in report.notes
    stages, steps = 2, 2
    assert sorted(EverySecond.ran_again) == sorted([1, 3] * stages * steps)


def test_an_unknown_kind_is_refused() -> None:
    x, _ = batch()
    with pytest.raises(ArgumentError, match="recompute='sometimes': expected 'never', 'except_last', 'always'"):
        pipeline(mlp(), (x,), ranks=2, loss=squared_error, recompute="sometimes")


def test_a_step_is_as_docs_design_draws_it() -> None:
    drawn = re.search(r"```\n(Pipeline\.step.*?)```", (ROOT / "docs/design.md").read_text(), re.DOTALL)
    assert drawn is not None
    expected = [line.split()[0] for line in drawn[1].splitlines()]
    seen: list[list[str]] = []
    model = nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9))
    x, y = batch()
    with pipeline(model, (x,), ranks=2, microbatches=2, loss=squared_error) as pipe:
        hook = model[0].register_forward_pre_hook(lambda *_: seen.append(_way()))
        pipe.step(x, target=y)
        hook.remove()
    assert seen
    assert all(way[: len(expected)] == expected for way in seen)
    assert len(expected) == 5  # the action, and four above it


def _way() -> list[str]:
    """The functions that are being called, from `Pipeline.step` inwards."""
    found: list[str] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        found.append(frame.f_code.co_qualname)
        frame = frame.f_back
    found.reverse()
    return found[found.index("Pipeline.step") :]


def test_a_hook_that_nothing_has_costs_no_context() -> None:
    one, other = Features([Idle()]), Features()
    assert one.forward is other.forward
