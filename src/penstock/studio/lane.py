"""Who computes when: questions of one kind one after another, so that several pages take no more of the machine than
one, and none that nobody waits for any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

_MOST_WAITING = 8
"""Each page asks one question of a kind at a time."""


class CrowdedError(Exception):
    """Too many wait already."""


class Lane:
    """Computes one answer at a time, in the order of asking. Each kind of question has a lane, so that none waits for
    another's; what is quick needs none."""

    def __init__(self) -> None:
        self._turn, self._waiting = asyncio.Lock(), 0

    async def run(self, request: Request, act: Callable[[], Response]) -> Response:
        """The answer of `act`, which is not begun if the one who asked has gone while others had their turn. Raises
        CrowdedError: too many wait already."""
        if self._waiting >= _MOST_WAITING:
            raise CrowdedError("server busy; retry in a moment")
        self._waiting += 1
        try:
            async with self._turn:
                if await request.is_disconnected():
                    return Response(status_code=499)  # goes to nobody
                return await run_in_threadpool(act)
        finally:
            self._waiting -= 1
