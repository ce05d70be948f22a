"""`penstock top`: shows a run's progress and the state of each rank."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock._base.formatting import collapse_ranges, format_bytes, pluralize
from penstock.cli._options import JSON, REQUIRED, argument, option, print_json, screen
from penstock.report.text import columns_table, print_unbroken

if TYPE_CHECKING:
    from penstock.trace.runs import RankState
    from penstock.trace.runs.summary import Health, RunSnapshot

EPILOG = """\
silent: no heartbeat for 5 s, so the process is stopped, dead or unreachable. gone: the process exited without closing \
its pipeline. Ranks on hosts that do not share the directory are shown as last reported by rank 0, without memory."""
"""Epilog of the help."""

_REFRESH_SECONDS = 0.5
_COLORS = dict.fromkeys(("failed", "silent", "gone"), "red") | {"waits": "yellow", "interrupted": "yellow"}
_COLORS |= {"ended": "dim", "between steps": "dim"}
_MAX_DAMAGED = 3
"""Maximum number of corrupted files to list."""


def top(
    run: Path = argument(
        "The run's directory, as in penstock.pipeline(run_dir='runs/gpt').", metavar="RUN", default=REQUIRED
    ),
    once: bool = option("Print once and exit (the default without a terminal).", "--once", default=False),
    as_json: bool = JSON,
) -> None:
    """Show a run's progress and the state of each rank.

    Refreshes until all ranks have finished, or Ctrl-C.
    """
    from penstock.trace.runs import read_run
    from penstock.trace.runs.summary import RunSnapshot

    snapshot = RunSnapshot.of(read_run(run))
    if as_json:
        print_json(_to_dict(snapshot))
        return
    console = screen()
    if once or not sys.stdout.isatty():
        show(snapshot, console)
        return
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            live.update(Group(*_parts(snapshot)), refresh=True)
            if snapshot.is_over:
                return
            time.sleep(_REFRESH_SECONDS)
            snapshot = RunSnapshot.of(read_run(run))


def _to_dict(snapshot: RunSnapshot) -> dict[str, Any]:
    about = snapshot.about
    return {
        "run": str(snapshot.path),
        "model": about.model,
        "schedule": about.schedule,
        "replicas": about.replicas,
        "microbatches": about.microbatches,
        "device": about.device,
        "progress": None if snapshot.progress is None else snapshot.progress.to_dict(),
        "damaged": list(snapshot.damaged),
        "ranks": [
            {**state.to_dict(), "health": health, "heard": state.heard, "seconds": round(_seconds(state), 3)}
            for state, health in snapshot.ranks
        ],
    }


def _seconds(state: RankState) -> float:
    """Return the time that a rank has spent in its action, by its last report."""
    return max(0.0, state.written - state.since)


def show(snapshot: RunSnapshot, console: Console) -> None:
    """Print the snapshot."""
    for part in _parts(snapshot):
        if isinstance(part, Table):
            print_unbroken(console, part)
        else:
            console.print(part)


_WORDS = ("action", "waiting on", "process")
"""Columns that may be wrapped on a narrow screen; numbers never are."""


def _table(snapshot: RunSnapshot) -> Table:
    """Return one row per rank, without columns that are empty."""
    states, healths = zip(*snapshot.ranks, strict=True)
    replicated = snapshot.about.replicas > 1

    def action(state: RankState, health: Health) -> str | None:
        return state.action if health in ("computes", "waits") else f"last {state.action}" if state.action else None

    def seconds(state: RankState, health: Health) -> str | None:
        quiet = health in ("silent", "gone")
        return f"{snapshot.now - state.written if quiet else _seconds(state):.1f} s" if health != "ended" else None

    def waiting_on(state: RankState, health: Health) -> str | None:
        return (
            ", ".join(collapse_ranges([f"rank {number}" for number in state.waits_for])) if health == "waits" else None
        )

    lines = columns_table(
        {
            "replica": [state.replica if replicated else None for state in states],
            "rank": [", ".join(collapse_ranges(map(str, state.ranks))) or None for state in states],
            "state": [Text(name, _COLORS.get(name, "green")) for name in healths],
            "action": map(action, states, healths),
            "duration": map(seconds, states, healths),
            "waiting on": map(waiting_on, states, healths),
            "step": [None if state.step is None else f"{state.step:,}" for state in states],
            "RSS": [None if state.rss_bytes is None else format_bytes(state.rss_bytes) for state in states],
            "GPU memory": [
                None if state.device_bytes is None else format_bytes(state.device_bytes) for state in states
            ],
            "process": [f"{state.host}:{state.pid}" if state.pid else "(via rank 0)" for state in states],
        },
        left=4,
    )
    for column in lines.columns:
        column.no_wrap = column.header not in _WORDS
    return lines


def _parts(snapshot: RunSnapshot) -> list[Text | Table]:
    """Return the parts of the screen. Failures precede the ranks, which may not all fit."""
    from penstock.trace.runs.summary import failure_messages

    about = snapshot.about
    replicas = f"{pluralize(about.replicas, 'replica')} of " if about.replicas > 1 else ""
    sizes = f"{replicas}{pluralize(about.ranks, 'rank')}, {pluralize(about.microbatches, 'microbatch')}"
    return [
        Text.assemble((str(snapshot.path), "bold"), f"  {about.model}: {about.schedule}, {sizes}, {about.device}"),
        Text(
            "no step has finished yet" if snapshot.progress is None else snapshot.progress.format(over=snapshot.is_over)
        ),
        *(Text(message, "red") for message in (*snapshot.damaged[:_MAX_DAMAGED], *failure_messages(snapshot.ranks))),
        Text(""),
        _table(snapshot) if snapshot.ranks else Text("waiting for the first heartbeat"),
    ]
