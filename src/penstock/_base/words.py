"""Wording that messages from several layers share."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any


def counted(number: int, what: str) -> str:
    """`1 stage`, `1,024 stages`, `3 microbatches`."""
    if number != 1:
        what = f"{what[:-1]}ies" if what.endswith("ry") else f"{what}es" if what.endswith(("ch", "ss")) else f"{what}s"
    return f"{number:,} {what}"


def sized(size: float) -> str:
    """`512 B`, `1.5 MB`: bytes, in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def a(what: str) -> str:
    """`a Tensor`, `an int`."""
    return f"{'an' if what[:1] in tuple('aeioAEIO') else 'a'} {what}"


def shortened(names: Collection[str], most: int = 4) -> str:
    """List names in a message: the first few, then how many more there are."""
    shown = ", ".join(map(repr, list(names)[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def in_ranges(names: Iterable[str]) -> list[str]:
    """Merge numbered names, such as `blocks.0`, `blocks.1` and `blocks.2` into `blocks.0-2`; keep the others."""
    found: list[tuple[str, str, str, str]] = []  # text before the last number, first, last, text after it
    for name in names:
        match = re.fullmatch(r"(.*?)(0|[1-9]\d*|)(\D*)", name)
        before, number, behind = match.groups() if match else (name, "", "")
        last = found[-1] if found else ("", "", "", "")
        if number and last[2] and (last[0], int(last[2]) + 1, last[3]) == (before, int(number), behind):
            found[-1] = before, last[1], number, behind
        else:
            found.append((before, number, number, behind))
    return [f"{before}{first if first == last else f'{first}-{last}'}{behind}" for before, first, last, behind in found]


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`did you mean 'ring'? `, if a name that is unknown resembles a known one; otherwise nothing."""
    near = difflib.get_close_matches(name, [*known], 1, cutoff)
    return f"did you mean {near[0]!r}? " if near else ""


def named(function: Any) -> Any:
    """Return what gives a callable its name: a partial's function, or the class of an object that can be called."""
    function = function.func if isinstance(function, partial) else function
    return function if hasattr(function, "__qualname__") else type(function)


def in_a_line(error: BaseException) -> str:
    """Format an error's type and message on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def line_of(text: str, most_characters: int) -> str:
    """Format a text from elsewhere as one printable line, cut to a length."""
    return printable(" ".join(text[: 2 * most_characters].split()))[:most_characters]


def printable(text: str) -> str:
    """Text without what a terminal would take as orders: what came from elsewhere is shown, never obeyed."""
    return "".join(one if one.isprintable() or one in "\n\t" else "\N{REPLACEMENT CHARACTER}" for one in text)


def all_printable(value: Any) -> Any:
    """Plain values of a file with each text in them printable."""
    if isinstance(value, dict):
        return {key: all_printable(one) for key, one in value.items()}
    if isinstance(value, list):
        return [all_printable(one) for one in value]
    return printable(value) if isinstance(value, str) else value
