"""`penstock verify`: compares pipelined training steps of a model with the unsplit model, value by value."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.text import Text

from penstock._base.errors import (
    ArgumentError,
    PartitionError,
    PenstockError,
    RankFailedError,
    VerificationError,
    check_counts,
    format_warning,
)
from penstock._base.formatting import pluralize
from penstock.cli._options import CUT, JSON, USUAL_OR_BATCH_SIZE, option, output_option, print_json, screen
from penstock.cli._schedule_options import ALL, check_size, parse_schedules
from penstock.cli._target import TARGET, SplitOptions, load_target
from penstock.distributed.launch.processes import launch
from penstock.report.text import columns_table
from penstock.schedule import MICROBATCHES, ScheduleSpec, generate, schedule_spec
from penstock.schedule.generators import ScheduleParams

if TYPE_CHECKING:
    from penstock.distributed.launch.target import Target
    from penstock.runtime.batch.cut import Microbatch
    from penstock.runtime.execute.transport_choice import TransportChoice
    from penstock.runtime.transport.protocol import TransportFactory

ReductionName = Literal["mean", "sum"]
"""Reduction of the loss over the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case(SplitOptions):
    """Options for the pipeline to verify."""

    target: str = TARGET
    ranks: int = option("Number of ranks.", "--ranks", "-n", default=2)
    microbatches: int | None = option(f"{CUT} (with replicas, each one's part of it); {USUAL_OR_BATCH_SIZE}.")
    reduction: ReductionName | None = option("Reduction of the loss over the batch; default: mean.")
    replicas: int = option("Data-parallel replicas, each on its part of the batch; one process per rank.", default=1)
    transport: str | None = option(
        "local: all ranks in one process (the default without replicas). auto (the default with them), distributed, "
        "staged, or a factory (FILE:FUNCTION): one process per rank, with this transport of pipeline().",
        metavar="NAME",
    )
    exact: bool | None = option("Require bitwise equality; default: wherever it is promised.", "--exact/--no-exact")
    full_batch: bool = option(
        "Also compare with the full batch, and explain a difference.", "--full-batch/--no-full-batch", default=True
    )


def verify(
    case: Case,
    as_json: bool = JSON,
    show_all: bool = output_option("Print a row for every value.", "--all", default=False),
) -> None:
    """Verify that a pipeline computes what the unsplit model does: outputs, loss, gradients and buffers.

    TARGET is a function that returns (model, args, target, loss): args is the
    tuple of the model's inputs, or a pair of that and a dict of keyword inputs;
    loss(output, target) returns a scalar; target and loss may be None if the
    model computes its own loss. If the batch is not in the first dimension, add
    a dict with batch_dims, split_fn or merge_fn at the end; one with reduction if the
    batch's loss is another function of the microbatches'. TARGET is called twice,
    with all generators at seed 0, to get two models that share nothing.

    With --schedule all, every schedule that takes these ranks and microbatches is
    verified in one process, on one line each; with several names (1f1b,zb-h1), each
    of these. The unsplit model runs only once.

    The exit status is 0 if everything is equal, 1 if something differs or the
    result is inconclusive (the loss is NaN or infinite), and 2 on any other error.
    """
    _choice(case.transport)  # raises before any process starts
    check_counts(replicas=case.replicas)
    in_one_process = case.transport == "local" or (case.transport is None and case.replicas == 1)
    if in_one_process and case.replicas > 1:
        raise ArgumentError(f"--replicas {case.replicas}: replicas need one process per rank; omit --transport local")
    if case.schedule == ALL or "," in case.schedule:
        if not in_one_process:
            raise ArgumentError(
                f"--schedule {case.schedule}: one process drives all ranks; omit --transport and --replicas"
            )
        _verify_each(case, as_json=as_json)
        return
    _check_numbers(case, schedule_spec(case.schedule))  # raises before anything is loaded
    (report,) = run_case(case, [case.schedule]) if in_one_process else [run_distributed(case)]
    if as_json:
        print_json(report)
    else:
        show(report, screen(), show_all=show_all)
    if not report["ok"]:
        raise VerificationError(report["summary"])


def _verify_each(case: Case, *, as_json: bool) -> None:
    """Verify the named schedules, or of all those that take these numbers."""
    out, names = sys.stdout, list[str]()  # while the model is loaded, output goes to stderr
    for spec in parse_schedules(case.schedule):
        try:
            _check_numbers(case, spec)
            names.append(spec.name)
        except PenstockError as error:
            if case.schedule != ALL:
                raise
            print(f"{spec.name}: not verified: {error}", file=sys.stderr)
    reports = list[dict[str, Any]]()
    for report in run_case(case, names):
        reports.append(report)
        if not as_json:
            print(f"{report['schedule']:17}{report['summary']}", file=out, flush=True)
    if not reports:
        raise ArgumentError(
            f"--schedule {case.schedule}: no schedule takes this model on these ranks; see the lines above"
        )
    if as_json:
        print_json(reports)
    if failed := [report["schedule"] for report in reports if not report["ok"]]:
        raise VerificationError(
            f"{len(failed)} of {pluralize(len(reports), 'schedule')} did not pass: {', '.join(failed)}"
        )
    missing = {*names} - {report["schedule"] for report in reports}
    if missing and case.schedule != ALL:
        raise ArgumentError(
            f"--schedule {case.schedule}: not verified: {', '.join(sorted(missing))}; see the lines above"
        )


def _check_numbers(case: Case, spec: ScheduleSpec) -> None:
    """Raise ArgumentError if the schedule does not work with the case's numbers, or has too many actions."""
    count = MICROBATCHES if case.microbatches is None else case.microbatches
    chunks = spec.chunks if case.stages_per_rank is None else case.stages_per_rank
    check_size([(spec, ScheduleParams(case.ranks, count, chunks))])
    generate(spec.name, case.ranks, count, case.stages_per_rank)


def run_case(case: Case, schedules: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the report of each schedule, as `VerificationReport.to_dict` returns it. If there are several, skip those
    that do not work with these numbers and this model. Until the last one, output goes to stderr."""
    from penstock.runtime.batch.cut import Microbatch
    from penstock.verification.reference_copy import with_reference
    from penstock.verification.verify import Verification

    refusal, has_passed = "", False
    with load_target(case.target, "the model or the loss") as target:
        calls = iter([lambda: target, target.again])

        def make() -> tuple[Any, Any]:
            called = next(calls)()
            return called.model, called.loss

        mesh, part = None, Microbatch(target.args, target.kwargs, target.target)
        if case.replicas > 1:
            from torch.distributed.device_mesh import init_device_mesh

            from penstock.partition.given_model import as_module

            device = next((p.device.type for p in as_module(target.model).parameters()), "cpu")
            mesh = init_device_mesh(device, (case.replicas, case.ranks), mesh_dim_names=("dp", "pp"))
            part = _part(target, case.replicas, mesh.get_local_rank("dp"))
        options: dict[str, Any] = {**case.arguments(), "ranks": case.ranks, "microbatches": case.microbatches}
        options |= {"mesh": mesh, "transport": _choice(case.transport), **target.cutting}
        if case.reduction is not None and target.reduction is not None:
            raise ArgumentError(f"--reduction {case.reduction}: {case.target} sets a reduction; pass only one")
        reduction = target.reduction or case.reduction or "mean"
        verification = Verification(*with_reference(make, None), part, options, reduction, case.exact, case.full_batch)
        for number, schedule in enumerate(schedules, 1):
            if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
                print(f"verifying {schedule} ({number} of {len(schedules)})", file=sys.stderr, flush=True)
            try:
                report = verification.report(schedule).to_dict()
            except PartitionError as error:
                if len(schedules) == 1 or (not has_passed and str(error) == refusal):  # whatever the schedule
                    raise
                refusal = str(error)
                print(f"{schedule}: not verified: {refusal}", file=sys.stderr)
            else:
                has_passed = True
                yield report


def _choice(name: str | None) -> TransportChoice:
    """Return `transport=` of `penstock.verify`. Raise ArgumentError if there is no such choice."""
    if name in (None, "local"):
        return "auto"
    from penstock.distributed.launch.target import load_function
    from penstock.runtime.execute.transport_choice import TRANSPORTS

    if name in TRANSPORTS:
        return name
    if ":" not in name:
        raise ArgumentError(
            f"--transport {name}: expected local, {', '.join(TRANSPORTS)}, or a factory as module:function or "
            "file.py:function"
        )
    factory: TransportFactory = load_function(name, "--transport")
    return factory


def _part(target: Target, replicas: int, replica: int) -> Microbatch:
    """Return a replica's part of the batch, cut as a pipeline cuts its batch."""
    from penstock._base.pytree import unflatten
    from penstock.runtime.batch.cut import Batch, Cutting, Microbatch

    cutting = Cutting.of(target.cutting.get("batch_dims"), target.cutting.get("split_fn")).into(replicas)
    batch = cutting.divide(Batch(target.args, target.kwargs, target.target), "batch")
    cut = cutting.cut(batch, "batch")
    if len(cut.sizes) != replicas or len(set(cut.sizes)) > 1:
        raise ArgumentError(
            f"--replicas {replicas}: the batch of {sum(cut.sizes)} samples has no {replicas} equal parts; change the "
            "batch or the number of replicas"
        )
    piece = cut.pieces[replica]
    args, kwargs = unflatten(piece.leaves, piece.structure)
    return Microbatch(args, kwargs, cutting.targets(batch, cut.sizes)[replica])


def run_distributed(case: Case) -> dict[str, Any]:
    """Run a case with one process per rank. Each writes its report or its error to a file in a directory."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as name:
        folder = Path(name)
        (folder / "case.json").write_text(json.dumps(asdict(case)), encoding="utf-8")
        threads = None if "OMP_NUM_THREADS" in os.environ else 1  # each rank uses as many as the one-device reference
        with contextlib.redirect_stderr(io.StringIO()) as end:  # how the first rank ended, which its error explains
            status = launch(["-m", "penstock.cli.verify", name], case.ranks * case.replicas, threads)
        results = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("rank-*.json"))]
    failed = (result for result in results if "error" in result)
    errors = sorted(failed, key=lambda result: (result["follows"], result["monotonic_ns"]))
    if errors:
        raise ArgumentError(errors[0]["error"])
    print(end.getvalue(), end="", file=sys.stderr)
    if status or len(results) < case.ranks * case.replicas:
        raise RankFailedError(
            f"the ranks ended with exit status {status}, and {len(results)} of {case.ranks * case.replicas} compared "
            "anything; see the lines above, and remove whatever ends a process in TARGET"
        )
    report: dict[str, Any] = results[0]["report"]
    return report


def rank_main(folder: Path) -> int:
    """Run one rank of `run_distributed` and return its exit status."""
    case = Case(**json.loads((folder / "case.json").read_text(encoding="utf-8")))
    warnings.formatwarning = format_warning
    try:
        (report,) = run_case(case, [case.schedule])
        result: dict[str, Any] = {"report": report}
    except PenstockError as error:
        if os.environ.get("PENSTOCK_DEBUG") == "1":
            traceback.print_exc()
        follows = isinstance(error, RankFailedError)  # another rank's error is the cause
        result = {"error": str(error), "follows": follows, "monotonic_ns": time.monotonic_ns()}
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(result), encoding="utf-8")
    return 2 if "error" in result else 0


# -- the table --------------------------------------------------------------------------------------------------------

LONG_TABLE = 24
"""Number of rows above which those with the same verdict are folded by module."""

_STYLES = {"equal": "green", "close": "yellow"}
_BLOCK_KINDS = ("gradient", "buffer")
"""Values named after their module; others are named after a phase ("output 3 in evaluation")."""


def show(report: Mapping[str, Any], console: Console, *, show_all: bool = False) -> None:
    """Print the compared values, one per row, and the summary."""
    rows = report["rows"]
    lines = list(_fold(rows)) if len(rows) > LONG_TABLE and not show_all else rows
    verdicts = [line["verdict"] for line in lines]
    columns = {
        "value": [line["kind"] for line in lines],
        "name": [line["name"] for line in lines],
        "stage": [", ".join(map(str, line["stages"])) for line in lines],
        "verdict": [Text(verdict, _STYLES.get(verdict, "bold red")) for verdict in verdicts],
        "max|difference|": [f"{line['max_difference']:.3g}" for line in lines],
        "step": [line.get("step") or None for line in lines],
    }
    table = columns_table(columns, left=4)
    for column in table.columns:
        column.no_wrap, column.overflow = column.header != "name", "fold"
    console.print(table)
    counts = {"rank": report["ranks"], "stage": report["stages"], "microbatch": report["microbatches"]}
    if report["replicas"] > 1:
        counts = {"replica": report["replicas"]} | counts
    sizes = ", ".join(pluralize(count, noun) for noun, count in counts.items())
    notes = "\n".join(f"note: {note}" for note in report["notes"])
    full_batch = report["full_batch"]
    explained = f"full batch: {full_batch['text']}" if full_batch and full_batch["verdict"] == "explained" else ""
    for text in filter(None, (notes, explained, f"{report['schedule']}, {sizes}: {report['summary']}")):
        console.print(f"\n{text}", soft_wrap=True)


def _fold(rows: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Merge neighboring rows of a block that are all equal, close for the same reason, or undefined."""

    def key(row: Mapping[str, Any]) -> Any:
        group = _block(row["name"]) if row["kind"] in _BLOCK_KINDS else row["name"].partition(" in ")[2]
        foldable = row["verdict"] in ("equal", "undefined") or (row["verdict"] == "close" and row["tolerance_reason"])
        same = (row["kind"], group, *row["stages"], row["verdict"], row["tolerance_reason"], row.get("step", 0))
        return same if foldable else row

    for _, group in groupby(rows, key):
        first, *folded = group
        if folded:
            name, _, phase = first["name"].partition(" in ")
            count, of = len(folded) + 1, f" in {phase}" if phase else ""
            name = f"{_block(name)}.* ({count})" if first["kind"] in _BLOCK_KINDS else f"all {count}{of}"
            largest = max(row["max_difference"] for row in (first, *folded))
            first = {**first, "name": name, "max_difference": largest}
        yield first


def _block(name: str) -> str:
    """Return the repeated block of a parameter (`layers.3` for `layers.3.norm.weight`), or else its module."""
    parts = name.split(".")
    end = next((i + 1 for i, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return ".".join(parts[:end])


if __name__ == "__main__":
    sys.exit(rank_main(Path(sys.argv[1])))
