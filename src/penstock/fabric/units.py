"""Parse human-readable sizes: 64KiB, 2600, 1.5MB."""

from __future__ import annotations

import re

from penstock.errors import ArgumentError

_SIZES = {
    "": 1, "b": 1,
    **{f"{prefix}{end}": 1024**power for power, prefix in enumerate("kmgt", 1) for end in ("", "b", "ib")},
}  # fmt: skip
"""K, M and G are powers of 1024, as in nccl-tests, with any suffix: 64kb means the same in a link's text."""

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)")


def size_of(text: str) -> int:
    """Returns the bytes of "64KiB", "1.5MB" or "2600". Raises ArgumentError unless that is an integer above 0."""
    match = _NUMBER.fullmatch(text.strip())
    factor = _SIZES.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise ArgumentError(
            f"{text!r} is not a size: pass bytes, or a number with KiB, MiB or GiB (kb, mb and gb are the same)"
        )
    size = float(match[1]) * factor
    if size < 1 or size != int(size):
        raise ArgumentError(f"{text!r} is {size:g} bytes: expected an integer number of bytes >= 1")
    return int(size)


def sizes_of(text: str) -> list[int]:
    """Parses a list like "64KiB,1MiB". Raises as `size_of` does, naming the size that is wrong."""
    texts, found = text.split(","), []
    for place, one in enumerate(texts, 1):
        try:
            found.append(size_of(one))
        except ArgumentError as error:
            which = f"size {place} of {len(texts)} in {text!r}: " if len(texts) > 1 else ""
            raise ArgumentError(f"{which}{error}") from None
    return found


def size_text(size: int) -> str:
    """Returns the shortest exact text for a size: 2600, 64KiB, 8MiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{unit}"
    return str(size)
