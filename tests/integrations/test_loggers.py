"""What a step's figures look like to those who show them: what each real package wrote is read back."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

import penstock
from penstock._base.errors import ArgumentError
from penstock.integrations.loggers import (
    CsvLog,
    JsonLinesLog,
    Log,
    MlflowLog,
    StepFigures,
    StepLogger,
    StepWriter,
    TensorBoardLog,
    WandbLog,
)
from penstock.integrations.opentelemetry import export_spans
from penstock.schedule import Op, generate
from penstock.schedule.timeline import Timeline
from penstock.simulate import LinkCost, StageCost, simulate
from scaffolding import small
from scaffolding.ranks import Ranks

Curves = dict[str, list[tuple[int, float]]]


def from_csv(folder: Path) -> Curves:
    with (folder / "steps.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    names = [name for name in lines[0] if name != "step"]
    return {name: [(int(line["step"]), float(line[name])) for line in lines if line[name]] for name in names}


def from_json_lines(folder: Path) -> Curves:
    found: Curves = {}
    for line in map(json.loads, (folder / "steps.jsonl").read_text().splitlines()):
        step = line.pop("step")
        for name, figure in line.items():
            found.setdefault(name, []).append((step, figure))
    return found


def from_tensorboard(folder: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.fixture
def mlflow_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    pytest.importorskip("mlflow", reason="pip install '.[test]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # its own word that files still serve
    from mlflow import MlflowClient

    client = MlflowClient(f"file:{tmp_path}/mlruns")
    return client.create_run(client.create_experiment("gpt")), client


@pytest.fixture
def kinds(tmp_path: Path, mlflow_run: tuple[Any, Any]) -> dict[str, tuple[Log, Callable[[], Curves]]]:
    run, client = mlflow_run
    kept: Curves = {}

    def keep(figures: dict[str, float], step: int) -> None:
        """As a run of Weights & Biases; a real one is long."""
        for name, figure in figures.items():
            kept.setdefault(name, []).append((step, figure))

    def from_mlflow() -> Curves:
        names = client.get_run(run.info.run_id).data.metrics
        return {
            name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)] for name in names
        }

    return {
        "csv": (CsvLog(tmp_path / "steps.csv", parts=("mean",)), lambda: from_csv(tmp_path)),
        "json lines": (JsonLinesLog(tmp_path / "steps.jsonl"), lambda: from_json_lines(tmp_path)),
        "tensorboard": (TensorBoardLog(tmp_path / "events"), lambda: from_tensorboard(tmp_path / "events")),
        "mlflow": (MlflowLog(run, client), from_mlflow),
        "weights and biases": (WandbLog(SimpleNamespace(log=keep)), lambda: kept),
    }


def loss_and_mean(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return (output - target).square().mean(), {"mean": output.detach().mean()}


def test_every_figure_is_written_where_it_is_known(kinds: dict[str, tuple[Log, Callable[[], Curves]]]) -> None:
    x, y = small.batch()
    clock = map(float, count(start=0, step=2))
    losses, means, norms = [], [], []
    logs = [log for log, _ in kinds.values()]
    with (
        penstock.pipeline(small.mlp(), (x,), ranks=2, microbatches=4, loss_fn=loss_and_mean) as pipe,
        StepLogger(*logs, clock=lambda: next(clock)) as logger,
    ):
        for step in range(3):
            result = pipe.step(x, target=y, timeline=step > 0)
            norms.append(float(pipe.clip_grad_norm_(1.0)))
            losses.append(float(result.loss))
            means.append(float(result.parts["mean"]))
            if step == 1:  # as if each rank had a process of its own
                assert result.timeline is not None
                result = replace(result, timeline=replace(result.timeline, serialized=False))
                bubble = result.timeline.bubble_rate
            logger.add(pipe.step_count, result, rows=len(x), tokens=50, gradient_norm=norms[-1])
    for kind, (_, read) in kinds.items():
        shown = read()
        assert shown.pop("loss") == list(zip((1, 2, 3), map(pytest.approx, losses), strict=True)), kind
        assert shown.pop("part/mean") == list(zip((1, 2, 3), map(pytest.approx, means), strict=True))
        assert shown.pop("gradient_norm") == list(zip((1, 2, 3), map(pytest.approx, norms), strict=True))
        assert shown.pop("bubble") == [(2, pytest.approx(bubble))]
        assert shown.pop("time/step") == [(2, 2.0), (3, 2.0)]
        assert shown.pop("rate/rows") == [(2, len(x) / 2), (3, len(x) / 2)]
        assert shown.pop("rate/tokens") == [(2, 25.0), (3, 25.0)]
        assert shown == {}


@pytest.mark.long  # above, with what stands in for its run
def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="pip install '.[test]'")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SILENT", "true")
    quiet = wandb.Settings(init_timeout=240, x_disable_stats=True, x_disable_meta=True, console="off")
    try:
        run = wandb.init(mode="offline", dir=str(tmp_path), project="gpt", settings=quiet)
        log = WandbLog(run)
        for step, loss in ((1, 31.40625), (2, 17.15625)):
            log.write(StepFigures(step, loss, gradient_norm=0.125))
        log.close()
        run.finish()
    finally:
        wandb.teardown()  # ends its process, which has written everything then
    (kept,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    records = kept.read_bytes()
    assert [
        text for text in (b"loss", b"31.40625", b"17.15625", b"gradient_norm", b"0.125") if text not in records
    ] == []


def test_files_are_continued(tmp_path: Path) -> None:
    for step in (1, 2):
        for log in (CsvLog(tmp_path / "steps.csv"), JsonLinesLog(tmp_path / "steps.jsonl")):
            log.write(StepFigures(step, float(step), bubble=0.25))
            log.close()
    for read in (from_csv, from_json_lines):
        found = read(tmp_path)
        assert (found["loss"], found["bubble"]) == ([(1, 1.0), (2, 2.0)], [(1, 0.25), (2, 0.25)])
    with pytest.raises(
        ArgumentError, match=r"steps\.csv begins with 'step,loss,.*; expected step,.*,part/router: pass"
    ):
        CsvLog(tmp_path / "steps.csv", parts=("router",))
    log = CsvLog(tmp_path / "steps.csv")
    with pytest.raises(ArgumentError, match=r"parts without a column: router; pass CsvLog\(parts=\('router',\)\)"):
        log.write(StepFigures(3, 1.0, parts={"router": 0.5}))
    log.close()


def test_a_line_that_a_crash_cut_in_half_is_ended_and_a_loss_that_is_no_number_is_text(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "lo')
    log = JsonLinesLog(tmp_path / "steps.jsonl")
    log.write(StepFigures(3, float("nan")))
    log.close()
    assert (tmp_path / "steps.jsonl").read_text().splitlines()[1:] == ['{"step": 2, "lo', '{"step": 3, "loss": "nan"}']


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'penstock\[tensorboard\]'"):
        StepWriter(tmp_path)


# -- spans of a step, as the SDK's exporter gets them -----------------------------------------------------------------


def timed_step(rank: int) -> Timeline | None:
    """The second step: in the first, ranks agree on shapes."""
    x, y = small.batch()
    with penstock.pipeline(small.mlp(), (x,), microbatches=4, loss_fn=mse_loss) as pipe:
        pipe.step(x, target=y)
        return pipe.step(x, target=y, timeline=True).timeline


def exported(timeline: Timeline, **more: Any) -> list[Any]:
    pytest.importorskip("opentelemetry.sdk", reason="pip install '.[test]'")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    export_spans(timeline, tracer=provider.get_tracer("test"), **more)
    return list(exporter.get_finished_spans())


def check_links(timeline: Timeline, spans: list[Any]) -> None:
    """One span for each action, below its rank's, and each receive's one link leads to its send."""
    (root,) = [one for one in spans if one.parent is None]
    ranks = {one.context.span_id: one for one in spans if one.parent and one.parent.span_id == root.context.span_id}
    assert [one.name for one in ranks.values()] == [f"rank {rank}" for rank in range(timeline.ranks)]
    actions = {one.context.span_id: one for one in spans if one is not root and one.context.span_id not in ranks}
    assert sorted(one.name for one in actions.values()) == sorted(str(span.action) for span in timeline)
    for one in actions.values():
        assert ranks[one.parent.span_id].attributes["penstock.rank"] == one.attributes["penstock.rank"]
        assert one.context.trace_id == root.context.trace_id
        assert root.start_time <= one.start_time <= one.end_time <= root.end_time
    links = {one.name: [actions[link.context.span_id] for link in one.links] for one in actions.values()}
    received = {span.action: span.rank for span in timeline if span.action.op.is_receive}
    assert {name for name, sent in links.items() if sent} == {str(action) for action in received}
    for action, rank in received.items():
        (sent,) = links[str(action)]
        assert sent.name == str(action.other_end)
        assert sent.attributes["penstock.rank"] != rank


def test_receives_of_a_step_of_processes_link_to_sends(ranks2: Ranks) -> None:
    timeline, *_ = ranks2.run(timed_step)
    assert any(span.action.op is Op.RECV_B for span in timeline)
    spans = exported(timeline, step=7, end_ns=10**18)
    check_links(timeline, spans)
    (root,) = [one for one in spans if one.parent is None]
    assert (root.name, root.attributes["penstock.step"], root.end_time) == ("step", 7, 10**18)
    assert root.end_time - root.start_time == round(timeline.makespan_seconds * 1e9)


def test_ranks_that_took_turns_are_refused() -> None:
    timeline = replace(simulate(generate("1f1b", 2, 2), StageCost(1.0, 1.0, 1.0), LinkCost(0.0)), serialized=True)
    with pytest.raises(ArgumentError, match="ranks took turns in one process"):
        exported(timeline)
