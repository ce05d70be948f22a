"""`penstock studio`: serves a local page to explore schedules and runs."""

from __future__ import annotations

import contextlib
import sys
import webbrowser
from pathlib import Path

from penstock._base.errors import ArgumentError, require
from penstock.cli._options import option

EPILOG = """\
The studio listens on this machine only, unless --host is set, and requires the token in the printed link. It is \
read-only, and restricted to the runs directory. Over ssh: ssh -L 8470:localhost:8470 HOST."""
"""Epilog of the help."""


def studio(
    runs: Path = option("Directory of the runs, plans and traces.", metavar="FOLDER", default=Path("runs")),
    host: str = option("Address to listen on.", default="127.0.0.1"),
    port: int = option("Port to listen on; 0 picks a free one.", default=8470),
    browser: bool = option("Open it in a browser.", "--open", default=False),
) -> None:
    """Explore schedules, runs, plans and traces in a local web page, and monitor a run. Ctrl-C ends it."""
    require("studio", "starlette", "uvicorn", for_what="penstock studio")
    from penstock.report.studio.app import bind, redirecting

    if not 0 <= port <= 65535:
        raise ArgumentError(f"--port {port}: expected a number from 0 to 65535")
    server = bind(host, port, runs)
    print(f"penstock studio: {server.link}   (Ctrl-C ends it)", flush=True)
    if not runs.is_dir():
        hint = f"penstock.pipeline(run_dir='{runs}/NAME') records a run there"
        print(f"penstock: {runs}: no such folder yet; {hint}", file=sys.stderr)
    with contextlib.ExitStack() as stack:
        if browser:
            webbrowser.open(stack.enter_context(redirecting(server.link)))
        server.run()
