"""`penstock studio`: a local page to play with schedules, to open runs, and to watch one."""

from __future__ import annotations

import contextlib
import sys
import webbrowser
from pathlib import Path

from penstock._base.errors import ArgumentError, require
from penstock.cli._options import option

EPILOG = """\
The studio is for this machine alone, unless --host says otherwise. Whoever opens it needs the token in the printed \
link. It only reads, and nothing outside the runs folder. Over ssh: ssh -L 8470:localhost:8470 HOST."""
"""Printed below the options."""


def studio(
    runs: Path = option("Where runs, plans and traces are that can be opened.", metavar="FOLDER", default=Path("runs")),
    host: str = option("The address to listen on.", default="127.0.0.1"),
    port: int = option("Port to listen on; 0 picks a free one.", default=8470),
    browser: bool = option("Open it in a browser.", "--open", default=False),
) -> None:
    """Play with schedules in a page, open runs, plans and traces, and watch a run. Ctrl-C ends it."""
    require("studio", "starlette", "uvicorn", for_what="penstock studio")
    from penstock.report.studio.app import bind, redirecting

    if not 0 <= port <= 65535:
        raise ArgumentError(f"--port {port}: expected a number from 0 to 65535")
    server = bind(host, port, runs)
    print(f"penstock studio: {server.link}   (Ctrl-C ends it)", flush=True)
    if not runs.is_dir():
        hint = f"penstock.pipeline(run='{runs}/NAME') records a run there"
        print(f"penstock: {runs}: no such folder yet; {hint}", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        if browser:
            webbrowser.open(stack.enter_context(redirecting(server.link)))
        server.run()
