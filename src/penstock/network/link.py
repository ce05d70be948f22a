"""A host's link to the switch: its rate and queue, and what happens to frames on it. parse.py parses its text.

benchmarks/fabric/README.md shows how well tbf keeps the rate, and why its buckets have these sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock._base.errors import ArgumentError
from penstock.network.impairment import NOTHING, Impairment

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
        """Returns tc's arguments for a host. `exact`: behind it is a user-space switch, which keeps the rate itself."""
        return self._tbf(self.port_burst if exact else self.burst, max(self.limit_bytes, HOST_BYTES))

    def port_tbf(self) -> str:
        """Returns tc's arguments for the switch's port."""
        return self._tbf(self.port_burst, self.limit_bytes)

    def _tbf(self, burst: int, limit: int) -> str:
        return f"tbf rate {round(self.bytes_per_second * 8)}bit burst {burst}b limit {limit}b"

    def __str__(self) -> str:
        return self.text or f"{round(self.bytes_per_second * 8)}bit"
