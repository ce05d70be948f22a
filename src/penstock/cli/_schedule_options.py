"""Options for the schedule of a verb: a name and its numbers, or a file."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from penstock._base.errors import ArgumentError, ScheduleError, check_counts
from penstock._base.files import read_text
from penstock._base.formatting import pluralize
from penstock.cli._errors import flag, in_options
from penstock.cli._options import CUT, USUAL, integers, options_on
from penstock.schedule import (
    MICROBATCHES,
    Schedule,
    ScheduleSpec,
    add_sharding,
    from_csv,
    generate,
    schedule_spec,
    schedule_specs,
)
from penstock.schedule.check import require_legal
from penstock.schedule.generators import ScheduleParams

ALL = "all"
"""Value of --schedule: every schedule that the numbers allow."""

_option = options_on("Schedule")
_TEXT_MARK = ", stages on ranks "


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """The schedule to use."""

    schedule: str | None = _option("Name of the schedule; `penstock schedules` lists them.")
    ranks: str | None = _option("Number of ranks.", "--ranks", "-n", metavar="INTEGER")
    microbatches: str | None = _option(f"{CUT}; {USUAL}.", metavar="INTEGER")
    stages_per_rank: int | None = _option("Stages per rank; default: the schedule's usual number.")
    unshard_window: int | None = _option(
        "Shard the stages (FSDP2) and gather this many per rank at once: adds UNSHARD and RESHARD."
    )
    csv: Path | None = _option(
        "Schedule from a file, which sets ranks and microbatches: torch's CSV (one line per rank, one cell per "
        "action, 0F1), or the text that `penstock draw --text` prints.",
        metavar="FILE",
    )

    def one(self) -> Schedule:
        """Return the requested schedule."""
        if self.csv is not None:
            for name in ("schedule", "ranks", "microbatches", "stages_per_rank"):
                if getattr(self, name) is not None:
                    raise ArgumentError(
                        f"--csv {self.csv}: the file already sets what {flag(name)} would; pass only one of the two"
                    )
            schedule = self._add_gathers(_read(self.csv))
            announce(sum(map(len, schedule.rows)))
            return schedule
        if self.is_many:
            raise ArgumentError(
                f"--schedule {self.schedule}: this command takes one schedule; `penstock schedules` lists them"
            )
        schedules, _ = self.all()
        return next(iter(schedules.values()))

    def all(self, *, several: bool = False) -> tuple[dict[Sized, Schedule], dict[Sized, str]]:
        """Return the requested schedules that the numbers allow, and the requirements of the others. `several`: allow
        several numbers of ranks or microbatches."""
        specs = parse_schedules(self._name())
        sizes = self._sizes(several=several)
        requested = [
            (spec, ScheduleParams(*size, spec.chunks if self.stages_per_rank is None else self.stages_per_rank))
            for spec in specs
            for size in sizes
        ]
        check_size((spec, numbers) for spec, numbers in requested if not spec.refusal(numbers))
        schedules, refused = dict[Sized, Schedule](), dict[Sized, str]()
        for spec, numbers in requested:
            key = spec.name, numbers.ranks, numbers.microbatches
            try:
                if reason := spec.refusal(numbers):
                    refused[key] = reason
                else:
                    schedules[key] = self._add_gathers(generate(*key, numbers.stages_per_rank))
            except ArgumentError as error:
                refused[key] = in_options(str(error), ("--unshard-window",))
        if not schedules:
            if len(requested) == 1:
                self._add_gathers(generate(*key, numbers.stages_per_rank))  # raises, with the fix
            reasons = "; ".join(dict.fromkeys(f"{name} {reason}" for (name, *_), reason in refused.items()))
            raise ArgumentError(f"--schedule {self.schedule}: no schedule works with these numbers: {reasons}")
        return schedules, refused

    @property
    def count(self) -> int | None:
        """The number of microbatches, if there is one."""
        return int(self.microbatches) if self.microbatches is not None and self.microbatches.isdecimal() else None

    @property
    def is_many(self) -> bool:
        """Whether several schedules are requested."""
        return self.csv is None and (self._name() == ALL or "," in self._name())

    @property
    def sweeps(self) -> bool:
        """Whether there are several numbers of ranks or microbatches."""
        return self.csv is None and "," in f"{self.ranks}{self.microbatches}"

    def _add_gathers(self, schedule: Schedule) -> Schedule:
        """Return the schedule with the gathers of --unshard-window."""
        if self.unshard_window is None:
            return schedule
        return add_sharding(schedule, set(range(schedule.stages)), self.unshard_window)

    def _name(self) -> str:
        if self.schedule is None:
            raise ArgumentError(
                "no schedule given: pass --schedule with a name (`penstock schedules` lists them), or --csv with a file"
            )
        return self.schedule

    def _sizes(self, *, several: bool) -> list[tuple[int, int]]:
        """Return each combination of the numbers of ranks and microbatches."""
        if self.ranks is None:
            raise ArgumentError(f"--schedule {self.schedule} needs --ranks: pass how many")
        numbers = list[list[int]]()
        for option, text in (("--ranks", self.ranks), ("--microbatches", self.microbatches)):
            if not several and "," in (text or ""):
                raise ArgumentError(
                    f"{option} {text}: this command takes one number; `penstock simulate` takes several"
                )
            numbers.append([MICROBATCHES] if text is None else integers(option, text))
        check_counts(required=False, stages_per_rank=self.stages_per_rank, unshard_window=self.unshard_window)
        sizes = [(ranks, microbatches) for ranks in numbers[0] for microbatches in numbers[1]]
        for ranks, microbatches in sizes:
            check_counts(ranks=ranks, microbatches=microbatches)
        return sizes


def parse_schedules(text: str) -> list[ScheduleSpec]:
    """Return the schedules of comma-separated names, each once, or all."""
    names = [*dict.fromkeys(name.strip() for name in text.split(","))]
    return [*schedule_specs()] if names == [ALL] else [schedule_spec(name) for name in names]


Sized = tuple[str, int, int]
"""Name of a schedule, and its numbers of ranks and microbatches."""


def _read(path: Path) -> Schedule:
    """Read a schedule from a file, in torch's format or as `str(schedule)` writes it."""
    text = read_text(path, f"--csv {path}")
    try:
        is_text = _TEXT_MARK in text.partition("\n")[0]
        schedule = Schedule.parse(text) if is_text else from_csv(text, path.stem)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    return require_legal(schedule, str(path))


# -- limits: refuse what would exhaust memory, announce what takes a while --------------------------------------------

MAX_ACTIONS = 20_000_000
"""Maximum number of actions to time: about 1 GiB of memory, and seconds (minutes without numba)."""

MAX_TO_SEARCH = 1_000_000
"""Maximum number of actions in a search, which tries them in many orders."""

MAX_STAGES = 10_000
"""Maximum number of stages of a schedule: finding those of each rank takes quadratic time."""

ANNOUNCED = 200_000
"""Number of actions from which the answer takes seconds."""

_ANNOUNCED_SECONDS = 10.0


def check_size(schedules: Iterable[tuple[ScheduleSpec, ScheduleParams]]) -> None:
    """Raise ArgumentError if schedules are too large to time; announce those that take a while."""
    announce(_total([(spec.actions(numbers), numbers) for spec, numbers in schedules], MAX_ACTIONS, "timed"))


def check_search_size(numbers: ScheduleParams, seconds: float) -> None:
    """Check the size of a search as `check_size` does."""
    actions = 3 * numbers.ranks * numbers.stages_per_rank * numbers.microbatches
    if _total([(actions, numbers)], MAX_TO_SEARCH, "searched") > ANNOUNCED // 10 or seconds > _ANNOUNCED_SECONDS:
        _print_note(f"searching for about {seconds:g} s, in addition to the time for named schedules")


def _total(sizes: Sequence[tuple[int, ScheduleParams]], limit: int, verb: str) -> int:
    """Return the total number of actions. Raise ArgumentError if it, or the number of stages, is too large."""
    total = sum(actions for actions, _ in sizes)
    if total > limit:
        _, largest = max(sizes, key=lambda size: size[0])
        raise ArgumentError(
            f"--ranks {largest.ranks} --microbatches {largest.microbatches}: that makes {total:,} actions; at most "
            f"{limit:,} can be {verb}; pass fewer ranks, microbatches or stages per rank"
        )
    for _, numbers in sizes:
        if (stages := numbers.ranks * numbers.stages_per_rank) > MAX_STAGES:
            raise ArgumentError(
                f"--ranks {numbers.ranks} with {pluralize(numbers.stages_per_rank, 'stage')} per rank makes {stages:,} "
                f"stages; the limit is {MAX_STAGES:,}; use fewer ranks or stages per rank"
            )
    return total


def announce(actions: int) -> None:
    """Print on stderr that timing so many actions takes a while, if it does."""
    if actions > ANNOUNCED:
        slow = "" if find_spec("numba") else "; numba makes it several times faster (pip install 'penstock[simulate]')"
        _print_note(f"timing {actions:,} actions; this may take a while{slow}")


def _print_note(line: str) -> None:
    print(f"penstock: {line}", file=sys.stderr, flush=True)
