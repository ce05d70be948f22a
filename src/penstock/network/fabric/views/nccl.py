"""Write results in the format that nccl-tests prints and stores (version 2 of its JSON), for tools that read it.

A row's time is the mean over trials of the average over ranks, nccl-tests' default (`-a 1`), or of the slowest, the
fastest or the first rank's time (`-a 3`, `-a 2`, `-a 0`). algbw and busbw are computed from it, so they differ from
Penstock's own tables, which use the median of the slowest rank. torch.distributed works in place for some collectives
and not for others; the columns of the other mode contain N/A, or null in JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

from penstock.network.fabric.algorithms import busbw_factor
from penstock.network.fabric.samples import Run, TransferTimes, iterations_of, rate_key
from penstock.network.fabric.steps import IN_PARTS, IN_PLACE, REDUCES, ROOTED
from penstock.network.fabric.workload import NCCL, Workload

Average = Literal["avg", "max", "min", "rank0"]
"""How times are combined over the ranks."""

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


def to_dict(run: Run, results: dict[str, Any], average: Average = "avg") -> dict[str, Any]:
    """Returns the JSON that `nccl-tests --json` writes, with transfers in order of execution; `experiment_name` holds
    the collective and the transfer. Times are in microseconds, bandwidths in 1e9 B/s; None without trials.

    The number of wrong elements can only be 0: the warm-up checks results, and no trial begins after a wrong one. It is
    None if they were not checked.
    """
    record, workload = run.record, Workload.from_dict(run.record["workload"])
    wrong = 0 if record["warmup"] and len(run.start_ns) else None
    rows = []
    for place, one in enumerate(results["transfers"]):
        collective, size, ranks = one["collective"], one["bytes"], len(one["ranks"])
        mean = _mean(TransferTimes.of(run, workload, place), collective, average)
        algbw = size / mean / 1e9 if mean else None
        busbw = algbw and algbw * busbw_factor(collective, ranks, one["shares"])
        measured = {"time": mean and mean * 1e6, "alg_bw": algbw, "bus_bw": busbw, "nwrong": wrong}
        in_place = collective in IN_PLACE
        rows.append(
            {
                "size": size,
                # Of one rank's piece, although the size is the whole buffer's.
                "count": size // workload.element_bytes // (ranks if collective in IN_PARTS else 1),
                "type": NCCL.get(workload.number, workload.number),
                "redop": workload.op if collective in REDUCES else "none",
                "root": "0" if collective in ROOTED else "-1",
                "out_of_place": None if in_place else measured,
                "in_place": measured if in_place else None,
                "actual_iterations": one["trials"],
                "experiment_name": f"{_PROGRAMS.get(collective, collective)}_perf: {one['name']}",
            }
        )
    hosts = enumerate(record["environment"])
    return {
        "version": 2,
        "config": {
            "nthreads": 1,
            "ngpus": 1,
            "minimum_bytes": min(row["size"] for row in rows),
            "maximum_bytes": max(row["size"] for row in rows),
            "warmup_iters": record["warmup"],
            "iterations": record["trials"],
            "aggregated_iterations": iterations_of(record),
            "validation": int(wrong is not None),
            "graph": 0,
            "devices": [{"rank": rank, "group": 0, "hostname": host.get("host", "")} for rank, host in hosts],
        },
        "results": rows,
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": _average_busbw(rows), "okay": "unchecked"},
        "errors": [results["missing"]] if results["missing"] else [],
    }


def _mean(times: TransferTimes, collective: str, average: Average) -> float | None:
    """Returns the mean time over the trials, in seconds; a message's counts from when both of its ranks are there."""
    if not len(times.durations):
        return None
    if rate_key(collective) == "transfer_s":
        return float(times.transfer.mean())
    over_ranks = {"avg": times.durations, "rank0": times.durations[:, 0]}
    over_ranks |= {"max": times.durations.max(1), "min": times.durations.min(1)}
    return float(over_ranks[average].mean())


def _average_busbw(rows: Sequence[dict[str, Any]]) -> float:
    found: list[float | None] = [(row["in_place"] or row["out_of_place"])["bus_bw"] for row in rows]
    known = [busbw for busbw in found if busbw is not None]
    return sum(known) / max(len(known), 1)


def text(run: Run, results: dict[str, Any], average: Average = "avg") -> str:
    """Returns what nccl-tests would have printed: a table per collective, with transfers in order of execution."""
    return "\n".join(_lines(to_dict(run, results, average))) + "\n"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    config = found["config"]
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in found["results"]:
        tables.setdefault(row["experiment_name"].partition(": ")[0], []).append(row)
    for program, rows in tables.items():
        sizes = [row["size"] for row in rows]
        yield f"# Collective test starting: {program}"
        yield (
            f"# nThread 1 nGpus 1 minBytes {min(sizes)} maxBytes {max(sizes)} warmup iters: {config['warmup_iters']} "
            f"iters: {config['iterations']} agg iters: {config['aggregated_iterations']} "
            f"validation: {config['validation']} graph: 0"
        )
        yield "#"
        yield "# Using devices"
        for device in config["devices"]:
            yield f"#  Rank {device['rank']:2d} on {device['hostname']:>10} device cpu"
        yield "#"
        yield from _HEAD
        for row in rows:
            one = row["in_place"] or row["out_of_place"]
            numbers = (_number(one["time"], 7), _bandwidth(one["alg_bw"]), _bandwidth(one["bus_bw"]))
            body = _RIGHT.format(*numbers, "N/A" if one["nwrong"] is None else one["nwrong"])
            both = _BLANK + body if row["in_place"] else body + _BLANK
            yield f"{row['size']:12d}{_LEFT.format(*(row[key] for key in ('count', 'type', 'redop', 'root')))}{both}"
        yield f"# {'Out of bounds values':<20} : 0 OK"
        yield f"# {'Avg bus bandwidth':<20} : {_average_busbw(rows):g} "
        yield "#"
        yield f"# Collective test concluded: {program}"


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
