"""`penstock explain`: shows where the time of a measured step went, the causes, and what to change first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from penstock._base.errors import ArgumentError
from penstock._base.formatting import duration, pluralize
from penstock.cli._options import JSON, REQUIRED, argument, option, print_json, screen
from penstock.report.text import make_format, pairs, print_columns
from penstock.report.web.idle_table import explain_idle
from penstock.simulate.figures import title

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.plan.explain import Change, Explanation, Prediction, TraceSteps
    from penstock.trace.runs import RecordedRun

EPILOG = """\
The order of each rank and the time of each action are the trace's; the effect of a change is simulated. ± covers the \
replay's error on this trace and that of the change's assumptions; "at most" marks assumptions that were not measured. \
Changes are ordered by the time that they save for certain."""
"""Epilog of the help."""

_MAX_RANKS = 16


@dataclass(frozen=True, slots=True)
class PredictionOptions:
    """Options for the predicted times of a run."""

    profile: Path | None = option("Output of `penstock profile`, to compare and to find a better cut.", metavar="FILE")
    cuts: str | None = option(
        "With --profile, the cuts of the run: a,b,c; default: as recorded, or the profile's best."
    )
    plan: Path | None = option("Plan of the run, from `penstock plan`, to compare with.", metavar="FILE")

    def of(self, run: TraceSteps) -> Prediction | None:
        """Return the prediction of the profile or the plan; None if neither was passed."""
        from penstock.costs import read_profile
        from penstock.plan import read_plan
        from penstock.plan.explain import Prediction
        from penstock.plan.explain.predicted import check_followed

        if self.cuts is not None and self.profile is None:
            raise ArgumentError(f"--cuts {self.cuts!r} requires --profile; pass both")
        plan = None if self.plan is None else check_followed(read_plan(self.plan), run, f"--plan {self.plan}")
        if self.profile is None and plan is not None:
            return Prediction(plan.stage_seconds, plan.pipeline_seconds, unchecked="threads, rows or devices")
        if self.profile is None:
            return None
        cuts = None if self.cuts is None else tuple(self.cuts.split(","))
        run_cuts, rows, threads = (None, None, 0) if plan is None else (plan.cuts, plan.choice.rows, 0)
        if (about := run.about) is not None:
            run_cuts, rows, threads = tuple(about.cuts), about.microbatch_rows, about.threads
            if cuts not in (None, run_cuts):
                raise ArgumentError(
                    f"--cuts {self.cuts}: the run was cut at {','.join(run_cuts) or 'nothing'}; omit --cuts"
                )
        order, profile = run.typical.slowest.schedule, read_profile(self.profile)
        depth, cuts = order.placement.depth, run_cuts if cuts is None else cuts
        return Prediction.of_profile(profile, depth, cuts, rows, threads, splits=order.splits)


def explain(
    run: list[Path] = argument(
        "Directory that penstock.pipeline(run_dir=...) recorded; or timelines as JSON, traces of Perfetto or "
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
    from penstock.plan.explain import Prediction, load_trace, steps_of_trace
    from penstock.plan.explain import explain as explain_run

    folder, trace = read_run_folder(run), steps_of_trace(load_trace(run, pattern))
    if step is not None and step != "all" and not step.isdigit():
        raise ArgumentError(f"--step {step}: expected the number of a step, or all")
    number = int(step) if step and step != "all" else None
    predicted = prediction.of(trace) or (None if folder is None else Prediction.of_run(folder))
    explanation = explain_run(trace, step=number, predicted=predicted, what_ifs=what_if or ())
    if as_json:
        print_json(explanation.to_dict())
    else:
        (show_steps if step == "all" else show)(explanation, screen())


def read_run_folder(paths: Sequence[Path]) -> RecordedRun | None:
    """Read the directory of a run, if `paths` is one."""
    from penstock.trace.runs import is_run, read_run

    runs = [path for path in paths if is_run(path) or not (path.suffix or path.exists())]
    if runs and len(paths) > 1 and runs[0].exists():
        raise ArgumentError(f"{runs[0]} is the directory of a run: pass one at a time, or several to penstock compare")
    return read_run(runs[0]) if runs else None


def show(explanation: Explanation, console: Console) -> None:
    """Print the step, what to change first, and where the time went."""
    _show_head(explanation, console)
    console.print(Text.assemble(("\nWhat to change first", "bold"), ", and by how much that changes a step"))
    console.print(_changes(explanation.advice) if explanation.advice else explanation.nothing)
    if explanation.what_ifs:
        console.print("\nWhat if", style="bold")
        console.print(_changes(explanation.what_ifs))
    slowest = f" (replica {explanation.step.slowest.number}, the slowest)" if len(explanation.step.replicas) > 1 else ""
    unit, name = (1.0, "s") if explanation.step.seconds >= 1 else (1e-3, "ms")
    console.print(Text.assemble(("\nWhere the time went", "bold"), f", in {name}{slowest}"))
    _show_ranks(explanation, unit, console)
    if (bubble := explanation.bubble) is not None:
        text = f"The largest bubble: rank {bubble.rank} waits {duration(bubble.seconds)} before {bubble.before}"
        if bubble.blocked_by is not None:
            text += (
                f", mostly for {bubble.blocked_by} of rank {bubble.blocked_by_rank}, which takes "
                f"{duration(bubble.blocked_by_seconds)} vs. a balanced share of {duration(bubble.usual_seconds)}"
            )
        console.print(f"\n{text}.")


def show_steps(explanation: Explanation, console: Console) -> None:
    """Print one line per step: its time, its slowest rank and its slowest stage."""
    steps = explanation.steps
    columns: dict[str, Iterable[object]] = {
        "step": [step.number for step in steps],
        "time": [duration(step.seconds) for step in steps],
        "vs\nmedian": [f"{step.of_median:.2f}" for step in steps],
        "slowest rank": [f"{step.slowest.who} ({step.slowest.times:.2f}x)" if step.slowest else "-" for step in steps],
        "slowest stage": [f"{step.stage} ({step.of_mean:.2f}x)" for step in steps],
        "longest\nmicrobatch": [f"{step.longest:.2f}x" for step in steps],
    }
    print_columns(console, columns)
    for text in _step_variation(explanation):
        console.print(text)


def _step_variation(explanation: Explanation) -> list[str]:
    """Describe how the steps of the run differ; return nothing for a single step."""
    from penstock.plan.explain.stragglers import describe

    if len(explanation.steps) < 2:
        return []
    times = [step.seconds for step in explanation.steps]
    return [f"{len(times)} steps take {duration(min(times))} to {duration(max(times))}", *describe(explanation.steps)]


def _show_head(explanation: Explanation, console: Console) -> None:
    step, run = explanation.step, explanation.run
    replicas = f", {pluralize(len(step.replicas), 'replica')}" if len(step.replicas) > 1 else ""
    origin = explanation.origin
    if origin != "measured":
        origin += ", with its costs' unit for a second"
    console.print(f"{title(step.slowest.schedule)}{replicas}, {origin}", style="bold")
    for note in run.notes:
        console.print(f"note: {note}", style="yellow")
    line = f"a step takes {duration(step.seconds)}"
    if len(run.steps) > 1:
        line += f" (step {step.number}, the median of {len(run.steps)})"
    outside = step.seconds - step.pipeline_seconds
    if outside > 0.001 * step.seconds:
        causes = f" (mostly {', '.join([*step.others][:2])})" if step.others else ""
        line += f"; {duration(outside)} outside the pipeline{causes}"
    console.print(line)
    added = {reason.value: value / step.seconds for reason, value in explanation.where.added_seconds.items()}
    if added["unexplained"] < 0:
        added["the replay is too slow"] = added.pop("unexplained")
    parts = [f"{name} {share:+.1%}" for name, share in added.items() if abs(share) >= 0.002]
    balanced = f"{duration(explanation.where.even_seconds)} if perfectly balanced"
    console.print(f"of the pipeline's {duration(step.pipeline_seconds)}: {', '.join([balanced, *parts])}")
    whole_steps = f"; of whole steps: {explanation.whole_error:.2%}" if explanation.whole_error else ""
    console.print(
        f"replay error: {explanation.replay_error:+.2%} of the step (worst {explanation.worst_error:.2%}{whole_steps})"
    )
    slowdown = explanation.slowdowns.describe() if explanation.slowdowns else ""
    for text in filter(None, (slowdown, *_step_variation(explanation))):
        console.print(text)
    if explanation.predicted_seconds is not None:
        worst = max(explanation.stages, key=lambda stage: abs(stage.of_predicted - 1))
        error = f"{worst.of_predicted:.2f}x the prediction"
        if not isfinite(worst.of_predicted):
            error = f"{duration(worst.seconds)}, predicted 0"
        predicted = f"predicted {duration(explanation.predicted_seconds)} for the pipeline"
        console.print(f"{predicted}; largest error at stage {worst.stage}: {error}")


def _changes(changes: Sequence[Change]) -> Table:
    return pairs(
        (change.claim, Text.assemble(change.text, (f" ({change.note})" if change.note else "", "dim")))
        for change in changes
    )


def _show_ranks(explanation: Explanation, unit: float, console: Console) -> None:
    """Print one line per rank; of many, the most and the least busy."""
    ranks, total = list(explanation.where.ranks), explanation.step.slowest.span_seconds
    if len(ranks) > _MAX_RANKS:
        busiest = sorted(ranks, key=lambda time: -time.compute_seconds)
        ranks = sorted([*busiest[: _MAX_RANKS // 2], *busiest[-_MAX_RANKS // 2 :]], key=lambda time: time.rank)
    by_rank = [[stage for stage in explanation.stages if stage.rank == time.rank] for time in ranks]
    predicted = [sum(stage.predicted_seconds or 0.0 for stage in stages) for stages in by_rank]
    seconds = make_format([total / unit], max_decimals=3 if total < 100 * unit else 1)
    columns: dict[str, Iterable[object]] = {
        "rank": [time.rank for time in ranks],
        "stages": [", ".join(str(stage.stage) for stage in stages) for stages in by_rank],
        "compute": [seconds(time.compute_seconds / unit) for time in ranks],
    }
    for cause, idle in explain_idle(explanation).columns[1:]:
        columns[cause.replace(" ", "\n", 1)] = [seconds(idle[time.rank] / unit) for time in ranks]
    columns["vs\nmean"] = [f"{sum(stage.of_mean for stage in stages) / len(stages):.2f}" for stages in by_rank]
    columns["vs\nprediction"] = [
        f"{sum(stage.seconds for stage in stages) / expected:.2f}" if expected else None
        for stages, expected in zip(by_rank, predicted, strict=True)
    ]
    print_columns(console, columns, left=2)
