"""Draw a run as SVG: the distribution of its times, its slow trials, its bandwidths, and where a trial's time went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.fabric.grouped import groups
from penstock.fabric.samples import Run
from penstock.fabric.statistics import outliers
from penstock.fabric.times import TransferTimes, rate_key
from penstock.fabric.units import size_text
from penstock.fabric.views.facts import rate_unit
from penstock.fabric.views.numbers import cut, cut_apart
from penstock.fabric.views.style import (
    COLORS,
    INK,
    MUTED,
    blank,
    colors,
    legend_beside,
    look,
    seconds_axis,
    seconds_label,
    svg,
)
from penstock.fabric.workload import Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]

MAX_DOTS = 800
"""The most samples drawn as separate dots; beyond this, the dots become one image."""

MAX_LANES = 24
"""The most ranks shown in a timeline."""

MAX_LETTERS = 28
"""The most letters of a name in a legend, or above a small picture."""

MAX_MARKED = 40
"""The most outliers marked per transfer, slowest first."""


def draw(run: Run, results: dict[str, Any]) -> dict[str, str]:
    """Draws the pictures and returns them by name: cdf, trials, timeline, slowest (rank), and busbw if sizes differ.

    A run without a complete trial has none.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    with look():
        if not len(run.start_ns):
            return {}
        workload = Workload.from_dict(run.record["workload"])
        found = groups(workload)
        by_group = [[TransferTimes.of(run, workload, place) for place in group.places] for group in found]
        times = [np.stack([one.completion for one in members], axis=1) for members in by_group]
        names = [group.name for group in found]
        drawn = {"cdf": _cdf(names, times), "trials": _trials(results, times)}
        if len({group["bytes"] for group in results["groups"]}) > 1:
            drawn["busbw"] = _busbw(results, _rated(results, by_group))
        drawn["timeline"] = _timeline(run)
        drawn["slowest"] = _slowest(results, by_group, times)
        return drawn


def _rated(results: dict[str, Any], by_group: Sequence[Sequence[TransferTimes]]) -> list[Floats]:
    """Returns the times that each group's bandwidths are based on."""
    keys = [rate_key(group["collective"]) for group in results["groups"]]
    return [
        np.stack([one.transfer if key == "transfer_s" else one.completion for one in members])
        for key, members in zip(keys, by_group, strict=True)
    ]


def _named(count: int) -> list[int]:
    """Returns the groups that a legend names: all of them, or an even selection."""
    return (
        sorted(set(np.linspace(0, count - 1, len(COLORS)).round().astype(int).tolist()))
        if count > len(COLORS)
        else list(range(count))
    )


def _longest(times: Sequence[Floats]) -> list[int]:
    """Returns the groups whose transfers take the longest, in order of execution."""
    medians = np.array([np.median(one) for one in times])
    return sorted(np.argsort(-medians, kind="stable")[: len(COLORS)].tolist())


def _counted(times: Sequence[Floats]) -> str:
    """Returns what a fraction refers to: trials, or transfers if a trial has several of a group."""
    return "trials" if all(one.shape[1] == 1 for one in times) else "transfers"


# -- distribution -----------------------------------------------------------------------------------------------------


def _cdf(names: Sequence[str], times: Sequence[Floats]) -> str:
    """Draws one curve per group from its transfers' times in all trials; `times` have shape [trial, transfer]."""
    figure = blank(9.6, 3.5)
    left, right = figure.subplots(1, 2)
    count, samples = len(times), max(one.size for one in times)
    color, name, named = colors(count), cut_apart(names, MAX_LETTERS), _named(count)
    for number, of_group in enumerate(times):
        ordered = np.sort(of_group, axis=None)
        at, size = _kept(len(ordered)), len(ordered)
        style = {"color": color[number], "lw": 1.6 if count <= len(COLORS) else 1.0}
        label = {"label": name[number]} if number in named else {}
        left.plot(ordered[at], (at + 1) / size, drawstyle="steps-post", **style)
        # P(T >= the i-th smallest) is the fraction of samples from it on; the line ends at the largest.
        right.plot(ordered[at], (size - at) / size, drawstyle="steps-pre", **style, **label)
    least, most = min(float(one.min()) for one in times), max(float(one.max()) for one in times)
    of = _counted(times)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlim(least / 1.1, most * 1.15)
        seconds_axis(axes.xaxis, least=0.16)
        axes.set_xlabel("completion time, slowest rank")
    left.set(title=f"Share of {of} that had ended", ylim=(0, 1.01))
    left.yaxis.set_major_formatter(_percent)
    right.set(title=f"Share of {of} that took at least as long", yscale="log", ylim=(0.7 / samples, 1.2))
    right.yaxis.set_major_formatter(_percent)
    right.yaxis.set_minor_locator(_none())
    for share, text in ((0.5, "p50"), (0.1, "p90"), (0.01, "p99"), (0.001, "p99.9")):
        if share >= 1 / samples:
            right.annotate(text, (1, share), xycoords=("axes fraction", "data"), xytext=(3, 0),
                           textcoords="offset points", va="center", color=MUTED, fontsize=8.5)  # fmt: skip
            right.axhline(share, color=MUTED, lw=0.6, ls=(0, (1, 3)))
    legend_beside(right, left=1.12)
    return svg(figure, "cdf")


def _kept(samples: int, most: int = 400) -> NDArray[np.int64]:
    """Returns the indices of sorted samples that suffice to draw a curve: all, or an even selection and the last."""
    if samples <= most:
        return np.arange(samples)
    even = np.linspace(0, samples - 1, most // 2)
    tail = samples - 1 - np.geomspace(1, samples, most // 2) + 1
    return np.unique(np.concatenate([even, tail, np.arange(samples - 20, samples)]).round().astype(np.int64))


def _percent(share: float, _position: int | None = None) -> str:
    """Formats a tick with all of its digits, because ticks 2.5% apart would otherwise seem to be 2% and 3% apart."""
    return f"{share * 100:g}%"


def _none() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


# -- by trial ---------------------------------------------------------------------------------------------------------


def _trials(results: dict[str, Any], times: Sequence[Floats]) -> str:
    """Draws one row for each of the longest groups, with one dot per transfer."""
    shown = _longest(times)
    color, trials = colors(len(times)), len(times[0])
    dots = sum(times[number].size for number in shown)
    figure = blank(9.6, 0.65 + 1.05 * len(shown))
    rows = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
    for axes, number in zip(rows, shown, strict=True):
        took, each = times[number].ravel(), times[number].shape[1]
        trial = np.arange(len(took)) // each
        far = outliers(took)
        far = far[np.argsort(-took[far], kind="stable")]
        marked, near = far[:MAX_MARKED], np.ones(len(took), bool)
        near[marked] = False
        size, alpha = (7, 0.75) if len(took) <= 500 else (3, 0.55)
        style: dict[str, Any] = {"color": color[number], "linewidths": 0}
        axes.scatter(trial[near], took[near], size, alpha=alpha, rasterized=dots > MAX_DOTS, **style)
        axes.scatter(trial[marked], took[marked], 17, zorder=3, edgecolors=INK, **{**style, "linewidths": 0.9})
        for stalled in results["stalled"][:MAX_MARKED]:
            axes.axvline(stalled, color=MUTED, lw=0.6, ls=(0, (1, 2)), zorder=0.5)
        median = float(np.median(took))
        axes.axhline(median, color=INK, lw=0.8, zorder=2.5)
        axes.set_yscale("log")
        axes.set_ylim(took.min() / 1.12, took.max() * 1.25)
        axes.set_title(cut(results["groups"][number]["name"], 48), fontsize=9.5, pad=3)
        note = _trials_note(median, took[far], trial[far])
        axes.set_title(note, loc="right", fontsize=8.5, fontweight="normal", pad=3, color=MUTED)
        axes.grid(axis="x", visible=False)
        seconds_axis(axes.yaxis)
    rows[-1].set_xlim(-0.01 * trials, trials * 1.01)
    stalls = "; dotted: it met a requested stall" if results["stalled"] else ""
    rows[-1].xaxis.get_major_locator().set_params(integer=True)
    rows[-1].set_xlabel(f"trial, in order{stalls}")
    figure.supylabel("completion time, slowest rank", fontsize=9.5)
    return svg(figure, "trials")


def _trials_note(median: float, far: Floats, trials: NDArray[np.int64]) -> str:
    """Summarizes outliers; `far` has their times, slowest first, and `trials` their trials."""
    text = f"median {seconds_label(median)}"
    if not len(far):
        return text
    worst = f"slowest {seconds_label(float(far[0]))} in trial {trials[0]:,}"
    return f"{text}, {len(far):,} outlier{'s' if len(far) > 1 else ''}, {worst}"


# -- by size ----------------------------------------------------------------------------------------------------------


def _busbw(results: dict[str, Any], times: Sequence[Floats]) -> str:
    figure = blank(9.6, 3.4)
    axes = figure.subplots()
    groups = results["groups"]
    scale, unit = rate_unit(results)
    kinds = list(dict.fromkeys(group["collective"] for group in groups))
    for kind, color in zip(kinds, COLORS, strict=False):
        found = sorted((t["bytes"], n) for n, t in enumerate(groups) if t["collective"] == kind and t["busbw_GBps"])
        if not found:
            continue
        sizes = [size for size, _ in found]
        # The bandwidth at a percentile is the size over that percentile of the time.
        factors = [groups[n]["busbw_GBps"] / (groups[n]["algbw_GBps"] or 1) for _, n in found]
        spread = np.array([np.percentile(times[n], (10, 50, 90)) for _, n in found])
        rates = np.array(sizes)[:, None] * np.array(factors)[:, None] / spread / 1e9 * scale
        axes.fill_between(sizes, rates[:, 2], rates[:, 0], color=color, alpha=0.18, linewidth=0)
        axes.plot(sizes, rates[:, 1], "o-", ms=4.5, color=color, label=f"{kind}, p50 (band: p10 to p90)")
        ideal = [(size, _ideal(groups[n], rate)) for (size, n), rate in zip(found, rates[:, 1], strict=True)]
        known = [(size, value) for size, value in ideal if value is not None]
        if known:
            axes.plot(*zip(*known, strict=True), ls=(0, (4, 2)), lw=1.2, color=color, label=f"{kind}, ideal")
    _links(axes, results, scale, unit)
    axes.set_xscale("log", base=2)
    ticks = _apart(sorted({group["bytes"] for group in groups}))
    axes.set_xticks(ticks, [_size_label(size) for size in ticks])
    axes.xaxis.set_minor_locator(_none())
    axes.set(title="Bus bandwidth by size", xlabel="size", ylabel=f"busbw ({unit})")
    axes.set_ylim(bottom=0)
    legend_beside(axes)
    return svg(figure, "busbw")


def _ideal(transfer: dict[str, Any], rate: float) -> float | None:
    percent = transfer.get("ideal_percent")
    return rate * 100 / percent if percent else None


def _links(axes: Axes, results: dict[str, Any], scale: float, unit: str) -> None:
    """Draws the bandwidth of the slowest measured link. An algorithm that avoids this link may be faster."""
    speeds = [link["bytes_per_second"] for link in results.get("links") or () if link.get("bytes_per_second")]
    if speeds:
        value = min(speeds) / 1e9 * scale
        axes.axhline(value, color=MUTED, lw=0.9, ls=(0, (1, 2)), label=f"slowest link, {value:.3g} {unit}")


def _apart(sizes: list[int], least: float = 1 / 11) -> list[int]:
    """Selects sizes far enough apart, as a fraction of a logarithmic axis, that their labels do not overlap."""
    kept = sizes[:1]
    distance = (sizes[-1] / sizes[0]) ** least
    for size in sizes[1:]:
        if size / kept[-1] >= distance:
            kept.append(size)
    return kept


def _size_label(size: int) -> str:
    """Formats a tick: the exact size if it is a power of two, otherwise three digits."""
    if size < 1000 or size & (size - 1) == 0:
        return size_text(size) + ("" if size % 1024 == 0 else " B")
    return f"{size / 1e3:.3g} kB" if size < 1e6 else f"{size / 1e6:.3g} MB"


# -- one trial --------------------------------------------------------------------------------------------------------


def _timeline(run: Run) -> str:
    """Draws the first and the slowest trial, each on its own time axis: one lane per rank, one bar per round."""
    from matplotlib.patches import Patch

    found = groups(Workload.from_dict(run.record["workload"]))
    name = cut_apart([group.name for group in found], MAX_LETTERS)
    color, named = colors(len(name)), _named(len(name))
    by_place = {place: color[number] for number, group in enumerate(found) for place in group.places}
    chosen = _chosen_trials(run)
    hosts = run.start_ns.shape[2]
    lanes = min(hosts, MAX_LANES)
    figure = blank(9.6, 0.5 + len(chosen) * (0.65 + 0.26 * lanes))
    rows = figure.subplots(len(chosen), 1, squeeze=False)[:, 0]
    for axes, (trial, title) in zip(rows, chosen, strict=True):
        _lanes(axes, run, trial, by_place)
        axes.set_title(title, pad=4)
        axes.set_ylim(lanes - 0.45, -0.55)
        axes.set_yticks(range(lanes), [f"rank {rank}" for rank in range(lanes)])
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.spines["left"].set_visible(False)
        seconds_axis(axes.xaxis)
    rows[-1].set_xlabel(
        "time since the first rank began its first transfer" + (f" ({lanes} of {hosts} ranks)" if lanes < hosts else "")
    )
    patches = [Patch(color=color[number], label=name[number]) for number in named]
    legend_beside(rows[0], patches)
    return svg(figure, "timeline")


def _chosen_trials(run: Run) -> list[tuple[int, str]]:
    """Returns the first trial, and the slowest of those whose rounds were kept (or of all, if none were)."""
    begin = np.where(run.end_ns >= 0, run.start_ns, np.iinfo(np.int64).max).min(axis=(1, 2))
    took = (run.end_ns.max(axis=(1, 2)) - begin) / 1e9
    kept = [trial for trial in np.unique(run.steps[:, 0]).tolist() if trial < len(took)] or range(len(took))
    slowest = max(kept, key=lambda trial: took[trial])
    chosen = [(0, f"First trial: {seconds_label(took[0])}")]
    if slowest:
        times = f"{took[slowest] / took[0]:.3g} times as long"
        chosen.append((slowest, f"Slowest trial, number {slowest:,}: {seconds_label(took[slowest])}, {times}"))
    return chosen


def _lanes(axes: Axes, run: Run, trial: int, color: dict[int, str]) -> None:
    """Draws each rank's transfers pale, from start to end, and their rounds in full color with gaps between them."""
    took_part = run.end_ns[trial] >= 0
    zero = run.start_ns[trial][took_part].min()
    whole = (run.end_ns[trial].max() - zero) / 1e9
    axes.set_xlim(0, whole * 1.002)
    rounds: dict[tuple[int, int], list[Sequence[int]]] = {}
    for row in run.steps[run.steps[:, 0] == trial].tolist():
        rounds.setdefault((row[1], row[2]), []).append(row)
    for number, rank in np.argwhere(took_part[:, :MAX_LANES]):
        start, end = ((times[trial, number, rank] - zero) / 1e9 for times in (run.start_ns, run.end_ns))
        parts = rounds.get((number, rank), [])
        axes.broken_barh([(start, end - start)], (rank - 0.36, 0.72), color=color[number], alpha=0.3 if parts else 1,
                         linewidth=0)  # fmt: skip
        bars = [((row[4] - zero) / 1e9, (row[5] - row[4]) / 1e9) for row in sorted(parts, key=lambda row: row[3])]
        bars = [(at, took - min(whole * 0.0015, took * 0.3)) for at, took in bars]
        if bars:
            axes.broken_barh(bars, (rank - 0.36, 0.72), color=color[number], linewidth=0)


# -- ranks ------------------------------------------------------------------------------------------------------------


def _slowest(results: dict[str, Any], by_group: Sequence[Sequence[TransferTimes]], times: Sequence[Floats]) -> str:
    """Draws, for the longest groups, the histogram of the slowest rank's times, and the outline of all other ranks'."""
    shown, color = _longest(times)[-4:], colors(len(by_group))
    name = cut_apart([group["name"] for group in results["groups"]], MAX_LETTERS)
    figure = blank(9.6, 2.7)
    for axes, number in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        slowest = results["groups"][number]["slowest_rank"]
        rank, found = slowest["rank"], slowest["histogram"]
        others = np.concatenate(
            [
                one.durations[:, place]
                for one in by_group[number]
                for place, other in enumerate(one.ranks)
                if other != rank
            ]
        )
        first, ratio = found["edges_s"][0], found["edges_s"][1] / found["edges_s"][0]
        low, high = (round(np.log(value / first) / np.log(ratio)) for value in (others.min(), others.max()))
        edges = first * ratio ** np.arange(min(low, 0) - 1, max(high, len(found["counts"])) + 2)
        shares = np.array(found["counts"]) / max(sum(found["counts"]), 1)
        axes.stairs(shares, found["edges_s"], fill=True, color=color[number], alpha=0.85)
        outline, _ = np.histogram(others, edges)
        axes.stairs(outline / max(len(others), 1), edges, color=INK, lw=0.9)
        axes.set_xscale("log")
        axes.set_ylim(bottom=0)
        seconds_axis(axes.xaxis, few=True)
        axes.set_title(f"{name[number]}\nrank {rank}", fontsize=8.5)
        axes.yaxis.set_major_formatter(_percent)
        axes.grid(axis="x", visible=False)
    figure.supylabel(f"share of {_counted(times)}", fontsize=9.5)
    figure.supxlabel("time of the slowest rank (outline: all other ranks)", fontsize=9.5)
    return svg(figure, "slowest")
