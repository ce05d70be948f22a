"""Moves values between ranks: the protocols, three transports, and what both ends of a channel agree on.

Your own transport needs only the names below (docs/extending.md shows one).
"""

from penstock.runtime.transport.agreement import Agreement, from_bytes, to_bytes
from penstock.runtime.transport.protocol import (
    Channel,
    Collectives,
    Endpoint,
    Message,
    Pending,
    PointToPoint,
    Transport,
    TransportFactory,
)

__all__ = [
    "Agreement",
    "Channel",
    "Collectives",
    "Endpoint",
    "Message",
    "Pending",
    "PointToPoint",
    "Transport",
    "TransportFactory",
    "from_bytes",
    "to_bytes",
]
