"""Who may ask: the checks that every request passes before anything is looked up.

A page elsewhere can make a reader's browser send requests here. It cannot read answers, as none allows another origin,
but it could keep the machine busy, or be taken for this server by a name that it makes point here (DNS rebinding). So a
request names this server in `Host` by an address or a name of its own, comes from its own pages if it says from where,
and only reads. On any other address than a loopback one, it also carries the token.
"""

from __future__ import annotations

import hmac
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

COOKIE = "penstock-studio"
"""The name of the token's cookie, before the port: cookies of two ports of one host are the same otherwise."""

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Of every response. No other origin is allowed anything, and no page may run or load what is not served here."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is refused."""

    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class Guard:
    """The rules of one server.

    Attributes:
        host: what it is bound to.
        port: where.
        token: what requests must carry; None: none.
        names: host names that are this machine's.
    """

    host: str
    port: int
    token: str | None
    names: frozenset[str] = frozenset()

    @classmethod
    def of(cls, host: str, port: int, token: str | None) -> Guard:
        """For a server on this machine, which is also called by its own names unless it is bound to loopback."""
        own = (
            {host.lower()}
            if is_loopback(host)
            else {host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
        )
        return cls(host, port, token, frozenset(own))

    @property
    def cookie(self) -> str:
        return f"{COOKIE}-{self.port}"

    def refuses(
        self, method: str, headers: Mapping[str, str], query: Mapping[str, str], cookies: Mapping[str, str]
    ) -> Refusal | None:
        """Why a request is refused; None: it is not.

        Args:
            headers: by name in lower case.
            query: the parameters of the address.
        """
        host = headers.get("host", "")
        if not self._is_own(host):
            return Refusal(
                421,
                f"Host {host[:80]!r} is not this server: open it by its address, or by the name given to --host",
            )
        if method not in ("GET", "HEAD"):
            return Refusal(405, f"{method[:20]}: the studio only reads; use GET")
        origin = headers.get("origin")
        if origin is not None and not _same(origin, host):
            return Refusal(403, f"requests from pages of {origin[:80]!r} are refused")
        navigates = (
            headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest", "document") == "document"
        )
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not navigates:
            return Refusal(403, "requests from pages of other sites are refused")
        if self.token is not None and not self._has_token(headers, query, cookies):
            return Refusal(401, "the token is missing or wrong: open the link that penstock studio printed")
        return None

    def brought(self, query: Mapping[str, str]) -> bool:
        """Whether an address carries the right token, which then goes into a cookie."""
        return self.token is not None and _equal(query.get("token", ""), self.token)

    def _has_token(self, headers: Mapping[str, str], query: Mapping[str, str], cookies: Mapping[str, str]) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = (query.get("token", ""), cookies.get(self.cookie, ""), bearer if scheme.lower() == "bearer" else "")
        return any(_equal(one, self.token or "") for one in given)

    def _is_own(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:
            return False
        if name is None:
            return False
        if is_loopback(name):
            return True
        return name in self.names or (not is_loopback(self.host) and _is_address(name))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host: localhost, 127.0.0.1, ::1."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _is_address(name: str) -> bool:
    """An address is what no other can make point here."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _same(origin: str, host: str) -> bool:
    scheme, _, rest = origin.partition("://")
    return scheme in ("http", "https") and rest.lower() == host.lower()


def _equal(given: str, token: str) -> bool:
    return bool(token) and hmac.compare_digest(given.encode(), token.encode())
