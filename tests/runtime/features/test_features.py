"""Features: hooks nest in the stated order; a kind of recomputation is one class and one line; a step is short."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock._base.errors import ArgumentError
from penstock.runtime.features.feature import Feature, contexts, within


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
