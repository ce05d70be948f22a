"""`penstock explain`: where the time of a measured step went, what caused it, and what to change first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isfinite, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from penstock._base.errors import ArgumentError
from penstock._base.words import counted
from penstock.cli._options import JSON, REQUIRED, argument, option, print_json, screen
from penstock.cli._outcome import format_of
from penstock.report.text import pairs, print_columns
from penstock.report.web.contents import duration
from penstock.schedule import names
from penstock.simulate.figures import title

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.plan import Plan
    from penstock.plan.explain import Change, Explanation, Predicted, Run
    from penstock.plan.explain.explanation import StageTime
    from penstock.trace.runs import RunRead

EPILOG = """\
The order of each rank and the time of each action are the trace's; the effect of a change is simulated. ± covers the \
replay's error on this trace and that of the change's assumptions; "at most" marks assumptions that were not measured. \
Changes are ordered by the time that they save for certain."""
"""Epilog of the help."""

_MAX_RANKS = 16


@dataclass(frozen=True, slots=True)
class PredictionOptions:
    """What was expected of a run."""

    profile: Path | None = option("Output of `penstock profile`, to compare and to find a better cut.", metavar="FILE")
    cuts: str | None = option(
        "With --profile, the cuts of the run: a,b,c; default: as recorded, or the profile's best."
    )
    plan: Path | None = option("Plan of the run, from `penstock plan`, to compare with.", metavar="FILE")

    def of(self, run: Run, folder: RunRead | None) -> Predicted | None:
        """What a profile, a plan or the run's own folder (if it has one) said of it; None if there is none of these."""
        from penstock.costs import read_profile
        from penstock.plan import read_plan
        from penstock.plan.explain import Predicted

        if self.cuts is not None and self.profile is None:
            raise ArgumentError(f"--cuts {self.cuts!r} requires --profile; pass both")
        about = None if folder is None else folder.about
        planned = None
        if self.plan is not None:
            planned = read_plan(self.plan)
            _check_plan(planned, run, folder, self.plan)
        if self.profile is None:
            if planned is not None:
                return Predicted(planned.stage_seconds, planned.pipeline_seconds)
            before = None if folder is None else folder.predicted()
            return None if before is None else Predicted(before.stage_seconds, before.step_seconds)
        cuts = None if self.cuts is None else tuple(self.cuts.split(","))
        known, rows, threads = (None, None, 0) if planned is None else (planned.cuts, planned.choice.rows, 0)
        if about is not None:
            known, rows, threads = tuple(about.cuts), about.microbatch_rows, about.threads
            if cuts not in (None, known):
                raise ArgumentError(
                    f"--cuts {self.cuts}: the run was cut at {','.join(known) or 'nothing'}; omit --cuts"
                )
        order, profile = run.typical.slowest.schedule, read_profile(self.profile)
        depth, cuts = order.placement.depth, known if cuts is None else cuts
        return Predicted.of_profile(profile, depth, cuts, rows, threads, splits=order.splits)


def _check_plan(plan: Plan, run: Run, folder: RunRead | None, file: Path) -> None:
    """Raises ArgumentError if a run did not follow this plan, as far as one can see."""
    order, choice = run.typical.slowest.schedule, plan.choice
    about, remedy = None if folder is None else folder.about, "Pass the plan of the run, or omit --plan"
    known = {order.name} & {*names()} if about is None else {about.schedule}
    ran = [order.ranks, order.placement.depth, order.microbatches]
    planned = [choice.ranks, choice.stages, choice.microbatches]
    cuts = None if about is None else [*about.cuts]
    if ran != planned or not known <= {choice.schedule} or cuts not in (None, [*plan.cuts]):
        raise ArgumentError(
            f"--plan {file}: the run, {_what(order.name, ran, cuts)}, did not follow it: "
            f"{_what(choice.schedule, planned, plan.cuts)}. {remedy}"
        )
    if plan.made_for is not None and about is not None and about.parameters:
        size = sum(prod(shape) for shape in plan.made_for.parameters.values())
        if size != about.parameters:
            raise ArgumentError(
                f"--plan {file}: it is for a model of {size:,} parameters, and the run's, {about.model}, has "
                f"{about.parameters:,}. {remedy}"
            )


def _what(schedule: str, sizes: Sequence[int], cuts: Sequence[str] | None) -> str:
    counts = ", ".join(map(counted, sizes, ("rank", "stage", "microbatch")))
    return f"{schedule} with {counts}" + ("" if cuts is None else f", cut at {', '.join(cuts) or 'nothing'}")


def explain(
    run: list[Path] = argument(
        "Directory that penstock.pipeline(run=...) recorded; or timelines as JSON, traces of Perfetto or "
        "torch's profiler, or columns (CSV): one file for all ranks, one per rank, or a directory of them; also .gz.",
        metavar="RUN...",
        default=REQUIRED,
    ),
    *,
    step: str | None = option("Number of the step, or all for a table; default: the one with the median time."),
    prediction: PredictionOptions,
    what_if: list[str] | None = option(
        "Change to simulate: schedule=zb-h1, cut=even, cut=2:0.1 (move a tenth of stage 2 to stage 1), "
        "stragglers=none, rank=2 (without its slowdown), microbatches=equal, actions=usual, link=0.5 (x its time), "
        "host=none. Combine changes with commas; repeatable.",
        metavar="CHANGE",
    ),
    pattern: str | None = option(
        "Action names of another tool, with groups op, stage and microbatch: "
        r"'(?P<op>fwd|bwd)-(?P<stage>\d+)-(?P<microbatch>\d+)'.",
        metavar="REGEX",
    ),
    as_json: bool = JSON,
) -> None:
    """Explain a measured step: where its time went, why, and what to change first.

    Actions of the trace are named by stage, op and microbatch (2F3), as in traces of
    penstock and torch, or described by columns.
    """
    from penstock.plan.explain import explain as explained
    from penstock.plan.explain import read_run, run_of

    folder, known = folder_of(run), run_of(read_run(run, pattern))
    if step is not None and step != "all" and not step.isdigit():
        raise ArgumentError(f"--step {step}: expected the number of a step, or all")
    number = int(step) if step and step != "all" else None
    found = explained(known, step=number, predicted=prediction.of(known, folder), what_ifs=what_if or ())
    if as_json:
        print_json(found.to_dict())
    else:
        (show_steps if step == "all" else show)(found, screen())


def folder_of(paths: Sequence[Path]) -> RunRead | None:
    """The folder of a run, if that is what was given."""
    from penstock.trace.runs import is_run, read_run

    runs = [path for path in paths if is_run(path)]
    if runs and len(paths) > 1:
        raise ArgumentError(f"{runs[0]} is the directory of a run: pass one at a time, or several to penstock compare")
    return read_run(runs[0]) if runs else None


def show(found: Explanation, console: Console) -> None:
    """Prints what the step is, what to change first, and where the time went."""
    _show_head(found, console)
    console.print("\n[bold]What to change first[/], and by how much that changes a step")
    console.print(_changes(found.advice) if found.advice else found.nothing)
    if found.what_ifs:
        console.print("\n[bold]What if[/]")
        console.print(_changes(found.what_ifs))
    slowest = f" (replica {found.step.slowest.number}, the slowest)" if len(found.step.replicas) > 1 else ""
    unit, name = (1.0, "s") if found.step.seconds >= 1 else (1e-3, "ms")
    console.print(f"\n[bold]Where the time went[/], in {name}{slowest}")
    _show_ranks(found, unit, console)
    if (bubble := found.bubble) is not None:
        text = f"The largest bubble: rank {bubble.rank} waits {duration(bubble.seconds)} before {bubble.before}"
        if bubble.culprit is not None:
            text += (
                f", mostly for {bubble.culprit} of rank {bubble.culprit_rank}, which takes "
                f"{duration(bubble.culprit_seconds)} vs. a balanced share of {duration(bubble.usual_seconds)}"
            )
        console.print(f"\n{text}.")


def show_steps(found: Explanation, console: Console) -> None:
    """Prints a line for each step: how long it took, which rank was slow, and which stage heavy."""
    steps = found.steps
    columns: dict[str, Iterable[object]] = {
        "step": [one.number for one in steps],
        "time": [duration(one.seconds) for one in steps],
        "vs\nmedian": [f"{one.of_median:.2f}" for one in steps],
        "slowest rank": [f"{one.slowest.who} ({one.slowest.times:.2f}x)" if one.slowest else "-" for one in steps],
        "slowest stage": [f"{one.stage} ({one.of_mean:.2f}x)" for one in steps],
        "longest\nmicrobatch": [f"{one.longest:.2f}x" for one in steps],
    }
    print_columns(console, columns)
    for text in _in_words(found):
        console.print(text)


def _in_words(found: Explanation) -> list[str]:
    """How the steps of the run differ; nothing if there is but one."""
    from penstock.plan.explain.stragglers import in_words

    if len(found.steps) < 2:
        return []
    times = [one.seconds for one in found.steps]
    return [f"{len(times)} steps take {duration(min(times))} to {duration(max(times))}", *in_words(found.steps)]


def _stragglers(found: Explanation) -> list[str]:
    """What uneven durations cost, and whose: of ranks, replicas and ops the two that cost most."""
    known = found.slowdowns
    if known is None or known.step < 1.01:
        return []
    replicas = enumerate(known.by_replica) if len(known.by_replica) > 1 else ()
    parts = []
    for what, slower in (("rank ", enumerate(known.by_rank)), ("replica ", replicas), ("", known.by_op.items())):
        worst: list[tuple[Any, float]] = sorted(slower, key=lambda pair: -pair[1])[:2]
        parts.append(", ".join(f"{what}{name} {times:.2f}x" for name, times in worst if times >= 1.01))
    alone = "; ".join(filter(None, parts))
    return [f"straggler slowdown {known.step:.2f}x (vs. typical op times){'; each alone: ' if alone else ''}{alone}"]


def _times_predicted(stage: StageTime) -> float:
    """Infinite where nothing was predicted to take any time."""
    if stage.predicted_seconds:
        return stage.seconds / stage.predicted_seconds
    return inf if stage.seconds else 1.0


def _show_head(found: Explanation, console: Console) -> None:
    step, run = found.step, found.run
    replicas = f", {counted(len(step.replicas), 'replica')}" if len(step.replicas) > 1 else ""
    origin = found.origin if found.origin == "measured" else f"{found.origin}, with its costs' unit for a second"
    console.print(Text(f"{title(step.slowest.schedule)}{replicas}, {origin}", "bold"))
    for note in run.notes:
        console.print(f"note: {note}", style="yellow")
    line = f"a step takes {duration(step.seconds)}"
    if len(run.steps) > 1:
        line += f" (step {step.number}, the median of {len(run.steps)})"
    outside = step.seconds - step.pipeline_seconds
    if outside > 0.001 * step.seconds:
        most = f" ({', '.join([*step.others][:2])} most)" if step.others else ""
        line += f"; {duration(outside)} outside the pipeline{most}"
    console.print(line)
    added = {reason.value: value / step.seconds for reason, value in found.where.added_seconds.items()}
    parts = [f"{name} {share:+.1%}" for name, share in added.items() if abs(share) >= 0.002]
    even = f"{duration(found.where.even_seconds)} if perfectly balanced"
    console.print(f"of the pipeline's {duration(step.pipeline_seconds)}: {', '.join([even, *parts])}")
    whole = f"; of whole steps: {found.whole_error:.2%}" if found.whole_error else ""
    console.print(
        f"replayed from its own durations: {found.replay_error:+.2%} of the step (worst {found.worst_error:.2%}{whole})"
    )
    for text in (*_stragglers(found), *_in_words(found)):
        console.print(text)
    if found.predicted_seconds is not None:
        times, wrong = max(((_times_predicted(one), one) for one in found.stages), key=lambda pair: abs(pair[0] - 1))
        much = f"{times:.2f}x the prediction" if isfinite(times) else f"{duration(wrong.seconds)}, predicted 0"
        console.print(
            f"predicted {duration(found.predicted_seconds)} for the pipeline; largest error at stage {wrong.stage}: "
            f"{much}"
        )


def _changes(changes: Sequence[Change]) -> Table:
    return pairs((one.claim, Text.assemble(one.text, (f" ({one.note})" if one.note else "", "dim"))) for one in changes)


def _show_ranks(found: Explanation, unit: float, console: Console) -> None:
    """A line for each rank; the busiest and the emptiest where there are many."""
    ranks, total = list(found.where.ranks), found.step.slowest.span_seconds
    if len(ranks) > _MAX_RANKS:
        busiest = sorted(ranks, key=lambda one: -one.compute_seconds)
        ranks = sorted([*busiest[: _MAX_RANKS // 2], *busiest[-_MAX_RANKS // 2 :]], key=lambda one: one.rank)
    stages = [[stage for stage in found.stages if stage.rank == one.rank] for one in ranks]
    expected = [sum(stage.predicted_seconds or 0.0 for stage in own) for own in stages]
    seconds = format_of([total / unit], most=3 if total < 100 * unit else 1)
    columns: dict[str, Iterable[object]] = {
        "rank": [one.rank for one in ranks],
        "stages": [", ".join(str(stage.stage) for stage in own) for own in stages],
        "compute": [seconds(one.compute_seconds / unit) for one in ranks],
    }
    for reason in found.where.ranks[0].idle_seconds:
        if any(one.idle_seconds[reason] >= 0.001 * total for one in found.where.ranks):
            idle = [seconds(one.idle_seconds[reason] / unit) for one in ranks]
            columns[reason.value.replace(" ", "\n", 1)] = idle
    columns["vs\nmean"] = [f"{sum(stage.of_mean for stage in own) / len(own):.2f}" for own in stages]
    columns["vs\nprediction"] = [
        f"{sum(stage.seconds for stage in own) / known:.2f}" if known else None
        for own, known in zip(stages, expected, strict=True)
    ]
    print_columns(console, columns, left=2)
