"""How messages write what several floors write."""

from __future__ import annotations


def counted(number: int, what: str) -> str:
    """`1 stage`, `1,024 stages`, `3 microbatches`."""
    plural = "" if number == 1 else "es" if what.endswith("ch") else "s"
    return f"{number:,} {what}{plural}"
