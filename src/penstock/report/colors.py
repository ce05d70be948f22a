"""The colors of every picture of a schedule: in the terminal, in files, in web pages and in the documentation.

One color for each kind of work, lighter on a rank's later chunks, darker for every other microbatch. The kinds can be
told apart with any kind of color-blindness, and by lightness alone; `tests/report/test_colors.py` measures it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from penstock.schedule.describe import Kind


@dataclass(frozen=True, slots=True)
class Theme:
    """The colors on one background, each as #rrggbb.

    Attributes:
        page, card: the background, and that of boxes on it.
        ink, muted, rule: text, less important text, thin lines.
        accent: what stands out: links, the critical path.
        fills: the color of each kind, for a rank's first chunk and even microbatches.
    """

    page: str
    card: str
    ink: str
    muted: str
    rule: str
    accent: str
    fills: Mapping[Kind, str]


def _fills(*colors: str) -> Mapping[Kind, str]:
    return MappingProxyType(dict(zip(Kind, colors, strict=True)))


LIGHT = Theme(
    page="#ffffff", card="#f6f7f9", ink="#1b2330", muted="#5c6573", rule="#dde1e7", accent="#c2185b",
    fills=_fills("#325aaf", "#cc721c", "#f8c440", "#62c2b5", "#5e1d4f", "#e1e5eb"),
)  # fmt: skip
DARK = Theme(
    page="#14181f", card="#1d232c", ink="#e6e9ee", muted="#9aa4b2", rule="#333b47", accent="#ff7aa8",
    fills=_fills("#446bd6", "#d07c28", "#f3d355", "#5fcabb", "#8a3a80", "#353a43"),
)  # fmt: skip

_LIGHTER = (0.0, 0.15, 0.27)
"""The fraction by which the colors of a rank's first, second and further chunks move towards white."""

_DARKER = (1.0, 0.9)
"""The brightness of even and odd microbatches, so that neighbors can be told apart without their names."""

CHUNKS, PARITIES = len(_LIGHTER), len(_DARKER)


def shade(theme: Theme, kind: Kind, chunk: int = 0, microbatch: int = 0) -> str:
    """Return the color of an action, as #rrggbb. Communication and waits have one color each.

    Args:
        theme: LIGHT or DARK.
        kind: what is done.
        chunk: the stage's index among its rank's stages.
        microbatch: its number.
    """
    if kind in (Kind.COMMUNICATION, Kind.WAIT):
        return theme.fills[kind]
    share, brightness = _LIGHTER[min(chunk, CHUNKS - 1)], _DARKER[microbatch % PARITIES]
    return "#" + "".join(
        f"{round((value + (255 - value) * share) * brightness):02x}" for value in rgb(theme.fills[kind])
    )


def rgb(color: str) -> tuple[int, int, int]:
    """Red, green and blue of #rrggbb, 0 to 255."""
    red, green, blue = bytes.fromhex(color.removeprefix("#"))
    return red, green, blue


def contrast(color: str, background: str) -> float:
    """Return how readable one color is on the other: WCAG's contrast ratio, from 1 to 21."""
    low, high = sorted(map(_luminance, (color, background)))
    return (high + 0.05) / (low + 0.05)


def ink(theme: Theme, kind: Kind, chunk: int = 0) -> str:
    """Black or white, whichever is read better on the shades of all microbatches. Arguments as for `shade`."""
    shades = [shade(theme, kind, chunk, parity) for parity in range(PARITIES)]
    return max("#000000", "#ffffff", key=lambda color: min(contrast(color, fill) for fill in shades))


def css() -> str:
    """Return a style sheet that defines the colors as variables, for a light and a dark background.

    `--page`, `--card`, `--ink`, `--muted`, `--rule` and `--accent` are a page's; `--op-F` (B, I, W, communication,
    wait) is an op's color, `--op-F-2-1` its shade on chunk 2 (and later ones) for odd microbatches, and
    `--ink-F-2-1` the color of text on it. An attribute `data-theme` of `light` or `dark` overrides what the reader's
    system asks for.
    """
    return (
        f":root {{ color-scheme: light dark; {variables(LIGHT)} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root:not([data-theme=light]) {{ {variables(DARK)} }} }}\n"
        f":root[data-theme=light] {{ color-scheme: light }}\n"
        f":root[data-theme=dark] {{ color-scheme: dark; {variables(DARK)} }}\n"
    )


def variables(theme: Theme) -> str:
    """Return the declarations of `css` for one background."""
    declarations = {f"--{name}": getattr(theme, name) for name in ("page", "card", "ink", "muted", "rule", "accent")}
    for kind, fill in theme.fills.items():
        declarations[f"--op-{kind}"], declarations[f"--ink-{kind}"] = fill, ink(theme, kind)
        if kind in (Kind.COMMUNICATION, Kind.WAIT):
            continue
        for chunk in range(CHUNKS):
            for parity in range(PARITIES):
                declarations[f"--op-{kind}-{chunk}-{parity}"] = shade(theme, kind, chunk, parity)
                declarations[f"--ink-{kind}-{chunk}-{parity}"] = ink(theme, kind, chunk)
    return " ".join(f"{name}: {color};" for name, color in declarations.items())


def _luminance(color: str) -> float:
    """WCAG's relative luminance, 0 to 1."""
    parts = (value / 255 for value in rgb(color))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
