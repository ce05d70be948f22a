"""Times of trials from the samples of a run: of each transfer, and of the whole step with and without overlap.

All in seconds, as arrays with a value a trial. The names are those of the field:

    completion      the longest that a rank took (nccl-tests' maximum over ranks)
    arrival skew    from the first rank that began to the last one
    transfer        from the last one's beginning until all have the result
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.fabric.samples import Run
from penstock.fabric.workload import Workload

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """Of one transfer of the workload; of one iteration, where a trial has several, but for how late ranks began.

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
        each = 1e-9 / iterations_of(run.record)
        durations = np.asarray((end - start) * each, float)
        return cls(
            ranks=ranks,
            durations=durations,
            late=(start - first) * 1e-9,
            completion=durations.max(1),
            arrival_skew=(last - first)[:, 0] * 1e-9,
            transfer=(end.max(1) - last[:, 0]) * each,
        )


def rate_key(collective: str) -> Literal["time_s", "transfer_s"]:
    """Of a transfer's results, the times that its bandwidths, its ideal and fits of it rest on.

    Of a message those from when both of its ends were there: a stage waits for what another one computes, and that is
    no matter of the network.
    """
    return "transfer_s" if collective == "send" else "time_s"


_ONE_WAY = ("broadcast", "gather", "reduce", "scatter", "send")


def runs_ahead(record: dict[str, Any], collective: str, shares: Sequence[int] = ()) -> bool:
    """Whether a rank may be done with a transfer, and begin the next, before it has reached the others.

    Of others no rank is done before all have begun; and the first to begin gets all that it needs in its own time.
    """
    alone = len(record["workload"]["transfers"]) == 1
    return not record.get("meets") and not alone and (collective in _ONE_WAY or bool(shares))


def ranks_of(workload: Workload, place: int, hosts: int) -> tuple[int, ...]:
    """Who takes part in a transfer: all hosts, where it names none."""
    return workload.transfers[place].ranks or tuple(range(hosts))


def iterations_of(record: dict[str, Any]) -> int:
    """How often a trial does each transfer in a row."""
    return int(record.get("iterations") or 1)


def algorithm_of(record: dict[str, Any], place: int) -> str:
    """Of a transfer: the one that was asked for, or what stood in where it does not do that collective."""
    return str((record.get("algorithms") or [record.get("algorithm", "")] * (place + 1))[place])


def measured_step(run: Run, workload: Workload) -> Seconds:
    """The whole step, from the start of what is computed in front of the first transfer until all have the last result,
    and with what is computed after it. Where hosts met between transfers, without the time that this took."""
    hosts = run.start_ns.shape[2]
    if run.record.get("meets"):
        each = [list(ranks_of(workload, number, hosts)) for number in range(len(workload.transfers))]
        spans = [run.end_ns[:, n, taking].max(1) - run.start_ns[:, n, taking].min(1) for n, taking in enumerate(each)]
        return np.asarray(np.sum(spans, axis=0) * (1e-9 / iterations_of(run.record)))
    firsts = []
    for host in range(hosts):
        place = next((n for n in range(len(workload.transfers)) if host in ranks_of(workload, n, hosts)), None)
        if place is not None:
            firsts.append(run.start_ns[:, place, host] - int(workload.transfers[place].compute_of(host) * 1e9))
    took_ns = run.end_ns.max((1, 2)) - np.min(firsts, axis=0)
    return np.asarray(took_ns * (1e-9 / iterations_of(run.record)) + workload.compute_seconds)


def computed_step(workload: Workload, transfers: Sequence[Seconds], hosts: int, *, overlap: bool) -> Seconds:
    """The whole step, if each transfer takes what it took in its trial once all of its ranks were there.

    Without overlap a rank computes when its last transfer has ended. With it, a rank computes all the time, as if
    nothing that it computes waited for what arrives (which holds for gradients, and not for activations), and a
    transfer begins when its ranks are ready for it and have ended the one before.

    Args:
        transfers: `TransferTimes.transfer` of each: in `completion` is what a rank waited for the others, which comes
            about here by itself.
    """
    trials = len(transfers[0])
    ready, done = np.zeros((hosts, trials)), np.zeros((hosts, trials))
    for place, (transfer, took) in enumerate(zip(workload.transfers, transfers, strict=True)):
        taking = list(ranks_of(workload, place, hosts))
        compute = np.array([[transfer.compute_of(host)] for host in taking])
        ready[taking] = (ready[taking] if overlap else done[taking]) + compute
        done[taking] = np.maximum(ready[taking], done[taking]).max(0) + took
    return np.asarray(np.maximum(ready, done).max(0) + workload.compute_seconds)
