"""`penstock studio` as a process: its link, a port in use, Ctrl-C."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from cli.command_line import refusal
from penstock.cli import app
from penstock.report.studio.app import Server


@contextmanager
def started(folder: Path, *options: str) -> Iterator[tuple[Any, str]]:
    """The process, and the link that it printed."""
    command = [sys.executable, "-m", "penstock", "studio", "--port", "0", "--runs", str(folder), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("penstock studio: http://"), process.stderr.read()
        yield process, line.split()[2]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_it_answers_and_ctrl_c_ends_it_quietly(tmp_path: Path) -> None:
    with started(tmp_path) as (process, link):
        assert link.startswith("http://127.0.0.1:")
        address, _, token = link.partition("#token=")
        assert len(token) >= 32
        assert httpx.get(f"{address}api/catalog").status_code == 401
        told = httpx.get(f"{address}api/catalog", headers={"authorization": f"Bearer {token}"})
        assert told.json()["usual"]["ranks"] == 4
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, out, err) == (0, "", "")


def test_a_browser_is_not_told_the_token_where_others_see_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody can read the arguments of a process. A file that one user alone can read leads the browser on."""
    opened: list[Any] = []

    def look(address: str) -> None:
        file = Path(address.removeprefix("file://"))
        opened.extend((address, file, file.parent.stat().st_mode & 0o777, file.read_text()))

    monkeypatch.setattr(webbrowser, "open", look)
    monkeypatch.setattr(Server, "run", lambda server: server.socket.close())
    CliRunner().invoke(app, ["studio", "--open", "--port", "0", "--runs", str(tmp_path)], catch_exceptions=False)
    address, file, mode, text = opened
    token = text.partition("#token=")[2].partition('"')[0]
    assert len(token) >= 32
    assert token not in address
    assert (mode, file.parent.exists()) == (0o700, False)


def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        says = refusal("studio", "--port", str(port))
    assert says == (
        f"--host 127.0.0.1 --port {port}: {os.strerror(98)}; pass another with --port, or 0 for any that is free"
    )


def test_it_asks_for_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "penstock studio: this needs uvicorn, pip install 'penstock[studio]'" in refusal("studio")
