"""Compute each trial's times from a run's samples: of each transfer, and of the step with and without overlap.

All are in seconds, as arrays with one value per trial. The names are the field's:

    completion      the longest time that a rank took (nccl-tests' maximum over ranks)
    arrival skew    from the start of the first rank to the start of the last
    transfer        from the start of the last rank until all have the result
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.network.fabric.samples import Run
from penstock.network.fabric.workload import Workload

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TransferTimes:
    """Times of one transfer of the workload, per iteration if a trial has several, except for how late ranks started.

    Attributes:
        ranks: the participants.
        durations, late: of each rank, and how long after the first it started: shape [trial, index in `ranks`].
        completion, arrival_skew, transfer: shape [trial].
    """

    ranks: tuple[int, ...]
    durations: Seconds
    late: Seconds
    completion: Seconds
    arrival_skew: Seconds
    transfer: Seconds

    @classmethod
    def of(cls, run: Run, workload: Workload, place: int) -> TransferTimes:
        """Computes the times of the transfer at index `place` of the workload."""
        ranks = ranks_of(workload, place, run.start_ns.shape[2])
        taking = list(ranks)
        # A clock's nanoseconds exceed a float's precision, so subtract first.
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
    """Returns which times of a transfer's results its bandwidths, ideal percentage and fits are based on.

    For a message, they are the times since both ends were there: a stage waits for another to finish computing, which
    has nothing to do with the network.
    """
    return "transfer_s" if collective == "send" else "time_s"


_ONE_WAY = ("broadcast", "gather", "reduce", "scatter", "send")


def runs_ahead(record: dict[str, Any], collective: str, shares: Sequence[int] = ()) -> bool:
    """Whether a rank may finish a transfer, and start the next, before the other ranks have reached it.

    In the other collectives, no rank finishes before all have started, and the first to start receives all it needs
    within its own time.
    """
    alone = len(record["workload"]["transfers"]) == 1
    return not record.get("meets") and not alone and (collective in _ONE_WAY or bool(shares))


def ranks_of(workload: Workload, place: int, hosts: int) -> tuple[int, ...]:
    """Returns the participants of a transfer: all hosts, if it names none."""
    return workload.transfers[place].ranks or tuple(range(hosts))


def iterations_of(record: dict[str, Any]) -> int:
    """Returns how many times in a row a trial runs each transfer."""
    return int(record.get("iterations") or 1)


def algorithm_of(record: dict[str, Any], place: int) -> str:
    """Returns a transfer's algorithm: the requested one, or its substitute if that does not support the collective."""
    return str((record.get("algorithms") or [record.get("algorithm", "")] * (place + 1))[place])


def measured_step(run: Run, workload: Workload) -> Seconds:
    """Returns the time of the whole step, including the computation before the first transfer and after the last.

    It ends when all ranks have the last result and have done the final computation. If hosts met between transfers, the
    time this took is not included.
    """
    hosts, each = run.start_ns.shape[2], 1e-9 / iterations_of(run.record)
    taking = [list(ranks_of(workload, place, hosts)) for place in range(len(workload.transfers))]
    if run.record.get("meets"):
        spans = [run.end_ns[:, n, ranks].max(1) - run.start_ns[:, n, ranks].min(1) for n, ranks in enumerate(taking)]
        return np.asarray(np.sum(spans, axis=0) * each)
    firsts: dict[int, NDArray[np.int64]] = {}
    for place, ranks in enumerate(taking):
        for host in ranks:
            before_ns = int(workload.transfers[place].compute_of(host) * 1e9)
            firsts.setdefault(host, run.start_ns[:, place, host] - before_ns)
    took_ns = run.end_ns.max((1, 2)) - np.min([*firsts.values()], axis=0)
    return np.asarray(took_ns * each + workload.compute_seconds)


def computed_step(workload: Workload, transfers: Sequence[Seconds], hosts: int, *, overlap: bool) -> Seconds:
    """Returns the time of the whole step if each transfer took its own trial's time once all of its ranks were there.

    Without overlap, a rank computes once its previous transfer has finished. With overlap, a rank computes all the
    time, as if its computation never waited for incoming data (true of gradients, but not of activations), and a
    transfer starts when its ranks are ready for it and have finished the previous one.

    Args:
        transfers: `TransferTimes.transfer` of each transfer. (`completion` would include the wait for other ranks,
            which this function computes itself.)
    """
    trials = len(transfers[0])
    ready, done = np.zeros((hosts, trials)), np.zeros((hosts, trials))
    for place, (transfer, took) in enumerate(zip(workload.transfers, transfers, strict=True)):
        taking = list(ranks_of(workload, place, hosts))
        compute = np.array([[transfer.compute_of(host)] for host in taking])
        ready[taking] = (ready[taking] if overlap else done[taking]) + compute
        done[taking] = np.maximum(ready[taking], done[taking]).max(0) + took
    return np.asarray(np.maximum(ready, done).max(0) + workload.compute_seconds)


def stalled(run: Run) -> tuple[int, ...]:
    """Returns the trials during which a link stood still, as reported by the switch; empty if no stall was requested.

    The switch and the hosts read the same clock, that of their machine.
    """
    told = (run.record.get("switch") or {}).get("stalls") or ()
    starts = np.where(run.end_ns >= 0, run.start_ns, np.iinfo(np.int64).max)
    met = np.zeros(len(run.start_ns), bool)
    for one in told if len(met) else ():
        begin, end = starts.min((1, 2)), run.end_ns.max((1, 2))
        until = np.iinfo(np.int64).max if one["until_ns"] is None else one["until_ns"]
        # The last stall that began before the trial's end.
        turn = (np.minimum(end, until) - one["since_ns"]) // one["every_ns"]
        over = one["since_ns"] + turn * one["every_ns"] + one["length_ns"]
        met |= (turn >= 1) & (begin < np.minimum(over, until))
    return tuple(np.flatnonzero(met).tolist())
