"""The style of figures: colors that color-blind readers can tell apart, few lines, and SVG whose text stays text.

Figures are drawn with matplotlib but without pyplot, so the caller's own plots are not affected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING, Any

from penstock.errors import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, RULE = "#1b2330", "#6b7482", "#dde1e7"
"""Colors of text and lines. A page replaces them with its own, so that figures follow light and dark mode."""

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f6a00")
"""Okabe and Ito's palette, without black and yellow, which are hard to see on a dark or a light page."""

FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

_LOOK: Any = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "butt",
    "svg.fonttype": "none",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "path.simplify_threshold": 0.3,
}


@contextmanager
def look() -> Iterator[None]:
    """Applies this module's style to figures that are created and written inside the block.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    require("fabric", "matplotlib", for_what="a plot")
    import matplotlib

    with matplotlib.rc_context(_LOOK):
        yield


def blank(width: float, height: float) -> Figure:
    """Returns an empty figure; sizes are in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def svg(figure: Figure, name: str) -> str:
    """Returns the figure as reproducible SVG without a prologue.

    Ids start with `name`, because a page has several figures.
    """
    import matplotlib

    text = StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None}, dpi=180)
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<metadata>.*?</metadata>\s*", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r"<!--.*?-->\s*", "", drawn, flags=re.DOTALL)
    used = set(re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", drawn))
    drawn = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", drawn)
    drawn = re.sub(r'(url\(#| id="|href="#)', rf"\g<1>{name}-", drawn)
    drawn = re.sub(r"font-family: [^;\"]*", f"font-family: {FONTS}", drawn)
    return _shorter(drawn)


def _shorter(drawn: str) -> str:
    """Rounds coordinates to 0.01 points, and removes line breaks between the points of a path."""
    drawn = re.sub(r"(\d+\.\d\d)\d+", r"\1", drawn)
    return re.sub(r" d=\"([^\"]*)\"", lambda match: f' d="{" ".join(match[1].split())}"', drawn)


def seconds_axis(axis: Any, *, few: bool = False, least: float = 0.13) -> None:
    """Labels an axis of seconds with 1 ms, 2 ms, 5 ms, 1 s; only a few ticks if `few`, for a short axis.

    Args:
        least: the fraction of a logarithmic axis that a label takes up, so that labels do not overlap.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

    if axis.get_scale() == "log":
        low, high = axis.get_view_interval()
        span = high / low
        room = 10 ** (least * math.log10(span))  # the ratio of one label to the next
        steps: tuple[float, ...] = (1, 2, 5) if room <= 2 else (1, 3) if room <= 3 else (1,)
        if span < 4:
            steps = (1, 1.5, 2, 3, 4, 5, 7)
        axis.set_major_locator(FixedLocator(_spread(low, high)) if few else LogLocator(subs=steps))
        axis.set_minor_formatter(NullFormatter())
    axis.set_major_formatter(FuncFormatter(lambda value, _: seconds_label(value)))


def _spread(low: float, high: float, least: float = 0.3) -> list[float]:
    """Returns round values on a short logarithmic axis, at least a fraction `least` of it apart so that labels fit."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    tried = [10.0**power * step for power in powers for step in (1, 1.5, 2, 3, 4, 5, 7)]
    kept: list[float] = []
    for value in tried:
        if low <= value <= high and (not kept or math.log(value / kept[-1]) >= least * math.log(high / low)):
            kept.append(value)
    return kept or [math.sqrt(low * high)]


def seconds_label(value: float) -> str:
    """Formats a tick's time: 1.5 ms."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "\u00b5s")):
        if abs(value) >= factor * 0.9999:
            return f"{value / factor:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns" if value else "0"


def colors(count: int) -> list[str]:
    """Returns one color each; if the palette is too small, colors from dark to light."""
    if count <= len(COLORS):
        return list(COLORS[:count])
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis"](0.88 * place / (count - 1))) for place in range(count)]


def legend_beside(axes: Axes, handles: list[Any] | None = None, left: float = 1.01) -> None:
    """Draws a legend to the right of the axes, where it covers nothing."""
    handles = axes.get_legend_handles_labels()[0] if handles is None else handles
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(left, 1.02), handlelength=1.2, borderaxespad=0)
