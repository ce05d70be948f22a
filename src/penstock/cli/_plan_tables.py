"""Plans on one screen: the best, what each of its ranks does and needs, why others lost, or what is missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from penstock._base.words import counted, in_ranges, sized
from penstock.cli._outcome import format_of
from penstock.report.text import pairs, print_unbroken, table
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
    from penstock.plan.planner import Lost

    best = found.best[0]
    tried = counted(len(found.best) + len(found.lost), "plan")
    console.print(f"[bold]{_named(best.choice)}[/]: the best of {tried}, {best.step_seconds:.4g} s a step")
    if best.choice.devices == 1:
        console.print(
            "On one device a pipeline is pointless: there is nothing to split. The plan runs the model as it is."
        )
    elif best.choice.ranks == 1:
        every: list[Plan | Lost] = sorted((*found.best, *found.lost), key=lambda one: one.step_seconds)
        piped = next((one for one in every if one.choice.ranks > 1 and not one.lacking_bytes), None)
        if not any(one.choice.ranks > 1 for one in every):
            beside = "as was asked for, or as no other layout works"
        elif piped is None:
            beside = "none with one fits"
        elif abs(piped.step_seconds - best.step_seconds) <= found.equal * best.step_seconds:
            beside = f"{_named(piped.choice)}, which has one, takes as long"
        elif isinstance(piped, Lost) and piped.bubble is None:
            beside = f"any plan with one is at least {_slower(piped, best)}"
        else:
            beside = f"the best with one is {_named(piped.choice)}, {_slower(piped, best)}"
        console.print(f"It has no pipeline; {beside}.")
    elif best.bubble >= _MOSTLY:
        console.print(
            f"Its ranks are idle {best.bubble:.0%} of the time: the batch is small for {best.choice.devices} devices, "
            "and fewer may be as fast."
        )
    console.print()
    alike = _alike(found.best)
    shown = [plans[0] for plans in alike]
    print_unbroken(console, _plans(alike))
    if any(plan.bubble >= _SEEN for plan in found.best):
        console.print("\nIdle time by cause, % of rank time")
        print_unbroken(console, _idle(shown))
    console.print()
    least = min(plan.step_seconds for plan in shown)
    equal = sum(plan.step_seconds <= (1 + found.equal) * least for plan in shown)
    tie = f" The first {equal} are as good as equal (within {found.equal:.1%}): the simplest is first." * (equal > 1)
    update = (
        f" A step of the first ends with {best.optimizer_seconds:.2g} s of AdamW." if best.optimizer_seconds else ""
    )
    console.print(
        "dp: replicas. pp: ranks. v: stages a rank. m: microbatches a replica, of so many rows. Idle: the share of "
        f"the ranks' time that is lost. Memory: of the fullest rank.{update}{tie}",
        style="dim",
    )
    console.print("\n[bold]Rank layout of the best plan[/]")
    print_unbroken(console, _ranks(best, cluster))
    if reasons := [*_reasons(found)]:
        console.print("\n[bold]Rejected plans[/]")
        for head, lines in reasons:
            console.print(head)
            console.print(pairs(lines))


def _alike(plans: Sequence[Plan]) -> list[list[Plan]]:
    """The plans that differ in nothing but the schedule's name, together: with few microbatches orders are the same."""
    found: dict[object, list[Plan]] = {}
    for plan in plans:
        numbers = (plan.step_seconds, plan.bubble, *plan.memory_bytes)
        key = replace(plan.choice, schedule=""), plan.cuts, *(f"{number:.6g}" for number in numbers)
        found.setdefault(key, []).append(plan)
    return [*found.values()]


def _plans(alike: Sequence[Sequence[Plan]]) -> Table:
    """A row for each plan, with the names of those that are alike."""
    plans = [same[0] for same in alike]
    sums = any(plan.reduce_seconds for plan in plans)
    heads = ("step s", "rows/s", "idle", *(("sums s",) if sums else ()))
    made = table("schedule", "dp", "pp", "v", "m", "rows", *heads, "memory")
    steps = format_of([plan.step_seconds for plan in plans])
    rates = format_of([plan.rows_per_second for plan in plans], most=2)
    for plan, same in zip(plans, alike, strict=True):
        choice = plan.choice
        numbers = (choice.replicas, choice.ranks, choice.chunks, choice.microbatches, choice.rows)
        made.add_row(
            " = ".join(one.choice.schedule for one in same),
            *map(str, numbers),
            steps(plan.step_seconds),
            rates(plan.rows_per_second),
            f"{plan.bubble:.1%}",
            *((f"{plan.reduce_seconds:.2g}",) if sums else ()),
            sized(max(plan.memory_bytes)),
        )
    return made


def _idle(plans: Sequence[Plan]) -> Table:
    causes = [cause for cause in Cause if any(plan.idle.get(cause.value, 0.0) >= _SEEN for plan in plans)]
    made = table("schedule", *(cause.value.replace(" for ", "\nfor ") for cause in causes))
    for plan in plans:
        made.add_row(plan.choice.schedule, *(f"{100 * plan.idle.get(cause.value, 0.0):.1f}" for cause in causes))
    return made


def _ranks(plan: Plan, cluster: Cluster) -> Table:
    """What each rank runs, for how long, and what it needs."""
    from penstock.plan.predict import order_of_plan

    schedule = order_of_plan(plan)
    limited = any(limit < math.inf for limit in plan.limit_bytes)
    changed = bool(plan.recompute or plan.offload)
    heads = ("activ-\nations", "memory", *(("limit",) if limited else ()), *(("stages that",) if changed else ()))
    made = table("rank", "device", "stages begin with", "F + B", "of the\nmean", *heads, left=3)
    depth, names = schedule.placement.depth, ("the input", *plan.cuts)
    own = [sorted({stage % depth for stage in stages}) for stages in schedule.placement.by_rank]
    seconds = [sum(plan.stage_seconds[stage] for stage in stages) for stages in own]
    shown, mean = format_of(seconds), sum(seconds) / len(seconds)
    for rank in _shown_ranks(plan):
        held = plan.held_bytes[rank] if plan.held_bytes else 0.0
        made.add_row(
            str(rank),
            _few(in_ranges([str(row[rank]) for row in plan.grid])) + _kinds([row[rank] for row in plan.grid], cluster),
            _few([names[stage] for stage in own[rank]]),
            shown(seconds[rank]),
            f"{seconds[rank] / mean:.2f}" if mean else "-",
            sized(plan.memory_bytes[rank] - held),
            sized(plan.memory_bytes[rank]),
            *((sized(size) if (size := plan.limit_bytes[rank]) < math.inf else "-",) if limited else ()),
            *((_ways(plan, own[rank]),) if changed else ()),
        )
    return made


def _kinds(devices: Sequence[int], cluster: Cluster) -> str:
    """The kinds of these devices, where there are several."""
    names = dict.fromkeys(cluster.kinds[cluster.kind_of[device]].name for device in devices)
    return f" ({', '.join(names)})" if len(cluster.kinds) > 1 else ""


def _shown_ranks(plan: Plan) -> list[int]:
    ranks = plan.choice.ranks
    if ranks <= _MAX_RANKS:
        return [*range(ranks)]
    return sorted({*range(_MAX_RANKS // 2), plan.fullest, *range(ranks - _MAX_RANKS // 2 + 1, ranks)})


def _few(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 3 else [*names[:2], "...", names[-1]])


def _ways(plan: Plan, stages: Sequence[int]) -> str:
    again, away = (sum(stage in some for stage in stages) for some in (plan.recompute, plan.offload))
    found = [f"{count} {what}" for count, what in ((again, "recompute"), (away, "offload")) if count]
    return f"{', '.join(found)}" if found else "-"


def _reasons(found: Planned) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The ways to lose, and for each the choices that came nearest, one for each schedule and number of ranks."""
    best = found.best[0]
    typical = _typical(found)
    lacking = sorted((one for one in typical if one.lacking_bytes), key=lambda one: one.lacking_bytes)
    slower = [one for one in typical if one.bubble is not None and not one.lacking_bytes]
    bounded = [one for one in typical if one.bubble is None]
    alike = [one for one in slower if one.step_seconds < best.step_seconds]
    if alike:
        yield f"As good as equal (within {found.equal:.1%}), not as simple:", _lines(alike, lambda one: _why(one, best))
    if slower := [one for one in slower if one not in alike]:
        yield "Slower:", _lines(slower, lambda one: _why(one, best))
    if bounded:
        yield (
            "Pruned (a lower bound exceeds the best plan):",
            _lines(bounded, lambda one: f"at least {_slower(one, best)}"),
        )
    if lacking:
        yield "Out of memory:", _lines(lacking, lambda one: f"the fullest rank needs {sized(one.lacking_bytes)} more")


def _lines(some: Sequence[Lost], said: Callable[[Lost], str]) -> list[tuple[str, str]]:
    lines = [(_named(one.choice), said(one)) for one in some[:_MAX_LINES]]
    rest = len(some) - len(lines)
    return [*lines, (f"and {rest} more", "")] if rest else lines


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
    return (
        f"{choice.schedule}, dp {choice.replicas} x pp {choice.ranks}"
        f"{f' x {choice.chunks}' if choice.chunks > 1 else ''}, {choice.microbatches} x {choice.rows}"
    )


def _slower(lost: Lost | Plan, best: Plan) -> str:
    if not best.step_seconds:
        return "no faster"
    more = lost.step_seconds / best.step_seconds - 1
    return f"{abs(more):.1%} {'faster' if more < 0 else 'slower'}"


def _why(lost: Lost, best: Plan) -> str:
    why = [f"idle {lost.bubble:.1%}"] if lost.bubble else []
    if lost.recomputed:
        why.append(f"{lost.recomputed} recomputed")
    if lost.offloaded:
        why.append(f"{lost.offloaded} offloaded")
    if lost.reduce_seconds:
        why.append(f"sums {lost.reduce_seconds / lost.step_seconds:.1%}")
    return f"{_slower(lost, best)}: {', '.join(why)}" if why else _slower(lost, best)


def show_lack(found: Planned, cluster: Cluster, told: Sequence[Remedy], console: Console, group: int = 1) -> None:
    """Prints what is missing, where, and what would fit. `group`: how many devices one of the cluster stands for."""
    nearest = found.nearest
    assert nearest is not None  # there is a choice, or else the planner has refused the numbers
    rank = nearest.fullest
    needed, held = nearest.memory_bytes[rank], nearest.held_bytes[rank]
    console.print(
        f"[bold]Nothing fits[/] into {sized(nearest.limit_bytes[rank])} a device. {_named(nearest.choice)}, with "
        f"{len(nearest.recompute)} of {nearest.choice.stages} stages recomputed, is closest: rank {rank} needs "
        f"{sized(needed)}, {sized(nearest.lacking_bytes)} more than there is: {sized(held)} for parameters, gradients "
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
        return "--host-link RATE, to offload activations to the host's memory"
    sizes = [f"{size / 2**20:.0f}MiB" if size < math.inf else "" for size in remedy.memory_bytes]
    if len(sizes) == 1:
        return f"--memory {sizes[0]}"
    return f"--memory {','.join(f'{kind.name}={size}' for kind, size in zip(cluster.kinds, sizes, strict=True))}"
