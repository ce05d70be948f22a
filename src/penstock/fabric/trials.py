"""Times of trials from the samples of a run: of each transfer, and of the whole step with and without overlap.

All in seconds, as arrays with a value a trial. The names are those of the field:

    completion      the longest that a rank took (nccl-tests' maximum over ranks)
    arrival skew    from the first rank that began to the last one
    transfer        from the last one's beginning until all have the result
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.fabric.samples import Run
from penstock.fabric.workload import Workload

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """Of one transfer of the workload.

    Attributes:
        ranks: who takes part.
        durations: of each rank, [trial, place in `ranks`].
        late: how long after the first each rank began, [trial, place in `ranks`].
        completion, arrival_skew, transfer: [trial].
    """

    ranks: tuple[int, ...]
    durations: Seconds
    late: Seconds
    completion: Seconds
    arrival_skew: Seconds
    transfer: Seconds

    @classmethod
    def of(cls, run: Run, workload: Workload, place: int) -> TransferTimes:
        """Of the transfer in this place of the workload."""
        ranks = ranks_of(workload, place, run.start_ns.shape[2])
        taking = list(ranks)
        # Nanoseconds of a clock do not fit into a float: differences first.
        start, end = run.start_ns[:, place, taking], run.end_ns[:, place, taking]
        first, last = start.min(1, keepdims=True), start.max(1, keepdims=True)
        durations = np.asarray((end - start) * 1e-9, float)
        return cls(
            ranks=ranks,
            durations=durations,
            late=(start - first) * 1e-9,
            completion=durations.max(1),
            arrival_skew=(last - first)[:, 0] * 1e-9,
            transfer=(end.max(1) - last[:, 0]) * 1e-9,
        )


def ranks_of(workload: Workload, place: int, hosts: int) -> tuple[int, ...]:
    """Who takes part in a transfer: all hosts, where it names none."""
    return workload.transfers[place].ranks or tuple(range(hosts))


def algorithm_of(record: dict[str, Any], place: int) -> str:
    """Of a transfer: the one that was asked for, or what stood in where it does not do that collective."""
    return str((record.get("algorithms") or [record.get("algorithm", "")] * (place + 1))[place])


def measured_step(run: Run, workload: Workload) -> Seconds:
    """The whole step, from the start of what is computed in front of the first transfer until all have the last result,
    and with what is computed after it."""
    first = workload.transfers[0].compute_seconds + workload.compute_seconds
    start = np.where(run.start_ns < 0, np.iinfo(np.int64).max, run.start_ns)
    return np.asarray((run.end_ns.max((1, 2)) - start[:, 0].min(1)) * 1e-9 + first)


def computed_step(workload: Workload, completions: list[Seconds], hosts: int, *, overlap: bool) -> Seconds:
    """The whole step, if each transfer takes what it took in its trial, and its ranks begin it together.

    Without overlap a rank computes when its last transfer has ended. With it, a rank computes all the time, as if
    nothing that it computes waited for what arrives (which holds for gradients, and not for activations), and a
    transfer begins when its ranks are ready for it and have ended the one before.
    """
    trials = len(completions[0])
    ready, done = np.zeros((hosts, trials)), np.zeros((hosts, trials))
    for place, (transfer, took) in enumerate(zip(workload.transfers, completions, strict=True)):
        taking = list(ranks_of(workload, place, hosts))
        ready[taking] = (ready[taking] if overlap else done[taking]) + transfer.compute_seconds
        done[taking] = np.maximum(ready[taking], done[taking]).max(0) + took
    return np.asarray(np.maximum(ready, done).max(0) + workload.compute_seconds)
