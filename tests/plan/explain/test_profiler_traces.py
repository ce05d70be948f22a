"""Traces as real jobs leave them: torch's profiler with several streams, a folder with a file per rank, B and E events,
steps that are cut off. They are explained as the timeline that they show, or refused in one line with the reason.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from planted import even, timeline, twice

from penstock._base.errors import ArgumentError
from penstock.plan.explain import Explanation, explain, load_trace
from penstock.schedule.timeline import Timeline

RANKS, BETWEEN = 3, 100.0
SHOWN = timeline(even, twice, ranks=RANKS, microbatches=4)


def profiled(shown: Timeline, rank: int, steps: int = 2, cut_off: int = 0, *, marked: bool = True) -> dict[str, Any]:
    """What torch's profiler writes of a rank: steps, ranges on the host and on the device's stream, and kernels.

    Args:
        cut_off: how many of the last step's actions are missing, as if the trace had ended.
        marked: whether actions have ranges, or only the kernels are there.
    """
    events: list[dict[str, Any]] = []

    def add(name: str, cat: str, thread: int, start: float, end: float, process: int = 4711) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": process, "tid": thread}
        events.append(event | {"ts": 1e6 * start, "dur": 1e6 * (end - start)})

    for step in range(steps):
        begin = BETWEEN * step
        add(f"ProfilerStep#{step}", "user_annotation", 4711, begin, begin + BETWEEN - 1)
        spans = [span for span in shown if span.rank == rank and span.action.op.is_compute]
        for span in spans[: len(spans) - cut_off if step == steps - 1 else None]:
            start, end, name = begin + span.start_seconds, begin + span.end_seconds, f"PP:{span.action}"
            if marked:
                add(name, "user_annotation", 4711, start - 0.3, start - 0.1)  # the host only gives the work
                add(name, "gpu_user_annotation", 7, start, end, process=rank)
            add("aten::linear", "cpu_op", 4711, start - 0.3, start - 0.2)
            add("cudaLaunchKernel", "cuda_runtime", 4711, start - 0.25, start - 0.2)
            add("sm90_xmma_gemm_bf16bf16", "kernel", 7, start, end, process=rank)
            add("ncclDevKernel_SendRecv(ncclDevComm*)", "kernel", 20, end, end + 0.05, process=rank)
            add("nccl:send 0->1", "user_annotation", 4711, end, end + 0.05)
    return {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": rank}, "traceEvents": events}


def folder(path: Path, **of_last: Any) -> Path:
    """A packed file per rank, as Holistic Trace Analysis takes them."""
    for rank in range(RANKS):
        given = profiled(SHOWN, rank, **(of_last if rank == RANKS - 1 else {}))
        (path / f"job_rank-{rank}.1700000000.pt.trace.json.gz").write_bytes(gzip.compress(json.dumps(given).encode()))
    return path


def begins_and_ends(shown: Timeline) -> Iterator[dict[str, Any]]:
    """The same as pairs of events, a process per rank, each action around what it calls."""
    for span in shown:
        if span.action.op.is_compute:
            where = {"pid": span.rank, "tid": 1}
            middle = (span.start_seconds + span.end_seconds) / 2
            yield {"ph": "B", "name": str(span.action), "ts": 1e6 * span.start_seconds, **where}
            yield {"ph": "B", "name": "matmul", "ts": 1e6 * middle, **where}
            yield {"ph": "E", "ts": 1e6 * middle + 1, **where}
            yield {"ph": "E", "ts": 1e6 * span.end_seconds, **where}


def check(found: Explanation) -> None:
    """That it is the timeline."""
    assert found.step.slowest.schedule.name == "1f1b"
    assert found.step.pipeline_seconds == pytest.approx(SHOWN.makespan_seconds)
    assert [one.seconds for one in found.stages] == pytest.approx([3.0] * RANKS)


def test_a_folder_with_a_file_for_each_rank(tmp_path: Path) -> None:
    found = explain(load_trace([folder(tmp_path)]))
    check(found)
    assert len(found.run.steps) == 2


def test_a_step_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    found = explain(load_trace([folder(tmp_path, cut_off=2)]))
    check(found)
    assert len(found.run.steps) == 1
    assert any(note.startswith("left out 1 pipeline, the first in step 1") for note in found.run.notes)


@pytest.mark.parametrize("indent", [None, 2])
def test_begins_and_ends_are_actions(tmp_path: Path, indent: int | None) -> None:
    events = [event | {"cat": "mine"} for event in begins_and_ends(SHOWN)]
    (tmp_path / "trace.json").write_text(json.dumps(events, indent=indent))
    check(explain(load_trace([tmp_path / "trace.json"])))


def test_receives_within_a_range_are_waiting(tmp_path: Path) -> None:
    """Torch's GPipe waits within its ranges, and gloo's receive lasts longer than what it waits for."""
    ranges = {
        0: [("Forward 0", 0, 1), ("Backward 0", 6, 12), ("gloo:recv", 6, 11)],
        1: [("Forward 0", 0, 5), ("gloo:recv", 0, 4), ("Backward 0", 5, 6), ("gloo:recv", 5.5, 13)],
    }
    for rank, given in ranges.items():
        events = [{"ph": "X", "pid": 1, "name": name, "ts": s * 1e6, "dur": (e - s) * 1e6} for name, s, e in given]
        told = {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(told))
    assert [one.seconds for one in explain(load_trace([tmp_path])).stages] == [2.0, 2.0]


def test_the_traces_of_some_ranks_are_said_to_be_that(tmp_path: Path) -> None:
    for rank in range(2):
        told = {"distributedInfo": {"rank": rank, "world_size": 3}, "traceEvents": profiled(SHOWN, rank)["traceEvents"]}
        (tmp_path / f"{rank}.json").write_text(json.dumps(told))
    assert any(note.startswith("the traces are of ranks 0, 1 of 3; pass") for note in load_trace([tmp_path]).notes)
    with pytest.raises(ArgumentError, match=r"0\.json: the trace of rank 0 of 3 alone; pass those of the others"):
        load_trace([tmp_path / "0.json"])


def test_the_same_trace_twice_is_refused(tmp_path: Path) -> None:
    file = min(folder(tmp_path).iterdir())
    (tmp_path / "again.json.gz").write_bytes(file.read_bytes())
    for given in ([tmp_path], [file, file]):
        with pytest.raises(ArgumentError, match=r"is the same trace as .*; pass each once"):
            load_trace(given)


def test_what_shows_no_actions_is_refused_in_a_line(tmp_path: Path) -> None:
    for rank in range(RANKS):
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(profiled(SHOWN, rank, marked=False)))
    with pytest.raises(ArgumentError, match="no event names an action of a pipeline") as refused:
        explain(load_trace([tmp_path]))
    assert "\n" not in str(refused.value)


def test_a_rank_whose_file_is_missing_is_named(tmp_path: Path) -> None:
    folder(tmp_path)
    next(tmp_path.glob("*rank-1*")).unlink()
    with pytest.raises(ArgumentError, match="no rank has stage 1, and there are stages up to 2; pass the trace"):
        explain(load_trace([tmp_path]))


@pytest.mark.parametrize(("packed", "older"), [(False, False), (True, True)])
def test_a_trace_beyond_the_limit_is_read_without_its_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool, older: bool
) -> None:
    """In Kineto's own layout operations are left out while the file is read, unless a pattern may name them."""
    given = profiled(SHOWN, 0)
    many = given["traceEvents"] * 5 + [event for event in given["traceEvents"] if event["cat"] == "kernel"] * 300
    lines = ",\n".join("  " + json.dumps(event, indent=2).replace("\n", "\n  ") for event in many)
    head = json.dumps({"schemaVersion": 1} | {key: value for key, value in given.items() if key != "traceEvents"})
    lines = lines.replace('"ph": "X",\n    "cat"', '"ph": "X", "cat"') if older else lines
    text = f'{head[:-1]},\n    "traceEvents": [\n{lines}\n  ],"traceName": "t" }}'.encode()
    file = tmp_path / "big.json"
    file.write_bytes(gzip.compress(text) if packed else text)
    small = tmp_path / "small.json"
    small.write_text(json.dumps(given | {"traceEvents": many}))
    expected = load_trace([small])
    monkeypatch.setattr("penstock._base.files.MAX_BYTES", len(text) // 4)
    monkeypatch.setattr("penstock._base.files._THINNED_BYTES", 1 << 12)
    assert load_trace([file]) == expected
    with pytest.raises(ArgumentError, match="more than 0 MiB, the limit for such a file; of a trace, keep only"):
        load_trace([file], pattern="(?P<op>fwd|bwd)-(?P<microbatch>[0-9]+)")
