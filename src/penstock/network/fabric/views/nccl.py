"""Print results in the columns that nccl-tests prints, for tools that read them.

A row's time is the mean over trials of the average over ranks, nccl-tests' default (`-a 1`), or of the slowest, the
fastest or the first rank's time (`-a 3`, `-a 2`, `-a 0`). algbw and busbw are computed from it, so they differ from
Penstock's own tables, which use the median of the slowest rank. torch.distributed works in place for some collectives
and not for others; the columns of the other mode contain N/A.
"""

from __future__ import annotations

from typing import Any, Literal

from penstock.network.fabric.algorithms import busbw_factor
from penstock.network.fabric.samples import Run, TransferTimes, rate_key
from penstock.network.fabric.steps import IN_PARTS, IN_PLACE, REDUCES, ROOTED
from penstock.network.fabric.workload import NCCL

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


def text(run: Run, results: dict[str, Any], average: Average = "avg") -> str:
    """Return what nccl-tests would have printed: a table per collective, with transfers in order of execution.

    No element can be wrong: the warm-up checks results, and no trial begins after a wrong one.
    """
    record, workload, lines = run.record, run.record.workload, list[str]()
    checked = bool(record.warmup and len(run.start_ns))
    tables: dict[str, list[tuple[int, float | None, str]]] = {}  # size, busbw, line
    for index, entry in enumerate(results["transfers"]):
        kind, size, ranks = entry["collective"], entry["bytes"], len(entry["ranks"])
        mean = _mean(run.times[index], kind, average)
        algbw = size / mean / 1e9 if mean else None
        busbw = algbw and algbw * busbw_factor(kind, ranks, entry["shares"])
        # Of one rank's piece, although the size is the whole buffer's.
        count = size // workload.element_bytes // (ranks if kind in IN_PARTS else 1)
        type_name, op = (NCCL.get(workload.type_name, workload.type_name), workload.op if kind in REDUCES else "none")
        numbers = _number(mean and mean * 1e6, 7), _bandwidth(algbw), _bandwidth(busbw)
        body = _RIGHT.format(*numbers, 0 if checked else "N/A")
        line = f"{size:12d}{_LEFT.format(count, type_name, op, 0 if kind in ROOTED else -1)}"
        line += _BLANK + body if kind in IN_PLACE else body + _BLANK
        tables.setdefault(kind, []).append((size, busbw, line))
    for kind, rows in tables.items():
        program, sizes = f"{_PROGRAMS.get(kind, kind)}_perf", [size for size, *_ in rows]
        measured = [busbw for _, busbw, _ in rows if busbw is not None]
        hosts = enumerate(record.environment)
        lines += [
            f"# Collective test starting: {program}",
            f"# nThread 1 nGpus 1 minBytes {min(sizes)} maxBytes {max(sizes)} warmup iters: {record.warmup} "
            f"iters: {record.trials} agg iters: {record.iterations} validation: {int(checked)} graph: 0",
            "#",
            "# Using devices",
            *(f"#  Rank {rank:2d} on {host.get('host', ''):>10} device cpu" for rank, host in hosts),
            "#",
            *_HEAD,
            *(line for *_, line in rows),
            f"# {'Out of bounds values':<20} : 0 OK",
            f"# {'Avg bus bandwidth':<20} : {sum(measured) / max(len(measured), 1):g} ",
            "#",
            f"# Collective test concluded: {program}",
        ]
    return "\n".join(lines) + "\n"


def _mean(times: TransferTimes, collective: str, average: Average) -> float | None:
    """Return the mean time over the trials, in seconds; a message's counts from when both of its ranks are there."""
    if not len(times.durations):
        return None
    if rate_key(collective) == "transfer_s":
        return float(times.transfer.mean())
    over_ranks = {"avg": times.durations, "rank0": times.durations[:, 0]}
    over_ranks |= {"max": times.durations.max(1), "min": times.durations.min(1)}
    return float(over_ranks[average].mean())


def _number(value: float | None, width: int) -> str:
    """Format with as many decimals, at most two, as fit."""
    texts = ["N/A"] if value is None else [f"{value:{form}}" for form in (".2f", ".1f", ".0f", ".1e", ".0e")]
    return f"{next((text for text in texts if len(text) <= width), texts[-1]):>{width}}"


def _bandwidth(value: float | None) -> str:
    """Format as `_number` does, but with two significant digits where that gives 0.00 (slow links): 0.0012, 1.2e-4."""
    if value is None or not 0 < value < 0.005:
        return _number(value, 6)
    return f"{value:6.4f}" if value >= 0.00095 else f"{value:.1e}".replace("e-0", "e-").rjust(6)
