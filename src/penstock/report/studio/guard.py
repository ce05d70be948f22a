"""The checks that every request passes before anything is looked up.

A page elsewhere can make a reader's browser send requests here. It cannot read answers, as none allows another origin,
but it could keep the machine busy, or be taken for this server by a name that it makes point here (DNS rebinding). So a
request names exactly this server and its port in `Host`, comes from its own pages if it has an origin, and only
reads. Other users of the machine can connect, too, so a request carries the token, unless it is for the page itself or
its scripts. These read the token in the fragment of the link, which no browser sends; `ENTER` leaves it in a cookie.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass

COOKIE = "penstock-studio"
"""The name of the token's cookie, before the port: cookies of two ports of one host are the same otherwise."""

ENTER = "/api/enter"

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response: no other origin is allowed anything, and pages run and load only what is served here."""


@dataclass(frozen=True, slots=True)
class Guard:
    """The rules of one server.

    Attributes:
        host: the address it is bound to.
        port: its port.
        token: what requests must carry.
        names: the allowed names in `Host`, without the port.
    """

    host: str
    port: int
    token: str
    names: frozenset[str]

    @classmethod
    def of(cls, host: str, port: int, token: str) -> Guard:
        """Build the guard of a server on this machine, which is also called by its own names unless it is bound to
        loopback."""
        own_names = [] if is_loopback(host) else [socket.gethostname(), socket.getfqdn()]
        return cls(host, port, token, frozenset(map(format_host, [host, "localhost", "127.0.0.1", "::1", *own_names])))

    @property
    def cookie(self) -> str:
        return f"{COOKIE}-{self.port}"

    def refusal(
        self, method: str, path: str, headers: Mapping[str, str], cookies: Mapping[str, str]
    ) -> tuple[int, str] | None:
        """Return the status and the reason with which a request is refused; None if it is allowed.

        Args:
            headers: by name in lower case.
        """
        host = headers.get("host", "")
        if not self._is_this_server(host):
            hint = f"open it by its address and port {self.port}, or by the name given to --host"
            return 421, f"Host {host[:80]!r} is not this server: {hint}"
        if method not in ("GET", "HEAD"):
            return 405, f"{method[:20]}: the studio only reads; use GET"
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in (f"http://{host.lower()}", f"https://{host.lower()}"):
            return 403, f"requests from pages of {origin[:80]!r} are refused"
        navigates = (
            headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest", "document") == "document"
        )
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not navigates:
            return 403, "requests from pages of other sites are refused"
        if path != "/" and not path.startswith("/static/") and not self._has_token(headers, cookies):
            return 401, "the token is missing or wrong: open the link that penstock studio printed"
        return None

    def _has_token(self, headers: Mapping[str, str], cookies: Mapping[str, str]) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        tokens = (cookies.get(self.cookie, ""), bearer if scheme.lower() == "bearer" else "")
        return any(hmac.compare_digest(token.encode(), self.token.encode()) for token in tokens)

    def _is_this_server(self, host: str) -> bool:
        name = host.lower().removesuffix(f":{self.port}")
        if name == host.lower() and self.port != 80:
            return False
        return name in self.names or (not is_loopback(self.host) and _is_address(name))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host: localhost, 127.0.0.1, ::1."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def format_host(host: str) -> str:
    """Format a host for an address: IPv6 in brackets."""
    return f"[{host}]".lower() if ":" in host else host.lower()


def _is_address(name: str) -> bool:
    """Whether a name is an IP address, which no other site can make point here."""
    try:
        return format_host(str(ipaddress.ip_address(name.strip("[]")))) == name
    except ValueError:
        return False
