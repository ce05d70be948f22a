"""Small charts as SVG, in the colors of the page that they are in: scales with round ticks, curves, dots and bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock.report.marks import Axis

INK, MUTED, RULE = "currentColor", "var(--muted, #6b7482)", "var(--rule, #dde1e7)"

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6a00")
"""Okabe and Ito's palette, without black and yellow, which are hard to see on a dark or a light page."""

WIDTH = 920
_STEPS = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1, 3), (1,))
"""Where a logarithmic axis has ticks within a power of ten: the first that leave room for their labels."""

_NARROW = 3.0
"""A logarithmic axis on which the highest value is less than so many times the lowest has ticks in equal steps."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Values from `low` to `high` as pixels from `first` to `last`."""

    low: float
    high: float
    first: float
    last: float
    is_log: bool = False

    def at(self, values: ArrayLike) -> NDArray[np.float64]:
        low, high, points = self.low, self.high, np.asarray(values, float)
        if self.is_log:
            low, high, points = math.log(low), math.log(high), np.log(points)
        return self.first + (points - low) / ((high - low) or 1.0) * (self.last - self.first)

    def ticks(self, room: float) -> list[float]:
        """Round values that are at least `room` pixels apart."""
        if not self.is_log or self.high < _NARROW * self.low:
            from_zero = self.high / (self.high - max(self.low, 0.0))  # the axis of `Axis` begins at zero
            max_ticks = max(1, int(abs(self.last - self.first) / room * from_zero))
            even = [value for value, _ in Axis.of(self.high, "", max_ticks).ticks if value >= self.low]
            return keep_apart(even, lambda value: float(self.at(value)), room) if self.is_log else even
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        values: list[float] = []
        for steps in _STEPS:
            values = [10.0**power * step for power in powers for step in steps]
            values = [value for value in values if self.low <= value <= self.high]
            if len(values) == 1 or (values and np.abs(np.diff(self.at(values))).min() >= room):
                return values
        return keep_apart(values, lambda value: float(self.at(value)), room)


def keep_apart(values: Sequence[Any], at: Callable[[Any], float], room: float) -> list[Any]:
    """Return those of ascending values whose positions are far enough from that of the last one taken."""
    spaced = list(values[:1])
    for value in values[1:]:
        if abs(at(value) - at(spaced[-1])) >= room:
            spaced.append(value)
    return spaced


@dataclass(slots=True)
class Plot:
    """A rectangle with axes, in pixels of its picture."""

    x: Scale
    y: Scale
    drawn: list[str] = field(default_factory=list)

    def title(self, text: str, note: str = "") -> None:
        """Draw a line above the panel, and a note at its right end."""
        top = self.y.last - 7
        self.drawn.append(words(text, self.x.first, top, "font-weight='650'"))
        self.drawn.append(words(note, self.x.last, top, f"text-anchor='end' fill='{MUTED}' font-size='11'"))

    def x_ticks(self, ticks: Iterable[tuple[float, str]], name: str = "", *, grid: bool = False) -> None:
        """Draw the axis with these ticks, below the panel; `name` is what it is of."""
        bottom = self.y.first
        self.drawn.append(_stroke(f"M{self.x.first:g} {bottom:g}H{self.x.last:g}", MUTED, 0.8))
        for value, text in ticks:
            x = float(self.x.at(value))
            self.drawn.append(_stroke(f"M{x:.1f} {bottom:g}V{self.y.last if grid else bottom + 4:g}", RULE, 0.8))
            self.drawn.append(words(text, x, bottom + 15, f"text-anchor='middle' fill='{MUTED}'"))
        middle = (self.x.first + self.x.last) / 2
        self.drawn.append(words(name, middle, bottom + 32, "text-anchor='middle'"))

    def y_axis(self, label: Callable[[float], str], room: float = 16) -> None:
        for value in self.y.ticks(room):
            y = float(self.y.at(value))
            self.drawn.append(_stroke(f"M{self.x.first:g} {y:.1f}H{self.x.last:g}", RULE, 0.8))
            self.drawn.append(words(label(value), self.x.first - 6, y + 4, f"text-anchor='end' fill='{MUTED}'"))

    def level(self, value: float, color: str = MUTED, dash: str = "", text: str = "") -> None:
        """Draw a horizontal line, named behind its end."""
        y = float(self.y.at(value))
        self.drawn.append(_stroke(f"M{self.x.first:g} {y:.1f}H{self.x.last:g}", color, 0.8, dash))
        self.drawn.append(words(text, self.x.last + 4, y + 4, f"fill='{MUTED}' font-size='11'"))

    def line(self, xs: ArrayLike, ys: ArrayLike, color: str, width: float = 1.6, dash: str = "") -> None:
        points = zip(self.x.at(xs).tolist(), self.y.at(ys).tolist(), strict=True)
        self.drawn.append(_stroke(f"M{'L'.join(f'{x:.1f} {y:.1f}' for x, y in points)}", color, width, dash))

    def dots(self, xs: ArrayLike, ys: ArrayLike, color: str, width: float) -> None:
        """Draw a dot at each point; of several on the same half pixel only one."""
        points = np.round(2 * np.column_stack([self.x.at(xs), self.y.at(ys)])) / 2
        path = "".join(f"M{x:g} {y:g}h0" for x, y in np.unique(points, axis=0).tolist())
        self.drawn.append(_stroke(path, color, width, extra="stroke-linecap='round'"))

    def bars(self, starts: ArrayLike, ends: ArrayLike, row: int, color: str, opacity: float = 1.0) -> None:
        """Draw bars in a row of the vertical axis, as one path."""
        top, bottom = float(self.y.at(row - 0.36)), float(self.y.at(row + 0.36))
        spans = zip(self.x.at(starts).tolist(), self.x.at(ends).tolist(), strict=True)
        path = "".join(f"M{a:.2f} {top:.1f}H{b:.2f}V{bottom:.1f}H{a:.2f}z" for a, b in spans)
        self.drawn.append(f"<path d='{path}' fill='{color}' opacity='{opacity:g}'/>")


def _stroke(path: str, color: str, width: float, dash: str = "", extra: str = "") -> str:
    dashed = f"stroke-dasharray='{dash}' " if dash else ""
    return f"<path d='{path}' fill='none' stroke='{color}' stroke-width='{width:g}' {dashed}{extra}/>"


def words(text: str, x: float, y: float, look: str = "") -> str:
    """Draw a line of text; nothing if it is empty."""
    return f"<text x='{x:.1f}' y='{y:.1f}' {look}>{escape(text)}</text>" if text else ""


def legend(entries: Iterable[tuple[str, str]], x: float, y: float) -> list[str]:
    """Draw the colors and what they stand for, below each other."""
    drawn = []
    for index, (color, text) in enumerate(entries):
        row_y = y + 17 * index
        drawn += [f"<path d='M{x:g} {row_y:g}h12' stroke='{color}' stroke-width='5'/>", words(text, x + 18, row_y + 4)]
    return drawn


def svg(height: float, parts: Iterable[Plot | str]) -> str:
    """Draw a picture of `WIDTH` pixels and this height."""
    drawn = (part if isinstance(part, str) else "".join(part.drawn) for part in parts)
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height:g}' font-size='12'"
    return f"{head} fill='{INK}'>{''.join(drawn)}</svg>"


def colors(count: int) -> list[str]:
    """Return one color each; if the palette is too small, colors from dark to light."""
    if count <= len(COLORS):
        return list(COLORS[:count])
    shares = (index / (count - 1) for index in range(count))
    return [f"hsl({270 - 210 * fraction:.0f} 60% {30 + 30 * fraction:.0f}%)" for fraction in shares]
