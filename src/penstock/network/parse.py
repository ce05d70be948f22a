"""Parse a link's text, in tc's words: "100mbit", "1gbit delay 5ms 1ms distribution pareto loss 0.1%".

The grammar is `RATE {WORD VALUE...}`, or two of these, `up RATE ... down RATE ...`. Each word is an entry of `_WORDS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from penstock._base.errors import ArgumentError
from penstock.network import quantities as q
from penstock.network.link import BUFFER_BYTES, DISTRIBUTIONS, Bursts, Chance, Impairment, Link

_Word = re.Match[str]
Settings = dict[str, Any]


def parse_link(text: str) -> Link:
    """Parse a link: a rate, then any of the words that `_WORDS` lists.

    Rates, sizes and times are tc's: kbit, mbit, gbit, tbit are bits per second; kbps, mbps, gbps are BYTES per second;
    each takes an `i` for powers of 1024. A size of 16kb is 16 * 1024 bytes; a bare time is in microseconds. `latency`
    is the longest that a frame may wait in the queue, another way to give `limit`. What follows `delay`, `loss`,
    `duplicate`, `corrupt`, `reorder`, `gap` and `distribution` is as in netem; `jitter` and `stall TIME every TIME` are
    our own. Raises ArgumentError: the text is not a link; the message points to the place.
    """
    words = [*re.finditer(r"\S+", text)]
    if not words:
        raise ArgumentError(f"the link is empty: pass a rate, like 100mbit; {_known_words()}")
    normalized = " ".join(text.split())
    marks = [index for index, word in enumerate(words) if word[0].lower() in ("up", "down")]
    if not marks:
        return replace(_Reader(text, words).link(), text=normalized)
    if marks[0]:
        raise _error(text, words[marks[0]], "what comes before this has no direction: begin with up or down")
    links: dict[str, Link] = {}
    for index, end in pairwise([*marks, len(words)]):
        mark, direction = words[index], words[index][0].lower()
        if direction in links:
            raise _error(text, mark, f"{mark[0]!r} is given twice")
        if end == index + 1:
            raise _error(text, mark, f"nothing follows {mark[0]!r}: pass a rate, like 100mbit")
        links[direction] = _Reader(text, words[index + 1 : end]).link()
    if len(links) == 1:
        missing = "down" if "up" in links else "up"
        raise _error(text, words[0], f"{next(iter(links))!r} sets only one direction: pass {missing!r} as well")
    up, down = links["up"], links["down"]
    if up.mtu != down.mtu:
        first = next(words[index + 1] for index in marks if words[index][0].lower() == "down")
        raise _error(text, first, f"down has an mtu of {down.mtu} and up one of {up.mtu}: use the same for both")
    return replace(up, text=normalized, down=down)


def _error(text: str, word: _Word, message: str, end: int | None = None) -> ArgumentError:
    """Build an error that points to a word, or to all up to `end`."""
    shown = text.replace("\n", " ").replace("\t", " ")
    marks = " " * word.start() + "^" * ((end or word.end()) - word.start())
    return ArgumentError(f"the link, at position {word.start() + 1}: {message}\n    {shown}\n    {marks}")


class _Reader:
    """Reads the words of one direction, one after another."""

    def __init__(self, text: str, words: list[_Word]) -> None:
        self._text = text
        self._words = words
        self._remaining = list(words)
        self.word = self._last = words[0]

    @property
    def next(self) -> str:
        return self._remaining[0][0].lower() if self._remaining else ""

    def error(self, message: str, word: _Word | None = None) -> ArgumentError:
        """Build an error that points to a word, by default the last one taken."""
        return _error(self._text, word or self._last, message)

    def take(self, read: Callable[[str], Any]) -> Any:
        """Take the next value, which is required."""
        if not self._remaining:
            raise self.error(f"{self._last[0]!r} needs a value")
        self._last = self._remaining.pop(0)
        try:
            return read(self._last[0])
        except ValueError as error:
            raise self.error(str(error)) from None

    def take_some(self, *reads: Callable[[str], Any]) -> list[Any]:
        """Take the next value, which is required, and as many of those after it as there are."""
        values: list[Any] = []
        for read in reads:
            if values and not self.next[:1].isdigit():
                break
            values.append(self.take(read))
        return values

    def accept(self, name: str) -> bool:
        """Whether the next word is this one; if so, take it."""
        return self.next == name and bool(self.take(str))

    def rate(self) -> Settings:
        value = self.take(q.rate)
        # If its unit stands apart, the error about that comes later.
        if self.next in ("", *_WORDS, *_SYNONYMS) and (hint := q.suspicious_rate_hint(self._last[0])):
            raise self.error(hint)
        return {"rate": value}

    def read(self) -> Settings:
        """Return what all words set."""
        settings: Settings = {} if self.next in (*_WORDS, *_SYNONYMS) else self.rate()
        while self._remaining:
            name = self.take(str.lower)
            name = _SYNONYMS.get(name, name)
            self.word = self._last
            if name not in _WORDS and (name in q.RATES or "/" in name):
                forms = "100mbit, 1gbit (bits per second) or 12.5MBps (bytes per second)"
                raise self.error(f"a rate has no space before its unit {self.word[0]!r}: pass one like {forms}")
            if name not in _WORDS:
                raise self.error(f"{self.word[0]!r} is not a word of a link; {_known_words()}")
            new = _WORDS[name][0](self)
            if repeated := [name.removesuffix("_seconds") for name in new if name in settings]:
                raise self.error(f"{self.word[0]!r} sets the {repeated[0]} again: pass it once", self.word)
            settings |= new
        return settings

    def link(self) -> Link:
        settings, by_name = self.read(), {word[0].lower(): word for word in self._words}
        for name, conflicts, message in (
            ("latency", "limit" in settings, "'limit' and 'latency' mean the same: pass one of them"),
            (
                "distribution",
                "jitter_seconds" not in settings,
                "a distribution applies to jitter: pass delay 5ms jitter 1ms, say",
            ),
            ("gap", "reorder" not in settings, "a gap applies to reordered frames: pass reorder 1%, say"),
        ):
            if name in settings and conflicts:
                raise self.error(message, by_name[name])
        try:
            if "rate" not in settings:
                raise ArgumentError("no rate is given: begin with one, like 100mbit")
            link = Link(
                settings["rate"],
                burst_bytes=int(settings["burst"]) if "burst" in settings else None,
                limit_bytes=int(settings.get("limit", BUFFER_BYTES)),
                mtu=settings.get("mtu", 1500),
                mtu_is_given="mtu" in settings,
                impairment=Impairment(**{name: value for name, value in settings.items() if name not in _LINK_KEYS}),
            )
            if "latency" not in settings:
                return link
            # As in tc: what leaves in that time, plus the bucket.
            return replace(link, limit_bytes=int(link.bytes_per_second * settings["latency"]) + link.burst)
        except ArgumentError as error:
            raise _error(self._text, self._words[0], str(error), self._words[-1].end()) from None


def _distribution(text: str) -> str:
    if text.lower() not in DISTRIBUTIONS:
        raise ValueError(f"there is no distribution {text!r}: pass one of {', '.join(DISTRIBUTIONS)}")
    return text.lower()


def _loss(reader: _Reader) -> Settings:
    if reader.accept("gemodel"):
        to_bad, *optional = reader.take_some(q.share, q.share, q.share, q.share)
        return {"loss": Bursts(to_bad, *(optional or [1 - to_bad]))}
    reader.accept("random")
    return _chance("loss")(reader)


def _stall(reader: _Reader) -> Settings:
    length = reader.take(q.seconds)
    if not reader.accept("every"):
        raise reader.error("a stall needs its period: pass one like stall 2s every 60s", reader.word)
    return {"stall_seconds": length, "stall_every_seconds": reader.take(q.seconds)}


def _sets(**reads: Callable[[str], Any]) -> Callable[[_Reader], Settings]:
    """Read values by the names of what they set; all but the first may be missing."""
    return lambda reader: dict(zip(reads, reader.take_some(*reads.values()), strict=False))


def _chance(name: str) -> Callable[[_Reader], Settings]:
    return lambda reader: {name: Chance(*reader.take_some(q.share, q.share))}


_WORDS: dict[str, tuple[Callable[[_Reader], Settings], str]] = {
    "rate": (_Reader.rate, "rate RATE"),
    "burst": (_sets(burst=q.size), "burst SIZE"),
    "limit": (_sets(limit=q.size), "limit SIZE"),
    "latency": (_sets(latency=q.seconds), "latency TIME"),
    "mtu": (_sets(mtu=q.count), "mtu BYTES"),
    "delay": (
        _sets(delay_seconds=q.seconds, jitter_seconds=q.seconds, correlation=q.share),
        "delay TIME [JITTER [CORRELATION]]",
    ),
    "jitter": (_sets(jitter_seconds=q.seconds, correlation=q.share), "jitter TIME [CORRELATION]"),
    "distribution": (_sets(distribution=_distribution), f"distribution {'|'.join(DISTRIBUTIONS)}"),
    "overtaking": (lambda reader: {"overtaking": True}, "overtaking"),
    "loss": (_loss, "loss [random] PERCENT [CORRELATION] or loss gemodel P [R [1-H [1-K]]]"),
    "duplicate": (_chance("duplicate"), "duplicate PERCENT [CORRELATION]"),
    "corrupt": (_chance("corrupt"), "corrupt PERCENT [CORRELATION]"),
    "reorder": (_chance("reorder"), "reorder PERCENT [CORRELATION]"),
    "gap": (_sets(gap=q.count), "gap FRAMES"),
    "stall": (_stall, "stall TIME every TIME"),
}
"""For each word, the function that reads its values, and its description for users."""

_SYNONYMS = {
    "buffer": "burst", "maxburst": "burst", "drop": "loss", "duplication": "duplicate", "corruption": "corrupt",
    "reordering": "reorder",
}  # fmt: skip
"""tc's synonyms."""


_LINK_KEYS = ("rate", "burst", "limit", "latency", "mtu")


def _known_words() -> str:
    return f"known words are {', '.join([shown for _, shown in _WORDS.values()][1:])}"
