"""`penstock explain`: where the time of a measured step went, what caused it, and what to change first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from penstock._base.errors import ArgumentError
from penstock._base.words import counted
from penstock.cli._options import Json, option, spread
from penstock.cli._outcome import Written, format_of
from penstock.report.text import pairs, print_unbroken, table
from penstock.schedule import names
from penstock.simulate.figures import title

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.plan import Plan
    from penstock.plan.explain import Change, Explanation, Predicted, Run
    from penstock.plan.explain.explanation import StageTime
    from penstock.plan.explain.where import RankTime
    from penstock.trace.runs import RunRead

EPILOG = """\
The order of each rank and the time of each action are the trace's; what a change brings is simulated. ± covers the \
replay's own error on this trace and what the change assumes; "at most" is said where that was not measured. Changes \
are ordered by the gain that is certain."""
"""Printed below the options."""

_MAX_RANKS = 16


@dataclass(frozen=True, slots=True)
class PredictionOptions:
    """What was expected of a run."""

    profile: Annotated[
        Path | None, option("What `penstock profile` wrote: compare, and find a better cut.", metavar="FILE")
    ] = None
    cuts: Annotated[
        str | None, option("With --profile, the cuts of the run: a,b,c; by default as recorded, or the profile's best.")
    ] = None
    plan: Annotated[
        Path | None, option("The plan of the run, from `penstock plan`: compare with it.", metavar="FILE")
    ] = None

    def of(self, run: Run, folder: RunRead | None) -> Predicted | None:
        """What a profile, a plan or the run's own folder (if it has one) said of it; None if there is none of these."""
        from penstock.plan.explain import Predicted

        if self.cuts is not None and self.profile is None:
            raise ArgumentError(f"--cuts {self.cuts!r} needs --profile, whose units it names")
        planned = None
        if self.plan is not None:
            from penstock.plan import read_plan

            planned = read_plan(self.plan)
            _check_plan(planned, run, folder, self.plan)
        if self.profile is None:
            if planned is not None:
                return Predicted(planned.stage_seconds, planned.pipeline_seconds)
            before = None if folder is None else folder.predicted()
            return None if before is None else Predicted(before.stage_seconds, before.step_seconds)
        from penstock.costs import read_profile

        order = run.typical.slowest.schedule
        known, rows, threads = (None, None, 0) if planned is None else (planned.cuts, planned.choice.rows, 0)
        if folder is not None:
            known, rows, threads = folder.about.cuts, folder.about.microbatch_rows, folder.about.threads
            if self.cuts is not None and self.cuts.split(",") != [*known]:
                raise ArgumentError(
                    f"--cuts {self.cuts}: the run was cut at {','.join(known) or 'nothing'}; leave --cuts out"
                )
        return Predicted.of_profile(
            read_profile(self.profile),
            order.placement.depth,
            known if self.cuts is None else self.cuts.split(","),
            rows,
            threads,
            splits=order.splits,
        )


def _check_plan(plan: Plan, run: Run, folder: RunRead | None, file: Path) -> None:
    """Raises ArgumentError if a run did not follow this plan, as far as one can see."""
    order, choice = run.typical.slowest.schedule, plan.choice
    known = {order.name} & {*names()} if folder is None else {folder.about.schedule}
    ran = [order.ranks, order.placement.depth, order.microbatches]
    planned = [choice.ranks, choice.stages, choice.microbatches]
    cuts = None if folder is None else [*folder.about.cuts]
    if ran != planned or not known <= {choice.schedule} or cuts not in (None, [*plan.cuts]):
        raise ArgumentError(
            f"--plan {file}: the run, {_what(order.name, ran, cuts)}, did not follow it: "
            f"{_what(choice.schedule, planned, plan.cuts)}. Pass the plan of the run, or leave --plan out"
        )
    if plan.made_for is not None and folder is not None and folder.about.parameters:
        size = sum(prod(shape) for shape in plan.made_for.parameters.values())
        if size != folder.about.parameters:
            raise ArgumentError(
                f"--plan {file}: it is for a model of {size:,} parameters, and the run's, {folder.about.model}, has "
                f"{folder.about.parameters:,}. Pass the plan of the run, or leave --plan out"
            )


def _what(schedule: str, sizes: Sequence[int], cuts: Sequence[str] | None) -> str:
    ranks, stages, microbatches = sizes
    where = "" if cuts is None else f", cut at {', '.join(cuts) or 'nothing'}"
    return (
        f"{schedule} with {counted(ranks, 'rank')}, {counted(stages, 'stage')}, "
        f"{counted(microbatches, 'microbatch')}{where}"
    )


@spread
def explain(
    run: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="A folder that penstock.pipeline(run=...) recorded; or timelines as JSON, traces of Perfetto or "
            "torch's profiler, or columns (CSV): one file for all ranks, one for each, or a folder of them; .gz too.",
        ),
    ],
    *,
    step: Annotated[
        str | None, option("Which step, or all for a table; by default the one whose time is the median.")
    ] = None,
    prediction: PredictionOptions,
    what_if: Annotated[
        list[str] | None,
        option(
            "Try this: schedule=zb-h1, cut=even, cut=2:0.1 (a tenth of stage 2 goes to stage 1), "
            "stragglers=none, rank=2 (if it were not slow), microbatches=equal, actions=usual, link=0.5 (of the time), "
            "host=none; several at once with commas; repeat it for others.",
            metavar="CHANGE",
        ),
    ] = None,
    pattern: Annotated[
        str | None,
        option(
            "How another tool names actions, with groups op, stage and microbatch: "
            r"'(?P<op>fwd|bwd)-(?P<stage>\d+)-(?P<microbatch>\d+)'.",
            metavar="REGEX",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Explain a measured step: where its time went, why, and what to change first.

    The trace's actions are named by stage, op and microbatch (2F3), as in
    penstock's and torch's own traces, or by columns.
    """
    from penstock.plan.explain import explain as explained
    from penstock.plan.explain import read_run, run_of

    folder, known = folder_of(run), run_of(read_run(run, pattern))
    every = step == "all"
    if step is not None and not every and not step.isdigit():
        raise ArgumentError(f"--step {step}: expected the number of a step, or all")
    number = None if step is None or every else int(step)
    predicted = prediction.of(known, folder)
    found = explained(known, step=number, predicted=predicted, what_ifs=what_if or ())
    if as_json:
        print(json.dumps(found.to_dict()))
    elif every:
        show_steps(found, Console(highlight=False))
    else:
        show(found, Console(highlight=False))


def folder_of(paths: Sequence[Path]) -> RunRead | None:
    """The folder of a run, if that is what was given."""
    from penstock.trace.runs import is_run, read_run

    if len(paths) > 1 and (runs := [str(path) for path in paths if is_run(path)]):
        raise ArgumentError(f"{runs[0]} is the folder of a run: pass one at a time, or several to penstock compare")
    return read_run(paths[0]) if len(paths) == 1 and is_run(paths[0]) else None


def show(found: Explanation, console: Console) -> None:
    """Prints what the step is, what to change first, and where the time went."""
    step = found.step
    unit, name = (1.0, "s") if step.seconds >= 1 else (1e-3, "ms")
    written = _written(step.seconds)
    _show_head(found, console, written)
    console.print("\n[bold]What to change first[/], and by how much that changes a step")
    console.print(_changes(found.advice) if found.advice else found.nothing)
    if found.what_ifs:
        console.print("\n[bold]What if[/]")
        console.print(_changes(found.what_ifs))
    slowest = f" (replica {found.step.slowest.number}, the slowest)" if len(found.step.replicas) > 1 else ""
    console.print(f"\n[bold]Where the time went[/], in {name}{slowest}")
    print_unbroken(console, _ranks(found, unit))
    _show_why(found, console, written)


def _written(largest: float) -> Written:
    """Seconds as text, to as many digits as the largest needs."""
    unit, name = (1.0, "s") if largest >= 1 else (1e-3, "ms")
    seconds = format_of([largest / unit], most=3 if largest / unit < 100 else 1)
    return lambda value: f"{seconds(value / unit)} {name}"


def show_steps(found: Explanation, console: Console) -> None:
    """Prints a line for each step: how long it took, which rank was slow, and which stage heavy."""
    written = _written(max(one.seconds for one in found.steps))
    made = table("step", "took", "of the\nmedian", "slowest rank", "heaviest stage", "longest\nmicrobatch", left=1)
    for one in found.steps:
        slow = "-" if one.slowest is None else f"{one.slowest.who} ({one.slowest.times:.2f}x)"
        stage = f"{one.stage} ({one.of_mean:.2f}x)"
        made.add_row(str(one.number), written(one.seconds), f"{one.of_median:.2f}", slow, stage, f"{one.longest:.2f}x")
    print_unbroken(console, made)
    for text in in_words(found):
        console.print(text)


def in_words(found: Explanation) -> list[str]:
    """How the steps of the run differ; nothing if there is but one."""
    from penstock.plan.explain.stragglers import in_words as said

    if len(found.steps) < 2:
        return []
    times = [one.seconds for one in found.steps]
    written = _written(max(times))
    return [f"{len(times)} steps take {written(min(times))} to {written(max(times))}", *said(found.steps)]


def _stragglers(found: Explanation) -> str:
    """What uneven durations cost, and whose; empty if they cost nothing."""
    known = found.slowdowns
    if known is None or known.step < 1.01:
        return ""
    parts = [
        ", ".join(f"{what} {name} {value:.2f}x" for name, value in _worst(pairs))
        for what, pairs in (
            ("rank", dict(enumerate(known.by_rank))),
            ("replica", dict(enumerate(known.by_replica)) if len(known.by_replica) > 1 else {}),
            ("", known.by_op),
        )
    ]
    only = "; ".join(part.replace("  ", " ").strip() for part in parts if part)
    return f"stragglers: {known.step:.2f} times as long as if every op took its usual time on all ranks" + (
        f"; each alone: {only}" if only else ""
    )


def _times_predicted(stage: StageTime) -> float:
    """Infinite where nothing was predicted to take any time."""
    if stage.predicted_seconds:
        return stage.seconds / stage.predicted_seconds
    return inf if stage.seconds else 1.0


def _worst(slower: Mapping[Any, float]) -> list[tuple[Any, float]]:
    """The two that cost most, if they cost anything."""
    return sorted(((k, v) for k, v in slower.items() if v >= 1.01), key=lambda pair: -pair[1])[:2]


def _show_head(found: Explanation, console: Console, written: Written) -> None:
    step, run = found.step, found.run
    replicas = f", {counted(len(step.replicas), 'replica')}" if len(step.replicas) > 1 else ""
    origin = found.origin if found.origin == "measured" else f"{found.origin}, with its costs' unit for a second"
    console.print(Text(f"{title(step.slowest.schedule)}{replicas}, {origin}", "bold"))
    for note in run.notes:
        console.print(f"note: {note}", style="yellow")
    several = f" (step {step.number}, the median of {len(run.steps)})" if len(run.steps) > 1 else ""
    outside, rest = step.seconds - step.pipeline_seconds, ""
    if outside > 0.001 * step.seconds:
        most = f" ({', '.join([*step.others][:2])} most)" if step.others else ""
        rest = f"; {written(outside)} outside the pipeline{most}"
    console.print(f"a step takes {written(step.seconds)}{several}{rest}")
    parts = [f"{written(found.where.even_seconds)} if all were even"]
    parts += [
        f"{reason.value} {value / step.seconds:+.1%}"
        for reason, value in found.where.added_seconds.items()
        if abs(value) >= 0.002 * step.seconds
    ]
    console.print(f"of the pipeline's {written(step.pipeline_seconds)}: {', '.join(parts)}")
    whole = f"; of whole steps: {found.whole_error:.2%}" if found.whole_error else ""
    console.print(
        f"replayed from its own durations: {found.replay_error:+.2%} of the step (worst {found.worst_error:.2%}{whole})"
    )
    if said := _stragglers(found):
        console.print(said)
    for text in in_words(found):
        console.print(text)
    if found.predicted_seconds is not None:
        times, wrong = max(((_times_predicted(one), one) for one in found.stages), key=lambda pair: abs(pair[0] - 1))
        much = f"{times:.2f} times what was predicted" if isfinite(times) else f"{written(wrong.seconds)} instead of 0"
        console.print(
            f"predicted {written(found.predicted_seconds)} for the pipeline; most wrong at stage {wrong.stage}, which "
            f"takes {much}"
        )


def _changes(changes: Sequence[Change]) -> Table:
    return pairs((one.claim, Text.assemble(one.text, (f" ({one.note})" if one.note else "", "dim"))) for one in changes)


def _ranks(found: Explanation, unit: float) -> Table:
    """A line for each rank; the busiest and the emptiest where there are many."""
    ranks = found.where.ranks
    total = found.step.slowest.span_seconds
    reasons = [
        reason for reason in ranks[0].idle_seconds if any(one.idle_seconds[reason] >= 0.001 * total for one in ranks)
    ]
    predicted = any(one.predicted_seconds is not None for one in found.stages)
    heads = ["of the\nmean", *(("of the\nprediction",) if predicted else ())]
    made = table(
        "rank", "stages", "computes", *(reason.value.replace(" ", "\n", 1) for reason in reasons), *heads, left=2
    )
    seconds = format_of([total / unit], most=3 if total / unit < 100 else 1)
    for one in _shown(found):
        stages = [stage for stage in found.stages if stage.rank == one.rank]
        cells = [seconds(one.idle_seconds[reason] / unit) for reason in reasons]
        share = sum(stage.of_mean for stage in stages) / len(stages)
        line = [str(one.rank), ", ".join(str(stage.stage) for stage in stages), seconds(one.compute_seconds / unit)]
        line += [*cells, f"{share:.2f}"]
        if predicted:
            known = sum(stage.predicted_seconds or 0.0 for stage in stages)
            line.append(f"{sum(stage.seconds for stage in stages) / known:.2f}" if known else "-")
        made.add_row(*line)
    return made


def _shown(found: Explanation) -> list[RankTime]:
    ranks = list(found.where.ranks)
    if len(ranks) <= _MAX_RANKS:
        return ranks
    busiest = sorted(ranks, key=lambda one: -one.compute_seconds)
    return sorted([*busiest[: _MAX_RANKS // 2], *busiest[-_MAX_RANKS // 2 :]], key=lambda one: one.rank)


def _show_why(found: Explanation, console: Console, written: Written) -> None:
    bubble = found.bubble
    if bubble is not None:
        text = f"The largest bubble: rank {bubble.rank} waits {written(bubble.seconds)} before {bubble.before}"
        if bubble.culprit is not None:
            text += (
                f", mostly for {bubble.culprit} of rank {bubble.culprit_rank}, which takes "
                f"{written(bubble.culprit_seconds)} where an even share is {written(bubble.usual_seconds)}"
            )
        console.print(f"\n{text}.")
