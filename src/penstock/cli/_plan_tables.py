"""Plans on one screen: the best, what each of its ranks does and needs, why others lost, or what is missing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console

from penstock._base.words import counted, in_ranges, sized
from penstock.cli._outcome import format_of, texts
from penstock.report.text import pairs, print_columns, print_unbroken
from penstock.simulate import Cause

if TYPE_CHECKING:
    from penstock.plan import Choice, Cluster, Lost, Plan, Planned
    from penstock.plan.remedies import Remedy

_MAX_LINES = 6
"""For each way to lose."""

_SEEN = 5e-4
"""The least share of the time that is not rounded to 0.0%."""

_MOSTLY = 0.5
"""From this share of idle time on, there are probably more devices than the batch can use."""

_USUAL = "1f1b"
"""What people ask for."""

_MAX_RANKS = 16
"""Of which each is shown; of more, the first and last, and the fullest."""


def show(found: Planned, console: Console, cluster: Cluster) -> None:
    """Prints the best plans, what each rank of the first does, and why others lost."""
    best = found.best[0]
    tried = counted(len(found.best) + len(found.lost), "plan")
    console.print(f"[bold]{_named(best.choice)}[/]: the best of {tried}, {best.step_seconds:.4g} s/step")
    if said := _of_ranks(found, best):
        console.print(said)
    console.print()
    alike = _alike(found.best)
    shown = [plans[0] for plans in alike]
    _show_plans(alike, console)
    if any(plan.bubble >= _SEEN for plan in found.best):
        console.print("\nIdle time by cause, % of rank time")
        _show_idle(shown, console)
    least = min(plan.step_seconds for plan in shown)
    equal = sum(plan.step_seconds <= (1 + found.equal) * least for plan in shown)
    note = (
        "dp: replicas. pp: ranks. vpp: stages per rank. Microbatches: per replica. mbs: microbatch size, in samples. "
        "Bubble: idle share of the ranks' time. Memory: of the peak-memory rank."
    )
    if best.optimizer_seconds:
        note += f" The first includes {best.optimizer_seconds:.2g} s/step of AdamW."
    if equal > 1:
        note += f" The first {equal} are equivalent (within {found.equal:.1%}): the simplest is first."
    console.print(f"\n{note}", style="dim")
    console.print("\n[bold]Rank layout of the best plan[/]")
    _show_ranks(best, cluster, console)
    for number, (head, lines) in enumerate(_reasons(found)):
        console.print(head if number else f"\n[bold]Rejected plans[/]\n{head}")
        print_unbroken(console, pairs(lines))


def _of_ranks(found: Planned, best: Plan) -> str:
    """What to say of a plan without a pipeline, or with one that is idle most of the time."""
    if best.choice.devices == 1:
        return "On one device a pipeline is pointless: there is nothing to split. The plan runs the model as it is."
    if best.choice.ranks > 1:
        few = f"the batch is small for {best.choice.devices} devices, and fewer may be as fast."
        return f"Its ranks are idle {best.bubble:.0%} of the time: {few}" if best.bubble >= _MOSTLY else ""
    every: list[Plan | Lost] = sorted((*found.best, *found.lost), key=lambda one: one.step_seconds)
    piped = next((one for one in every if one.choice.ranks > 1 and not one.lacking_bytes), None)
    if piped is None:
        return "It has no pipeline; no plan with one fits, or none was asked for."
    much = f"{'at least ' if piped.bubble is None else ''}{_slower(piped, best)}"
    if abs(piped.step_seconds - best.step_seconds) <= found.equal * best.step_seconds:
        much = "equivalent"
    return f"It has no pipeline; the best with one is {_named(piped.choice)}, {much}."


def _alike(plans: Sequence[Plan]) -> list[list[Plan]]:
    """The plans that differ in nothing but the schedule's name, together: with few microbatches orders are the same."""
    found: dict[object, list[Plan]] = {}
    for plan in plans:
        numbers = (plan.step_seconds, plan.bubble, *plan.memory_bytes)
        key = replace(plan.choice, schedule=""), plan.cuts, *(f"{number:.6g}" for number in numbers)
        found.setdefault(key, []).append(plan)
    return [*found.values()]


def _show_plans(alike: Sequence[Sequence[Plan]], console: Console) -> None:
    """A row for each plan, with the names of those that are alike."""
    plans = [same[0] for same in alike]
    choices = [plan.choice for plan in plans]
    sums = any(plan.reduce_seconds for plan in plans)
    columns: dict[str, Sequence[object]] = {
        "schedule": [" = ".join(one.choice.schedule for one in same) for same in alike],
        "dp": [choice.replicas for choice in choices],
        "pp": [choice.ranks for choice in choices],
        "vpp": [choice.chunks for choice in choices],
        "micro-\nbatches": [choice.microbatches for choice in choices],
        "mbs": [choice.rows for choice in choices],
        "step s": texts([plan.step_seconds for plan in plans]),
        "samples/s": texts([plan.rows_per_second for plan in plans], most=2),
        "bubble": [f"{plan.bubble:.1%}" for plan in plans],
        "grad\nreduce s": [f"{plan.reduce_seconds:.2g}" if sums else None for plan in plans],
        "memory": [sized(max(plan.memory_bytes)) for plan in plans],
    }
    print_columns(console, columns)


def _show_idle(plans: Sequence[Plan], console: Console) -> None:
    idle = {cause: [plan.idle.get(cause.value, 0.0) for plan in plans] for cause in Cause}
    columns = {
        cause.value.replace(" for ", "\nfor "): [f"{100 * share:.1f}" for share in shares]
        for cause, shares in idle.items()
        if max(shares) >= _SEEN
    }
    print_columns(console, {"schedule": [plan.choice.schedule for plan in plans], **columns})


def _show_ranks(plan: Plan, cluster: Cluster, console: Console) -> None:
    """What each rank runs, for how long, and what it needs."""
    from penstock.plan.predict import order_of_plan

    placement, names = order_of_plan(plan).placement, ("the input", *plan.cuts)
    own = [sorted({stage % placement.depth for stage in stages}) for stages in placement.by_rank]
    seconds = [sum(plan.stage_seconds[stage] for stage in stages) for stages in own]
    times, mean = format_of(seconds), sum(seconds) / len(seconds)
    held = plan.held_bytes or [0.0] * len(own)
    ranks, half = range(plan.choice.ranks), _MAX_RANKS // 2
    shown = [*ranks] if len(ranks) <= _MAX_RANKS else sorted({*ranks[:half], plan.fullest, *ranks[1 - half :]})
    columns: dict[str, Sequence[object]] = {
        "rank": shown,
        "device": [_devices([row[rank] for row in plan.grid], cluster) for rank in shown],
        "first modules": [_few([names[stage] for stage in own[rank]]) for rank in shown],
        "F + B": [times(seconds[rank]) for rank in shown],
        "vs\nmean": [f"{seconds[rank] / mean:.2f}" if mean else "-" for rank in shown],
        "activ-\nations": [sized(plan.memory_bytes[rank] - held[rank]) for rank in shown],
        "memory": [sized(plan.memory_bytes[rank]) for rank in shown],
        "limit": [sized(limit) if (limit := plan.limit_bytes[rank]) < math.inf else None for rank in shown],
        "recompute /\noffload": [_ways(plan, own[rank]) for rank in shown],
    }
    print_columns(console, columns, left=3)


def _devices(devices: Sequence[int], cluster: Cluster) -> str:
    """Their numbers and, where there are several, their kinds."""
    kinds = dict.fromkeys(cluster.kinds[cluster.kind_of[device]].name for device in devices)
    return _few(in_ranges(map(str, devices))) + (f" ({', '.join(kinds)})" if len(cluster.kinds) > 1 else "")


def _few(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 3 else [*names[:2], "...", names[-1]])


def _ways(plan: Plan, stages: Sequence[int]) -> str | None:
    counts = {way: sum(stage in getattr(plan, way) for stage in stages) for way in ("recompute", "offload")}
    return ", ".join(f"{count} {way}" for way, count in counts.items() if count) or None


def _reasons(found: Planned) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The ways to lose, and for each the choices that came nearest, one for each schedule and number of ranks."""
    best, equal = found.best[0], f"Equivalent (within {found.equal:.1%}), less simple:"
    slower, pruned, lacking = "Slower:", "Pruned (a lower bound exceeds the best plan):", "Out of memory:"
    lines: dict[str, list[tuple[str, str]]] = {equal: [], slower: [], pruned: [], lacking: []}
    for lost in sorted(_typical(found), key=lambda one: one.lacking_bytes):
        if lost.lacking_bytes:
            way, why = lacking, f"the peak-memory rank needs {sized(lost.lacking_bytes)} more"
        elif lost.bubble is None:
            way, why = pruned, f"at least {_slower(lost, best)}"
        else:
            way, why = equal if lost.step_seconds < best.step_seconds else slower, _why(lost, best)
        lines[way].append((_named(lost.choice), why))
    for head, some in lines.items():
        if some:
            more = [(f"and {len(some) - _MAX_LINES} more", "")] if len(some) > _MAX_LINES else []
            yield head, [*some[:_MAX_LINES], *more]


def _typical(found: Planned) -> list[Lost]:
    """Of the choices that lost, those of kinds that are not among the best: the best of each schedule with the winner's
    ranks; with other ranks, the best of all, and of the usual schedule.
    """
    ranks = found.best[0].choice.ranks
    seen = {(plan.choice.ranks, plan.choice.schedule) for plan in found.best}
    others: set[int] = set()
    typical = []
    for lost in found.lost:
        kind, own = (lost.choice.ranks, lost.choice.schedule), lost.choice.ranks == ranks
        if kind not in seen and (own or lost.choice.ranks not in others or lost.choice.schedule == _USUAL):
            seen.add(kind)
            others.add(lost.choice.ranks)
            typical.append(lost)
    return typical


def _named(choice: Choice) -> str:
    chunks = f" vpp={choice.chunks}" if choice.chunks > 1 else ""
    microbatches = counted(choice.microbatches, "microbatch")
    return f"{choice.schedule}: dp={choice.replicas} pp={choice.ranks}{chunks}, {microbatches} of {choice.rows}"


def _slower(lost: Lost | Plan, best: Plan) -> str:
    if not best.step_seconds:
        return "no faster"
    more = lost.step_seconds / best.step_seconds - 1
    return f"{abs(more):.1%} {'faster' if more < 0 else 'slower'}"


def _why(lost: Lost, best: Plan) -> str:
    why = [
        f"bubble {lost.bubble:.1%}" if lost.bubble else "",
        f"{lost.recomputed} recomputed" if lost.recomputed else "",
        f"{lost.offloaded} offloaded" if lost.offloaded else "",
        f"reduce {lost.reduce_seconds / lost.step_seconds:.1%}" if lost.reduce_seconds else "",
    ]
    return ": ".join(filter(None, (_slower(lost, best), ", ".join(filter(None, why)))))


def show_lack(found: Planned, cluster: Cluster, told: Sequence[Remedy], console: Console, group: int = 1) -> None:
    """Prints what is missing, where, and what would fit. `group`: how many devices one of the cluster stands for."""
    nearest = found.nearest
    assert nearest is not None  # there is a choice, or else the planner has refused the numbers
    rank = nearest.fullest
    needed, held = nearest.memory_bytes[rank], nearest.held_bytes[rank]
    console.print(
        f"[bold]Nothing fits[/] into {sized(nearest.limit_bytes[rank])} per device. {_named(nearest.choice)}, with "
        f"{len(nearest.recompute)} of {nearest.choice.stages} stages recomputed, is closest: rank {rank} needs "
        f"{sized(needed)}, {sized(nearest.lacking_bytes)} too much: {sized(held)} for parameters, gradients "
        f"and the optimizer, and {sized(needed - held)} for activations."
    )
    if told:
        console.print("\nAny of these changes fits:")
    for one in told:
        console.print(f"  {_change(one, cluster, group)}: {_named(one.plan.choice)}")


def _change(remedy: Remedy, cluster: Cluster, group: int) -> str:
    if remedy.devices:
        return f"--devices {remedy.devices * group}"
    if remedy.offload:
        return "--offload-link RATE, to offload activations to the host's memory"
    sizes = [f"{size / 2**20:.0f}MiB" if size < math.inf else "" for size in remedy.memory_bytes]
    if len(sizes) > 1:
        sizes = [f"{kind.name}={size}" for kind, size in zip(cluster.kinds, sizes, strict=True)]
    return f"--memory {','.join(sizes)}"
