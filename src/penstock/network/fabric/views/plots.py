"""Draw a run as SVG: the distribution of its times, its slow trials, its bandwidths, and where a trial's time went.

Pictures have the colors of the page that they are in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from penstock._base.formatting import format_bytes, pluralize
from penstock.network.fabric.samples import Run
from penstock.network.fabric.statistics import outliers
from penstock.network.fabric.views.numbers import seconds, shorten, shorten_distinct
from penstock.network.fabric.views.wording import rate_unit
from penstock.network.fabric.workload import groups
from penstock.network.quantities import size_text
from penstock.report.marks import Axis

Floats = NDArray[np.float64]

MAX_LANES = 24
"""The most ranks shown in a timeline."""
MAX_LETTERS = 28
"""The most letters of a name in a legend."""
MAX_MARKED = 40
"""The most outliers marked per transfer, slowest first."""
_LEFT, _RIGHT, _BESIDE = 66, 650, 700
"""Where panels begin and end, and the legend beside them begins."""


def draw(run: Run, results: dict[str, Any]) -> dict[str, str]:
    """Draw the pictures and return them by name: cdf, trials, busbw if sizes differ, and timeline.

    A run without a complete trial has none.
    """
    if not len(run.start_ns):
        return {}
    all_groups = groups(run.record.workload)
    times = [np.stack([run.times[index].completion for index in group.indices], axis=1) for group in all_groups]
    drawn = {"cdf": _cdf([group.name for group in all_groups], times), "trials": _trials(results, times)}
    if len({group["bytes"] for group in results["groups"]}) > 1:
        drawn["busbw"] = _busbw(results)
    return {**drawn, "timeline": _timeline(run)}


def _legend(names: Sequence[str], y: float) -> list[str]:
    """Name the groups: all of them, or an even selection."""
    count, shown = len(names), min(len(names), len(COLORS))
    chosen = sorted(set(np.linspace(0, count - 1, shown).round().astype(int).tolist()))
    color, name = colors(count), shorten_distinct(names, MAX_LETTERS)
    return legend([(color[index], name[index]) for index in chosen], _BESIDE, y)


# -- distribution -----------------------------------------------------------------------------------------------------


def _cdf(names: Sequence[str], times: Sequence[Floats]) -> str:
    """Draw one curve per group from its transfers' times in all trials; `times` have shape [trial, transfer]."""
    count = max(series.size for series in times)
    shortest, longest = min(float(series.min()) for series in times), max(float(series.max()) for series in times)
    unit = "trials" if all(series.shape[1] == 1 for series in times) else "transfers"
    rows = Scale(0.0, 1.0, 250, 30), Scale(0.7 / count, 1.2, 250, 30, is_log=True)
    columns = [Scale(shortest / 1.1, longest * 1.15, first, first + 250, is_log=True) for first in (_LEFT, 400)]
    ended, took = panels = [Plot(x, y) for x, y in zip(columns, rows, strict=True)]
    ended.title(f"Share of {unit} that had ended")
    took.title(f"Share of {unit} that took at least as long")
    for panel in panels:
        ticks = [(value, seconds(value)) for value in panel.x.ticks(62)]
        panel.x_ticks(ticks, "completion time, slowest rank", grid=True)
        panel.y_axis(lambda share: f"{share * 100:g}%", 30)  # all digits: ticks may be 2.5% apart
    for share, text in ((0.5, "p50"), (0.1, "p90"), (0.01, "p99"), (0.001, "p99.9")):
        if share >= 1 / count:
            took.level(share, dash="1 3", text=text)
    for color, series in zip(colors(len(times)), times, strict=True):
        ordered = np.sort(series, axis=None)
        at, size = _curve_indices(len(ordered)), len(ordered)
        # Steps: the share that has ended rises at a sample, the share that took as long falls after it.
        ended.line(np.repeat(ordered[at], 2)[1:], np.repeat((at + 1) / size, 2)[:-1], color)
        took.line(np.repeat(ordered[at], 2)[:-1], np.repeat((size - at) / size, 2)[1:], color)
    return svg(290, [*panels, *_legend(names, 40)])


def _curve_indices(samples: int, limit: int = 400) -> NDArray[np.int64]:
    """Return the indices of sorted samples that suffice to draw a curve: all, or an even selection and the last."""
    if samples <= limit:
        return np.arange(samples)
    tail = samples - np.geomspace(1, samples, limit // 2)
    return np.unique(np.concatenate([np.linspace(0, samples - 1, limit // 2), tail]).round().astype(np.int64))


# -- by trial ---------------------------------------------------------------------------------------------------------


def _trials(results: dict[str, Any], times: Sequence[Floats]) -> str:
    """Draw one row for each of the groups whose transfers take longest, with one dot per transfer."""
    medians = np.array([np.median(samples) for samples in times])
    shown = sorted(np.argsort(-medians, kind="stable")[: len(COLORS)].tolist())
    color, trials = colors(len(times)), len(times[0])
    columns = Scale(-0.01 * trials, trials * 1.01, _LEFT, WIDTH - 10)
    panels = []
    for row, number in enumerate(shown):
        took, per_trial = times[number].ravel(), times[number].shape[1]
        trial = np.arange(len(took)) // per_trial
        far = outliers(took)
        far = far[np.argsort(-took[far], kind="stable")]
        top = 28 + 104 * row
        panel = Plot(columns, Scale(took.min() / 1.12, took.max() * 1.25, top + 72, top, is_log=True))
        note = f"median {seconds(float(medians[number]))}"
        if len(far):
            slowest = f"slowest {seconds(float(took[far[0]]))} in trial {trial[far[0]]:,}"
            note = f"{note}, {pluralize(len(far), 'outlier')}, {slowest}"
        panel.title(shorten(results["groups"][number]["name"], 48), note)
        panel.y_axis(seconds)
        for stalled in results["stalled"][:MAX_MARKED]:
            panel.line([stalled, stalled], [panel.y.low, panel.y.high], MUTED, 0.7, "1 2")
        panel.dots(trial, took, color[number], 2.5 if len(took) <= 500 else 1.5)
        panel.level(float(medians[number]), INK)
        panel.dots(trial[far[:MAX_MARKED]], took[far[:MAX_MARKED]], INK, 6)
        panel.dots(trial[far[:MAX_MARKED]], took[far[:MAX_MARKED]], color[number], 4)
        panels.append(panel)
    stalls = "; dotted: it met a requested stall" if results["stalled"] else ""
    panels[-1].x_ticks(Axis.of(trials, "slots").ticks, f"trial, in order; completion time of the slowest rank{stalls}")
    return svg(104 * len(shown) + 40, panels)


# -- by size ----------------------------------------------------------------------------------------------------------


def _busbw(results: dict[str, Any]) -> str:
    """Draw each collective's bus bandwidth by size, and what the links and any algorithm could reach."""
    entries, (scale, unit) = [entry for entry in results["groups"] if entry["busbw_GBps"]], rate_unit(results)
    speeds = [link["bytes_per_second"] for link in results.get("links") or () if link.get("bytes_per_second")]
    slowest = min(speeds) / 1e9 * scale if speeds else 0.0  # an algorithm that avoids this link may be faster
    measured: dict[str, list[tuple[int, float]]] = {}  # (size, rate) by collective
    ideal: dict[str, list[tuple[int, float]]] = {}
    for entry in sorted(entries, key=lambda entry: int(entry["bytes"])):
        kind, size, rate = entry["collective"], entry["bytes"], entry["busbw_GBps"] * scale
        measured.setdefault(kind, []).append((size, rate))
        if entry["ideal_percent"]:
            ideal.setdefault(kind, []).append((size, rate * 100 / entry["ideal_percent"]))
    highest = max([slowest, *(rate for points in (*measured.values(), *ideal.values()) for _, rate in points)])
    sizes = sorted({entry["bytes"] for entry in results["groups"]})
    panel = Plot(Scale(sizes[0] / 1.05, sizes[-1] * 1.05, _LEFT, _RIGHT, is_log=True), Scale(0, highest, 250, 30))
    panel.title("Bus bandwidth by size", f"{unit}, of the median; dashed: ideal")
    panel.y_axis(lambda value: f"{value:g}", 30)
    labels = [size_text(size) if size.bit_count() == 1 and size > 512 else format_bytes(size) for size in sizes]
    panel.x_ticks(keep_apart([*zip(sizes, labels, strict=True)], lambda tick: float(panel.x.at(tick[0])), 56), "size")
    if slowest:
        panel.level(slowest, dash="1 2", text=f"slowest link, {slowest:.3g} {unit}")
    by_color = list(zip(colors(len(measured)), measured, strict=True))
    for color, kind in by_color:
        xs, ys = np.array(measured[kind]).T
        panel.line(xs, ys, color)
        panel.dots(xs, ys, color, 5)
        if kind in ideal:
            xs, ys = np.array(ideal[kind]).T
            panel.line(xs, ys, color, 1.2, "4 2")
    return svg(290, [panel, *legend([(color, f"{kind}, p50") for color, kind in by_color], _BESIDE, 60)])


# -- one trial --------------------------------------------------------------------------------------------------------


def _timeline(run: Run) -> str:
    """Draw the first and the slowest trial, each on its own time axis: one lane per rank, one bar per round."""
    grouped = groups(run.record.workload)
    palette = {n: color for color, group in zip(colors(len(grouped)), grouped, strict=True) for n in group.indices}
    hosts = run.start_ns.shape[2]
    lanes, top, panels, names = min(hosts, MAX_LANES), 30.0, [], list[str]()
    for trial, title in _choose_trials(run):
        took_part = run.end_ns[trial] >= 0
        zero, last = run.start_ns[trial][took_part].min(), run.end_ns[trial].max()
        axis = Axis.of(float(last - zero) / 1e9)
        bottom = top + 25 * lanes
        panel = Plot(Scale(0, float(last - zero) / 1e9, _LEFT, _RIGHT), Scale(lanes - 0.5, -0.5, bottom, top))
        panel.title(title)
        panel.x_ticks([(second, f"{text} {axis.unit}") for second, text in axis.ticks], grid=True)
        names += [words(f"rank {rank}", 10, float(panel.y.at(rank)) + 4) for rank in range(lanes)]
        _lanes(panel, run, trial, palette)
        panels.append(panel)
        top = bottom + 54
    shown = f"; {lanes} of {hosts} ranks" if lanes < hosts else ""
    names.append(words(f"time since the first rank began its first transfer{shown}", _LEFT, top - 20))
    return svg(top - 10, [*panels, *names, *_legend([group.name for group in grouped], 40)])


def _choose_trials(run: Run) -> list[tuple[int, str]]:
    """Return the first trial, and the slowest of those whose rounds were kept (or of all, if none were)."""
    begin = np.where(run.end_ns >= 0, run.start_ns, np.iinfo(np.int64).max).min(axis=(1, 2))
    took = (run.end_ns.max(axis=(1, 2)) - begin) / 1e9
    candidates = [trial for trial in np.unique(run.rounds[:, 0]).tolist() if trial < len(took)] or range(len(took))
    slowest = max(candidates, key=lambda trial: took[trial])
    chosen = [(0, f"First trial: {seconds(took[0])}")]
    if slowest:
        times = f"{took[slowest] / took[0]:.3g} times as long"
        chosen.append((slowest, f"Slowest trial, number {slowest:,}: {seconds(took[slowest])}, {times}"))
    return chosen


def _lanes(panel: Plot, run: Run, trial: int, color: dict[int, str]) -> None:
    """Draw each rank's transfers pale, from start to end, and their rounds in full color with gaps between them."""
    took_part = run.end_ns[trial] >= 0
    zero = run.start_ns[trial][took_part].min()
    rounds: dict[tuple[int, int], list[Sequence[int]]] = {}
    for row in run.rounds[run.rounds[:, 0] == trial].tolist():
        rounds.setdefault((row[1], row[2]), []).append(row)
    for number, rank in np.argwhere(took_part[:, :MAX_LANES]).tolist():
        start, end = ((times[trial, number, rank] - zero) / 1e9 for times in (run.start_ns, run.end_ns))
        parts = rounds.get((number, rank), [])
        panel.bars([start], [end], rank, color[number], 0.3 if parts else 1.0)
        if parts:
            began, ended = (np.array([row[column] - zero for row in parts]) / 1e9 for column in (4, 5))
            gap = np.minimum(panel.x.high * 0.0015, (ended - began) * 0.3)
            panel.bars(began, ended - gap, rank, color[number])


# -- scales, curves, dots and bars -------------------------------------------------------------------------------------

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
