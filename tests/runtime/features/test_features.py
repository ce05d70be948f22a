"""Hooks of features nest in the stated order, and all are left when one refuses."""

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
        if self._name == "refuses":
            raise ArgumentError("no")
        self._said.append(f"+{self._name}")
        try:
            yield
        finally:
            self._said.append(f"-{self._name}")


def test_the_first_feature_is_the_outermost_and_is_left_when_another_refuses() -> None:
    said: list[str] = []
    features = [Notes("a", said), Feature(), Notes("b", said)]
    within(contexts(features, "forward", 0, runs_again=False), lambda: said.append("code"))()
    assert said == ["+a", "+b", "code", "-b", "-a"]
    features, said[:] = [Notes("a", said), Notes("refuses", said), Notes("b", said)], []
    with pytest.raises(ArgumentError):
        within(contexts(features, "forward", 0, runs_again=False), lambda: said.append("code"))()
    assert said == ["+a", "-a"]
