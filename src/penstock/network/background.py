"""Neighbors' traffic: frames that exist only in the switch's accounts, in the queue to a host that the job shares.

They take up time on the link and room in the queue, and are dropped when it is full. No host sends or receives them, so
they cost no processor time. A source is described by one of

    RATE [to HOST] [size BYTES]                      random frames with exponential gaps
    incast BYTES every TIME [to HOST] [size BYTES]   many senders at once: this many bytes at one moment
    trace FILE [to HOST]                             a recording: lines `seconds,bytes`, repeated

and applies to every host unless it names one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock._base.errors import ArgumentError
from penstock._base.files import parse_csv, quoted, read_text
from penstock.network import quantities as q

FRAME_BYTES = 1514
AHEAD_NS = 50_000_000
"""How far ahead of the clock arrivals are generated."""
_MIN_GAP_SECONDS = 10e-6
"""The least mean gap between frames to a host; frames are made larger than requested if they would come more often."""

Arrivals = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Arrival times in nanoseconds since the start, ascending, and sizes in bytes."""


@dataclass(frozen=True, slots=True)
class Neighbor:
    """One source of traffic.

    Attributes:
        target: the host whose link it shares; None for every host.
        bytes_per_second: the rate of steady traffic, or 0.
        burst_bytes, period_seconds: the size and period of an incast, or 0.
        trace: seconds and bytes of a trace, in order.
    """

    target: int | None
    frame_bytes: int = FRAME_BYTES
    bytes_per_second: float = 0.0
    burst_bytes: int = 0
    period_seconds: float = 0.0
    trace: tuple[tuple[float, int], ...] = ()


def parse_background(text: str, hosts: int) -> Neighbor:
    """Parse the description of a source of traffic. Raise ArgumentError: the text is not valid, the host does not
    exist, or the file cannot be read."""
    try:
        return _neighbor(text, hosts)
    except ValueError as error:
        raise ArgumentError(f"the background {text!r}: {error}") from None


_WORDS: dict[str, tuple[Callable[[str], Any], dict[str, Callable[[str], Any]]]] = {
    "rate": (q.rate, {"to": q.count, "size": q.size}),
    "incast": (q.size, {"to": q.count, "size": q.size, "every": q.seconds}),
    "trace": (str, {"to": q.count}),
}
"""Parsers by kind of source: of its value, and of the values of the words that may follow."""


def _neighbor(text: str, hosts: int) -> Neighbor:
    words = text.split()
    if not words:
        raise ValueError("it is empty: pass one like '50mbit to 1'")
    kind = words[0].lower()
    if kind not in ("incast", "trace"):
        kind, words = "rate", ["rate", *words]  # a rate comes without its word
    if len(words) < 2:
        raise ValueError(f"{kind!r} needs a value")
    _, value_text, *words = words
    read, options = _WORDS[kind]
    value = read(value_text)
    if hint := q.suspicious_rate_hint(value_text) if kind == "rate" else "":
        raise ValueError(hint)
    arguments: dict[str, Any] = {}
    for word, argument in itertools.zip_longest(words[::2], words[1::2]):
        name = word.lower()
        if name not in options:
            raise ValueError(f"{word!r} is unknown here: pass {', '.join(options)}")
        if name in arguments:
            raise ValueError(f"{word!r} is given twice")
        if argument is None:
            raise ValueError(f"{word!r} needs a value")
        arguments[name] = options[name](argument)
    target, size = arguments.get("to"), int(arguments.get("size", FRAME_BYTES))
    if target is not None:
        q.check_host(target, hosts)
    if not 64 <= size <= 65535:
        raise ValueError(f"a frame cannot have {size} bytes: pass 64 to 65535")
    if kind == "trace":
        trace = tuple(_read_trace(Path(value)))
        if len(trace) > (max_frames := trace[-1][0] / _MIN_GAP_SECONDS) + 1:
            raise ValueError(f"{value_text} has {len(trace):,} frames: pass at most {max_frames:,.0f} in that time")
        return Neighbor(target, trace=trace)
    if kind == "incast":
        burst = int(value)
        if not (period := arguments.get("every")):
            raise ValueError("an incast needs its period: pass one like 'incast 1mb every 100ms'")
        min_frame_bytes = math.ceil(burst / period * _MIN_GAP_SECONDS)
        return Neighbor(target, max(size, min_frame_bytes), burst_bytes=burst, period_seconds=period)
    if value <= 0:
        raise ValueError("the rate is 0: pass a rate above 0, or omit this background")
    return Neighbor(target, max(size, round(value * _MIN_GAP_SECONDS)), bytes_per_second=value)


def _read_trace(path: Path) -> Iterator[tuple[float, int]]:
    rows = list(parse_csv(read_text(path), str(path)))
    if rows and rows[0] and not rows[0][0].replace(".", "", 1).isdigit():
        rows = rows[1:]
    last = 0.0
    for number, row in enumerate(rows, 1):
        try:
            seconds, size = float(row[0]), int(row[1])
        except (ValueError, IndexError):
            raise ValueError(f"{path}, row {number}: {quoted(','.join(row))} is not `seconds,bytes`") from None
        if not (last <= seconds < math.inf) or size < 1:
            raise ValueError(f"{path}, row {number}: times must ascend from 0, and sizes be above 0")
        last = seconds
        yield seconds, size
    if not rows or last == 0:
        raise ValueError(f"{path} has no traffic: pass lines `seconds,bytes`")


def arrivals(neighbor: Neighbor, seed: int, host: int) -> Iterator[Arrivals]:
    """Yield a source's frames to a host forever, one batch at a time."""
    if neighbor.trace:
        seconds, sizes = (np.array(column) for column in zip(*neighbor.trace, strict=True))
        for repeat in itertools.count():
            yield np.rint((repeat * seconds[-1] + seconds) * 1e9).astype(np.int64), sizes.astype(np.int64)
    elif neighbor.burst_bytes:
        full_frames, last_bytes = divmod(neighbor.burst_bytes, neighbor.frame_bytes)
        burst = np.array([neighbor.frame_bytes] * full_frames + [last_bytes] * (last_bytes > 0), dtype=np.int64)
        for repeat in itertools.count(1):
            yield np.full(len(burst), round(repeat * neighbor.period_seconds * 1e9), dtype=np.int64), burst
    else:
        random = np.random.Generator(np.random.Philox(np.random.SeedSequence([abs(seed), seed < 0, 977, host])))
        mean_ns = neighbor.frame_bytes / neighbor.bytes_per_second * 1e9
        at_ns = 0.0
        while True:
            gaps = at_ns + np.cumsum(random.exponential(mean_ns, 1024))
            at_ns = float(gaps[-1])
            yield np.rint(gaps).astype(np.int64), np.full(1024, neighbor.frame_bytes, dtype=np.int64)


class Stream:
    """All frames to one host, ordered by time."""

    def __init__(self, neighbors: Sequence[Neighbor], seed: int, host: int) -> None:
        shared = [neighbor for neighbor in neighbors if neighbor.target in (None, host)]
        self._sources = [arrivals(neighbor, seed + 1000003 * index, host) for index, neighbor in enumerate(shared)]
        self._pending = [(_EMPTY, _EMPTY) for _ in self._sources]
        """Each source's frames that were generated but are not due yet."""
        self._leftover: Arrivals = (_EMPTY, _EMPTY)

    def until(self, end_ns: int, max_frames: int) -> Arrivals:
        """Return the next arrivals before `end_ns`, at most `max_frames`."""
        parts = [self._leftover]
        for index, source in enumerate(self._sources):
            while True:
                at_ns, sizes = self._pending[index]
                count = int(np.searchsorted(at_ns, end_ns))
                parts.append((at_ns[:count], sizes[:count]))
                self._pending[index] = at_ns[count:], sizes[count:]
                if count < len(at_ns):
                    break
                self._pending[index] = next(source)
        at_ns, sizes = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        order = np.argsort(at_ns, kind="stable")
        first, leftover = order[:max_frames], order[max_frames:]
        self._leftover = at_ns[leftover], sizes[leftover]
        return at_ns[first], sizes[first]


_EMPTY = np.zeros(0, dtype=np.int64)
