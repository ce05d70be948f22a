"""What joins a host to the switch: its rate and queue, and what happens to frames on it. parse.py parses its text.

How well tbf keeps the rate, and why its buckets have these sizes: benchmarks/fabric/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ArgumentError
from penstock.network.impairment import NOTHING, Impairment

_ETHERNET, _HEADERS = 14, 52
"""Bytes of an Ethernet header, as tbf counts frames, and of IPv4 and TCP with time stamps."""

BUFFER_BYTES = 1024 * 1024
"""Of the switch's queue to a host, unless the text says otherwise."""

HOST_BYTES = 16 * 1024 * 1024
"""Least size of a host's own queue: TCP keeps it short, and a host does not drop what it has not sent yet."""

BURST_SECONDS = 50e-6
PORT_SECONDS = 200e-6
"""How late the shaper of a host, and that of the switch's port, may wake without losing rate: see `Link.burst`."""


@dataclass(frozen=True, slots=True)
class Link:
    """One link, the same in both directions unless `down` is given.

    Between two hosts that have the same link, a frame meets the impairment once, on its way to the switch, so that
    what is written is what two hosts measure, one way. See `Network`.

    Attributes:
        bytes_per_second: of whole Ethernet frames (header, no preamble or checksum), as tbf counts them.
        burst_bytes: of tbf's bucket, or None for `burst`'s choice.
        limit_bytes: of the switch's queue towards a host; what comes when it is full is dropped.
        mtu: bytes of the largest IP packet.
        mtu_is_given: the mtu was requested explicitly.
        text: as given.
        impairment: what happens to frames besides the rate.
        down: from the switch to the host, if that differs.

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
        """Size of the largest frame."""
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

        Larger by what the link carries in `PORT_SECONDS`: frames that the sender's tbf releases late, and so at once,
        must not lose time again.
        """
        return self.burst + int(self.bytes_per_second * PORT_SECONDS)

    @property
    def goodput_ratio(self) -> float:
        """The share of the rate that is left for what TCP carries: 0.956 with an mtu of 1500."""
        return (self.mtu - _HEADERS) / self.frame_bytes

    @property
    def varies(self) -> bool:
        """Whether one frame is delayed for longer than another, in either direction."""
        return self.impairment.varies or (self.down is not None and self.down.varies)

    def tbf(self) -> str:
        """The words for tc on a host."""
        return self._tbf(self.burst, max(self.limit_bytes, HOST_BYTES))

    def host_tbf(self) -> str:
        """The words for tc on a host behind a switch in user space, which keeps the rate to the frame."""
        return self._tbf(self.port_burst, max(self.limit_bytes, HOST_BYTES))

    def port_tbf(self) -> str:
        """The words for tc at the switch's port."""
        return self._tbf(self.port_burst, self.limit_bytes)

    def _tbf(self, burst: int, limit: int) -> str:
        return f"tbf rate {round(self.bytes_per_second * 8)}bit burst {burst}b limit {limit}b"

    def __str__(self) -> str:
        return self.text or f"{round(self.bytes_per_second * 8)}bit"
