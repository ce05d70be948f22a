"""Wording that messages from several layers share."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any


def pluralize(number: int, noun: str) -> str:
    """`1 stage`, `1,024 stages`, `3 microbatches`."""
    if number != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}es" if noun.endswith(("ch", "ss")) else f"{noun}s"
    return f"{number:,} {noun}"


def format_bytes(size: float) -> str:
    """`512 B`, `1.5 MB`: bytes, in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def duration(seconds: float) -> str:
    """Format a measured time with four digits and a unit: `1.234 ms`."""
    scale, unit = next(((s, u) for s, u in _SECONDS if abs(seconds) >= s * 0.99995), _SECONDS[-1 if seconds else 0])
    value = seconds / scale
    digits = max(0, 3 - len(str(int(abs(value)))) + 1)
    return f"{value:,.{digits}f} {unit}"


def short_duration(seconds: float) -> str:
    """Format a time of a run or a step in short: `39.4 ms`, `2.5 s`, `5 min`, `3 h 20 min`, `4 d 3 h`."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms" if seconds else "0 s"
    if seconds < 99.5:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def a(noun: str) -> str:
    """`a Tensor`, `an int`."""
    return f"{'an' if noun[:1] in tuple('aeioAEIO') else 'a'} {noun}"


def list_names(names: Collection[str], max_items: int = 4) -> str:
    """List names in a message: the first few, then how many more there are."""
    shown = ", ".join(map(repr, list(names)[:max_items]))
    return f"{shown} and {len(names) - max_items} more" if len(names) > max_items else shown


def collapse_ranges(names: Iterable[str]) -> list[str]:
    """Merge numbered names, such as `blocks.0`, `blocks.1` and `blocks.2` into `blocks.0-2`; keep the others."""
    ranges: list[tuple[str, str, str, str]] = []  # text before the last number, first, last, text after it
    for name in names:
        match = re.fullmatch(r"(.*?)(0|[1-9]\d*|)(\D*)", name)
        before, number, after = match.groups() if match else (name, "", "")
        last = ranges[-1] if ranges else ("", "", "", "")
        if number and last[2] and (last[0], int(last[2]) + 1, last[3]) == (before, int(number), after):
            ranges[-1] = before, last[1], number, after
        else:
            ranges.append((before, number, number, after))
    return [f"{before}{first if first == last else f'{first}-{last}'}{after}" for before, first, last, after in ranges]


def name_stages(numbers: Collection[int]) -> str:
    """Format `stage 1`, or `stages 0-2, 4`."""
    return f"{'stage' if len(numbers) == 1 else 'stages'} {', '.join(collapse_ranges(map(str, numbers)))}"


def did_you_mean(name: str, names: Iterable[str], cutoff: float = 0.6) -> str:
    """`did you mean 'ring'? `, if an unknown name resembles one of `names`; otherwise an empty string."""
    close = difflib.get_close_matches(name, [*names], 1, cutoff)
    return f"did you mean {close[0]!r}? " if close else ""


def named(function: Any) -> Any:
    """Return the object that names a callable: a partial's function, or the class of a callable object."""
    function = function.func if isinstance(function, partial) else function
    return function if hasattr(function, "__qualname__") else type(function)


def one_line(error: BaseException) -> str:
    """Format an error's type and message on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def printable_line(text: str, max_characters: int) -> str:
    """Format untrusted text as one printable line, cut to a length."""
    return strip_control_chars(" ".join(text[: 2 * max_characters].split()))[:max_characters]


def strip_control_chars(text: str) -> str:
    """Replace characters that a terminal would interpret, so that untrusted text is only shown."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


def strip_all_control_chars(value: Any) -> Any:
    """Make each text in the plain values of a file printable."""
    if isinstance(value, dict):
        return {key: strip_all_control_chars(item) for key, item in value.items()}
    if isinstance(value, list):
        return [strip_all_control_chars(item) for item in value]
    return strip_control_chars(value) if isinstance(value, str) else value
