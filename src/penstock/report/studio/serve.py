"""Runs the studio until it is told to end."""

from __future__ import annotations

import contextlib
import secrets
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from penstock._base.errors import ArgumentError
from penstock.report.studio.app import Studio
from penstock.report.studio.guard import Guard, in_address
from penstock.report.studio.library import Library


@dataclass(frozen=True, slots=True)
class Server:
    """A studio that is bound to its address.

    Attributes:
        address: without the token.
    """

    socket: socket.socket
    guard: Guard
    address: str
    library: Library

    @property
    def link(self) -> str:
        """What to open: the token is in the fragment, which no browser sends or logs on its way."""
        return f"{self.address}#token={self.guard.token}"

    def made(self) -> uvicorn.Server:
        """What serves, to be run with `sockets=[self.socket]`."""
        config = uvicorn.Config(
            Studio(self.library, self.guard).app(),
            http="h11",
            log_level="warning",
            access_log=False,
            server_header=False,
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


def bind(host: str, port: int, runs: Path) -> Server:
    """Binds the studio to an address.

    Args:
        host: loopback, unless others are to reach it.
        port: 0: any that is free.
        runs: the folder whose runs, plans and traces can be opened.

    Raises:
        ArgumentError: the address is in use, or not one of this machine's.
    """
    bound = _bound(host, port)
    port = bound.getsockname()[1]
    shown = host if host not in ("0.0.0.0", "::") else socket.gethostname()
    guard = Guard.of(host, port, secrets.token_urlsafe(24))
    return Server(bound, guard, f"http://{in_address(shown)}:{port}/", Library(runs))


@contextlib.contextmanager
def redirecting(link: str) -> Iterator[str]:
    """The address of a file that only this user can read, and that leads a browser to a link: `ps` shows arguments."""
    with tempfile.TemporaryDirectory(prefix="penstock-studio-") as folder:
        file = Path(folder, "open.html")
        file.write_text(f'<meta http-equiv="refresh" content="0; url={link}"><a href="{link}">Penstock studio</a>')
        yield file.as_uri()


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
    except OSError as error:
        raise ArgumentError(f"--host {host}: {error.strerror or error}; pass an address of this machine") from None
    made = socket.socket(family, kind)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(64)
    except OSError as error:
        made.close()
        hint = "pass another with --port, or 0 for any that is free" if port else "pass an address of this machine"
        raise ArgumentError(f"--host {host} --port {port}: {error.strerror or error}; {hint}") from None
    return made
