"""A studio that runs beside a test, on a port of its own."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.report.studio.app import Server, bind
from penstock.trace.runs import summary


@pytest.fixture(autouse=True)
def _ranks_spoke_just_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a busy machine takes to open a page, no rank of a run in a test falls silent meanwhile."""
    monkeypatch.setattr(summary, "SILENT_SECONDS", math.inf)


@pytest.fixture
def studio(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Starts one, as `studio(folder)`."""
    ends = []

    def started(folder: Path = tmp_path) -> Server:
        server = bind("127.0.0.1", 0, folder)
        made = server.build()
        thread = threading.Thread(target=made.run, kwargs={"sockets": [server.socket]})
        thread.start()
        ends.append((made, thread))
        while not made.started:
            time.sleep(0.01)
        return server

    yield started
    for made, thread in ends:
        made.should_exit = True
        thread.join()


@pytest.fixture
def open_page(studio: Callable[..., Server], open_page: Any) -> Any:
    """Pages are closed before the studio ends that they still ask."""
    return open_page
