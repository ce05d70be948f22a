"""`penstock top`: a run's progress and the state of each rank."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock._base.words import counted, in_ranges, sized
from penstock.cli._options import JSON, REQUIRED, argument, option, print_json, screen
from penstock.report.text import columns_of, print_unbroken

if TYPE_CHECKING:
    from penstock.trace.runs import RankState, RunRead
    from penstock.trace.runs.progress import Progress
    from penstock.trace.runs.summary import Health

EPILOG = """\
silent: no heartbeat for 5 s, so the process is stopped, dead or unreachable. gone: the process exited without closing \
its pipeline. Ranks on hosts that do not share the directory are shown as last reported by rank 0, without memory."""
"""Epilog of the help."""

_REFRESH_SECONDS = 0.5
_COLORS = dict.fromkeys(("failed", "silent", "gone"), "red") | {"waits": "yellow", "interrupted": "yellow"}
_COLORS |= {"ended": "dim", "between steps": "dim"}
_MAX_DAMAGED = 3
"""Files whose damage is shown."""


def top(
    run: Path = argument(
        "The run's directory, as in penstock.pipeline(run='runs/gpt').", metavar="RUN", default=REQUIRED
    ),
    once: bool = option("Print once and exit (the default without a terminal).", "--once", default=False),
    as_json: bool = JSON,
) -> None:
    """Show a run's progress and the state of each rank.

    Refreshes until all ranks have finished, or Ctrl-C.
    """
    seen = Seen.of(run)
    if as_json:
        print_json(seen.to_dict())
        return
    console = screen()
    if once or not sys.stdout.isatty():
        show(seen, console)
        return
    with suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False, screen=False) as live:
        while True:
            live.update(Group(*_parts(seen)), refresh=True)
            if seen.is_over:
                return
            time.sleep(_REFRESH_SECONDS)
            seen = Seen.of(run)


@dataclass(frozen=True)
class Seen:
    """A run at one moment."""

    run: RunRead
    progress: Progress | None
    ranks: Sequence[tuple[RankState, Health]]
    damaged: Sequence[str] = ()
    now: float = field(default_factory=time.time)

    @classmethod
    def of(cls, path: Path) -> Seen:
        """How a run stands now; its progress, by its last steps."""
        from penstock.trace.runs import read_run
        from penstock.trace.runs.progress import Progress
        from penstock.trace.runs.summary import LAST_STEPS_BYTES, health

        run = read_run(path)
        states, damaged = run.ranks_and_damage()
        ranks = [(state, health(state)) for state in states]
        return cls(run, Progress.of(run.steps(LAST_STEPS_BYTES), run.about.total_steps), ranks, damaged)

    @property
    def is_over(self) -> bool:
        """Whether no rank will say anything any more."""
        return bool(self.ranks) and all(how in ("ended", "interrupted", "gone", "failed") for _, how in self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        about = self.run.about
        return {
            "run": str(self.run.path),
            "model": about.model,
            "schedule": about.schedule,
            "replicas": about.replicas,
            "microbatches": about.microbatches,
            "device": about.device,
            "progress": None if self.progress is None else self.progress.to_dict(),
            "damaged": list(self.damaged),
            "ranks": [
                {**state.to_dict(), "health": how, "heard": state.heard, "seconds": round(_seconds(state), 3)}
                for state, how in self.ranks
            ],
        }


def _seconds(state: RankState) -> float:
    """For how long a rank has been in its action, as far as it has said."""
    return max(0.0, state.written - state.since)


def show(seen: Seen, console: Console) -> None:
    """Prints all of it."""
    for part in _parts(seen):
        if isinstance(part, Table):
            print_unbroken(console, part)
        else:
            console.print(part)


_WORDS = ("action", "waiting on", "process")
"""Columns that may be wrapped on a narrow screen; numbers never are."""


def _table(seen: Seen) -> Table:
    """A row for each rank, without the columns in which nothing is known."""
    states, health = zip(*seen.ranks, strict=True)
    replicated = seen.run.about.replicas > 1

    def action(state: RankState, how: Health) -> str | None:
        return state.action if how in ("computes", "waits") else f"last {state.action}" if state.action else None

    def seconds(state: RankState, how: Health) -> str | None:
        quiet = how in ("silent", "gone")
        return f"{seen.now - state.written if quiet else _seconds(state):.1f} s" if how != "ended" else None

    def whom(state: RankState, how: Health) -> str | None:
        return ", ".join(in_ranges([f"rank {number}" for number in state.waits_for])) if how == "waits" else None

    made = columns_of(
        {
            "replica": [one.replica if replicated else None for one in states],
            "rank": [", ".join(in_ranges(map(str, one.ranks))) or None for one in states],
            "state": [Text(how, _COLORS.get(how, "green")) for how in health],
            "action": map(action, states, health),
            "duration": map(seconds, states, health),
            "waiting on": map(whom, states, health),
            "step": [None if one.step is None else f"{one.step:,}" for one in states],
            "RSS": [None if one.rss_bytes is None else sized(one.rss_bytes) for one in states],
            "GPU memory": [None if one.device_bytes is None else sized(one.device_bytes) for one in states],
            "process": [f"{one.host}:{one.pid}" if one.pid else "(via rank 0)" for one in states],
        },
        left=4,
    )
    for column in made.columns:
        column.no_wrap = column.header not in _WORDS
    return made


def _parts(seen: Seen) -> list[Text | Table]:
    """What failed comes before the ranks, of which a screen may have no room for all."""
    from penstock.trace.runs.summary import troubles

    about = seen.run.about
    replicas = f"{counted(about.replicas, 'replica')} of " if about.replicas > 1 else ""
    sizes = f"{replicas}{counted(about.ranks, 'rank')}, {counted(about.microbatches, 'microbatch')}"
    return [
        Text.assemble((str(seen.run.path), "bold"), f"  {about.model}: {about.schedule}, {sizes}, {about.device}"),
        Text("no step has finished yet" if seen.progress is None else seen.progress.said(over=seen.is_over)),
        *(Text(sentence, "red") for sentence in (*seen.damaged[:_MAX_DAMAGED], *troubles(seen.ranks))),
        Text(""),
        _table(seen) if seen.ranks else Text("waiting for the first heartbeat"),
    ]
