"""What joins a host to the switch: its rate and queue, and what frames meet on it. parse.py reads it from a text.

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
from dataclasses import dataclass

from penstock.errors import ArgumentError
from penstock.network.impairment import NOTHING, Impairment

_ETHERNET, _HEADERS = 14, 52
"""Bytes of an Ethernet header, as tbf counts frames, and of IPv4 and TCP with time stamps."""

BUFFER_BYTES = 1024 * 1024
"""Of the switch's queue towards a host if the text says nothing."""

HOST_BYTES = 16 * 1024 * 1024
"""Of a host's own queue, at least: TCP keeps it short, and a host does not drop what it has not sent yet."""

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
        mtu_is_given: somebody asked for that one.
        text: as it was given.
        impairment: what frames meet beside the rate.
        down: from the switch to the host, if that differs.

    Raises:
        ArgumentError: a value with which no frame could pass.
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

    @property
    def varies(self) -> bool:
        """Whether one frame is delayed for longer than another, in either direction."""
        return self.impairment.varies or (self.down is not None and self.down.varies)

    def wire_bytes(self, size: int) -> int:
        """What a message costs on the link when TCP fills its segments; without the acknowledgements coming back."""
        return size + math.ceil(size / (self.mtu - _HEADERS)) * (_HEADERS + _ETHERNET)

    def tbf(self) -> str:
        """The words for tc at a host."""
        return self._tbf(self.burst, max(self.limit_bytes, HOST_BYTES))

    def host_tbf(self) -> str:
        """The words for tc at a host before a switch in user space, which keeps the rate to the frame."""
        return self._tbf(self.port_burst, max(self.limit_bytes, HOST_BYTES))

    def port_tbf(self) -> str:
        """The words for tc at the switch's port."""
        return self._tbf(self.port_burst, self.limit_bytes)

    def _tbf(self, burst: int, limit: int) -> str:
        return f"tbf rate {round(self.bytes_per_second * 8)}bit burst {burst}b limit {limit}b"

    def __str__(self) -> str:
        return self.text or f"{round(self.bytes_per_second * 8)}bit"
