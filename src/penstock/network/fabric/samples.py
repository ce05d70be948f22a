"""Store every sample of a run, one per line, as soon as its trial ends, so that a killed run leaves complete trials.

The folder of a run contains:

    spec.json      what to run; written before any host starts (if the hosts are started here)
    run.json       what ran, where, and how it ended; written once all hosts have joined
    samples.csv    trial,transfer,rank,start_ns,end_ns        on rank 0's clock
    steps.csv      trial,transfer,rank,round,start_ns,end_ns  for the first trial, and for each trial that was slower
                   than all before it
"""
# ruff: noqa: UP013  (a class takes a line for each entry, and none can be called "from")

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NotRequired, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypedDict  # pydantic takes typing's only from Python 3.12 on

from penstock._base.errors import ArgumentError
from penstock._base.files import MAX_QUOTED, MAX_VALUES, STRICT, quoted, read_bytes, read_json, validate
from penstock._base.formatting import printable_line, strip_all_control_chars
from penstock.network import MAX_HOSTS
from penstock.network.fabric.algorithms import ENGINE, or_default
from penstock.network.fabric.steps import ROOTED
from penstock.network.fabric.workload import MAX_SECONDS, Workload
from penstock.network.scenario import AppliedEvent
from penstock.network.topology import Topology, recorded_topology

SPEC, RUN, SAMPLES, STEPS = "spec.json", "run.json", "samples.csv", "steps.csv"
HEAD = ("trial", "transfer", "rank", "start_ns", "end_ns")
STEPS_HEAD = ("trial", "transfer", "rank", "round", "start_ns", "end_ns")


class SampleFile:
    """Append rows to a file that starts with a header; each `add` reaches the file system before it returns."""

    def __init__(self, path: Path, head: tuple[str, ...]) -> None:
        self._file = path.open("w", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")
        self.add([head])

    def add(self, rows: Iterable[tuple[int | str, ...]]) -> None:
        self._writer.writerows(rows)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Run:
    """A run as stored in its folder.

    Attributes:
        record: run.json.
        start_ns, end_ns: shape (trials, transfers, ranks), with transfers in the workload's order; -1 if a rank does
            not take part. Only complete trials.
        rounds: the rows of steps.csv.
    """

    record: RunRecord
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    rounds: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, len(STEPS_HEAD)), np.int64), repr=False)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read a run that finished or was killed; incomplete trials are left out. Raise ArgumentError: the folder holds
        no run, a run that ended before its hosts joined, or damaged samples."""
        if not (folder / RUN).exists() and (folder / SPEC).exists():
            raise ArgumentError(
                f"the run in {folder} ended before its hosts had joined, so it has no samples. Their output is in "
                f"{folder}/host-*.log. Run it again with --out {folder}, which replaces it"
            )
        no_run = f"{folder} holds no run of penstock fabric"
        if not (folder / RUN).exists():
            reason = f"it has no {RUN}" if folder.is_dir() else "there is no such folder"
            raise ArgumentError(f"{no_run}: {reason}. Pass a folder that a run was written to, such as runs/fabric-1")
        record = validate(RunRecord, strip_all_control_chars(read_json(folder / RUN)), f"{no_run}: {RUN}")
        transfers, hosts, network = record.workload.transfers, record.hosts, record.network
        if network and network["hosts"] != hosts:
            raise ArgumentError(f"{folder / RUN}: hosts={hosts:,}, but network.hosts={network['hosts']:,}")
        try:
            _ = record.topology
        except (ValueError, OverflowError) as error:  # of which ArgumentError is one
            raise ArgumentError(f"{folder / RUN}: network: {quoted(str(error))}") from None
        try:
            table, rounds = _read_table(folder / SAMPLES, HEAD), _read_table(folder / STEPS, STEPS_HEAD)
        except (ValueError, OverflowError) as error:
            raise ArgumentError(f"{no_run}: {error}") from None
        if hosts * len(transfers) > MAX_VALUES:
            raise ArgumentError(f"{folder / RUN}: {len(transfers):,} transfers of {hosts:,} hosts are too many")
        if not all(transfer.fits(hosts) for transfer in transfers):
            raise ArgumentError(f"{folder / RUN}: the workload has ranks that are not among the {hosts:,} hosts")
        takes_part = np.array([[not t.ranks or rank in t.ranks for rank in range(hosts)] for t in transfers])
        of_trial = np.argwhere(takes_part)  # the transfer and the rank of each row of a trial
        trials = len(table) // len(of_trial)
        whole, every = trials * len(of_trial), np.arange(trials + 1)  # and one that may have been cut off
        expected = np.column_stack([np.repeat(every, len(of_trial)), np.tile(of_trial, (trials + 1, 1))])
        order = np.lexsort(table[:, 2::-1].T)
        rows, left = table[order], iter(expected[whole:].tolist())
        # Some rows of the last trial, in order: `in` moves on to where it finds one.
        foreign = np.array([row not in left for row in rows[whole:, :3].tolist()], bool)
        wrong = np.append((rows[:whole, :3] != expected[:whole]).any(1), foreign) | (rows[:, 4] < rows[:, 3])
        if wrong.any():
            first = wrong.argmax()
            line, row, right = order[first] + 2, rows[first], expected[first]
            raise ArgumentError(
                f"{folder / SAMPLES} is damaged: line {line}, {','.join(map(str, row))}: expected trial, transfer and "
                f"rank {','.join(map(str, right))} once, with an end after the start. Restore the file as the run "
                "wrote it, or run again"
            )
        start = np.full((trials, *takes_part.shape), -1, np.int64)
        end = start.copy()
        start[:, takes_part], end[:, takes_part] = rows[:whole, 3:].T.reshape(2, trials, len(of_trial))
        return cls(record, start, end, rounds)

    @cached_property
    def times(self) -> tuple[TransferTimes, ...]:
        """The times of each transfer, in the workload's order."""
        return tuple(TransferTimes.from_run(self, index) for index in range(len(self.record.workload.transfers)))


def _read_table(path: Path, head: tuple[str, ...]) -> NDArray[np.int64]:
    """Read the rows below the header, without an incomplete last line; none if the file was never started."""
    data = read_bytes(path) if path.exists() else b""
    if data.count(b"\n") > MAX_VALUES:
        raise ArgumentError(f"{path} has more than {MAX_VALUES:,} lines, the limit for such a file")
    file = io.BytesIO(data[: data.rfind(b"\n") + 1])  # without a line that was cut off
    first = file.readline().rstrip().decode(errors="replace")
    if first and tuple(first.split(",")) != head:
        raise ValueError(f"{path.name} begins with {printable_line(first, MAX_QUOTED)!r}; expected {','.join(head)}")
    if file.tell() == len(file.getbuffer()):
        return np.empty((0, len(head)), np.int64)
    return np.loadtxt(file, np.int64, delimiter=",", ndmin=2, usecols=range(len(head)))


# -- times of trials, in seconds, as arrays with one value per trial ---------------------------------------------------

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
    def from_run(cls, run: Run, index: int) -> TransferTimes:
        """Compute the times of the transfer at this index of the workload."""
        ranks = run.record.workload.transfers[index].members(run.start_ns.shape[2])
        columns = list(ranks)
        # A clock's nanoseconds exceed a float's precision, so subtract first.
        start, end = run.start_ns[:, index, columns], run.end_ns[:, index, columns]
        first, last = start.min(1, keepdims=True), start.max(1, keepdims=True)
        scale = 1e-9 / run.record.iterations
        durations = np.asarray((end - start) * scale, float)
        return cls(
            ranks=ranks,
            durations=durations,
            late=(start - first) * 1e-9,
            completion=durations.max(1),
            arrival_skew=(last - first)[:, 0] * 1e-9,
            transfer=(end.max(1) - last[:, 0]) * scale,
        )


def rate_key(collective: str) -> Literal["time_s", "transfer_s"]:
    """Return which times of a transfer's results its bandwidths, ideal percentage and fits are based on.

    For a message, they are the times since both ends were there: a stage waits for another to finish computing, which
    has nothing to do with the network.
    """
    return "transfer_s" if collective == "send" else "time_s"


def measured_step(run: Run) -> Seconds:
    """Return the time of the whole step, including the computation before the first transfer and after the last.

    It ends when all ranks have the last result and have done the final computation. If hosts met between transfers, the
    time this took is not included.
    """
    workload, hosts, scale = run.record.workload, run.start_ns.shape[2], 1e-9 / run.record.iterations
    members = [list(transfer.members(hosts)) for transfer in workload.transfers]
    if run.record.synchronizes_between_transfers:
        spans = [run.end_ns[:, n, ranks].max(1) - run.start_ns[:, n, ranks].min(1) for n, ranks in enumerate(members)]
        return np.asarray(np.sum(spans, axis=0) * scale)
    starts: dict[int, NDArray[np.int64]] = {}
    for index, ranks in enumerate(members):
        for host in ranks:
            if host not in starts:
                starts[host] = run.start_ns[:, index, host] - int(workload.transfers[index].compute_on(host) * 1e9)
    took_ns = run.end_ns.max((1, 2)) - np.min([*starts.values()], axis=0)
    return np.asarray(took_ns * scale + workload.compute_seconds)


def computed_step(workload: Workload, transfers: Sequence[Seconds], hosts: int, *, overlap: bool) -> Seconds:
    """Return the time of the whole step if each transfer took its own trial's time once all of its ranks were there.

    Without overlap, a rank computes once its previous transfer has finished. With overlap, a rank computes all the
    time, as if its computation never waited for incoming data (true of gradients, but not of activations), and a
    transfer starts when its ranks are ready for it and have finished the previous one.

    Args:
        transfers: `TransferTimes.transfer` of each transfer. (`completion` would include the wait for other ranks,
            which this function computes itself.)
    """
    trials = len(transfers[0])
    ready, done = np.zeros((hosts, trials)), np.zeros((hosts, trials))
    for transfer, took in zip(workload.transfers, transfers, strict=True):
        members = list(transfer.members(hosts))
        compute = np.array([[transfer.compute_on(host)] for host in members])
        ready[members] = (ready[members] if overlap else done[members]) + compute
        done[members] = np.maximum(ready[members], done[members]).max(0) + took
    return np.asarray(np.maximum(ready, done).max(0) + workload.compute_seconds)


def stalled_trials(run: Run) -> tuple[int, ...]:
    """Return the trials during which a link stood still, as reported by the switch; empty if no stall was requested.

    The switch and the hosts read the same clock, that of their machine.
    """
    stalls = run.record.switch["stalls"] if run.record.switch else ()
    starts = np.where(run.end_ns >= 0, run.start_ns, np.iinfo(np.int64).max)
    is_stalled = np.zeros(len(run.start_ns), bool)
    for stall in stalls if len(is_stalled) else ():
        begin, end = starts.min((1, 2)), run.end_ns.max((1, 2))
        until = np.iinfo(np.int64).max if stall["until_ns"] is None else stall["until_ns"]
        # The last stall that began before the trial's end.
        number = (np.minimum(end, until) - stall["since_ns"]) // stall["every_ns"]
        stall_end = stall["since_ns"] + number * stall["every_ns"] + stall["length_ns"]
        is_stalled |= (number >= 1) & (begin < np.minimum(stall_end, until))
    return tuple(np.flatnonzero(is_stalled).tolist())


# -- run.json ----------------------------------------------------------------------------------------------------------

_MAX_HOSTS = 10_000
"""The most hosts in a run that can be read, whether started by torchrun or by `--hosts`."""
_Count = Annotated[int, Field(ge=0, lt=1 << 40)]
_Positive = Annotated[int, Field(ge=1, lt=1 << 40)]
_Time = Annotated[int, Field(ge=-(1 << 62), le=1 << 62)]
_Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
_PositiveSeconds = Annotated[float, Field(ge=1e-9, le=MAX_SECONDS)]
_Rate = Annotated[float, Field(ge=1e-3, le=1e15)]
_HostCount = Annotated[int, Field(ge=2, le=MAX_HOSTS)]
_Number = Annotated[str, Field(pattern=r"^\d{1,5}$")]
# fmt: off
MeasuredLink = TypedDict("MeasuredLink", {
    "from": _Count, "to": _Count, "latency_seconds": _Seconds, "bytes_per_second": _Rate | None,
})
Network = TypedDict("Network", {
    "hosts": _HostCount, "shaper": str | None, "remarks": list[str], "link": str | None, "own": dict[_Number, str],
    "background": list[str], "slow": dict[_Number, float], "held_back_by": str | None, "mtu": NotRequired[int | None],
    "rates": NotRequired[dict[str, Any] | None],
})
_Stall = TypedDict("_Stall", {
    "since_ns": _Time, "length_ns": _Time, "every_ns": Annotated[_Time, Field(ge=1)], "until_ns": _Time | None,
})
_Late = TypedDict("_Late", {"p50": _Seconds | None, "p99": _Seconds | None, "worst": _Seconds | None})
_Counted = TypedDict("_Counted", {
    "frames": _Count, "bytes": _Count, "lost": _Count, "duplicated": _Count, "corrupted": _Count, "reordered": _Count,
    "queue_full": _Count, "host_gone": _Count, "no_such_host": _Count, "background_bytes": _Count,
})
_Port = TypedDict("_Port", {"up": _Counted, "down": _Counted})
_Switch = TypedDict("_Switch", {
    "late": _Late, "no_room": _Count, "seconds": _Seconds, "busy_seconds": _Seconds, "stalls": list[_Stall],
    "links": list[_Port],
})
_Environment = TypedDict("_Environment", {
    "host": NotRequired[str], "cores": NotRequired[_Positive | None], "kernel": NotRequired[str | None],
    "torch": NotRequired[str | None], "congestion_control": NotRequired[str | None],
    "interface": NotRequired[str | None],
})
_Cpu = TypedDict("_Cpu", {
    "cpu_seconds": _Seconds, "wall_seconds": _PositiveSeconds, "involuntary_switches": NotRequired[_Count | None],
    "busy": NotRequired[_Seconds | None], "steal": NotRequired[_Seconds | None],
})
_Clock = TypedDict("_Clock", {"offset_ns": _Time, "uncertainty_ns": _Time})
# fmt: on
for _kind in (MeasuredLink, Network, _Stall, _Late, _Counted, _Port, _Switch, _Environment, _Cpu, _Clock):
    _kind.__pydantic_config__ = STRICT | {"extra": "allow"}  # type: ignore[union-attr]  # reports show all of them


@dataclass(frozen=True)
class Settings:
    """What a run was asked to do: entries of both spec.json and run.json.

    Attributes:
        algorithm: a step-list algorithm, used for every collective that has it; other collectives use their first.
            "engine" means the backend's own collectives.
        warmup: the number of trials before them, all checked for correct results; None for `spec.CHECKED` trials, and
            then as many as it takes until times are steady.
        iterations: how many times in a row a trial runs each transfer, as in nccl-tests; times are per iteration.
        overlap: whether communication overlaps with computing the next layer, one transfer after another.
        seed: of the payload.
        join_seconds, stall_seconds: how long hosts have to join, and how long to wait for another before giving up.
        measures_links: whether to measure pairs of neighbors before the trials.
        link: the hosts' link, as requested.
        network: how `Machines.describe` describes the hosts' network; None if the hosts have a network of their own.
    """

    __pydantic_config__: ClassVar = STRICT
    workload: Workload
    hosts: Annotated[int, Field(ge=2, le=_MAX_HOSTS)]
    algorithm: str = "ring"
    trials: _Count = 200
    warmup: _Count | None = None
    overlap: bool = False
    iterations: _Positive = 1
    seed: int = 0
    join_seconds: float = 120.0
    stall_seconds: float = 120.0
    backend: str = "gloo"
    measures_links: bool = True
    link: str | None = None
    network: Network | None = None

    @property
    def synchronizes_between_transfers(self) -> bool:
        """Whether hosts wait for each other between the transfers of a trial: sizes that belong to no job."""
        return not self.workload.computes and not any(transfer.kind for transfer in self.workload.transfers)

    def algorithm_for(self, index: int) -> str:
        """Return a transfer's algorithm: the requested one, or its substitute if that lacks the collective."""
        if self.algorithm in (ENGINE, ""):
            return self.algorithm
        return or_default(self.workload.transfers[index].collective, self.algorithm)


@dataclass(frozen=True)
class RunRecord(Settings):
    """run.json: what ran, where, and how it ended. Entries of later versions are ignored.

    Attributes:
        warmup: how many trials there were, all in all.
    """

    __pydantic_config__: ClassVar = STRICT | {"extra": "ignore"}
    algorithm: str = ""
    trials: _Count = 0
    backend: str = ""
    links: tuple[MeasuredLink, ...] = ()
    switch: _Switch | None = None
    happened: tuple[AppliedEvent, ...] = ()
    environment: tuple[_Environment, ...] = ()
    machine_cores: _Positive | None = None
    shared_machine: bool = False
    cpu: tuple[_Cpu, ...] = ()
    clock: tuple[_Clock, ...] = ()
    steady: bool | None = None
    complete: bool = False
    missing: str = ""
    version: int = 1

    @cached_property
    def topology(self) -> Topology | None:
        """The links; None if nothing shaped them, or a scenario may have changed them. Raise ArgumentError: a link's
        text is none."""
        return recorded_topology(self.network)

    @property
    def links_changed(self) -> bool:
        """Whether a scenario may have changed the links during the run: their properties are then not known."""
        return self.network is not None and bool(self.network["link"]) and self.network.get("rates") is None

    def runs_ahead(self, collective: str, shares: Sequence[int] = ()) -> bool:
        """Whether a rank may finish a transfer, and start the next, before the other ranks have reached it.

        In the other collectives, no rank finishes before all have started, and the first to start receives all it
        needs within its own time.
        """
        follows_at_once = len(self.workload.transfers) > 1 and not self.synchronizes_between_transfers
        return follows_at_once and (collective in (*ROOTED, "send") or bool(shares))
