"""Parse rates, sizes, times and percentages in tc's notation. Parsers raise ValueError with what they expected."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from numbers import Integral
from typing import TypeVar

from penstock._base.errors import ArgumentError

T = TypeVar("T")

NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([A-Za-z]*)")
_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
RATES = {
    "": 1 / 8,
    **{f"{prefix}bit": 1000**power / 8 for prefix, power in _PREFIXES.items()},
    **{f"{prefix}ibit": 1024**power / 8 for prefix, power in _PREFIXES.items() if prefix},
    **{f"{prefix}bps": 1000.0**power for prefix, power in _PREFIXES.items()},
    **{f"{prefix}ibps": 1024.0**power for prefix, power in _PREFIXES.items() if prefix},
}
"""As in tc: bits per second, bare or with "bit"; "bps" means BYTES per second. Case does not matter."""
_SIZES = {
    "": 1.0,
    "b": 1.0,
    **{f"{prefix}{end}": 1024.0**power for prefix, power in _PREFIXES.items() if prefix for end in ("", "b", "ib")},
    **{f"{prefix}bit": 1024**power / 8 for prefix, power in _PREFIXES.items()},
}
"""As in tc: k and kb are 1024 bytes, kbit 1024 bits."""
_TIMES = {
    "": 1e-6,
    "s": 1.0, "sec": 1.0, "secs": 1.0, "ms": 1e-3, "msec": 1e-3, "msecs": 1e-3, "us": 1e-6, "usec": 1e-6, "usecs": 1e-6,
}  # fmt: skip
"""As in tc: a bare number is in microseconds."""


def _parser(
    units: dict[str, float], kind: str, examples: str, limit: float = float("inf"), limit_text: str = ""
) -> Callable[[str], float]:
    def read(text: str) -> float:
        match = NUMBER.fullmatch(text)
        factor = units.get(match[2].lower()) if match else None
        if match is None or factor is None:
            raise ValueError(f"{text!r} is not a {kind}: pass one like {examples}")
        value = float(match[1]) * factor
        if value > limit:
            raise ValueError(f"{text!r} is too large a {kind}: pass at most {limit_text}")
        return value

    return read


rate = _parser(RATES, "rate", "100mbit, 1gbit (bits per second) or 12.5MBps (bytes per second)", 1.25e12, "10tbit")
"""Parses a rate into bytes per second."""
_MIN_BARE = 1000.0
"""A rate without a unit below this many bytes per second was hardly meant in bits."""


def suspicious_rate_hint(text: str) -> str | None:
    """Explain what is wrong with a very slow rate without a unit (100 usually means Mbit/s); None if nothing is."""
    if text[-1:] not in ".0123456789" or not 0 < rate(text) < _MIN_BARE:
        return None
    return f"{text!r} is {text} bits per second, as for tc: did you mean {text}mbit? If not, pass {text}bit"


size = _parser(_SIZES, "size", "1600, 16kb or 1mb")
"""Parses a size into bytes."""
seconds = _parser(_TIMES, "time", "500us, 20ms or 1s", 86400.0, "86400s, one day")


def share(text: str) -> float:
    """Parse a percentage into 0..1. The sign is required, because a bare 0.1 could mean either."""
    match = NUMBER.fullmatch(text[:-1]) if text.endswith("%") else None
    if match is None or match[2]:
        raise ValueError(f"{text!r} is not a percentage: pass one like 0.1% or 25%")
    if float(match[1]) > 100:
        raise ValueError(f"{text!r} is more than 100%: pass 0% to 100%")
    return float(match[1]) / 100


def count(text: str) -> int:
    """Parse an integer."""
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{text!r} is not an integer; use one such as 5 or 1500")
    return int(text)


def check_host(host: object, hosts: int, prefix: str = "") -> None:
    """Raise ArgumentError unless there is a host of this number among so many. `prefix` begins the message."""
    if isinstance(host, bool) or not isinstance(host, Integral) or host not in range(hosts):
        valid = f"the hosts are 0 to {hosts - 1}" if hosts > 1 else "there is only host 0"
        raise ArgumentError(f"{prefix}host {host!r} does not exist: {valid}")


_HOST_VALUE = re.compile(r"\s*(\d{1,9})\s*=\s*(\S.*?)\s*", re.ASCII | re.DOTALL)


def by_host(texts: Iterable[str], hosts: int, value_name: str, parse: Callable[[str], T]) -> dict[int, T]:
    """Parse values by host, from texts like "2=25%". Raise ArgumentError: a text has another form, a host does not
    exist, or it gets two values."""
    values: dict[int, T] = {}
    for text in texts:
        match = _HOST_VALUE.fullmatch(text)
        if match is None:
            raise ArgumentError(f"{text!r} is not a host with {value_name}")
        host = int(match[1])
        check_host(host, hosts, f"{text!r}: ")
        if host in values:
            raise ArgumentError(f"{text!r}: host {host} is given twice; pass it once")
        values[host] = parse(match[2])
    return values


# -- sizes of transfers and buffers ------------------------------------------------------------------------------------


def parse_size(text: str) -> int:
    """Return the bytes of "64KiB", "1.5MB" or "2600". Raise ArgumentError unless that is an integer above 0."""
    try:
        value = size("".join(text.split()))
    except ValueError:
        raise ArgumentError(
            f"{text!r} is not a size: pass bytes, or a number with KiB, MiB or GiB (kb, mb and gb are the same)"
        ) from None
    if value < 1 or value != int(value):
        raise ArgumentError(f"{text!r} is {value:g} bytes: expected an integer number of bytes >= 1")
    return int(value)


def parse_sizes(text: str) -> list[int]:
    """Parse a list like "64KiB,1MiB". Raise as `parse_size` does, naming the size that is wrong."""
    texts, sizes = text.split(","), []
    for number, item in enumerate(texts, 1):
        try:
            sizes.append(parse_size(item))
        except ArgumentError as error:
            prefix = f"size {number} of {len(texts)} in {text!r}: " if len(texts) > 1 else ""
            raise ArgumentError(f"{prefix}{error}") from None
    return sizes


def size_text(size: int) -> str:
    """Return the shortest exact text for a size: 2600, 64KiB, 8MiB."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size and size % 1024**power == 0:
            return f"{size // 1024**power}{unit}"
    return str(size)
