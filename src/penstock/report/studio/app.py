"""The studio's routes, each of which asks the guard, parses its query and answers it; and its server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import socket
import tempfile
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock._base.errors import ArgumentError, PenstockError
from penstock._base.files import finite
from penstock.report.frame import base_style
from penstock.report.studio import answers, background, live
from penstock.report.studio.guard import ENTER, HEADERS, Guard, format_host
from penstock.report.studio.library import Library
from penstock.report.studio.query import SimulationQuery, parse_integer, parse_number

_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
PAGE = "penstock-page"
"""A header of the page's own queries: an error then has status 200, like other answers."""
_MAX_ADDRESS = 4000
"""Maximum length of the query in an address."""
_MAX_WAITING = 8
"""Maximum length of a queue. Each page sends one query of a kind at a time."""


@cache
def assets() -> Mapping[str, tuple[str, str]]:
    """Return the scripts and styles of the page, with their types, by folder and name. Nothing else is served from
    here."""
    contents = {"studio/base.css": ("text/css", base_style())}
    for folder in ("web", "studio"):
        for file in files(f"penstock.report.{folder}").joinpath("static").iterdir():
            kind = _TYPES.get(file.name[file.name.rfind(".") :])
            if kind is not None:
                contents[f"{folder}/{file.name}"] = (kind, file.read_text(encoding="utf-8"))
    return contents


class Studio:
    """The answers to requests.

    Args:
        library: the runs folder.
        guard: the checks of every request.
    """

    def __init__(self, library: Library, guard: Guard) -> None:
        self.library, self.guard = library, guard

    def app(self) -> ASGIApp:
        simulations, searches = WorkQueue(), WorkQueue()
        routes = [
            Route("/", _page),
            Route(ENTER, self.enter),
            Route("/static/{folder}/{name}", _static),
            _route("/api/catalog", lambda parameters: answers.catalog()),
            _route("/api/simulate", lambda parameters: answers.simulate(SimulationQuery.of(parameters)), simulations),
            _route("/api/walk", lambda parameters: answers.walk(SimulationQuery.of(parameters)), simulations),
            _route("/api/search", _search, searches),
            _route("/api/library", lambda parameters: self._entries()),
            _route("/api/open", self._open, WorkQueue()),
            _route("/api/live", self._live),
            _route("/export/{kind}", _export, simulations, searches),
            _route("/report", self._report, WorkQueue()),
        ]
        return Guarded(Starlette(routes=routes), self.guard)

    async def enter(self, request: Request) -> Response:
        response = _json({})
        response.set_cookie(self.guard.cookie, self.guard.token, httponly=True, samesite="strict")
        return response

    def _entries(self) -> Any:
        return {"folder": self.library.root.name, "entries": self.library.entries()}

    def _open(self, parameters: dict[str, str]) -> Any:
        name, step = parameters.pop("name", ""), _pop_step(parameters)
        what_ifs = [change for change in parameters.pop("what_if", "").split("|") if change]
        _reject_unknown(parameters)
        return self.library.read(name, lambda path: background.read("open_view", path, name, step, what_ifs))

    def _live(self, parameters: dict[str, str]) -> Any:
        name, offset = parameters.pop("name", ""), parse_integer("place", parameters.pop("place", "0"))
        _reject_unknown(parameters)
        return self.library.read(name, lambda path: live.live(path, offset), live.PARTS)

    def _report(self, parameters: dict[str, str]) -> Response:
        name, step = parameters.pop("name", ""), _pop_step(parameters)
        _reject_unknown(parameters)
        text = self.library.read(name, lambda path: background.read("report", path, step))
        return Response(text, media_type="text/html", headers={"Content-Security-Policy": policy(text)})


class Guarded:
    """Asks the guard before each request, and gives every response its headers."""

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app, self._guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return  # the studio has no web sockets

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        request = Request(scope)
        refusal = self._guard.refusal(request.method, scope["path"], request.headers, request.cookies)
        if refusal is None and len(scope["query_string"]) > _MAX_ADDRESS:
            answer: ASGIApp = _json({"error": f"the address is longer than {_MAX_ADDRESS} characters"}, 414)
        elif refusal is not None:
            answer = _json({"error": refusal[1]}, refusal[0])
        else:
            answer = self._app
        await answer(scope, receive, with_headers)


def _route(
    path: str,
    answer: Callable[[dict[str, str]], Any],
    queue: WorkQueue | None = None,
    search_queue: WorkQueue | None = None,
) -> Route:
    """Build the route that answers queries of a kind: with a response, a value for JSON, or an error. Without a queue
    it is quick, and waits for nothing; queries about a search's schedule may use the searches' own queue."""

    async def respond(request: Request) -> Response:
        def act() -> Response:
            result = answer(_parameters(request))
            return result if isinstance(result, Response) else _json(result)

        is_search = request.query_params.get("schedule") == answers.SEARCHED
        chosen_queue = search_queue if search_queue is not None and is_search else queue
        try:
            return await (run_in_threadpool(act) if chosen_queue is None else chosen_queue.run(request, act))
        except (PenstockError, QueueFullError) as error:
            status = 503 if isinstance(error, QueueFullError) else 400
            return _json({"error": str(error)}, 200 if request.headers.get(PAGE) else status)

    return Route(path, respond)


def _parameters(request: Request) -> dict[str, str]:
    """Return the parameters of an address. Raise ArgumentError if one is repeated."""
    items = request.query_params.multi_items()
    if len(parameters := dict(items)) < len(items) or parameters.keys() & request.path_params.keys():
        raise ArgumentError("a parameter is repeated; pass each once")
    return parameters | request.path_params


def _reject_unknown(parameters: Mapping[str, str]) -> None:
    if parameters:
        raise ArgumentError(f"{min(parameters)!r} is not a parameter of this address")


def _pop_step(parameters: dict[str, str]) -> int | None:
    return parse_integer("step", step) if (step := parameters.pop("step", "")) else None


def _pop_search(parameters: dict[str, str]) -> tuple[str, float]:
    """Remove and return the placement and the seconds of a search."""
    return parameters.pop("placement", "loop"), parse_number("seconds", parameters.pop("seconds", "1"))


def _search(parameters: dict[str, str]) -> Any:
    shape, seconds = _pop_search(parameters)
    return answers.search_for(SimulationQuery.of(parameters), shape, seconds)


def _export(parameters: dict[str, str]) -> Response:
    kind, name, (shape, seconds) = parameters.pop("kind"), parameters.pop("schedule", ""), _pop_search(parameters)
    query = SimulationQuery.of(parameters)
    is_search = name == answers.SEARCHED
    summary = answers.search_cached(query, shape, seconds)[1] if is_search else answers.simulate_named(query, name)
    file, media_type, text = answers.export(summary, kind)
    return Response(text, media_type=media_type, headers={"Content-Disposition": f'attachment; filename="{file}"'})


async def _page(request: Request) -> Response:
    return _asset("studio/index.html")


async def _static(request: Request) -> Response:
    return _asset("{folder}/{name}".format(**request.path_params))


def _asset(name: str) -> Response:
    asset = assets().get(name)
    if asset is None:
        return _json({"error": f"there is no file {name[:80]!r}"}, 404)
    return Response(asset[1], media_type=asset[0])


def _json(value: Any, status: int = 200) -> Response:
    try:
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError):
        text = json.dumps(finite(value), separators=(",", ":"), allow_nan=False)
    return Response(text, status, media_type="application/json")


def policy(text: str) -> str:
    """Return the content security policy of a report: it may run its own script with its own styles, by their hashes,
    and load nothing else.

    Its styles are the first in the page and its script the last, so that nothing in between, which came from a run, is
    ever among them. Widths of bars are attributes of elements, which no hash covers.
    """
    style = text.partition("<style>")[2].partition("</style>")[0]
    script = text.rpartition('<script type="module">')[2].rpartition("</script>")[0]
    return (
        f"default-src 'none'; script-src {_hash_source(script)}; style-src-elem {_hash_source(style)}; "
        "style-src-attr 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def _hash_source(content: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


# -- work queues -------------------------------------------------------------------------------------------------------


class QueueFullError(Exception):
    """Too many queries are waiting."""


class WorkQueue:
    """Computes one answer at a time, in the order of requests, so that several pages take no more of the machine than
    one, and skips answers that no client waits for any more. Each kind of query has a queue, so that none waits for
    another's; quick ones need none."""

    def __init__(self) -> None:
        self._turn, self._waiting = asyncio.Lock(), 0

    async def run(self, request: Request, act: Callable[[], Response]) -> Response:
        """Return the answer of `act`, which is skipped if the client has disconnected while others had their turn.
        Raise QueueFullError if too many are waiting already."""
        if self._waiting >= _MAX_WAITING:
            raise QueueFullError("server busy; retry in a moment")
        self._waiting += 1
        try:
            async with self._turn:
                if await request.is_disconnected():
                    return Response(status_code=499)  # the client is gone
                return await run_in_threadpool(act)
        finally:
            self._waiting -= 1


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
        """The link to open: the token is in the fragment, which no browser sends or logs."""
        return f"{self.address}#token={self.guard.token}"

    def build(self) -> uvicorn.Server:
        """Build the server, to be run with `sockets=[self.socket]`."""
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
        """Serve until SIGINT or SIGTERM. The socket takes connections from the beginning."""
        try:
            self.build().run(sockets=[self.socket])
        except KeyboardInterrupt:
            pass  # uvicorn has ended everything, and then raises what it caught
        finally:
            self.socket.close()


def bind(host: str, port: int, runs: Path) -> Server:
    """Bind the studio to an address.

    Args:
        host: loopback, unless others are to reach it.
        port: 0: any that is free.
        runs: the folder whose runs, plans and traces can be opened.

    Raises:
        ArgumentError: the address is in use, or not one of this machine's.
    """
    bound = _bind(host, port)
    port = bound.getsockname()[1]
    shown = host if host not in ("0.0.0.0", "::") else socket.gethostname()
    guard = Guard.of(host, port, secrets.token_urlsafe(24))
    return Server(bound, guard, f"http://{format_host(shown)}:{port}/", Library(runs))


@contextlib.contextmanager
def redirecting(link: str) -> Iterator[str]:
    """Yield the address of a file that only this user can read, and that redirects a browser to a link: `ps` shows
    arguments."""
    with tempfile.TemporaryDirectory(prefix="penstock-studio-") as folder:
        file = Path(folder, "open.html")
        file.write_text(f'<meta http-equiv="refresh" content="0; url={link}"><a href="{link}">Penstock studio</a>')
        yield file.as_uri()


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[
            0
        ]
    except OSError as error:
        raise ArgumentError(f"--host {host}: {error.strerror or error}; pass an address of this machine") from None
    bound = socket.socket(family, kind)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(64)
    except OSError as error:
        bound.close()
        hint = "pass another with --port, or 0 for any that is free" if port else "pass an address of this machine"
        raise ArgumentError(f"--host {host} --port {port}: {error.strerror or error}; {hint}") from None
    return bound
