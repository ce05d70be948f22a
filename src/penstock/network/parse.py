"""Parse a link's text, in tc's words: "100mbit", "1gbit delay 5ms 1ms distribution pareto loss 0.1%".

The grammar is `RATE {WORD VALUE...}`, or two of these, `up RATE ... down RATE ...`. Each word is an entry of `_WORDS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.errors import ArgumentError
from penstock.network import quantities as q
from penstock.network.impairment import DISTRIBUTIONS, Bursts, Chance, Impairment
from penstock.network.link import BUFFER_BYTES, Link

_NOT_HERE = {
    "slot": "frames are not delayed to slots here: pass delay and jitter",
    "ecn": "frames are not marked here: pass loss alone",
    "seed": "the whole network has one seed: pass --link-seed",
    "netem": "leave that word out: what follows it means the same here",
}
"""netem's words that have no meaning here, and what to do instead."""


def parse_link(text: str) -> Link:
    """Parses a link: a rate, then any of the words that `words` lists.

    Rates, sizes and times are tc's: kbit, mbit, gbit, tbit are bits per second; kbps, mbps, gbps are BYTES per second;
    each takes an `i` for powers of 1024. A size of 16kb is 16 * 1024 bytes; a bare time is in microseconds. `latency`
    is the longest that a frame may wait in the queue, another way to give `limit`. What follows `delay`, `loss`,
    `duplicate`, `corrupt`, `reorder`, `gap` and `distribution` is as in netem; `jitter` and `stall TIME every TIME` are
    our own.

    Raises:
        ArgumentError: the text is not a link; the message points to the place.
    """
    words = [_Word(match[0], match.start()) for match in re.finditer(r"\S+", text)]
    if not words:
        raise ArgumentError(f"the link is empty: pass a rate, like 100mbit; {_more()}")
    ways = _ways(text, words)
    links = {way: _link(text, _read(text, part), part) for way, part in ways.items()}
    whole = " ".join(text.split())
    if "" in links:
        return replace(links[""], text=whole)
    up, down = links["up"], links["down"]
    if up.mtu != down.mtu:
        raise _error(text, ways["down"][0], f"down has an mtu of {down.mtu} and up one of {up.mtu}: give both the same")
    return replace(up, text=whole, down=down)


@dataclass(frozen=True, slots=True)
class _Word:
    text: str
    start: int

    @property
    def name(self) -> str:
        return self.text.lower()


@dataclass(slots=True)
class _Values:
    """The values that follow a word, taken one by one."""

    text: str
    word: _Word
    left: list[_Word]
    taken: list[_Word] = field(default_factory=list)

    def take(self, read: Callable[[str], Any]) -> Any:
        """Takes the next value, which is required."""
        if not self.left:
            last = self.taken[-1] if self.taken else self.word
            raise _error(self.text, last, f"{last.text!r} needs a value")
        word = self.left.pop(0)
        self.taken.append(word)
        try:
            return read(word.text)
        except ValueError as error:
            raise _error(self.text, word, str(error)) from None

    def some(self, read: Callable[[str], Any], *more: Callable[[str], Any]) -> list[Any]:
        """Takes the next value, which is required, and as many of those after it as there are."""
        found = [self.take(read)]
        for read in more:
            if not (self.left and self.left[0].text[:1].isdigit()):
                break
            found.append(self.take(read))
        return found

    def said(self, name: str) -> bool:
        """Whether the next word is this one; if so, take it."""
        if self.left and self.left[0].name == name:
            self.taken.append(self.left.pop(0))
            return True
        return False


Found = dict[str, Any]


def _rate(values: _Values) -> Found:
    found = {"rate": values.take(q.rate)}
    apart = values.left and values.left[0].name in q.RATES  # the error about the unit comes later
    if not apart and (wrong := q.hardly_meant(values.taken[-1].text)):
        raise _error(values.text, values.taken[-1], wrong)
    return found


def _distribution(text: str) -> str:
    if text.lower() not in DISTRIBUTIONS:
        raise ValueError(f"there is no distribution {text!r}: pass one of {', '.join(DISTRIBUTIONS)}")
    return text.lower()


def _loss(values: _Values) -> Found:
    if values.said("gemodel"):
        to_bad, *more = values.some(q.share, q.share, q.share, q.share)
        return {"loss": Bursts(to_bad, *(more or [1 - to_bad]))}
    values.said("random")
    return _chance("loss")(values)


def _stall(values: _Values) -> Found:
    length = values.take(q.seconds)
    if not values.said("every"):
        raise _error(values.text, values.word, "a stall needs its period: pass one like stall 2s every 60s")
    return {"stall_seconds": length, "stall_every_seconds": values.take(q.seconds)}


def _sets(**reads: Callable[[str], Any]) -> Callable[[_Values], Found]:
    """Reads values by the names of what they set; all but the first may be missing."""
    return lambda values: dict(zip(reads, values.some(*reads.values()), strict=False))


def _chance(name: str) -> Callable[[_Values], Found]:
    return lambda values: {name: Chance(*values.some(q.share, q.share))}


_WORDS: dict[str, tuple[Callable[[_Values], Found], str]] = {
    "rate": (_rate, "rate RATE"),
    "burst": (_sets(burst=q.size), "burst SIZE"),
    "buffer": (_sets(burst=q.size), ""),
    "maxburst": (_sets(burst=q.size), ""),
    "limit": (_sets(limit=q.size), "limit SIZE"),
    "latency": (_sets(latency=q.seconds), "latency TIME"),
    "mtu": (_sets(mtu=q.count), "mtu BYTES"),
    "delay": (
        _sets(delay_seconds=q.seconds, jitter_seconds=q.seconds, correlation=q.share),
        "delay TIME [JITTER [CORRELATION]]",
    ),
    "jitter": (_sets(jitter_seconds=q.seconds, correlation=q.share), "jitter TIME [CORRELATION]"),
    "distribution": (_sets(distribution=_distribution), f"distribution {'|'.join(DISTRIBUTIONS)}"),
    "overtaking": (lambda values: {"overtaking": True}, "overtaking"),
    "loss": (_loss, "loss [random] PERCENT [CORRELATION] or loss gemodel P [R [1-H [1-K]]]"),
    "drop": (_loss, ""),
    "duplicate": (_chance("duplicate"), "duplicate PERCENT [CORRELATION]"),
    "duplication": (_chance("duplicate"), ""),
    "corrupt": (_chance("corrupt"), "corrupt PERCENT [CORRELATION]"),
    "corruption": (_chance("corrupt"), ""),
    "reorder": (_chance("reorder"), "reorder PERCENT [CORRELATION]"),
    "reordering": (_chance("reorder"), ""),
    "gap": (_sets(gap=q.count), "gap FRAMES"),
    "stall": (_stall, "stall TIME every TIME"),
}
"""For each word, the function that reads its values, and its description for users; "" for tc's synonyms."""


def words() -> list[str]:
    """Returns all words that a link's text may have after its rate, with their values."""
    return [shown for _, shown in _WORDS.values() if shown][1:]


def _ways(text: str, all_words: list[_Word]) -> dict[str, list[_Word]]:
    """Splits the words by direction; the key is "" if the text has no directions."""
    marks = [place for place, word in enumerate(all_words) if word.name in ("up", "down")]
    if not marks:
        return {"": all_words}
    if marks[0] != 0:
        raise _error(text, all_words[marks[0]], "what comes before this has no direction: begin with up or down")
    found: dict[str, list[_Word]] = {}
    for place, end in zip(marks, [*marks[1:], len(all_words)], strict=True):
        mark, part = all_words[place], all_words[place + 1 : end]
        if mark.name in found:
            raise _error(text, mark, f"{mark.text!r} is given twice")
        if not part:
            raise _error(text, mark, f"nothing follows {mark.text!r}: pass a rate, like 100mbit")
        found[mark.name] = part
    for way, other in (("up", "down"), ("down", "up")):
        if way not in found:
            said = f"{other!r} sets only one direction: pass {way!r} as well"
            raise _error(text, all_words[0], said)
    return found


def _read(text: str, given: list[_Word]) -> Found:
    """Returns what each word sets."""
    left = list(given)
    if left[0].name not in _WORDS and left[0].name not in _NOT_HERE:
        left.insert(0, _Word("rate", left[0].start))
    found: Found = {}
    while left:
        word = left.pop(0)
        read = _reader(text, word)
        values = _Values(text, word, left)
        new = read(values)
        twice = next((name for name in new if name in found), None)
        if twice is not None:
            raise _error(text, word, f"{word.text!r} sets the {twice.removesuffix('_seconds')} again: pass it once")
        found |= new
    return found


def _reader(text: str, word: _Word) -> Callable[[_Values], Found]:
    if word.name in _NOT_HERE:
        raise _error(text, word, _NOT_HERE[word.name])
    if word.name in _WORDS:
        return _WORDS[word.name][0]
    if word.name in q.RATES:
        raise _error(text, word, f"a rate has no space before its unit {word.text!r}")
    raise _error(text, word, f"{word.text!r} is not a word of a link; {_more()}")


_OF_LINK = ("rate", "burst", "limit", "latency", "mtu")


def _link(text: str, found: Found, part: list[_Word]) -> Link:
    whole = _Word(text[part[0].start : part[-1].start + len(part[-1].text)], part[0].start)
    named = {word.name: word for word in part}
    if "rate" not in found:
        raise _error(text, whole, "no rate is given: begin with one, like 100mbit")
    if "limit" in found and "latency" in found:
        raise _error(text, named["latency"], "'limit' and 'latency' mean the same: pass one of them")
    if "distribution" in found and "jitter_seconds" not in found:
        raise _error(text, named["distribution"], "a distribution applies to jitter: pass delay 5ms jitter 1ms, say")
    if "gap" in found and "reorder" not in found:
        raise _error(text, named["gap"], "a gap applies to reordered frames: pass reorder 1%, say")
    try:
        impairment = Impairment(**{name: value for name, value in found.items() if name not in _OF_LINK})
        link = Link(
            found["rate"],
            burst_bytes=int(found["burst"]) if "burst" in found else None,
            limit_bytes=int(found.get("limit", BUFFER_BYTES)),
            mtu=found.get("mtu", 1500),
            mtu_is_given="mtu" in found,
            impairment=impairment,
        )
        if "latency" not in found:
            return link
        # As in tc: what leaves in that time, plus the bucket.
        return replace(link, limit_bytes=int(link.bytes_per_second * found["latency"]) + link.burst)
    except ArgumentError as error:
        raise _error(text, whole, str(error)) from None


def _more() -> str:
    return f"known words are {', '.join(words())}"


def _error(text: str, at: _Word, said: str) -> ArgumentError:
    shown = text.replace("\n", " ").replace("\t", " ")
    return ArgumentError(
        f"the link, at position {at.start + 1}: {said}\n    {shown}\n    {' ' * at.start}{'^' * len(at.text)}"
    )
