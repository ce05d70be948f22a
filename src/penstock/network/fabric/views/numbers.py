"""Format numbers for reports."""

from __future__ import annotations

from collections.abc import Sequence

NONE = "n/a"
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def seconds(value: float | None) -> str:
    """Format with three digits and a unit: 1.20ms; n/a for None."""
    if value is None:
        return NONE
    if not value:
        return "0s"
    # A value that rounds to 1000 of one unit is shown as 1 of the next.
    factor, unit = next(((f, u) for f, u in _UNITS if abs(value) >= f * 0.9995), _UNITS[-1])
    return f"{digits(value / factor)}{unit}"


def digits(value: float | None) -> str:
    """Format with three digits, or all digits before the decimal point if there are more; n/a for None."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:#.3g}".removesuffix(".")


def percent(value: float | None) -> str:
    return NONE if value is None else f"{value:.0f}"


def shorten(name: str, max_length: int) -> str:
    """Shorten a name to its end, which distinguishes layers."""
    return name if len(name) <= max_length else "\u2026" + name[len(name) - max_length + 1 :]


def shorten_distinct(names: Sequence[str], max_length: int) -> list[str]:
    """Shorten names to their ends, or, if different names would then look the same, to their beginnings and ends."""
    ends = [shorten(name, max_length) for name in names]
    if len(set(ends)) == len(set(names)):
        return ends
    first = max_length // 2
    last = max_length - first - 1
    return [name if len(name) <= max_length else f"{name[:first]}\u2026{name[len(name) - last :]}" for name in names]
