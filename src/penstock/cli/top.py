"""`penstock top`: a run's progress and the state of each rank."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from penstock._base.words import counted, in_ranges, sized
from penstock.cli._options import Json, option, spread
from penstock.report.text import print_unbroken, table

if TYPE_CHECKING:
    from penstock.trace.runs import RankState, RunRead
    from penstock.trace.runs.progress import Progress
    from penstock.trace.runs.summary import Health

EPILOG = """\
A rank that is silent has said nothing for 5 s: its process is stopped, gone or out of reach. One that is gone has no \
process any more, and did not close its pipeline. Ranks of hosts that do not share the folder are shown as rank 0 has \
heard of them, without their memory."""
"""Printed below the options."""

_REFRESH_SECONDS = 0.5
_COLORS = dict.fromkeys(("failed", "silent", "gone"), "red") | {"waits": "yellow", "interrupted": "yellow"}
_COLORS |= {"ended": "dim", "between steps": "dim"}
_MAX_DAMAGED = 3
"""Files whose damage is shown."""


@spread
def top(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder, as in penstock.pipeline(run='runs/gpt').")],
    once: Annotated[bool, option("Print once and exit (the default without a terminal).", "--once")] = False,
    as_json: Json = False,
) -> None:
    """Show a run's progress and the state of each rank.

    Refreshes until all ranks have ended, or Ctrl-C.
    """
    if as_json:
        print(json.dumps(Seen.of(run).to_dict()))
        return
    console = Console(highlight=False)
    if once or not sys.stdout.isatty():
        show(Seen.of(run), console)
        return
    seen = Seen.of(run)
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
                {**state.to_dict(), "health": how, "heard": state.heard, "seconds": round(self._seconds(state), 3)}
                for state, how in self.ranks
            ],
        }

    def _seconds(self, state: RankState) -> float:
        """For how long it has been in its action, as far as it has said."""
        return max(0.0, state.written - state.since)

    def line(self, state: RankState, how: Health) -> list[str | Text]:
        """One rank, for people."""
        quiet = how in ("silent", "gone")
        seconds = self.now - state.written if quiet else self._seconds(state)
        doing = state.action if how in ("computes", "waits") else f"last {state.action}" if state.action else ""
        whom = in_ranges([f"rank {number}" for number in state.waits_for])
        return [
            f"{state.replica}" if self.run.about.replicas > 1 else "",
            ", ".join(in_ranges(map(str, state.ranks))) or "-",
            Text(how, _COLORS.get(how, "green")),
            doing,
            f"{seconds:.1f} s" if how != "ended" else "",
            ", ".join(whom) if how == "waits" else "",
            "-" if state.step is None else f"{state.step:,}",
            "-" if state.rss_bytes is None else sized(state.rss_bytes),
            "-" if state.device_bytes is None else sized(state.device_bytes),
            f"{state.host}:{state.pid}" if state.pid else "(via rank 0)",
        ]


def show(seen: Seen, console: Console) -> None:
    """Prints all of it."""
    for part in _parts(seen):
        if isinstance(part, Table):
            print_unbroken(console, part)
        else:
            console.print(part)


_COLUMNS = ("repl.", "rank", "state", "action", "for", "waits for", "step", "memory", "device", "process")
_WORDS = ("action", "waits for", "process")
"""Columns that are broken where a screen is narrow; figures never are."""


def _table(lines: Sequence[Sequence[str | Text]]) -> Table:
    """An entry for each rank, without the columns in which nothing is known."""
    shown = [index for index in range(len(_COLUMNS)) if any(str(line[index]) not in ("", "-") for line in lines)]
    made = table(*(_COLUMNS[index] for index in shown), left=sum(index < 4 for index in shown))
    for column, index in zip(made.columns, shown, strict=True):
        column.no_wrap = _COLUMNS[index] not in _WORDS
    for line in lines:
        made.add_row(*(Text.assemble(line[index]) for index in shown))
    return made


def _parts(seen: Seen) -> list[Text | Table]:
    """What failed comes before the ranks, of which a screen may have no room for all."""
    from penstock.trace.runs.summary import troubles

    about = seen.run.about
    replicas = f"{counted(about.replicas, 'replica')} of " if about.replicas > 1 else ""
    sizes = f"{replicas}{counted(about.ranks, 'rank')}, {counted(about.microbatches, 'microbatch')}"
    return [
        Text.assemble((str(seen.run.path), "bold"), f"  {about.model}: {about.schedule}, {sizes}, {about.device}"),
        Text("no step has ended yet" if seen.progress is None else seen.progress.said(over=seen.is_over)),
        *(Text(sentence, "red") for sentence in (*seen.damaged[:_MAX_DAMAGED], *troubles(seen.ranks))),
        Text(""),
        _table([seen.line(*one) for one in seen.ranks]) if seen.ranks else Text("waiting for the first heartbeat"),
    ]
