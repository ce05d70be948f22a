"""What joins a host to the switch, in the words of tc: "100mbit", "1gbit burst 16kb", "12.5MBps latency 20ms".

The grammar is `RATE {WORD VALUE}`. A word is a line of `_WORDS`; words that later steps will know stand in `_LATER`.

How well tbf keeps the rate (one TCP connection between two hosts, 2 cores that other work kept full, Linux 6.18; time
minus that of 1 byte, as a multiple of `Link.wire_bytes` / rate; the median of 6 to 60 messages, and the range of the
medians of several runs with BBR and CUBIC):

    message            16 KiB       64 KiB       256 KiB      1 MiB        8 MiB
    100mbit            0.93         0.98         1.00         1.00         1.00
    1gbit              0.71-0.76    0.94-0.97    1.00-1.03    1.02-1.19    1.04-1.81
    1gbit mtu 9000     0.23-0.25    0.81         0.95         0.99         1.00

(benchmarks/fabric/link_rate.py.) The bucket is ahead of the rate by its size, so short messages cost less than their
share. A timer that wakes later than the bucket lasts loses rate: for 8 MiB, 100mbit with a bucket of one frame took
1.15 times as long, 1gbit with 3100 bytes at both ends 2.3 times, with 9 KiB at both 1.25 times; with 9 KiB at the
host and more at the switch it held (`Link.port_burst`). What is left at 1gbit is the processor's: the fastest 8 MiB
took 1.02 to 1.05 in five of six runs, and larger frames need less of it. Segmentation offloads stay on, as tbf itself
splits what is larger than its bucket: without them 1gbit with 9 KiB at both ends took 1.7 to 2.0 times. With 3 ms of
idle time before each message, BBR and CUBIC differed by less than one and the same differed between runs.

All that was before TCP was told to send no more at once than the bucket holds (gso_max_size), so that tbf need not take
it apart: a ring of 4 MiB among 4 hosts at 1gbit then took 73 to 79 ms instead of 147, with the processors 77% busy
instead of 92%.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from penstock.errors import ArgumentError

_ETHERNET, _HEADERS = 14, 52
"""Bytes of an Ethernet header, as tbf counts frames, and of IPv4 and TCP with time stamps."""

BUFFER_BYTES = 1024 * 1024
"""Of the switch's queue towards a host if the text says nothing."""

HOST_BYTES = 16 * 1024 * 1024
"""Of a host's own queue, at least: TCP keeps it short, and a host does not drop what it has not sent yet."""

BURST_SECONDS = 50e-6
PORT_SECONDS = 200e-6
"""How late the shaper of a host, and that of the switch's port, may wake without losing rate: see `Link.burst`."""

_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)([A-Za-z]*)")
_PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_RATES = {
    "": 1 / 8,
    **{f"{prefix}bit": 1000**power / 8 for prefix, power in _PREFIXES.items()},
    **{f"{prefix}ibit": 1024**power / 8 for prefix, power in _PREFIXES.items() if prefix},
    **{f"{prefix}bps": 1000.0**power for prefix, power in _PREFIXES.items()},
    **{f"{prefix}ibps": 1024.0**power for prefix, power in _PREFIXES.items() if prefix},
}
"""As in tc: bits per second, bare or with "bit"; "bps" are BYTES per second. Case does not matter."""
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
"""As in tc: a bare number is microseconds."""


@dataclass(frozen=True, slots=True)
class Link:
    """One link, the same in both directions.

    Attributes:
        bytes_per_second: of whole Ethernet frames (header, no preamble or checksum), as tbf counts them.
        burst_bytes: of tbf's bucket, or None for `burst`'s choice.
        limit_bytes: of the switch's queue towards a host; what comes when it is full is dropped.
        mtu: bytes of the largest IP packet.
        text: as it was given.

    Raises:
        ArgumentError: a value with which no frame could pass.
    """

    bytes_per_second: float
    burst_bytes: int | None = None
    limit_bytes: int = BUFFER_BYTES
    mtu: int = 1500
    text: str = ""

    def __post_init__(self) -> None:
        if not (1 <= self.bytes_per_second < 2**63 / 8):
            raise ArgumentError(f"the rate is {self.bytes_per_second:g} bytes per second: give at least 8bit")
        if not 576 <= self.mtu <= 65535:
            raise ArgumentError(f"the mtu is {self.mtu}, but a packet here has 576 to 65535 bytes")
        for word, size in (("burst", self.burst_bytes), ("limit", self.limit_bytes)):
            if size is not None and not self.frame_bytes <= size < 2**32:
                raise ArgumentError(
                    f"{word} is {size} bytes, but one frame has {self.frame_bytes} (mtu {self.mtu} and an Ethernet "
                    f"header), so no frame would pass: give {word} {self.frame_bytes} or more, below 4gb"
                )

    @property
    def frame_bytes(self) -> int:
        """Of the largest frame."""
        return self.mtu + _ETHERNET

    @property
    def burst(self) -> int:
        """Bytes of the bucket of a host's tbf: as given, or two frames and what the link carries in `BURST_SECONDS`."""
        if self.burst_bytes is not None:
            return self.burst_bytes
        return 2 * self.frame_bytes + int(self.bytes_per_second * BURST_SECONDS)

    @property
    def port_burst(self) -> int:
        """Bytes of the bucket of the switch's tbf towards a host.

        Larger by what the link carries in `PORT_SECONDS`: frames that the sender's tbf lets go late, and so at once,
        must not lose time again.
        """
        return self.burst + int(self.bytes_per_second * PORT_SECONDS)

    @property
    def goodput_ratio(self) -> float:
        """The share of the rate that is left for what TCP carries: 0.956 with an mtu of 1500."""
        return (self.mtu - _HEADERS) / self.frame_bytes

    def wire_bytes(self, size: int) -> int:
        """What a message costs on the link when TCP fills its segments; without the acknowledgements coming back."""
        return size + math.ceil(size / (self.mtu - _HEADERS)) * (_HEADERS + _ETHERNET)

    def tbf(self) -> str:
        """The words for tc at a host."""
        return self._tbf(self.burst, max(self.limit_bytes, HOST_BYTES))

    def port_tbf(self) -> str:
        """The words for tc at the switch's port."""
        return self._tbf(self.port_burst, self.limit_bytes)

    def _tbf(self, burst: int, limit: int) -> str:
        return f"tbf rate {round(self.bytes_per_second * 8)}bit burst {burst}b limit {limit}b"

    def __str__(self) -> str:
        return self.text or f"{round(self.bytes_per_second * 8)}bit"


def _scaled(units: dict[str, float], what: str, examples: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        match = _NUMBER.fullmatch(text)
        factor = units.get(match[2].lower()) if match else None
        if match is None or factor is None:
            raise ValueError(f"{text!r} is no {what}: give one like {examples}")
        return float(match[1]) * factor

    return read


def _count(text: str) -> float:
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{text!r} is no number of bytes: give one like 1500 or 9000")
    return int(text)


_RATE = _scaled(_RATES, "rate", "100mbit, 1gbit (bits per second) or 12.5MBps (bytes per second)")
_SIZE = _scaled(_SIZES, "size", "1600, 16kb or 1mb")
_TIME = _scaled(_TIMES, "time", "500us, 20ms or 1s")

_WORDS: dict[str, tuple[str, Callable[[str], float]]] = {
    "rate": ("rate", _RATE),
    "burst": ("burst", _SIZE),
    "buffer": ("burst", _SIZE),
    "maxburst": ("burst", _SIZE),
    "limit": ("limit", _SIZE),
    "latency": ("latency", _TIME),
    "mtu": ("mtu", _count),
}
"""By word: what it sets, and how its value is read (a ValueError says what is wrong with it)."""

_LATER = {
    "delay", "jitter", "distribution", "loss", "drop", "corrupt", "corruption", "duplicate", "duplication", "reorder",
    "reordering", "gap", "slot", "ecn", "seed", "netem",
}  # fmt: skip
"""Words of netem, which the next step will know."""


def parse_link(text: str) -> Link:
    """A link from its text: a rate, then any of `burst SIZE`, `limit SIZE` or `latency TIME`, `mtu BYTES`.

    Rates and sizes are tc's: kbit, mbit, gbit, tbit are bits per second, kbps, mbps, gbps BYTES per second, each with
    an `i` for powers of 1024; a size of 16kb has 16 * 1024 bytes. `latency` is the longest that a frame may wait in
    the queue, another way to give `limit`.

    Raises:
        ArgumentError: the text is no link; the message points to the place.
    """
    words = [(match[0], match.start()) for match in re.finditer(r"\S+", text)]
    if not words:
        raise ArgumentError(f"the link's text is empty: give a rate, like 100mbit{_more()}")
    if words[0][0].lower() not in _WORDS and words[0][0].lower() not in _LATER:
        words.insert(0, ("rate", words[0][1]))
    values: dict[str, float] = {}
    for place in range(0, len(words), 2):
        name, start = words[place]
        meaning, read = _word(text, name, start)
        if place + 1 == len(words):
            raise _error(text, start, len(name), f"{name!r} lacks its value")
        if meaning in values:
            raise _error(text, start, len(name), f"{name!r} sets the {meaning} a second time")
        value, value_start = words[place + 1]
        try:
            values[meaning] = read(value)
        except ValueError as error:
            raise _error(text, value_start, len(value), str(error)) from None
    return _link(text, values)


def _word(text: str, name: str, start: int) -> tuple[str, Callable[[str], float]]:
    if name.lower() in _LATER:
        said = f"{name!r} is not there yet: a link has a rate and a queue; delay, jitter and loss are the next step"
        raise _error(text, start, len(name), said)
    if name.lower() in _WORDS:
        return _WORDS[name.lower()]
    if name.lower() in _RATES:
        raise _error(text, start, len(name), f"a rate has no space before its unit {name!r}")
    raise _error(text, start, len(name), f"{name!r} is no word of a link{_more()}")


def _link(text: str, values: dict[str, float]) -> Link:
    if "rate" not in values:
        raise _error(text, 0, len(text), "no rate is given: begin with one, like 100mbit")
    if "limit" in values and "latency" in values:
        at = text.lower().index("latency")
        raise _error(text, at, len("latency"), "'limit' and 'latency' say the same thing: give one of them")
    try:
        link = Link(
            values["rate"],
            burst_bytes=int(values["burst"]) if "burst" in values else None,
            limit_bytes=int(values.get("limit", BUFFER_BYTES)),
            mtu=int(values.get("mtu", 1500)),
            text=" ".join(text.split()),
        )
        if "latency" not in values:
            return link
        # As tc has it: what leaves in that time, beside the bucket.
        limit = int(link.bytes_per_second * values["latency"]) + link.burst
        return Link(link.bytes_per_second, link.burst_bytes, limit, link.mtu, link.text)
    except ArgumentError as error:
        raise _error(text, 0, len(text), str(error)) from None


def _more() -> str:
    return "; after it may come: burst SIZE, limit SIZE or latency TIME, mtu BYTES"


def _error(text: str, start: int, length: int, said: str) -> ArgumentError:
    shown = text.replace("\n", " ").replace("\t", " ")
    return ArgumentError(
        f"the link's text at position {start + 1}: {said}\n    {shown}\n    {' ' * start}{'^' * length}"
    )
