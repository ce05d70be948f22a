"""What a step gives back, and what ranks get for that: the outputs if requested, the batch's loss, and the timeline.

The loss goes to every rank: a step starts that, and only those who read the loss wait for it. On the CPU it is there at
the end of a step, and travels as other small values do. A device computes it later, so it travels once it has been
copied to the host (`Control.sum_loss`).

All ranks know all rows of the schedule, so of a timeline only times travel, as integers in one array: actions that were
pickled took longer than noting the times, and a tensor takes longer than an array.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from penstock._base.errors import ArgumentError
from penstock._base.process import cores
from penstock.runtime.exact.rules import Layout
from penstock.runtime.execute.clock import Moment
from penstock.runtime.execute.control import Arrival
from penstock.runtime.execute.engine import Engine
from penstock.runtime.execute.executor import BoundSchedule
from penstock.runtime.transport.agreement import from_bytes, to_bytes
from penstock.runtime.transport.protocol import Message, Pending
from penstock.schedule import Schedule
from penstock.schedule.timeline import Timeline


def collect_outputs(
    engine: Engine, owners: Sequence[int], outputs: Sequence[Any] | None, targets: range
) -> tuple[Any, ...] | None:
    """Bring each microbatch's output, in order, to the ranks that requested it; return None on the others.

    Every rank calls it.

    Args:
        owners: the rank that has each microbatch's output.
        outputs: the outputs by microbatch, on the ranks of last stages; None for those that are elsewhere.
        targets: the ranks that requested them.
    """
    local_rank = engine.world.rank
    if local_rank is None:
        return None if outputs is None else tuple(outputs)
    collected = {} if outputs is None else {k: outputs[k] for k, owner in enumerate(owners) if owner == local_rank}
    for k, owner in enumerate(owners):
        if local_rank == owner and any(rank != owner for rank in targets):
            engine.control.transfer(_pickle(collected[k]), owner, targets)
        elif local_rank in targets and local_rank != owner:
            arrived = io.BytesIO(engine.control.transfer(b"", owner, targets))
            collected[k] = _Unpickler(arrived, engine.devices[local_rank]).load()
    return tuple(collected[k] for k in range(len(owners))) if local_rank in targets else None


def _pickle(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Takes a tensor as its bytes: not every dtype can be pickled, and a slice would travel with the memory between
    its elements."""

    def persistent_id(self, value: Any) -> tuple[bytes, Layout] | None:
        if not isinstance(value, Tensor):
            return None
        return to_bytes(value), Layout.of(value)._replace(misalignment=0, requires_grad=False)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self._device = device

    def persistent_load(self, packed: tuple[bytes, Layout]) -> Tensor:
        return from_bytes(*packed, self._device)


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

    def expect(self, arriving: Arrival) -> None:
        """Reading waits for this, too."""
        self.waits.append(arriving)
        self._arriving += arriving.pending

    @property
    def is_ready(self) -> bool:
        """Whether `read` waits neither for another rank nor for a device."""
        on_host = all(term is None or term.device.type == "cpu" for term in self.terms)
        return not self.waits and (self._rows is not None or on_host)

    def read(self) -> Tensor | None:
        """Return the loss, a scalar on the CPU; None if there is none."""
        return self._wait_for_terms()[0]

    def read_parts(self) -> dict[str, Tensor]:
        """Return the parts of the loss, by name; those that there are."""
        named = zip(self._names, self._wait_for_terms()[1:], strict=True)
        return {name: total for name, total in named if total is not None}

    def _wait_for_terms(self) -> list[Tensor | None]:
        while self.waits:
            self.waits[-1]()
            self.waits.pop()  # only now: another thread may look
        self._arriving.clear()
        return self._totals()

    def read_quietly(self) -> Tensor | None:
        """Return what `read` returns, for a thread of a failed run: its waits are not registered with the watchdog.
        They may raise, or never end."""
        for pending in [*self._arriving]:
            pending.wait()
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
        local_names = [*dict.fromkeys(name for parts in bound.head.parts for name in parts)]
        if self._shared and bound.training not in self._names:
            has_loss = any(loss is not None for loss in bound.head.losses)
            gathered = self._engine.control.gather(local_names if has_loss else None)
            if known := [names for names in gathered if names is not None]:
                self._names[bound.training] = [*dict.fromkeys(name for names in known for name in names)]
        bound.head.names = self._names.get(bound.training, () if self._shared else local_names)
        new = [name for name in local_names if name not in bound.head.names]
        if new and self._of_function:
            raise ArgumentError(
                f"loss_fn returned {new[0]!r} besides its loss, which it did not in the first step, when all ranks "
                "learned what there is; return the same parts every time (NaN for one that has no value)"
            )


def share_loss(engine: Engine, bound: BoundSchedule, microbatches: int, *, broadcast: bool) -> SharedLoss:
    """Share the loss of a step that has run. Every rank calls it.

    Args:
        microbatches: of each replica.
        broadcast: whether every rank is to have the loss; otherwise it stays where it was computed.
    """
    world, control, head = engine.world, engine.control, bound.head
    owners = bound.last_ranks
    microbatches_on = {rank: [k for k, owner in enumerate(owners) if owner == rank] for rank in dict.fromkeys(owners)}
    replicas, terms_per_loss = world.data_parallel if broadcast else 1, 1 + len(head.names)
    terms: list[Tensor | None] = [None] * terms_per_loss
    lengths = [terms_per_loss]
    if replicas > 1:  # each microbatch has its own place in a sum over all processes
        terms *= microbatches * replicas
        for owned in (owned for rank, owned in microbatches_on.items() if rank in engine.ranks and world.tp_rank == 0):
            start = (world.replica * microbatches + owned[0]) * terms_per_loss
            terms[start : start + len(owned) * terms_per_loss] = head.terms(owned)
    elif len(microbatches_on) > 1 and not world.is_local:
        terms = [term for owned in microbatches_on.values() for term in head.terms(owned)]
        lengths = [len(owned) * terms_per_loss for owned in microbatches_on.values()]
    elif not microbatches_on.keys().isdisjoint(engine.ranks):
        terms = head.totals()
    shared = SharedLoss(terms, replicas, head.names)
    if not broadcast or world.is_local:
        return shared
    if control.sums_losses:
        shared.expect(control.sum_loss(shared.terms, shared.fill))
    else:
        for rank, rows in zip(microbatches_on, torch.split(shared.fill(shared.terms), lengths), strict=True):
            shared.expect(engine.broadcast(rows, rank))
    return shared


def share_timeline(
    engine: Engine, schedule: Schedule, moments: Mapping[int, Sequence[Moment]], *, timed: bool
) -> Timeline | None:
    """Return the timeline of a step, on every rank; None if it was not timed. Every rank calls it.

    Args:
        moments: by rank of this process, in the order of its row.
    """
    if not timed:
        return None
    times = {rank: [(began, ready, ended) for _, began, ready, ended in row] for rank, row in moments.items()}
    if engine.world.is_local:
        return Timeline.from_rows(schedule.rows, [times[rank] for rank in engine.ranks], serialized=True)
    on_cpu, local_ranks = engine.devices[engine.ranks[0]].type == "cpu", int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    crowded = on_cpu and local_ranks * torch.get_num_threads() > cores()
    gathered = engine.control.gather_pipeline(np.array(times[engine.ranks[0]], dtype=np.int64), "the timeline")
    return Timeline.from_rows(schedule.rows, [rank_times.tolist() for rank_times in gathered], crowded=crowded)


@dataclass(frozen=True, slots=True, repr=False)
class StepResult:
    """What one `step` or `evaluate` gives back. Printing it shows the loss only if that takes no waiting.

    Attributes:
        losses: each microbatch's own loss, unweighted, in order of microbatch; empty except on the last stage's rank.
        timeline: what every rank did when, if it was asked for.
        sizes: the rows of each microbatch; on every rank.
    """

    losses: tuple[Tensor, ...] = ()
    timeline: Timeline | None = None
    sizes: tuple[int, ...] = ()
    _loss: SharedLoss | None = field(default=None, repr=False)
    _outputs: tuple[Any, ...] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        loss_text = "under way" if self._loss is not None and not self._loss.is_ready else "none here"
        if self._loss is not None and self._loss.is_ready and (loss := self._loss.read()) is not None:
            loss_text = f"{float(loss):.6g}"
        return f"{type(self).__name__}(loss={loss_text}, sizes={self.sizes})"

    def __iter__(self) -> NoReturn:
        raise TypeError("a step returns no tuple: read result.loss and, with outputs=True, result.outputs")

    @property
    def loss(self) -> Tensor:
        """The loss of the whole batch: a scalar on the CPU, the same on every rank.

        Raises:
            ArgumentError: there is none here (no loss was computed, or `broadcast_loss=False` on another rank).
        """
        loss = None if self._loss is None else self._loss.read()
        if loss is None:
            raise ArgumentError(
                "result.loss: there is no loss on this rank; pass loss_fn=..., and keep broadcast_loss=True"
            )
        return loss

    @property
    def parts(self) -> dict[str, Tensor]:
        """What else the loss function returned, by name, or the scalars in the output of a model that computes its own
        loss: averaged like the loss, and where that is. See docs/guides/batches.md.
        """
        return {} if self._loss is None else self._loss.read_parts()

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The model's output for each microbatch, in order; on the rank of the last stage, or the ranks that asked.

        A schedule with two copies of the model has two last stages; with `outputs=True` each one's rank has None for
        the other's.

        Raises:
            ArgumentError: they were not asked for, or are on another rank.
        """
        if self._outputs is None:
            raise ArgumentError(
                "result.outputs: not kept here; pass outputs=True, and read them where pipe.has_outputs is true, or "
                "outputs='all', or the number of the rank that is to have them"
            )
        return self._outputs
