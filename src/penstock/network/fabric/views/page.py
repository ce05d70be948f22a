"""Render a run as one self-contained HTML page: figures, tables and pictures, what was run, and where."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock._base.errors import require
from penstock._base.files import write_text
from penstock.network.fabric.samples import Run
from penstock.network.fabric.views.numbers import NONE, digits, percent, seconds
from penstock.network.fabric.views.plots import draw
from penstock.network.fabric.views.wording import (
    TIMES,
    columns,
    facts,
    has_kinds,
    headings,
    notes,
    rank_figures,
    rate_unit,
    warnings,
)
from penstock.report.web.contents import Contents, Metric, Section
from penstock.report.web.page import page as report_page

CAPTIONS = {
    "cdf": "How the times are distributed. The right picture shows the tail: what fraction took at least that long.",
    "trials": "Trials in the order they ran, with the median as a line; outliers are circled.",
    "busbw": "How well the transfers used the network, by the convention of nccl-tests.",
    "timeline": "Where a trial's time went: one lane per rank, one bar per round of the algorithm.",
}


def write_page(run: Run, results: dict[str, Any], path: Path) -> None:
    """Write the page. Raise OSError: the file cannot be written."""
    write_text(path, page(run, results))


def page(run: Run, results: dict[str, Any]) -> str:
    """Return the page as HTML."""
    require("fabric", "jinja2", for_what="report.html")
    table, left = columns(results, tuple(TIMES), full=True), 1 + has_kinds(results)
    lines, below = facts(run, results), notes(run, results)
    pictures = [(CAPTIONS[name], drawn) for name, drawn in draw(run, results).items()]
    nothing = [] if pictures else ["No trial was completed, so there is nothing to draw."]
    return report_page(
        Contents(
            title=run.record.workload.name,
            headings=tuple(headings(run)),
            warnings=tuple(warnings(run, results)),
            metrics=tuple(_metrics(run, results)),
            sections=(
                Section("Transfers, in order of execution", table, left, has_total=True, facts=lines, notes=below),
                Section("Pictures", notes=nothing, pictures=pictures),
                Section("Ranks", _ranks(run, results), left=2),
                Section("What was run, and where", details=_environment(run)),
            ),
        )
    )


def _metrics(run: Run, results: dict[str, Any]) -> list[Metric]:
    """Return the key figures."""
    step, (scale, unit) = results["step"]["time_s"], rate_unit(results)
    tail = next((name for name in ("p999", "p99", "p90") if step[name] is not None), "max")
    ratio = "too few trials for more"
    if step["p50"] and step[tail]:
        ratio = f"{step[tail] / step['p50']:.3g} times the median"
    metrics = [Metric("step, median", seconds(step["p50"]), f"{len(run.start_ns):,} trials")]
    metrics.append(Metric(f"step, {TIMES[tail]}", seconds(step[tail]), ratio))
    rates = [group for group in results["groups"] if group["busbw_GBps"]]
    if rates:
        best = max(rates, key=lambda transfer: float(transfer["busbw_GBps"]))
        metrics.append(Metric("best busbw", f"{digits(best['busbw_GBps'] * scale)} {unit}", best["name"]))
    if shares := [transfer for transfer in rates if transfer["ideal_percent"]]:
        worst = min(shares, key=lambda transfer: float(transfer["ideal_percent"]))
        metrics.append(Metric("farthest from ideal", f"{percent(worst['ideal_percent'])} %", worst["name"]))
    return metrics


def _ranks(run: Run, results: dict[str, Any]) -> list[list[str]]:
    """Return the table of ranks: their times, their processor usage, and their clock offsets."""
    longest = max(results["groups"], key=lambda group: float(group["time_s"]["mean"] or 0))  # per transfer
    by_rank = {entry["rank"]: entry for entry in longest["per_rank"]}
    rows = [
        ["rank", "host", f"p50 of {longest['name']}", f"p99 of {longest['name']}", "took longest", "came last", "busy",
         "switches", "clock offset"]
    ]  # fmt: skip
    for rank, (took_longest, came_last) in rank_figures(results).items():
        sources: list[Sequence[Mapping[str, Any]]] = [run.record.cpu, run.record.clock, run.record.environment]
        cpu, clock, host = (values[rank] if rank < len(values) else {} for values in sources)
        wall, switches, offset = cpu.get("wall_seconds"), cpu.get("involuntary_switches"), clock.get("offset_ns")
        rows.append([str(rank), str(host.get("host", ""))])
        rows[-1] += [seconds(by_rank.get(rank, {}).get(name)) for name in ("p50", "p99")]
        rows[-1] += [f"{took_longest:.0%}", f"{came_last:.0%}"]
        rows[-1].append(f"{cpu.get('cpu_seconds', 0.0) / wall:.0%}" if wall else NONE)
        rows[-1].append(NONE if switches is None else f"{switches:,}")
        error = seconds((clock.get("uncertainty_ns") or 0) / 1e9)
        rows[-1].append(NONE if offset is None else f"{seconds(offset / 1e9)} \u00b1{error}")
    return rows


def _environment(run: Run) -> list[tuple[str, str]]:
    """Return (title, text) pairs: the run's settings, the workload, and each host, with identical hosts together."""
    settings = asdict(run.record)
    workload = settings.pop("workload")
    hosts: dict[str, list[int]] = {}
    for rank, host in enumerate(settings.pop("environment")):
        hosts.setdefault(_pairs({key: value for key, value in host.items() if key != "host"}), []).append(rank)
    return [
        *((f"Host of rank{'s' if len(r) > 1 else ''} {', '.join(map(str, r))}", text) for text, r in hosts.items()),
        ("Settings, links, clocks and processors", _pairs(settings)),
        ("Workload", _pairs(workload)),
    ]


def _pairs(values: dict[str, Any]) -> str:
    """Format one pair per line; multi-line values keep their line breaks."""
    lines = []
    for key, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if not isinstance(value, str) and len(text) > 100:
            text = json.dumps(value, indent=1, ensure_ascii=False)
        lines.append(f"{key}:\n{text}" if "\n" in text else f"{key}: {text}")
    return "\n".join(lines)
