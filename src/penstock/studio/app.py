"""The studio's addresses: each asks the guard, reads its question, and gives one answer."""

from __future__ import annotations

import asyncio
import hashlib
import json
from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock._base.files import finite
from penstock.errors import ArgumentError, PenstockError
from penstock.report.frame import base_style
from penstock.studio import answers, background, exports, live
from penstock.studio.guard import ENTER, HEADERS, Guard
from penstock.studio.library import Library
from penstock.studio.question import Question, number, whole

_TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
PAGE = "penstock-page"
"""A header of the page's own questions: what cannot be answered is then an answer as others are."""
_LONGEST = 4000
"""Characters of an address's question."""
_MAX_WAITING = 8
"""Each page asks one question of a kind at a time."""


@cache
def assets() -> Mapping[str, tuple[str, str]]:
    """The scripts and styles of the page, with their types, by folder and name. Nothing else is served from here."""
    found = {"studio/base.css": ("text/css", base_style())}
    for folder in ("web", "studio"):
        for file in files(f"penstock.{folder}").joinpath("static").iterdir():
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
        self._playing, self._searching, self._reading, self._reporting = Lane(), Lane(), Lane(), Lane()

    def app(self) -> ASGIApp:
        routes = [
            Route("/", self.page),
            Route(ENTER, self.enter),
            Route("/static/{folder}/{name}", self.static),
            Route("/api/catalog", _answering(lambda given: answers.catalog())),
            Route("/api/simulate", _answering(lambda given: answers.simulate(Question.of(given)), self._playing)),
            Route("/api/walk", _answering(lambda given: answers.walk(Question.of(given)), self._playing)),
            Route("/api/search", _answering(self._search, self._searching)),
            Route("/api/library", _answering(lambda given: self._entries())),
            Route("/api/open", _answering(self._open, self._reading)),
            Route("/api/live", _answering(self._live)),
            Route("/export/{kind}", self.export),
            Route("/report", self.report),
        ]
        return Guarded(Starlette(routes=routes), self.guard)

    async def page(self, request: Request) -> Response:
        return _asset("studio/index.html")

    async def enter(self, request: Request) -> Response:
        entered = _json({})
        entered.set_cookie(self.guard.cookie, self.guard.token, httponly=True, samesite="strict")
        return entered

    async def static(self, request: Request) -> Response:
        return _asset("{folder}/{name}".format(**request.path_params))

    async def export(self, request: Request) -> Response:
        def made() -> Response:
            given = _given(request)
            name, where, seconds = given.pop("schedule", ""), given.pop("placement", "loop"), given.pop("seconds", "1")
            question = Question.of(given)
            searching = name == answers.SEARCHED
            figures = (
                answers.searched(question, _where(where), number("seconds", seconds))[1]
                if searching
                else answers.named(question, name)
            )
            file = exports.export(figures, request.path_params["kind"])
            return Response(
                file.content,
                media_type=file.media_type,
                headers={"Content-Disposition": f'attachment; filename="{file.name}"'},
            )

        searching = request.query_params.get("schedule") == answers.SEARCHED
        return await _tried(request, made, self._searching if searching else self._playing)

    async def report(self, request: Request) -> Response:
        def made() -> Response:
            given = _given(request)
            name, step = given.pop("name", ""), given.pop("step", "")
            _refuse(given)
            path, number = self.library.path(name), whole("step", step) if step else None
            text = self.library.readable(lambda: background.read("report", path, number), name)
            return Response(text, media_type="text/html", headers={"Content-Security-Policy": policy(text)})

        return await _tried(request, made, self._reporting)

    def _search(self, given: dict[str, str]) -> Any:
        where, seconds = _where(given.pop("placement", "loop")), number("seconds", given.pop("seconds", "1"))
        return answers.search_for(Question.of(given), where, seconds)

    def _entries(self) -> Any:
        return {"folder": self.library.root.name, "entries": [asdict(one) for one in self.library.entries()]}

    def _open(self, given: dict[str, str]) -> Any:
        name, step = given.pop("name", ""), given.pop("step", "")
        what_ifs = [one for one in given.pop("what_if", "").split("|") if one]
        _refuse(given)
        number = whole("step", step) if step else None
        path = self.library.path(name)
        return self.library.readable(lambda: background.read("opened", path, name, number, what_ifs), name)

    def _live(self, given: dict[str, str]) -> Any:
        name, place = given.pop("name", ""), whole("place", given.pop("place", "0"))
        _refuse(given)
        path = self.library.path(name, live.PARTS)
        return self.library.readable(lambda: live.live(path, place), name)


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
                given = {name for name, _ in message["headers"]}
                own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message["headers"], *(one for one in own if one[0] not in given)]
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


def _answering(answer: Callable[[dict[str, str]], Any], lane: Lane | None = None) -> Any:
    async def answered(request: Request) -> Response:
        return await _tried(request, lambda: _json(answer(_given(request))), lane)

    return answered


async def _tried(request: Request, act: Callable[[], Response], lane: Lane | None) -> Response:
    """An answer, or why there is none. What has no lane is quick, and waits for nothing."""
    try:
        return await (run_in_threadpool(act) if lane is None else lane.run(request, act))
    except (PenstockError, CrowdedError) as error:
        status = 503 if isinstance(error, CrowdedError) else 400
        return _json({"error": str(error)}, 200 if request.headers.get(PAGE) else status)


def _given(request: Request) -> dict[str, str]:
    """The parameters of an address. Raises ArgumentError if one is there twice."""
    given = request.query_params.multi_items()
    if len(found := dict(given)) < len(given):
        raise ArgumentError("a parameter is there twice; pass each once")
    return found


def _refuse(given: Mapping[str, str]) -> None:
    if given:
        raise ArgumentError(f"{min(given)!r} is no parameter of this address")


def _where(text: str) -> answers.PlacementName:
    if text == "loop":
        return "loop"
    if text == "v":
        return "v"
    raise ArgumentError(f"placement={text[:20]!r}: expected loop or v")


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
    """What a report may do: run its own script with its own styles, by their hashes, and load nothing at all.

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
        """The answer of `act`, which is not begun if the one who asked has gone while others had their turn. Raises
        CrowdedError: too many wait already."""
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
