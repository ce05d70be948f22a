"""A host's link to the switch: its rate and queue, and what happens to frames on it, in the terms of tc netem.

These are only values: parse.py parses their text, and frame_fates.py draws from them.

benchmarks/fabric/README.md shows how well tbf keeps the rate, and why its buckets have these sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock._base.errors import ArgumentError

DISTRIBUTIONS = ("uniform", "normal", "pareto", "paretonormal")
"""Distributions of the jitter, as in netem."""


@dataclass(frozen=True, slots=True)
class Chance:
    """The chance that something happens to a frame.

    Attributes:
        share: the fraction of frames affected, 0..1.
        correlation: how likely a frame is to share the fate of the one before it, 0..1. Unlike netem's formula, this
            leaves `share` unchanged.
    """

    share: float = 0.0
    correlation: float = 0.0


NEVER = Chance()


@dataclass(frozen=True, slots=True)
class Bursts:
    """Loss by the Gilbert-Elliott model, netem's `loss gemodel`. All values are probabilities per frame, 0..1.

    Attributes:
        to_bad: the good state turns bad (p).
        to_good: the bad state turns good (r).
        loss_in_bad: a frame is lost in the bad state (1-h).
        loss_in_good: a frame is lost in the good state (1-k).
    """

    to_bad: float
    to_good: float
    loss_in_bad: float = 1.0
    loss_in_good: float = 0.0


@dataclass(frozen=True, slots=True)
class Impairment:
    """What happens to frames in one direction.

    Attributes:
        delay_seconds: the delay of every frame.
        jitter_seconds: the unit of the distribution: for uniform, the delay varies by up to this much either way; for
            the others, it is the standard deviation before the tails are cut off at four times the jitter.
        correlation: of the jitter, 0..1, as in `Chance`.
        distribution: one of `DISTRIBUTIONS`.
        overtaking: if True, a frame with a shorter delay passes those ahead of it, as in netem without a rate;
            otherwise it waits for them, so under load jitter turns into delay.
        loss, duplicate, corrupt, reorder: chances per frame. A reordered frame is not delayed and overtakes others; no
            other frame overtakes one.
        gap: the least distance in frames between two reordered frames.
        stall_seconds, stall_every_seconds: how long nothing leaves, and how often; the first stall comes after a whole
            period.

    Raises:
        ArgumentError: the values contradict each other.
    """

    delay_seconds: float = 0.0
    jitter_seconds: float = 0.0
    correlation: float = 0.0
    distribution: str = "uniform"
    overtaking: bool = False
    loss: Chance | Bursts = NEVER
    duplicate: Chance = NEVER
    corrupt: Chance = NEVER
    reorder: Chance = NEVER
    gap: int = 1
    stall_seconds: float = 0.0
    stall_every_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.overtaking and not self.jitter_seconds:
            raise ArgumentError(
                "without jitter no frame overtakes another: with overtaking also pass jitter, such as jitter 1ms"
            )
        if self.reorder.share and not self.delay_seconds:
            raise ArgumentError(
                "without a delay no frame can overtake another: with reorder also pass delay, such as delay 5ms"
            )
        if self.stall_seconds and self.stall_seconds >= self.stall_every_seconds:
            raise ArgumentError(
                f"a stall of {self.stall_seconds:g} s every {self.stall_every_seconds:g} s never ends: pass a longer "
                "period"
            )
        if self.gap < 1:
            raise ArgumentError(f"gap is {self.gap}: pass an integer >= 1")

    def __bool__(self) -> bool:
        return self != NOTHING

    @property
    def longest_seconds(self) -> float:
        """The longest delay of a frame, apart from stalls."""
        return self.delay_seconds + self._spread_seconds

    @property
    def shortest_seconds(self) -> float:
        """The shortest delay of a frame; 0 if frames may be reordered."""
        return 0.0 if self.reorder.share else max(self.delay_seconds - self._spread_seconds, 0.0)

    @property
    def varies(self) -> bool:
        """Whether frames differ in their delay."""
        return bool(self.jitter_seconds or self.reorder.share)

    @property
    def _spread_seconds(self) -> float:
        return self.jitter_seconds * (1 if self.distribution == "uniform" else 4)


NOTHING = Impairment()


# -- links -------------------------------------------------------------------------------------------------------------

_ETHERNET, _HEADERS = 14, 52
"""The bytes of an Ethernet header as tbf counts frames, and of IPv4 and TCP headers with time stamps."""

BUFFER_BYTES = 1024 * 1024
"""The default size of the switch's queue to a host."""

HOST_BYTES = 16 * 1024 * 1024
"""The least size of a host's own queue: TCP keeps it short, and a host does not drop what it has not sent yet."""

BURST_SECONDS = 50e-6
PORT_SECONDS = 200e-6
"""How late the shapers of a host and of the switch's port may wake up without losing rate; see `Link.burst`."""


@dataclass(frozen=True, slots=True)
class Link:
    """One link, the same in both directions unless `down` is given.

    Between two hosts with the same link, a frame meets the impairment only once, on its way to the switch. What the
    text says is therefore what two hosts measure, one way. See `Topology`.

    Attributes:
        bytes_per_second: of whole Ethernet frames (with header, without preamble and checksum), as tbf counts them.
        burst_bytes: the size of tbf's bucket; None for the default of `burst`.
        limit_bytes: the size of the switch's queue to a host; frames that arrive when it is full are dropped.
        mtu: the bytes of the largest IP packet.
        mtu_is_given: whether the mtu was given explicitly.
        text: the link's text as given.
        impairment: what happens to frames besides the rate.
        down: the link from the switch to the host, if it differs.

    Raises:
        ArgumentError: no frame could pass with one of the values.
    """

    bytes_per_second: float
    burst_bytes: int | None = None
    limit_bytes: int = BUFFER_BYTES
    mtu: int = 1500
    mtu_is_given: bool = False
    text: str = ""
    impairment: Impairment = NOTHING
    down: Link | None = None

    def __post_init__(self) -> None:
        if not (1 <= self.bytes_per_second < 2**63 / 8):
            raise ArgumentError(f"the rate is {self.bytes_per_second:g} bytes per second: pass at least 8bit")
        if not 576 <= self.mtu <= 65535:
            raise ArgumentError(f"the mtu is {self.mtu}: pass 576 to 65535")
        for word, size in (("burst", self.burst_bytes), ("limit", self.limit_bytes)):
            if size is not None and not self.frame_bytes <= size < 2**32:
                raise ArgumentError(
                    f"{word} is {size} bytes, but a frame has up to {self.frame_bytes} (mtu {self.mtu} and an Ethernet "
                    f"header), so full frames would not pass: use {word} {self.frame_bytes} or more, below 4gb"
                )

    @property
    def frame_bytes(self) -> int:
        """The size of the largest frame."""
        return self.mtu + _ETHERNET

    @property
    def burst(self) -> int:
        """The bytes of a host's tbf bucket: as given, or two frames plus what the link carries in `BURST_SECONDS`."""
        if self.burst_bytes is not None:
            return self.burst_bytes
        return 2 * self.frame_bytes + int(self.bytes_per_second * BURST_SECONDS)

    @property
    def port_burst(self) -> int:
        """The bytes of the tbf bucket at the switch's port to a host.

        It is larger than `burst` by what the link carries in `PORT_SECONDS`: frames that the sender's tbf releases
        late, and so all at once, must not lose time again.
        """
        return self.burst + int(self.bytes_per_second * PORT_SECONDS)

    @property
    def goodput_ratio(self) -> float:
        """The fraction of the rate left for TCP's payload: 0.956 with an mtu of 1500."""
        return (self.mtu - _HEADERS) / self.frame_bytes

    @property
    def varies(self) -> bool:
        """Whether frames differ in their delay, in either direction."""
        return self.impairment.varies or (self.down is not None and self.down.varies)

    def host_tbf(self, *, exact: bool) -> str:
        """Return tc's arguments for a host. `exact`: behind it is a user-space switch, which keeps the rate itself."""
        return self._tbf(self.port_burst if exact else self.burst, max(self.limit_bytes, HOST_BYTES))

    def port_tbf(self) -> str:
        """Return tc's arguments for the switch's port."""
        return self._tbf(self.port_burst, self.limit_bytes)

    def _tbf(self, burst: int, limit: int) -> str:
        return f"tbf rate {round(self.bytes_per_second * 8)}bit burst {burst}b limit {limit}b"

    def __str__(self) -> str:
        return self.text or f"{round(self.bytes_per_second * 8)}bit"
