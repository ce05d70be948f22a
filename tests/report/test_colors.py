"""Everybody can tell apart what a picture shows: with any kind of color-blindness, and in grayscale."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from penstock.report.colors import (
    CHUNKS,
    DARK,
    LIGHT,
    PARITIES,
    Theme,
    contrast,
    ink,
    rgb,
    shade,
)
from penstock.schedule.describe import Kind

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
EYES = {
    "normal": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
    "grayscale": np.tile([0.2126, 0.7152, 0.0722], (3, 1)),
}
# Ottosson 2020. Distances are times 100: what is just noticeable is about 2.
TO_CONES = np.array(
    [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
     [0.0883024619, 0.2817188376, 0.6299787005]]
)  # fmt: skip
TO_OKLAB = np.array(
    [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
     [0.0259040371, 0.7827717662, -0.8086757660]]
)  # fmt: skip
THEMES = pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W)


def seen(color: str, eyes: str) -> np.ndarray:
    """A color in OKLab as such eyes see it."""
    parts = np.array(rgb(color)) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return np.asarray(100 * TO_OKLAB @ np.cbrt(TO_CONES @ np.clip(EYES[eyes] @ linear, 0, 1)))


def apart(one: str, other: str, eyes: str) -> float:
    return float(np.linalg.norm(seen(one, eyes) - seen(other, eyes)))


def shades(theme: Theme, kind: Kind) -> list[str]:
    return [shade(theme, kind, chunk, number) for chunk in range(CHUNKS) for number in range(PARITIES)]


@THEMES
@pytest.mark.parametrize("eyes", EYES)
def test_kinds_differ_for_all_eyes(theme: Theme, eyes: str) -> None:
    for one, other in combinations(Kind, 2):
        least = 7 if eyes == "grayscale" else 11
        assert apart(theme.fills[one], theme.fills[other], eyes) > least, (one, other)


@THEMES
@pytest.mark.parametrize("eyes", [eyes for eyes in EYES if eyes != "grayscale"])
def test_no_shade_of_one_kind_looks_like_a_shade_of_another(theme: Theme, eyes: str) -> None:
    for one, other in combinations(Kind, 2):
        least = min(apart(a, b, eyes) for a in shades(theme, one) for b in shades(theme, other))
        assert least > 5, (one, other)


@THEMES
def test_microbatches_and_chunks_have_shades(theme: Theme) -> None:
    for kind in COMPUTE:
        for chunk in range(CHUNKS):
            assert apart(shade(theme, kind, chunk, 0), shade(theme, kind, chunk, 1), "normal") > 2
            assert shade(theme, kind, chunk, 4) == shade(theme, kind, chunk, 0)
        assert len(set(shades(theme, kind))) == CHUNKS * PARITIES
        assert shade(theme, kind, CHUNKS + 3) == shade(theme, kind, CHUNKS - 1)


@THEMES
def test_everything_is_read_on_its_background(theme: Theme) -> None:
    assert contrast(theme.page, theme.ink) > 12
    assert contrast(theme.page, theme.muted) > 4.5
    assert contrast(theme.page, theme.accent) > 4.5
    for kind in Kind:
        for chunk in range(CHUNKS):
            for number in range(PARITIES):
                assert contrast(shade(theme, kind, chunk, number), ink(theme, kind, chunk)) > 4.5, (kind, chunk)
        assert apart(theme.page, theme.fills[kind], "normal") > 7
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
