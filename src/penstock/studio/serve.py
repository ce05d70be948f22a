"""Runs the studio until it is told to end."""

from __future__ import annotations

import asyncio
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from penstock.errors import ArgumentError
from penstock.studio.app import Studio
from penstock.studio.guard import Guard, is_loopback
from penstock.studio.library import Library

_AT_ONCE = 64
"""Connections; more are refused until some have been closed."""
_PATIENCE_SECONDS = 10.0
"""For the next request of a connection."""


class Impatient(H11Protocol):
    """Connections whose requests come within seconds: others are closed, so that they keep nobody else out."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._answered: object = None
        self._look_again()

    def _look_again(self) -> None:
        self._look = self.loop.call_later(_PATIENCE_SECONDS, self._close_if_idle)

    def _close_if_idle(self) -> None:
        busy = self.cycle is not None and not self.cycle.response_complete
        if self.transport.is_closing():
            return
        if not busy and self.cycle is self._answered:
            self.transport.close()
        else:
            self._answered = self.cycle
            self._look_again()

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        super().connection_lost(exc)


@dataclass(frozen=True, slots=True)
class Server:
    """A studio that is bound to its address.

    Attributes:
        link: the address to open, with the token if one is needed.
    """

    socket: socket.socket
    guard: Guard
    link: str
    library: Library

    def made(self) -> uvicorn.Server:
        """What serves, to be run with `sockets=[self.socket]`."""
        config = uvicorn.Config(
            Studio(self.library, self.guard).app(),
            http=Impatient,
            log_level="warning",
            access_log=False,
            server_header=False,
            limit_concurrency=_AT_ONCE,
            h11_max_incomplete_event_size=16 << 10,
            timeout_graceful_shutdown=1,
        )
        return uvicorn.Server(config)

    def run(self) -> None:
        """Serves until SIGINT or SIGTERM. The socket takes connections from the beginning."""
        try:
            self.made().run(sockets=[self.socket])
        except KeyboardInterrupt:
            pass  # uvicorn has ended everything, and then raises what it caught
        finally:
            self.socket.close()


def bind(host: str, port: int, runs: Path, *, with_token: bool = False) -> Server:
    """Binds the studio to an address.

    Args:
        host: loopback, unless others are to reach it; then it needs a token.
        port: 0: any that is free.
        runs: the folder whose runs, plans and traces can be opened.
        with_token: whether loopback needs a token too.

    Raises:
        ArgumentError: the address is in use, or not one of this machine's.
    """
    token = secrets.token_urlsafe(24) if with_token or not is_loopback(host) else None
    bound = _bound(host, port)
    port = bound.getsockname()[1]
    shown = host if host not in ("0.0.0.0", "::") else socket.gethostname()
    link = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/" + (f"?token={token}" if token else "")
    return Server(bound, Guard.of(host, port, token), link, Library(runs))


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
    except OSError as error:
        raise ArgumentError(f"--host {host}: {error.strerror or error}; give an address of this machine") from None
    made = socket.socket(family, kind)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(64)
    except OSError as error:
        made.close()
        hint = "give another with --port, or 0 for any that is free" if port else "give an address of this machine"
        raise ArgumentError(f"--host {host} --port {port}: {error.strerror or error}; {hint}") from None
    return made
