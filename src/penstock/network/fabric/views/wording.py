"""What every report says about a run in words: title, warnings, overall figures, and notes for the reader."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from penstock._base.formatting import pluralize
from penstock.network.fabric.algorithms import ENGINE
from penstock.network.fabric.results import ABOVE_IDEAL
from penstock.network.fabric.samples import MeasuredLink, Run, rate_key
from penstock.network.fabric.statistics import MIN_SAMPLES, PERCENTILES, min_samples
from penstock.network.fabric.views.network import network_facts, saturated
from penstock.network.fabric.views.numbers import NONE, digits, percent, seconds

TIMES = {"min": "min", "p50": "p50", "p90": "p90", "p99": "p99", "p999": "p99.9", "max": "max"}
"""Column headings of times, by their name in the results."""


_OFTEN = 0.5
"""A rank that arrives last in more than this fraction of its transfers gets a line."""

_LATE = 0.01
"""If ranks arrive within this fraction of a transfer's time, none of them is late."""

_MIN_FOR_LATE = 20
"""With fewer trials, any rank may arrive last that often by chance."""

_MAX_NAMED = 12
"""The most trials that a line lists."""

_DEPENDENT = 0.8
"""If the effective number of trials is below this fraction of the actual number, a note says so."""
_WIDEST = 1.0
"""An interval wider than this fraction of the mean says nothing."""


def title(run: Run) -> str:
    """Return what was run, in one line."""
    return f"{run.record.workload.name}: {', '.join(headings(run))}"


def headings(run: Run) -> list[str]:
    """Return hosts, algorithm and collectives, trials, backend, and link."""
    record = run.record
    kinds = list(dict.fromkeys(transfer.collective for transfer in record.workload.transfers))
    algorithm = "torch.distributed's own" if record.algorithm == ENGINE else record.algorithm
    done, requested = len(run.start_ns), record.trials
    return [
        f"{record.hosts} hosts",
        f"{algorithm} {' and '.join(kinds) if len(kinds) < 3 else 'collectives'}",
        pluralize(done, "trial") if done == requested else f"{done:,} of {pluralize(requested, 'trial')}",
        record.backend,
        *([f"link {record.link}"] if record.link else []),
    ]


def warnings(run: Run, results: dict[str, Any]) -> list[str]:
    """Return reasons why the figures may not be what they seem."""
    messages = []
    if not results["complete"]:
        messages.append(f"the run is not complete; missing: {results['missing'] or 'its end'}")
    if run.record.steady is False:
        messages.append(
            f"times were still changing after {run.record.warmup} trials of warm-up, so the first measured trials "
            "may be off: pass a larger --warmup, if they settle at all"
        )
    counters = run.record.switch
    if counters and (reason := saturated(counters)):
        messages.append(reason)
    highest = max([*results["groups"], results["step"]], key=lambda row: row["ideal_percent"] or 0.0)
    if (highest["ideal_percent"] or 0.0) > ABOVE_IDEAL:
        explanation = "so its times or its links were measured wrong, as beside other work"
        if highest is not results["step"] and run.record.runs_ahead(highest["collective"], highest["shares"]):
            explanation = (
                "because a rank can begin it while others are still in the previous transfer: some traffic is then "
                "timed in one of the two, and its bytes are counted in the other"
            )
        share_text = f"{highest['name']} is at {highest['ideal_percent']:,.0f}% of the possible rate"
        messages.append(f"ideal: {share_text}, {explanation}; ignore this column")
    if _is_limited_by_cpu(results):
        messages.append(f"processors: {results['cpu']['text']}")
    return messages


def _is_limited_by_cpu(results: dict[str, Any]) -> bool:
    return bool(results["cpu"]["saturated"] or results["cpu"]["scheduler_tails"])


def facts(run: Run, results: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (name, text) pairs: the step with and without overlap, the links, the fits, the processors."""
    step, rows = results["step"], []
    overlaps = [
        f"{seconds(step[key])} {name} overlap with compute ({'measured' if step['overlap'] == overlap else 'computed'})"
        for name, key, overlap in (("without", "without_overlap_s", False), ("with", "with_overlap_s", True))
        if step[key] is not None
    ]
    if overlaps and any(transfer["collective"] == "send" for transfer in results["transfers"]):
        overlaps.append("as if no stage waited to compute until it has received")
    if overlaps and not step["compute_s"]:
        overlaps = ["there is no compute between the transfers, so overlap changes nothing"]
    if overlaps:
        rows.append(("step", ", ".join(overlaps)))
    if stalled := results["stalled"]:
        tail = f" and {len(stalled) - _MAX_NAMED:,} more" if len(stalled) > _MAX_NAMED else ""
        shown = f"trial{'s' if len(stalled) > 1 else ''} {', '.join(f'{n:,}' for n in stalled[:_MAX_NAMED])}{tail}"
        count_text = f"{len(stalled):,} of {pluralize(len(run.start_ns), 'trial')}"
        rows.append(("stalls", f"{count_text} met a requested stall: {shown}"))
    network = run.record.network
    if network and (network["shaper"] not in (None, "tbf") or network["slow"]):
        rows += network_facts(network, counters=run.record.switch, events=[*map(str, run.record.happened)])
    rows += [*_links(run.record.links), *(("fit", _fit(entry["fit"])) for entry in results["model"])]
    late = {rank: late for rank, (_, late) in rank_figures(results).items()}
    worst = max(late, key=late.__getitem__, default=0)
    max_ranks = max(len(transfer["ranks"]) for transfer in results["transfers"])  # one of two ranks is always last
    medians = [(t["arrival_skew_s"]["p50"], t["time_s"]["p50"]) for t in results["transfers"] if worst in t["ranks"]]
    skew = max((skew for skew, took in medians if (skew or 0.0) >= _LATE * (took or math.inf)), default=0.0)
    if max_ranks > 2 and len(run.start_ns) >= _MIN_FOR_LATE and late[worst] > _OFTEN and skew:
        text = f"came last to {late[worst]:.0%} of its transfers, up to {seconds(skew)} after the first (median)"
        rows.append(("late", f"rank {worst} {text}"))
    if results["cpu"]["text"] and not _is_limited_by_cpu(results):
        rows.append(("cpu", str(results["cpu"]["text"])))
    return rows


def rank_figures(results: dict[str, Any]) -> dict[int, tuple[float, float]]:
    """Return, for each rank that takes part in a transfer, in which fraction of its transfers it took the longest of
    all, and in which it was the last to start; empty for a run without trials."""
    sums: dict[int, list[int]] = {}
    for transfer in results["transfers"]:
        for entry in transfer["per_rank"]:
            counts = transfer["trials"], entry["trials_slowest"], entry["trials_latest"]
            sums[entry["rank"]] = [a + b for a, b in zip(sums.get(entry["rank"], (0, 0, 0)), counts, strict=True)]
    return {rank: (longest / trials, last / trials) for rank, (trials, longest, last) in sorted(sums.items())}


def _links(measured: Sequence[MeasuredLink]) -> list[tuple[str, str]]:
    """Describe the links measured before the trials: each one, or the range if there are many."""
    if len(measured) <= 2:
        return [(f"link {link['from']}-{link['to']}", _link([link])) for link in measured]
    slowest = min(measured, key=lambda link: float(link["bytes_per_second"] or math.inf))
    return [("links", f"{len(measured)}, {_link(measured)}; {slowest['from']} to {slowest['to']} is the slowest")]


def _link(measured: Sequence[MeasuredLink]) -> str:
    latencies = [seconds(value) for value in sorted(link["latency_seconds"] for link in measured)]
    bandwidths = sorted(link["bytes_per_second"] for link in measured if link["bytes_per_second"])
    rates = f", {bits(*dict.fromkeys((bandwidths[0], bandwidths[-1])))}" if bandwidths else ""
    return f"alpha {_range(latencies)}{rates}"


def _fit(fit: dict[str, Any]) -> str:
    """Describe the link fitted to a collective's medians."""
    limited = " (limited to the links)" if fit["held_to_links"] else ""
    return (
        f"{fit['collective']}: alpha {seconds(fit['alpha_seconds'])} a step, 1/beta "
        f"{format_rate(fit['bytes_per_second'])}{limited}; at most {fit['largest_residual']:.0%} off"
    )


def _range(ordered: list[str]) -> str:
    return ordered[0] if ordered[0] == ordered[-1] else f"{ordered[0]} to {ordered[-1]}"


def bits(*bytes_per_second: float) -> str:
    """Format bandwidths in a common unit: 95.5 to 95.59 Mbit/s."""
    unit, scale = ("Gbit/s", 1e9) if max(bytes_per_second) * 8 >= 9.9995e9 else ("Mbit/s", 1e6)
    return f"{_range([f'{rate * 8 / scale:,.4g}' for rate in bytes_per_second])} {unit}"


def format_rate(bytes_per_second: float | None) -> str:
    """Format a fitted link's bandwidth; None means that beta is 0."""
    return bits(bytes_per_second) if bytes_per_second else "no limit"


def mean(entry: dict[str, Any]) -> str:
    """Format a mean with the wider side of its interval, or n/a for an interval that says nothing.

    An interval says nothing with too few trials, or with an outlier among not quite so few.
    """
    middle, interval = entry["time_s"]["mean"], entry["mean_interval"]
    if not middle:
        return seconds(middle)
    wider = max(interval[1] - middle, middle - interval[0]) / middle if interval else math.inf
    return f"{seconds(middle)} \u00b1{f'{wider:.1%}' if wider <= _WIDEST else NONE}"


def columns(
    results: dict[str, Any], times: Sequence[str], *, rates: bool = True, full: bool = False
) -> list[list[str]]:
    """Return the lines of a table: its heads, a line for each group of similar transfers, and the step's.

    Args:
        times: names from `TIMES` to show, followed by the mean; no mean is shown without them.
        rates: whether to show skew, bandwidths and what is ideal, and collectives if they differ.
        full: whether to show the time from the last arrival on, too.
    """
    is_grouped, (scale, unit) = has_groups(results), rate_unit(results)
    kinds = rates and has_kinds(results)
    waits = ("arrival_skew_s", *(("transfer_s",) if full else ()))
    shown = [*(["times"] if is_grouped else []), *([*(TIMES[name] for name in times), "mean"] if times else [])]
    tail = ["skew\np50", *(["transfer\np50"] if full else []), f"algbw\n{unit}", f"busbw\n{unit}", "ideal\n%"]
    lines = [["transfer", *(["collective"] if kinds else []), "bytes", *shown, *(tail if rates else [])]]
    for entry in (*results["groups"], {**results["step"], "times": len(results["transfers"])}):
        line = [entry["name"], *([entry["collective"] or ""] if kinds else []), f"{entry['bytes']:,}"]
        line += [f"{entry['times']:,}"] if is_grouped else []
        line += [*(seconds(entry["time_s"][name]) for name in times), mean(entry)] if times else []
        if rates:
            line += [seconds(entry[name]["p50"]) if name in entry else "" for name in waits]
            speeds = (entry[name] and entry[name] * scale for name in ("algbw_GBps", "busbw_GBps"))
            line += [*map(digits, speeds), percent(entry["ideal_percent"])]
        lines.append(line)
    return lines


def has_kinds(results: dict[str, Any]) -> bool:
    """Whether collectives differ."""
    return len({group["collective"] for group in results["groups"]}) > 1


def has_groups(results: dict[str, Any]) -> bool:
    """Whether any row has more than one transfer."""
    return len(results["groups"]) < len(results["transfers"])


def notes(run: Run, results: dict[str, Any]) -> list[str]:
    """Return what a reader must know about the columns."""
    trials, times = len(run.start_ns), [group["time_s"] for group in results["groups"]]
    effective = min((group["effective_trials"] for group in results["groups"]), default=trials)
    depend, count = effective < _DEPENDENT * trials, run.record.iterations
    short = [
        f"{TIMES[name]} needs {min_samples(q):,}"
        for name, q in PERCENTILES.items()
        if name in TIMES and any(figures[name] is None for figures in times)
    ]
    sends = any(rate_key(entry["collective"]) == "transfer_s" for entry in results["transfers"])
    unbounded = results["links"] and None in {entry["bound_s"] for entry in results["groups"]}
    conditions = {
        "Times are of the slowest rank of each trial. Skew: from the first rank's arrival to the last one's. Ideal: "
        "the least that the links allow, in percent of the median. \u00b1: the wider side of the mean's 95% interval; "
        "n/a above 100%.": True,
        "Transfers that differ only in microbatch or replica share a row: bytes and times are those of one "
        "transfer, percentiles are over all of them, and those of one trial count as one sample.": has_groups(results),
        f"Times are per iteration, of {count} in a row; a trial's skew is that of its first iteration.": count > 1,
        "Rates and ideal of a send are measured from when both of its ranks had arrived.": sends,
        "Ideal is n/a: a scenario may have changed the links.": run.record.links_changed,
        "Ideal is n/a if a host has several partners and no shaper sets the rate of its port.": (
            unbounded and not run.record.links_changed
        ),
        f"Trials depend on each other: {trials:,} are worth {effective:,.0f} independent ones, and count as that "
        "many.": depend,
        "There are too few trials to tell whether they depend on each other; if they do, the 95% intervals are too "
        f"narrow. Pass --trials {MIN_SAMPLES} or more.": 0 < trials < MIN_SAMPLES,
        f"n/a: {min(trials, int(effective)):,} {'independent ' if depend else ''}trials are too few for that "
        f"percentile; {', '.join(short)}.": short,
    }
    return [*(note for note, holds in conditions.items() if holds), *run.record.workload.notes]


def rate_unit(results: dict[str, Any]) -> tuple[float, str]:
    """Return the factor from GB/s, and the unit that suits a run's bandwidths: GB/s, or MB/s on slow links."""
    highest = max((transfer["busbw_GBps"] or 0.0 for transfer in results["groups"]), default=0.0)
    return (1.0, "GB/s") if highest >= 0.5 or not highest else (1e3, "MB/s")
