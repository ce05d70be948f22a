"""Tables of plans: the best ones, the rank layout of the first, rejected ones, or what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from penstock._base.formatting import collapse_ranges, format_bytes, pluralize
from penstock.report.text import format_all, make_format, pairs, print_columns
from penstock.simulate import IdleCause

if TYPE_CHECKING:
    from penstock.plan import Cluster, ParallelConfig, Plan, PlanResult, RejectedConfig

_MAX_LINES = 6
"""Maximum number of rejected plans to list per reason."""

_MIN_SHARE = 5e-4
"""Minimum share of the time that is not rounded to 0.0%."""

_USUAL = "1f1b"
"""The schedule that users look for."""

_MAX_RANKS = 16
"""Maximum number of ranks to list. Larger pipelines show the first, the last and the peak-memory rank."""


def show(result: PlanResult, console: Console, cluster: Cluster) -> None:
    """Print the best plans, the rank layout of the first, and the reasons for rejecting others."""
    best = result.best[0]
    tried = pluralize(len(result.best) + len(result.rejected), "plan")
    rest = f": the best of {tried}, {best.step_seconds:.4g} s/step"
    console.print(Text.assemble((_describe(best.choice), "bold"), rest))
    if note := _pipeline_note(result, best):
        console.print(note)
    console.print()
    groups = _equal_plans(result.best)
    plans = [group[0] for group in groups]
    _show_plans(groups, console)
    if any(plan.bubble >= _MIN_SHARE for plan in result.best):
        console.print("\nIdle time by cause, % of rank time")
        _show_idle(plans, console)
    fastest = min(plan.step_seconds for plan in plans)
    equal = sum(plan.step_seconds <= (1 + result.equal) * fastest for plan in plans)
    note = (
        "dp: replicas. pp: ranks. vpp: stages per rank. Microbatches: per replica. mbs: microbatch size, in samples. "
        "Bubble: idle share of the ranks' time. Memory: of the peak-memory rank."
    )
    if best.optimizer_seconds:
        note += f" The first includes {best.optimizer_seconds:.2g} s/step of AdamW."
    if equal > 1:
        note += f" The first {equal} are equivalent (within {result.equal:.1%}): the simplest is first."
    console.print(f"\n{note}", style="dim")
    console.print("\nRank layout of the best plan", style="bold")
    _show_ranks(best, cluster, console)
    for number, (head, lines) in enumerate(_reasons(result)):
        if not number:
            console.print("\nRejected plans", style="bold")
        console.print(head)
        console.print(pairs(lines))


def _pipeline_note(result: PlanResult, best: Plan) -> str:
    """Return a note on a plan without a pipeline, or with one that is mostly idle."""
    if best.choice.devices == 1:
        return "On one device a pipeline is pointless: there is nothing to split. The plan runs the model as it is."
    if best.choice.ranks > 1:
        count, ranks = pluralize(best.choice.microbatches, "microbatch"), best.choice.ranks
        text = f"Its ranks are idle {best.bubble:.0%} of the time: {count} cannot keep {ranks} ranks busy."
        return text if best.choice.microbatches < ranks else ""
    plans: list[Plan | RejectedConfig] = sorted((*result.best, *result.rejected), key=lambda plan: plan.step_seconds)
    piped = next((plan for plan in plans if plan.choice.ranks > 1 and not plan.lacking_bytes), None)
    if piped is None:
        return "It has no pipeline; no plan with one fits, or none was requested."
    slower = _compare_speed(piped, best)
    if piped.bubble is None:
        return f"It has no pipeline; every plan with one is at least {slower}."
    if abs(piped.step_seconds - best.step_seconds) <= result.equal * best.step_seconds:
        slower = "equivalent"
    return f"It has no pipeline; the best with one is {_describe(piped.choice)}, {slower}."


def _equal_plans(plans: Sequence[Plan]) -> list[list[Plan]]:
    """Group plans that differ only in the name of the schedule: with few microbatches schedules coincide."""
    groups: dict[object, list[Plan]] = {}
    for plan in plans:
        numbers = (plan.step_seconds, plan.bubble, *plan.memory_bytes)
        key = replace(plan.choice, schedule=""), plan.cuts, *(f"{number:.6g}" for number in numbers)
        groups.setdefault(key, []).append(plan)
    return [*groups.values()]


def _show_plans(groups: Sequence[Sequence[Plan]], console: Console) -> None:
    """Print one row per group of equal plans, with the names of their schedules."""
    plans = [group[0] for group in groups]
    choices = [plan.choice for plan in plans]
    has_reduce = any(plan.reduce_seconds for plan in plans)
    columns: dict[str, Sequence[object]] = {
        "schedule": [" = ".join(plan.choice.schedule for plan in group) for group in groups],
        "dp": [choice.replicas for choice in choices],
        "pp": [choice.ranks for choice in choices],
        "vpp": [choice.chunks for choice in choices],
        "micro-\nbatches": [choice.microbatches for choice in choices],
        "mbs": [choice.rows for choice in choices],
        "step s": format_all([plan.step_seconds for plan in plans]),
        "samples/s": format_all([plan.rows_per_second for plan in plans], max_decimals=2),
        "bubble": [f"{plan.bubble:.1%}" for plan in plans],
        "grad\nreduce s": [f"{plan.reduce_seconds:.2g}" if has_reduce else None for plan in plans],
        "memory": [format_bytes(max(plan.memory_bytes)) for plan in plans],
    }
    print_columns(console, columns)


def _show_idle(plans: Sequence[Plan], console: Console) -> None:
    idle = {cause: [plan.idle.get(cause.value, 0.0) for plan in plans] for cause in IdleCause}
    columns = {
        cause.value.replace(" for ", "\nfor "): [f"{100 * share:.1f}" for share in shares]
        for cause, shares in idle.items()
        if max(shares) >= _MIN_SHARE
    }
    print_columns(console, {"schedule": [plan.choice.schedule for plan in plans], **columns})


def _show_ranks(plan: Plan, cluster: Cluster, console: Console) -> None:
    """Print what each rank runs, its time and its memory."""
    from penstock.plan.predict import schedule_for_plan

    placement, names = schedule_for_plan(plan).placement, ("the input", *plan.cuts)
    by_rank = [sorted({stage % placement.depth for stage in stages}) for stages in placement.by_rank]
    seconds = [sum(plan.stage_seconds[stage] for stage in stages) for stages in by_rank]
    times, mean = make_format(seconds), sum(seconds) / len(seconds)
    static = plan.held_bytes or [0.0] * len(by_rank)
    ranks, half = range(plan.choice.ranks), _MAX_RANKS // 2
    shown = [*ranks] if len(ranks) <= _MAX_RANKS else sorted({*ranks[:half], plan.fullest, *ranks[1 - half :]})
    columns: dict[str, Sequence[object]] = {
        "rank": shown,
        "device": [_devices([row[rank] for row in plan.grid], cluster) for rank in shown],
        "first modules": [_shorten([names[stage] for stage in by_rank[rank]]) for rank in shown],
        "F + B": [times(seconds[rank]) for rank in shown],
        "vs\nmean": [f"{seconds[rank] / mean:.2f}" if mean else "-" for rank in shown],
        "activ-\nations": [format_bytes(plan.memory_bytes[rank] - static[rank]) for rank in shown],
        "memory": [format_bytes(plan.memory_bytes[rank]) for rank in shown],
        "limit": [format_bytes(limit) if (limit := plan.limit_bytes[rank]) < math.inf else None for rank in shown],
        "recompute /\noffload": [_policies(plan, by_rank[rank]) for rank in shown],
    }
    print_columns(console, columns, left=3)


def _devices(devices: Sequence[int], cluster: Cluster) -> str:
    """Return the numbers of devices and, if there are several, their types."""
    kinds = dict.fromkeys(cluster.kinds[cluster.kind_of[device]].name for device in devices)
    return _shorten(collapse_ranges(map(str, devices))) + (f" ({', '.join(kinds)})" if len(cluster.kinds) > 1 else "")


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 3 else [*names[:2], "...", names[-1]])


def _policies(plan: Plan, stages: Sequence[int]) -> str | None:
    counts = {policy: sum(stage in getattr(plan, policy) for stage in stages) for policy in ("recompute", "offload")}
    return ", ".join(f"{count} {policy}" for policy, count in counts.items() if count) or None


def _reasons(result: PlanResult) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the reasons for rejection, each with its closest plans, one per schedule and number of ranks."""
    best, equal = result.best[0], f"Equivalent (within {result.equal:.1%}), less simple:"
    slower, pruned, too_large = "Slower:", "Pruned (a lower bound exceeds the plans above):", "Out of memory:"
    lines: dict[str, list[tuple[str, str]]] = {equal: [], slower: [], pruned: [], too_large: []}
    for plan in sorted(_typical(result), key=lambda plan: plan.lacking_bytes):
        if plan.lacking_bytes:
            reason, detail = too_large, f"the peak-memory rank needs {format_bytes(plan.lacking_bytes)} more"
        elif plan.bubble is None:
            reason, detail = pruned, f"at least {_compare_speed(plan, best)}"
        else:
            reason, detail = equal if plan.step_seconds < best.step_seconds else slower, _describe_rejection(plan, best)
        lines[reason].append((_describe(plan.choice), detail))
    for head, plans in lines.items():
        if plans:
            omitted = [(f"and {len(plans) - _MAX_LINES} more", "")] if len(plans) > _MAX_LINES else []
            yield head, [*plans[:_MAX_LINES], *omitted]


def _typical(result: PlanResult) -> list[RejectedConfig]:
    """Return rejected plans that do not resemble the best: the best of each schedule with the winner's number of ranks;
    with other numbers, the best of all and of the usual schedule.
    """
    ranks = result.best[0].choice.ranks
    seen = {(plan.choice.ranks, plan.choice.schedule) for plan in result.best}
    seen_ranks: set[int] = set()
    typical = []
    for plan in result.rejected:
        kind, same_ranks = (plan.choice.ranks, plan.choice.schedule), plan.choice.ranks == ranks
        if kind not in seen and (same_ranks or plan.choice.ranks not in seen_ranks or plan.choice.schedule == _USUAL):
            seen.add(kind)
            seen_ranks.add(plan.choice.ranks)
            typical.append(plan)
    return typical


def _describe(choice: ParallelConfig) -> str:
    chunks = f" vpp={choice.chunks}" if choice.chunks > 1 else ""
    microbatches = pluralize(choice.microbatches, "microbatch")
    return f"{choice.schedule}: dp={choice.replicas} pp={choice.ranks}{chunks}, {microbatches} of {choice.rows}"


def _compare_speed(plan: RejectedConfig | Plan, best: Plan) -> str:
    if not best.step_seconds:
        return "no faster"
    change = plan.step_seconds / best.step_seconds - 1
    return f"{abs(change):.1%} {'faster' if change < 0 else 'slower'}"


def _describe_rejection(plan: RejectedConfig, best: Plan) -> str:
    details = [
        f"bubble {plan.bubble:.1%}" if plan.bubble else "",
        f"{plan.recomputed} recomputed" if plan.recomputed else "",
        f"{plan.offloaded} offloaded" if plan.offloaded else "",
        f"reduce {plan.reduce_seconds / plan.step_seconds:.1%}" if plan.reduce_seconds else "",
    ]
    return ": ".join(filter(None, (_compare_speed(plan, best), ", ".join(filter(None, details)))))


def show_shortfall(result: PlanResult, remedies: Sequence[tuple[str, Plan]], console: Console) -> None:
    """Print which memory is missing, and the options with which a plan fits."""
    closest = result.closest
    assert closest is not None  # without any plan the planner has raised
    rank = closest.fullest
    required, static = closest.memory_bytes[rank], closest.held_bytes[rank]
    text = (
        f" into {format_bytes(closest.limit_bytes[rank])} per device. "
        f"{_describe(closest.choice)}, with {len(closest.recompute)} of {closest.choice.stages} stages recomputed, is "
        f"closest: rank {rank} needs {format_bytes(required)}, {format_bytes(closest.lacking_bytes)} too much: "
        f"{format_bytes(static)} for parameters, gradients and the optimizer, and "
        f"{format_bytes(required - static)} for activations."
    )
    console.print(Text.assemble(("Nothing fits", "bold"), text))
    if remedies:
        console.print("\nAny of these changes fits:")
    for options, plan in remedies:
        console.print(f"  {options}: {_describe(plan.choice)}, {plan.step_seconds:.4g} s/step")
