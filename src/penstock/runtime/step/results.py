"""What ranks get of a step: the model's outputs if they ask for them, the batch's loss, and the timeline.

The loss goes to every rank: a step starts that, and only those who read the loss wait for it. On the CPU it is there at
the end of a step, and travels as other small values do. A device computes it later, so it travels once it has been
copied to the host (`Control.send_late`).

All ranks know all rows of the schedule, so of a timeline only times travel, as integers in one array: actions that were
pickled took longer than noting the times, and a tensor takes longer than an array.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from penstock._base.errors import ArgumentError
from penstock._base.process import cores
from penstock._base.trees import map_tensors
from penstock.distributed.groups import Groups
from penstock.runtime.exact import rules as exact
from penstock.runtime.exact.rules import Layout
from penstock.runtime.execute.clock import Moment
from penstock.runtime.execute.control import Arriving
from penstock.runtime.execute.engine import BoundSchedule, Engine
from penstock.runtime.transport.distributed import all_reduce
from penstock.runtime.transport.protocol import Message, Pending
from penstock.schedule import Schedule
from penstock.schedule.timeline import Timeline

Wanted = bool | int | Literal["all"]
"""Who gets a step's outputs: True, the rank of the last stage; "all" ranks; or the rank with that number."""

_ALL = 1


def code_of(wanted: Wanted, ranks: int) -> int:
    """Encode the choice, on which all ranks must agree, as a number: 0 for True and False, since outputs then stay in
    place.

    Raises:
        ArgumentError: this is not a valid choice.
    """
    if isinstance(wanted, bool):
        return 0
    if wanted == "all":
        return _ALL
    if isinstance(wanted, int) and 0 <= wanted < ranks:
        return _ALL + 1 + wanted
    raise ArgumentError(f"outputs={wanted!r}: expected True, False, 'all' or a rank from 0 to {ranks - 1}")


def words(code: int) -> str:
    """Return the argument that a code stands for."""
    return {0: "outputs=True or False", _ALL: "outputs='all'"}.get(code, f"outputs={code - _ALL - 1}")


def bring(engine: Engine, schedule: Schedule, outputs: Sequence[Any] | None, code: int) -> tuple[Any, ...] | None:
    """Bring each microbatch's output, in order, to the ranks that want it; return None on the others. Every rank calls
    it.

    Args:
        outputs: the outputs by microbatch, on the ranks of last stages; None for those that are elsewhere.
        code: the choice, from `code_of`; not 0.
    """
    here = engine.world.rank
    if here is None:
        return None if outputs is None else tuple(outputs)
    wanted = range(engine.world.ranks) if code == _ALL else range(code - _ALL - 1, code - _ALL)
    owners = _owners(schedule)
    mine = {} if outputs is None else {k: outputs[k] for k, owner in owners.items() if owner == here}
    found = dict(mine)
    for k, owner in owners.items():
        if here == owner and any(rank != owner for rank in wanted):
            engine.control.bring(_packed(mine[k]), owner, wanted)
        elif here in wanted and here != owner:
            packed, layouts = engine.control.bring(_NOTHING, owner, wanted)
            found[k] = map_tensors(partial(_unpacked, iter(layouts), engine.devices[engine.ranks[0]]), packed)
    return tuple(found[k] for k in owners) if here in wanted else None


def _owners(schedule: Schedule) -> dict[int, int]:
    """Return the rank that has each microbatch's output, ascending by microbatch."""
    placement = schedule.placement
    lasts = [stage for stage in range(placement.stages) if placement.is_last(stage)]
    found = {k: placement.rank_of[stage] for stage in lasts for k in schedule.numbers_on(stage)}
    return dict(sorted(found.items()))


_Packed = tuple[Any, list[Layout]]
_NOTHING: _Packed = None, []


def _packed(output: Any) -> _Packed:
    """Return an output with its tensors as bytes on the host, and their layouts in order: not every dtype can be
    pickled, and a slice would travel with the memory between its elements."""
    layouts = []

    def pack(tensor: Tensor) -> Tensor:
        layouts.append(Layout.of(tensor)._replace(misalignment=0, requires_grad=False))
        return exact.pack(tensor).cpu().view(torch.uint8).clone()

    return map_tensors(pack, output), layouts


def _unpacked(layouts: Iterator[Layout], device: torch.device, data: Tensor) -> Tensor:
    buffer = exact.allocate(next(layouts), device)
    buffer.flat.view(torch.uint8).copy_(data)
    return exact.unpack(buffer)


_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class SharedLoss:
    """A batch's loss on its way to every rank. Reading it waits, and starts nothing.

    The loss is the sum, in order, of terms from one rank or several. Each travels with its dtype, as float64, which
    holds every smaller float exactly.

    Args:
        terms: None where a term is on another rank. Not read before they are sent or asked for: reading waits for
            their device.
        divisor: what the sum is divided by, term by term.
        names: the parts of the loss. Each term of the loss is followed by one of each part.
    """

    def __init__(self, terms: Message, divisor: int = 1, names: Sequence[str] = ()) -> None:
        self._divisor = divisor
        self._names = tuple(names)
        self._rows: Tensor | None = None
        self.terms: Message = [None if term is None else term.detach().clone() for term in terms]
        self.waits: list[Callable[[], None]] = []
        """Each returns when some of the rows are here; none is left once all are."""
        self._arriving: list[Pending] = []

    def fill(self, terms: Message) -> Tensor:
        """Make what travels: a row per term, of its value and 1 + the number of its dtype. All zero on ranks without
        the term, so that a sum over ranks gives the term.

        Args:
            terms: those of this loss, or copies of them on the host.
        """
        self._rows = torch.zeros((len(terms), 2), dtype=torch.float64)
        for row, term in zip(self._rows, terms, strict=True):
            if term is not None:
                row[0] = term.cpu().double()
                row[1] = float(1 + _DTYPES.index(term.dtype))
        return self._rows

    def expect(self, arriving: Arriving) -> None:
        """Reading waits for this, too."""
        self.waits.append(arriving)
        self._arriving += arriving.pending

    @property
    def is_here(self) -> bool:
        """Whether `read` waits neither for another rank nor for a device."""
        on_host = all(term is None or term.device.type == "cpu" for term in self.terms)
        return not self.waits and (self._rows is not None or on_host)

    def read(self) -> Tensor | None:
        """Return the loss, a scalar on the CPU; None if there is none."""
        return self._all()[0]

    def read_parts(self) -> dict[str, Tensor]:
        """Return the parts of the loss, by name; those that there are."""
        named = zip(self._names, self._all()[1:], strict=True)
        return {name: total for name, total in named if total is not None}

    def _all(self) -> list[Tensor | None]:
        while self.waits:
            self.waits[-1]()
            self.waits.pop()  # only now: another thread may look
        self._arriving.clear()
        return self._totals()

    def read_quietly(self) -> Tensor | None:
        """Return what `read` returns, for a thread of a run that has failed: the watchdog is not told of its waits.
        They may raise, or never end."""
        for one in [*self._arriving]:
            one.wait()
        return self._totals()[0]

    def _totals(self) -> list[Tensor | None]:
        totals: list[Tensor | None] = [None] * (1 + len(self._names))
        rows = self.fill(self.terms) if self._rows is None else self._rows
        for index, (value, dtype) in enumerate(rows.tolist()):
            if dtype:
                term = torch.tensor(value, dtype=_DTYPES[int(dtype) - 1]) / self._divisor
                total = totals[index % len(totals)]
                totals[index % len(totals)] = term if total is None else total + term
        return totals


class LossParts:
    """The names of the parts that a loss function returns besides its loss, which every rank learns from the first loss
    in training and in evaluation.

    Args:
        shared: whether every rank is to have the loss.
        of_function: whether the user's function computes the loss, and not the model.
    """

    def __init__(self, engine: Engine, *, shared: bool, of_function: bool) -> None:
        self._engine, self._shared, self._of_function = engine, shared, of_function
        self._names: dict[bool, Sequence[str]] = {}

    def agree(self, bound: BoundSchedule) -> None:
        """Agree on the names of the parts of a step's loss. Raise ArgumentError for one that the first step had not."""
        found = [*dict.fromkeys(name for parts in bound.head.parts for name in parts)]
        if self._shared and bound.training not in self._names:
            has_loss = any(loss is not None for loss in bound.head.losses)
            given = [names for names in self._engine.control.gather(found if has_loss else None) if names is not None]
            if given:
                self._names[bound.training] = [*dict.fromkeys(name for names in given for name in names)]
        bound.head.names = self._names.get(bound.training, () if self._shared else found)
        new = [name for name in found if name not in bound.head.names]
        if new and self._of_function:
            raise ArgumentError(
                f"loss_fn returned {new[0]!r} besides its loss, which it did not in the first step, when all ranks "
                "learned what there is; return the same parts every time (NaN for one that has no value)"
            )


def share_loss(engine: Engine, bound: BoundSchedule, microbatches: int, *, wanted: bool) -> SharedLoss:
    """Share the loss of a step that has run. Every rank calls it.

    Args:
        microbatches: of each replica.
        wanted: whether every rank is to have the loss; otherwise it stays where it was computed.
    """
    world, control, schedule, head = engine.world, engine.control, bound.schedule, bound.head
    lasts = [stage for stage in range(schedule.placement.stages) if schedule.placement.is_last(stage)]
    numbers = {schedule.placement.rank_of[stage]: schedule.numbers_on(stage) for stage in lasts}  # of microbatches
    replicas, sums = world.data_parallel if wanted else 1, 1 + len(head.names)
    terms: list[Tensor | None] = [None] * sums
    lengths = [sums]
    if replicas > 1:  # each microbatch has its own place in a sum over all processes
        terms *= microbatches * replicas
        for own in (own for rank, own in numbers.items() if rank in engine.ranks and world.tp_rank == 0):
            start = (world.replica * microbatches + own.start) * sums
            terms[start : start + len(own) * sums] = head.terms(own)
    elif len(numbers) > 1 and not world.is_local:
        terms = [term for own in numbers.values() for term in head.terms(own)]
        lengths = [len(own) * sums for own in numbers.values()]
    elif not numbers.keys().isdisjoint(engine.ranks):
        terms = head.totals()
    shared = SharedLoss(terms, replicas, head.names)
    if not wanted or world.is_local:
        return shared
    if control.sends_late:

        def begin(groups: Groups, terms: Message) -> Pending:
            return all_reduce([shared.fill(terms)], groups["losses"])

        shared.expect(control.send_late(shared.terms, begin, control.others if replicas > 1 else control.line))
    elif replicas > 1:
        shared.expect(control.broadcast_sum(shared.fill(shared.terms)))
    else:
        for rank, rows in zip(numbers, torch.split(shared.fill(shared.terms), lengths), strict=True):
            shared.expect(engine.broadcast(rows, rank))
    return shared


def share_timeline(
    engine: Engine, schedule: Schedule, moments: Mapping[int, Sequence[Moment]], *, wanted: bool
) -> Timeline | None:
    """Return the timeline of a step, on every rank; None if it is not wanted. Every rank calls it.

    Args:
        moments: by rank of this process, in the order of its row.
    """
    if not wanted:
        return None
    times = {rank: [(began, ready, ended) for _, began, ready, ended in row] for rank, row in moments.items()}
    if engine.world.is_local:
        return Timeline.from_rows(schedule.rows, [times[rank] for rank in engine.ranks], serialized=True)
    on_cpu, here = engine.devices[engine.ranks[0]].type == "cpu", int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    crowded = on_cpu and here * torch.get_num_threads() > cores()
    everyone = engine.control.gather_line(np.array(times[engine.ranks[0]], dtype=np.int64), "the timeline")
    return Timeline.from_rows(schedule.rows, [one.tolist() for one in everyone], crowded=crowded)
