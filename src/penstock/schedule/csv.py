"""Schedules as CSV, in the two formats of `torch.distributed.pipelining`: one line per rank, one cell per action.

`compute_only` has just the computations; torch adds messages when it loads them. `compute_comms` also has messages and
gradient reductions, and torch runs it as is. An empty cell is a bubble, which torch and Penstock skip.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterator
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Literal, TextIO, TypeAlias, get_args

from penstock._base import files
from penstock._base.errors import ArgumentError, ScheduleError
from penstock.schedule.action import Action, Op, Overlap, parse_item
from penstock.schedule.communication import add_communication
from penstock.schedule.dependencies import stages_with_backward
from penstock.schedule.passes import compute_only, reduce_replicas
from penstock.schedule.placement import MAX_RANKS, Placement
from penstock.schedule.schedule import Schedule

Format: TypeAlias = Literal["compute_only", "compute_comms"]
"""The formats of `_load_csv` and `_dump_csv` of torch's `_PipelineScheduleRuntime`."""

# Torch's grammar, a part of ours. A row's columns hold nine digits.
_WITH_MICROBATCH = "|".join(op.value for op in Op if op.is_compute or op.is_communication)
_WITHOUT = "|".join(op.value for op in Op if not (op.is_compute or op.is_communication))
_ACTION = rf"[0-9]{{1,9}}(?:(?:{_WITH_MICROBATCH})[0-9]{{1,9}}|{_WITHOUT})"
_CELL = re.compile(rf"{_ACTION}|\({_ACTION};{_ACTION}\)OVERLAP_F_B")
_EXPECTED = (
    "expected stage, op and microbatch, as in 0F1, 1SEND_F0 or (0F7;7B3)OVERLAP_F_B, or stage and "
    f"{_WITHOUT.replace('|', ', ')}; numbers of up to nine digits"
)
_SHOWN_CHARACTERS = 60


def write_csv(schedule: Schedule, path_or_file: str | PathLike[str] | TextIO, format: Format = "compute_only") -> None:
    """Write the result of `to_csv`, and raise what it raises. A file must be open for text, with `newline=""`."""
    text = to_csv(schedule, format)
    if isinstance(path_or_file, str | PathLike):
        files.write_text(path_or_file, text)
    else:
        path_or_file.write(text)


def read_csv(
    path_or_file: str | PathLike[str] | TextIO, name: str | None = None, *, drop: Collection[Op] = ()
) -> Schedule:
    """Read a file with `from_csv`. The name defaults to the last part of the path, without its suffix.

    Raises what `from_csv` raises, and ScheduleError if the file is not UTF-8.
    """
    try:
        if isinstance(path_or_file, str | PathLike):
            name = Path(path_or_file).stem if name is None else name
            text = files.read_bytes(path_or_file).decode()
        else:
            text = path_or_file.read()
    except UnicodeDecodeError as error:
        before, after = error.object[: error.start], error.object[error.start :]
        column = before[before.rfind(b"\n") + 1 :].count(b",")
        cell = before[max(before.rfind(mark) for mark in b",\n") + 1 :] + re.split(rb"[,\r\n]", after)[0]
        raise _error(before.count(b"\n"), column, cell, f"the text is not in {error.encoding}") from None
    return from_csv(text, "csv" if name is None else name, drop=drop)


def to_csv(schedule: Schedule, format: Format = "compute_only") -> str:
    """Write the schedule as torch's `_PipelineScheduleRuntime._load_csv` reads it, with CRLF line endings.

    >>> from penstock.schedule import generate
    >>> to_csv(generate("gpipe", ranks=2, microbatches=1))
    '0F0,0B0\\r\\n1F0,1B0\\r\\n'

    Args:
        schedule: with or without messages.
        format: "compute_only": only F, B, I, W and overlaps; the rest is left out, since torch adds its own.
            "compute_comms": if there are no messages, `add_communication` adds them. A stage with a backward and no
            `REDUCE_GRAD` gets one after its last B or W, because that is where torch divides gradients by the number of
            microbatches. Sharded (FSDP) stages need `UNSHARD` and `RESHARD` too, which torch adds to the other format.

    Raises:
        ScheduleError: torch's format cannot express the schedule: several pipelines, messages between stages that
            are not neighbors, reductions of tied stages, a stage that no rank computes. Or torch would run it
            wrongly: the last stage's forwards are not in ascending order of microbatch. `str(schedule)` keeps
            everything.
        ArgumentError: the format is unknown.
    """
    if format not in get_args(Format):
        raise ArgumentError(f"format={format!r}: expected {' or '.join(map(repr, get_args(Format)))}")
    _check_expressible(schedule)
    reduced = compute_only(schedule) if format == "compute_only" else _complete(schedule)
    file = io.StringIO(newline="")
    csv.writer(file).writerows([str(item) for item in row.items()] for row in reduced.rows)
    text = file.getvalue()
    try:
        parsed = from_csv(text, schedule.name)
    except ScheduleError as error:
        raise _inexpressible(schedule, str(error)) from None
    if parsed != reduced:
        reason = f"it would be read as {parsed.microbatches} microbatches, stages on ranks {parsed.placement}, but has"
        raise _inexpressible(schedule, f"{reason} {reduced.microbatches}, on {reduced.placement}")
    return text


def from_csv(text: str, name: str = "csv", *, drop: Collection[Op] = ()) -> Schedule:
    """Read a schedule that torch's `_dump_csv`, or `to_csv`, wrote, in either format.

    The file does not say which rank owns which stage, nor how many microbatches there are: the rank that computes a
    stage owns it, and the highest microbatch is the last. Nothing else is checked here; `check` does that.

    Args:
        text: one line per rank.
        name: the schedule's name.
        drop: ops to leave out, none of them a computation. Torch's own `compute_comms` has `UNSHARD` and `RESHARD`,
            which mean nothing without sharded stages; a pipeline places its own.

    Raises:
        ScheduleError: it is not a schedule; names row and column, counted from 1, and the cell's text.
        ArgumentError: `drop` has a computation.
    """
    computing = [op.value for op in drop if op.is_compute]
    if computing:
        raise ArgumentError(f"drop={computing}: without its computations it is another schedule; drop other ops only")
    table, rows = _table(text)
    rank_of = _owners(table, rows)
    microbatches = 1 + max(a.microbatch or 0 for _, a in _actions(rows) if a.op.is_compute)
    items = ([item for item in row.values() if isinstance(item, Overlap) or item.op not in drop] for row in rows)
    return Schedule(name, Placement(len(rows), rank_of), microbatches, items)


# -- reading ----------------------------------------------------------------------------------------------------------

_Items: TypeAlias = dict[int, Action | Overlap]
"""A row's items by column, in order."""


def _error(row: int, column: int, text: str | bytes, reason: str) -> ScheduleError:
    """Return the error for a cell. `row` and `column` count from 0 here, and from 1 in the message."""
    return ScheduleError(f"row {row + 1}, column {column + 1}, {text[:_SHOWN_CHARACTERS]!r}: {reason}")


def _table(text: str) -> tuple[list[list[str]], list[_Items]]:
    files.check_value_count(text, "the text")
    text = text.removeprefix("\ufeff")  # the byte order mark that spreadsheets write
    reader = csv.reader(io.StringIO(text, newline=""))
    table: list[list[str]] = []
    rows: list[_Items] = []
    try:
        for rank, cells in enumerate(reader):
            if rank == MAX_RANKS:
                raise _error(rank, 0, "", f"more than {MAX_RANKS:,} ranks, the limit")
            table.append(cells)
            rows.append(_items(rank, cells))
    except csv.Error as error:
        raise _error(len(table), 0, text.splitlines()[len(table)], f"this is not CSV: {error}") from None
    if not table:
        raise _error(0, 0, "", "the file is empty; expected a line for each rank, a cell for each action")
    return table, rows


def _items(rank: int, cells: list[str]) -> _Items:
    items: _Items = {}
    for column, cell in enumerate(cells):
        text = cell.strip()
        if not text:
            continue
        if not _CELL.fullmatch(text):
            raise _error(rank, column, cell, _EXPECTED)
        try:
            items[column] = parse_item(text)
        except ScheduleError as error:
            raise _error(rank, column, cell, str(error)) from None
    if not items:
        raise _error(
            rank, 0, "", f"rank {rank} has no actions; each line has those of one rank, and each rank has some"
        )
    return items


def _actions(rows: list[_Items]) -> Iterator[tuple[tuple[int, int], Action]]:
    """Yield each action with its row and column."""
    for rank, row in enumerate(rows):
        for column, item in row.items():
            for action in item.parts:
                yield (rank, column), action


def _owners(table: list[list[str]], rows: list[_Items]) -> tuple[int, ...]:
    """Return the rank of each stage: the one that computes it."""
    computed: dict[int, tuple[int, int]] = {}
    for position, action in _actions(rows):
        if action.op.is_compute:
            computed.setdefault(action.stage, position)
    for (rank, column), action in _actions(rows):
        stage, cell = action.stage, table[rank][column]
        if stage not in computed:
            raise _error(rank, column, cell, f"no rank computes stage {stage}, so its rank is unknown; add F or B")
        owner, first = computed[stage]
        if owner != rank:
            location = f"row {owner + 1}, column {first + 1} has {table[owner][first].strip()}"
            raise _error(rank, column, cell, f"stage {stage} is on two ranks: {location}; keep all its actions on one")
        if stage >= len(computed):
            missing = next(s for s in range(stage) if s not in computed)
            raise _error(rank, column, cell, f"no rank computes stage {missing}; number the stages 0, 1, 2 and so on")
    return tuple(computed[stage][0] for stage in range(len(computed)))


# -- writing ----------------------------------------------------------------------------------------------------------


def _inexpressible(schedule: Schedule, reason: str) -> ScheduleError:
    return ScheduleError(
        f"schedule {schedule.name!r} cannot be expressed in torch's format: {reason}; "
        "write str(schedule), which Schedule.parse reads"
    )


def _check_expressible(schedule: Schedule) -> None:
    if schedule.placement.pipelines > 1:
        raise _inexpressible(schedule, f"it has {schedule.placement.pipelines} pipelines, where torch has one")
    for rank, row in enumerate(schedule.rows):
        for item in row.items():
            if _CELL.fullmatch(str(item)):
                continue
            reason = f"rank {rank} has {item}; {_EXPECTED}"
            if isinstance(item, Action) and item.op.is_communication:
                reason = f"rank {rank} has {item}, and torch's messages go between neighboring stages only"
            elif isinstance(item, Action) and item.op is Op.REDUCE_GRAD:
                reason = f"rank {rank} has {item}, and torch does not support tied stages"
            raise _inexpressible(schedule, reason)
    last = schedule.stages - 1
    row = schedule.rows[schedule.placement.rank_of[last]]
    forwards = [action.microbatch or 0 for action in row if action.stage == last and action.op is Op.F]
    for earlier, later in pairwise(forwards):
        if earlier > later:
            # Torch appends each loss to a list, and the backward of microbatch k takes the list's entry k.
            reason = f"stage {last} has F{earlier} before F{later}, and torch would mix up their losses"
            raise _inexpressible(schedule, reason)


def _complete(schedule: Schedule) -> Schedule:
    """Add messages, and a `REDUCE_GRAD` for each stage that has a backward."""
    actions = [action for row in schedule.rows for action in row]
    if not any(action.op.is_communication for action in actions):
        schedule = add_communication(schedule)
    reduced = {action.stage for action in actions if action.op is Op.REDUCE_GRAD}
    return reduce_replicas(schedule, stages_with_backward(schedule) - reduced)
