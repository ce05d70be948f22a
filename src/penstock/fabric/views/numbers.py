"""Numbers as reports print them."""

from __future__ import annotations

from collections.abc import Sequence

NONE = "n/a"
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def seconds(value: float | None) -> str:
    """Three digits and a unit: 1.20ms; n/a for None."""
    if value is None:
        return NONE
    if not value:
        return "0s"
    # What rounds to 1000 of a unit is 1 of the next.
    factor, unit = next(((f, u) for f, u in _UNITS if abs(value) >= f * 0.9995), _UNITS[-1])
    return f"{digits(value / factor)}{unit}"


def digits(value: float | None) -> str:
    """Three digits, or all of those in front of the point; n/a for None."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".removesuffix(".")


def percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.0f}"


def cut(name: str, most: int) -> str:
    """A name that fits: its end, which tells layers apart."""
    return name if len(name) <= most else "\u2026" + name[len(name) - most + 1 :]


def cut_apart(names: Sequence[str], most: int) -> list[str]:
    """Names that fit: their ends, unless these would make different names the same; then beginnings and ends."""
    ends = [cut(name, most) for name in names]
    if len(set(ends)) == len(set(names)):
        return ends
    first = most // 2
    last = most - first - 1
    return [name if len(name) <= most else f"{name[:first]}\u2026{name[len(name) - last :]}" for name in names]
