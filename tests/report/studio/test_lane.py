"""Who computes when: nothing waits for a question of another kind, and what nobody waits for is not computed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from penstock.report.studio import answers
from penstock.report.studio.app import Server
from penstock.report.studio.query import SimulationQuery
from scaffolding.run_folders import a_run

Start = Callable[..., Server]


class Slow:
    """In place of `answers.simulate`: answers once it is let."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.begun, self.let = threading.Event(), threading.Event()

    def __call__(self, question: SimulationQuery) -> dict[str, Any]:
        self.asked.append(question.ranks)
        self.begun.set()
        assert self.let.wait(30)
        return {"ranks": question.ranks}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow()
    monkeypatch.setattr(answers, "simulate", made)
    yield made
    made.let.set()


def get(link: str, address: str, **options: Any) -> httpx.Response:
    base, _, token = link.partition("#token=")
    return httpx.get(f"{base}{address}", headers={"authorization": f"Bearer {token}"}, **options)


def asking(link: str, ranks: int) -> tuple[threading.Thread, list[httpx.Response]]:
    found: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: found.append(get(link, "api/simulate", params={"ranks": ranks}, timeout=30))
    )
    thread.start()
    return thread, found


def left(link: str, ranks: int) -> None:
    """Asks, and goes away before the answer."""
    address = urlsplit(link)
    with socket.create_connection((address.hostname, address.port)) as made:
        token = address.fragment.removeprefix("token=")
        lines = f"GET /api/simulate?ranks={ranks} HTTP/1.1", f"Host: {address.netloc}", f"Authorization: Bearer {token}"
        made.sendall("\r\n".join((*lines, "\r\n")).encode())
        time.sleep(0.2)  # until it has been read


def test_nothing_waits_for_another_kind_and_what_nobody_waits_for_is_left(
    studio: Start, slow: Slow, tmp_path: Path
) -> None:
    a_run(tmp_path / "gpt")
    link = studio(tmp_path).link
    first, answer = asking(link, 2)
    assert slow.begun.wait(30)
    for _ in range(3):
        left(link, 3)
    last, newest = asking(link, 4)
    for address in ("api/live?name=gpt", "api/library", "api/open?name=gpt", "api/catalog"):
        assert get(link, address, timeout=10).status_code == 200
    slow.let.set()
    first.join()
    last.join()
    assert (answer[0].json(), newest[0].json()) == ({"ranks": 2}, {"ranks": 4})
    assert slow.asked == [2, 4]


def test_too_many_questions_are_refused_at_once(studio: Start, slow: Slow, tmp_path: Path) -> None:
    a_run(tmp_path / "gpt")
    link = studio(tmp_path).link
    waiting = [asking(link, 2)]
    assert slow.begun.wait(30)
    waiting += [asking(link, 3) for _ in range(12)]
    deadline = time.monotonic() + 20
    while sum(bool(found) for _, found in waiting) < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    refused = [found[0] for _, found in waiting if found]
    assert {one.status_code for one in refused} == {503}
    assert "retry in a moment" in refused[0].json()["error"]
    assert get(link, "api/live?name=gpt").status_code == 200
    slow.let.set()
    for thread, _ in waiting:
        thread.join()
    assert [found[0].status_code for _, found in waiting].count(200) == 8
