"""Write results in the format that nccl-tests prints and stores (version 2 of its JSON), for tools that read it.

A row's time is the mean over trials of the average over ranks, nccl-tests' default (`-a 1`), or of the slowest, the
fastest or the first rank's time (`-a 3`, `-a 2`, `-a 0`). algbw and busbw are computed from it, so they differ from
Penstock's own tables, which use the median of the slowest rank. torch.distributed works in place for some collectives
and not for others; the columns of the other mode contain N/A, or null in JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from penstock.network.fabric.algorithms import busbw_factor
from penstock.network.fabric.samples import Run
from penstock.network.fabric.times import TransferTimes, iterations_of, rate_key
from penstock.network.fabric.workload import NCCL, REDUCES, Workload

Average = Literal["avg", "max", "min", "rank0"]
"""How times are combined over the ranks."""

_IN_PLACE = {"all_reduce", "broadcast", "reduce"}
_ROOTED = {"broadcast", "reduce", "gather", "scatter"}
_COUNTS_PIECES = {"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"}
"""Collectives whose count is one rank's piece, although their size is the whole buffer's."""

_PROGRAMS = {"all_to_all": "alltoall"}

_LEFT = "  {:>12}  {:>8}  {:>6}  {:>6}"
_RIGHT = "  {:>7}  {:>6}  {:>6}  {:>6}"
_HEAD = (
    f"# {'':>10}{_LEFT.format('', '', '', '')}           out-of-place                       in-place          ",
    f"# {'size':>10}{_LEFT.format('count', 'type', 'redop', 'root')}"
    + _RIGHT.format("time", "algbw", "busbw", "#wrong") * 2,
    f"# {'(B)':>10}{_LEFT.format('(elements)', '', '', '')}" + _RIGHT.format("(us)", "(GB/s)", "(GB/s)", "") * 2,
)
_BLANK = _RIGHT.format("N/A", "N/A", "N/A", "N/A")


@dataclass(frozen=True, slots=True)
class Line:
    """A transfer as nccl-tests shows it. Times in microseconds, bandwidths in 1e9 B/s; None without trials."""

    name: str
    collective: str
    size: int
    count: int
    type: str
    redop: str
    root: int
    time: float | None
    algbw: float | None
    busbw: float | None
    trials: int


def rows(run: Run, results: dict[str, Any], average: Average = "avg") -> list[Line]:
    """Returns one line per transfer, in order of execution."""
    workload = Workload.from_dict(run.record["workload"])
    made = []
    for place, transfer in enumerate(results["transfers"]):
        collective, size = transfer["collective"], transfer["bytes"]
        mean = _mean(TransferTimes.of(run, workload, place), collective, average)
        ranks = len(transfer["ranks"])
        algbw = size / mean / 1e9 if mean else None
        made.append(
            Line(
                name=transfer["name"],
                collective=collective,
                size=size,
                count=size // workload.element_bytes // (ranks if collective in _COUNTS_PIECES else 1),
                type=NCCL.get(workload.number, workload.number),
                redop=workload.op if collective in REDUCES else "none",
                root=0 if collective in _ROOTED else -1,
                time=mean and mean * 1e6,
                algbw=algbw,
                busbw=algbw and algbw * busbw_factor(collective, ranks, transfer["shares"]),
                trials=transfer["trials"],
            )
        )
    return made


def _mean(times: TransferTimes, collective: str, average: Average) -> float | None:
    """Returns the mean time over the trials, in seconds; a message's counts from when both of its ranks are there."""
    if not len(times.durations):
        return None
    if rate_key(collective) == "transfer_s":
        return float(times.transfer.mean())
    over_ranks = {"avg": times.durations, "rank0": times.durations[:, 0]}
    over_ranks |= {"max": times.durations.max(1), "min": times.durations.min(1)}
    return float(over_ranks[average].mean())


def text(run: Run, results: dict[str, Any], average: Average = "avg") -> str:
    """Returns what nccl-tests would have printed: a table per collective, with transfers in order of execution."""
    return "\n".join(_lines(run, rows(run, results, average))) + "\n"


def _lines(run: Run, found: list[Line]) -> Iterator[str]:
    record, wrong = run.record, _wrong(run)
    for collective in dict.fromkeys(row.collective for row in found):
        table = [row for row in found if row.collective == collective]
        sizes = [row.size for row in table]
        yield f"# Collective test starting: {_program(collective)}"
        yield (
            f"# nThread 1 nGpus 1 minBytes {min(sizes)} maxBytes {max(sizes)} warmup iters: {record['warmup']} "
            f"iters: {record['trials']} agg iters: {iterations_of(record)} validation: {int(wrong is not None)} "
            "graph: 0"
        )
        yield "#"
        yield "# Using devices"
        for rank, host in enumerate(record["environment"]):
            yield f"#  Rank {rank:2d} on {host.get('host', ''):>10} device cpu"
        yield "#"
        yield from _HEAD
        for row in table:
            numbers = (_number(row.time, 7), _bandwidth(row.algbw), _bandwidth(row.busbw))
            body = _RIGHT.format(*numbers, "N/A" if wrong is None else wrong)
            both = _BLANK + body if collective in _IN_PLACE else body + _BLANK
            yield f"{row.size:12d}{_LEFT.format(row.count, row.type, row.redop, row.root)}{both}"
        busbw = [row.busbw for row in table if row.busbw is not None]
        yield f"# {'Out of bounds values':<20} : {wrong or 0} {'FAILED' if wrong else 'OK'}"
        yield f"# {'Avg bus bandwidth':<20} : {sum(busbw) / max(len(busbw), 1):g} "
        yield "#"
        yield f"# Collective test concluded: {_program(collective)}"


def _number(value: float | None, width: int) -> str:
    """Formats with as many decimals, at most two, as the digits before the decimal point leave room for."""
    if value is None:
        return f"{'N/A':>{width}}"
    digits = len(str(int(value))) if value >= 1 else 0
    if digits > width:
        return f"{value:{width}.1e}" if width >= 7 else f"{value:{width}.0e}"
    decimals = 2 if digits < width - 2 else 1 if digits < width - 1 else 0
    return f"{value:{width}.{decimals}f}"


def _bandwidth(value: float | None, width: int = 6) -> str:
    """Formats as `_number` does, but with two significant digits where that gives 0.00 (slow links): 0.0012, 1.2e-4."""
    if value is None or not 0 < value < 0.005:
        return _number(value, width)
    if value >= 0.00095:
        return f"{value:{width}.4f}"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{f'{digits}e{int(power)}':>{width}}"


def _program(collective: str) -> str:
    return f"{_PROGRAMS.get(collective, collective)}_perf"


def _wrong(run: Run) -> int | None:
    """Returns the number of wrong elements, or None if they were not checked.

    It can only be 0: the warm-up checks results, and no trial begins after a wrong one.
    """
    return 0 if run.record["warmup"] and len(run.start_ns) else None


def to_dict(run: Run, results: dict[str, Any], average: Average = "avg") -> dict[str, Any]:
    """Returns the JSON that `nccl-tests --json` writes; `experiment_name` holds the collective and the transfer."""
    record, found, wrong = run.record, rows(run, results, average), _wrong(run)
    sizes = [row.size for row in found]
    busbw = [row.busbw for row in found if row.busbw is not None]
    hosts = enumerate(record["environment"])
    return {
        "version": 2,
        "config": {
            "nthreads": 1,
            "ngpus": 1,
            "minimum_bytes": min(sizes),
            "maximum_bytes": max(sizes),
            "warmup_iters": record["warmup"],
            "iterations": record["trials"],
            "aggregated_iterations": iterations_of(record),
            "validation": int(wrong is not None),
            "graph": 0,
            "devices": [{"rank": rank, "group": 0, "hostname": host.get("host", "")} for rank, host in hosts],
        },
        "results": [_entry(row, wrong) for row in found],
        "out_of_bounds": {"count": wrong or 0, "okay": "false" if wrong else "true"},
        "average_bus_bandwidth": {"bandwidth": sum(busbw) / max(len(busbw), 1), "okay": "unchecked"},
        "errors": [results["missing"]] if results["missing"] else [],
    }


def _entry(row: Line, wrong: int | None) -> dict[str, Any]:
    measured = {"time": row.time, "alg_bw": row.algbw, "bus_bw": row.busbw, "nwrong": wrong}
    in_place = row.collective in _IN_PLACE
    return {
        "size": row.size,
        "count": row.count,
        "type": row.type,
        "redop": row.redop,
        "root": str(row.root),
        "out_of_place": None if in_place else measured,
        "in_place": measured if in_place else None,
        "actual_iterations": row.trials,
        "experiment_name": f"{_program(row.collective)}: {row.name}",
    }
