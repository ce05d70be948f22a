"""Picks a few cases to stand for a matrix, or for a list; the others are `long`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def long_after(count: int, *cases: Any) -> list[Any]:
    """The cases, for `parametrize`: the first so many, and those that are long. One of several arguments is a tuple."""
    every = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [*cases[:count], *(pytest.param(*case, marks=pytest.mark.long) for case in every[count:])]


def representatives(one_in: int, *axes: Sequence[Any]) -> list[Any]:
    """The product of the axes, for `parametrize`. All cases are long, except those on every `one_in`-th diagonal.

    With 0 in place of `one_in`, all are. Otherwise each value of each axis is in a case that is not long; if it is in
    several, the values of the other axes differ.
    Raises ValueError if there are too few values for that.
    """
    places = list(product(*map(range, map(len, axes))))
    short = [place for place in places if one_in and sum(place) % one_in == 0]
    for axis, values in enumerate(axes):
        missing = set(range(len(values))) - {place[axis] for place in short}
        if one_in and missing:
            raise ValueError(f"one in {one_in} leaves out {[values[index] for index in sorted(missing)]}")
    return [
        pytest.param(
            *(values[index] for values, index in zip(axes, place, strict=True)),
            marks=() if place in short else pytest.mark.long,
        )
        for place in places
    ]
