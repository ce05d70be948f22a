"""Parse human-readable sizes, as in a link's text: 64KiB, 2600, 1.5MB. K, M and G are powers of 1024."""

from __future__ import annotations

from penstock.errors import ArgumentError
from penstock.network import quantities


def size_of(text: str) -> int:
    """Returns the bytes of "64KiB", "1.5MB" or "2600". Raises ArgumentError unless that is an integer above 0."""
    try:
        size = quantities.size("".join(text.split()))
    except ValueError:
        raise ArgumentError(
            f"{text!r} is not a size: pass bytes, or a number with KiB, MiB or GiB (kb, mb and gb are the same)"
        ) from None
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
