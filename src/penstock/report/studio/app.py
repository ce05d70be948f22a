"""The studio's addresses: each asks the guard, reads its question, and gives one answer. And its server."""

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
from penstock.report.studio.guard import ENTER, HEADERS, Guard, in_address
from penstock.report.studio.library import Library
from penstock.report.studio.question import Question, number, whole

_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
PAGE = "penstock-page"
"""A header of the page's own questions: what cannot be answered is then an answer as others are."""
_LONGEST = 4000
"""Characters of an address's question."""
_MAX_WAITING = 8
"""Each page asks one question of a kind at a time."""


@cache
def assets() -> Mapping[str, tuple[str, str]]:
    """Return the scripts and styles of the page, with their types, by folder and name. Nothing else is served from
    here."""
    found = {"studio/base.css": ("text/css", base_style())}
    for folder in ("web", "studio"):
        for file in files(f"penstock.report.{folder}").joinpath("static").iterdir():
            kind = _TYPES.get(file.name[file.name.rfind(".") :])
            if kind is not None:
                found[f"{folder}/{file.name}"] = (kind, file.read_text(encoding="utf-8"))
    return found


class Studio:
    """The answers to requests.

    Args:
        library: the runs folder.
        guard: who may ask.
    """

    def __init__(self, library: Library, guard: Guard) -> None:
        self.library, self.guard = library, guard

    def app(self) -> ASGIApp:
        playing, searching = Lane(), Lane()
        routes = [
            Route("/", _page),
            Route(ENTER, self.enter),
            Route("/static/{folder}/{name}", _static),
            _answering("/api/catalog", lambda given: answers.catalog()),
            _answering("/api/simulate", lambda given: answers.simulate(Question.of(given)), playing),
            _answering("/api/walk", lambda given: answers.walk(Question.of(given)), playing),
            _answering("/api/search", _search, searching),
            _answering("/api/library", lambda given: self._entries()),
            _answering("/api/open", self._open, Lane()),
            _answering("/api/live", self._live),
            _answering("/export/{kind}", _export, playing, searching),
            _answering("/report", self._report, Lane()),
        ]
        return Guarded(Starlette(routes=routes), self.guard)

    async def enter(self, request: Request) -> Response:
        entered = _json({})
        entered.set_cookie(self.guard.cookie, self.guard.token, httponly=True, samesite="strict")
        return entered

    def _entries(self) -> Any:
        return {"folder": self.library.root.name, "entries": self.library.entries()}

    def _open(self, given: dict[str, str]) -> Any:
        name, step = given.pop("name", ""), _step(given)
        what_ifs = [one for one in given.pop("what_if", "").split("|") if one]
        _refuse(given)
        return self.library.read(name, lambda path: background.read("opened", path, name, step, what_ifs))

    def _live(self, given: dict[str, str]) -> Any:
        name, place = given.pop("name", ""), whole("place", given.pop("place", "0"))
        _refuse(given)
        return self.library.read(name, lambda path: live.live(path, place), live.PARTS)

    def _report(self, given: dict[str, str]) -> Response:
        name, step = given.pop("name", ""), _step(given)
        _refuse(given)
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
        refusal = self._guard.refuses(request.method, scope["path"], request.headers, request.cookies)
        if refusal is None and len(scope["query_string"]) > _LONGEST:
            answer: ASGIApp = _json({"error": f"the address is longer than {_LONGEST} characters"}, 414)
        elif refusal is not None:
            answer = _json({"error": refusal[1]}, refusal[0])
        else:
            answer = self._app
        await answer(scope, receive, with_headers)


def _answering(
    path: str, answer: Callable[[dict[str, str]], Any], usual: Lane | None = None, searching: Lane | None = None
) -> Route:
    """Build the route that answers queries of a kind: with a response, a value for JSON, or an error. Without a lane it
    is quick, and waits for nothing; queries about a search's schedule may use the searches' own lane."""

    async def answered(request: Request) -> Response:
        def act() -> Response:
            made = answer(_given(request))
            return made if isinstance(made, Response) else _json(made)

        is_search = request.query_params.get("schedule") == answers.SEARCHED
        lane = searching if searching is not None and is_search else usual
        try:
            return await (run_in_threadpool(act) if lane is None else lane.run(request, act))
        except (PenstockError, CrowdedError) as error:
            status = 503 if isinstance(error, CrowdedError) else 400
            return _json({"error": str(error)}, 200 if request.headers.get(PAGE) else status)

    return Route(path, answered)


def _given(request: Request) -> dict[str, str]:
    """Return the parameters of an address. Raise ArgumentError if one is repeated."""
    given = request.query_params.multi_items()
    if len(found := dict(given)) < len(given) or found.keys() & request.path_params.keys():
        raise ArgumentError("a parameter is there twice; pass each once")
    return found | request.path_params


def _refuse(given: Mapping[str, str]) -> None:
    if given:
        raise ArgumentError(f"{min(given)!r} is no parameter of this address")


def _step(given: dict[str, str]) -> int | None:
    return whole("step", step) if (step := given.pop("step", "")) else None


def _where(given: dict[str, str]) -> tuple[str, float]:
    """Return where and for how long to search."""
    return given.pop("placement", "loop"), number("seconds", given.pop("seconds", "1"))


def _search(given: dict[str, str]) -> Any:
    where, seconds = _where(given)
    return answers.search_for(Question.of(given), where, seconds)


def _export(given: dict[str, str]) -> Response:
    kind, name, (where, seconds) = given.pop("kind"), given.pop("schedule", ""), _where(given)
    question = Question.of(given)
    searched = name == answers.SEARCHED
    figures = answers.searched(question, where, seconds)[1] if searched else answers.named(question, name)
    file, media_type, text = answers.export(figures, kind)
    return Response(text, media_type=media_type, headers={"Content-Disposition": f'attachment; filename="{file}"'})


async def _page(request: Request) -> Response:
    return _asset("studio/index.html")


async def _static(request: Request) -> Response:
    return _asset("{folder}/{name}".format(**request.path_params))


def _asset(name: str) -> Response:
    found = assets().get(name)
    if found is None:
        return _json({"error": f"there is no file {name[:80]!r}"}, 404)
    return Response(found[1], media_type=found[0])


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
        f"default-src 'none'; script-src {_hashed(script)}; style-src-elem {_hashed(style)}; "
        "style-src-attr 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def _hashed(content: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


# -- who computes when -------------------------------------------------------------------------------------------------


class CrowdedError(Exception):
    """Too many wait already."""


class Lane:
    """Computes one answer at a time, in the order of asking, so that several pages take no more of the machine than
    one, and none that nobody waits for any more. Each kind of question has a lane, so that none waits for
    another's; what is quick needs none."""

    def __init__(self) -> None:
        self._turn, self._waiting = asyncio.Lock(), 0

    async def run(self, request: Request, act: Callable[[], Response]) -> Response:
        """Return the answer of `act`, which is skipped if the client has disconnected while others had their turn.
        Raise CrowdedError if too many are waiting already."""
        if self._waiting >= _MAX_WAITING:
            raise CrowdedError("server busy; retry in a moment")
        self._waiting += 1
        try:
            async with self._turn:
                if await request.is_disconnected():
                    return Response(status_code=499)  # goes to nobody
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
        """What to open: the token is in the fragment, which no browser sends or logs on its way."""
        return f"{self.address}#token={self.guard.token}"

    def made(self) -> uvicorn.Server:
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
            self.made().run(sockets=[self.socket])
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
    bound = _bound(host, port)
    port = bound.getsockname()[1]
    shown = host if host not in ("0.0.0.0", "::") else socket.gethostname()
    guard = Guard.of(host, port, secrets.token_urlsafe(24))
    return Server(bound, guard, f"http://{in_address(shown)}:{port}/", Library(runs))


@contextlib.contextmanager
def redirecting(link: str) -> Iterator[str]:
    """Yield the address of a file that only this user can read, and that redirects a browser to a link: `ps` shows
    arguments."""
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
