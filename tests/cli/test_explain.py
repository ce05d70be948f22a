"""`penstock explain`: what it reads, what its screen says, and what it refuses."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from command_line import as_json, output, refusal
from rich.console import Console

from penstock.cli.explain import show
from penstock.costs import Profile, UnitCost
from penstock.plan.explain import explain, load_trace
from penstock.plan.explain.breakdown import TimeCategory
from penstock.report import to_perfetto
from penstock.report.studio.open_view import open_view
from penstock.report.web.sources import load_contents
from penstock.schedule import Action, Op, generate
from penstock.schedule.timeline import Span, Timeline
from penstock.simulate import LinkCost, StageCost, simulate
from scaffolding.nanoseconds import merged
from scaffolding.run_folders import ABOUT, a_run

HEAVY = [1.0, 1.0, 1.5, 1.0]


def measured(seconds: float = 0.01, schedule: str = "1f1b") -> Timeline:
    """A step whose stage 2 is heavy."""
    costs = [StageCost(one * seconds, one * seconds, one * seconds) for one in HEAVY]
    return simulate(generate(schedule, 4, 8), costs, LinkCost(0.01 * seconds))


def write(path: Path, value: Any) -> Path:
    data = json.dumps(value).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def named(timeline: Timeline, name: str, *, rank: int | None = None, unix: float = 0.0) -> list[dict[str, Any]]:
    """Events of a trace, as torch's profiler writes them."""
    found = []
    for span in timeline:
        if rank is None or span.rank == rank:
            word = {"F": "Forward", "B": "Backward"}.get(span.action.op.value, "")
            text = name.format(
                a=span.action, word=word, s=span.action.stage, o=span.action.op.value, k=span.action.microbatch
            )
            times = {"ts": (span.start_seconds + unix) * 1e6, "dur": (span.end_seconds - span.start_seconds) * 1e6}
            found.append(
                {"ph": "X", "cat": "user_annotation", "name": text, "pid": 4000 + span.rank, "tid": 1, **times}
            )
    return found


# -- the same step in every form --------------------------------------------------------------------------------------


def a_timeline(folder: Path) -> list[Path]:
    return [write(folder / "timeline.json", measured().to_dict())]


def by_rank(folder: Path, name: str, timeline: Timeline | None = None, *, profiler: bool = False) -> None:
    """A file for each rank, whose events have such names."""
    for rank in range(4):
        events = named(timeline or measured(), name, rank=rank, unix=1.7e9 if profiler else 0.0)
        if profiler:
            told = {"distributedInfo": {"rank": rank}, "traceEvents": events}
            write(folder / f"host_{rank + 17}.pt.trace.json.gz", told)
        else:
            write(folder / f"rank{rank}.json", {"traceEvents": events})


def ranges_of_torch(folder: Path) -> None:
    """`_PipelineScheduleRuntime`: a range begins with the wait for the input."""
    spans = (measured().spans(rank) for rank in range(4))
    waiting = merged([replace(s, start_seconds=s.start_seconds - s.waited_seconds) for s in row] for row in spans)
    by_rank(folder, "PP:{a}", waiting)


def in_arguments(folder: Path) -> None:
    events = []
    for event in named(measured(), "{word} {s} {k}"):
        word, stage, microbatch = event["name"].split()
        events.append({**event, "name": word.lower(), "args": {"stage": int(stage), "microbatch": int(microbatch)}})
    write(folder / "trace.json", events)


def parts_of_other_names(folder: Path) -> None:
    """With and without labels, in any order."""
    names = ["stage{s}_{o}_mb{k}", "[stage {s}] {word} microbatch {k}", "{word}(s={s},m={k})", "mb{k} {o} stage {s}"]
    write(folder / "t.json", [e for rank in range(4) for e in named(measured(), names[rank], rank=rank)])


def rows(unit: float = 1.0, suffix: str = "") -> list[dict[str, Any]]:
    times = [(f"start{suffix}", "start_seconds"), (f"end{suffix}", "end_seconds")]
    return [
        {"op": str(span.action.op.value), "mb": span.action.microbatch, "stage": span.action.stage}
        | {column: getattr(span, field) * unit for column, field in times}
        for span in measured()
    ]


def columns(folder: Path, delimiter: str = ",") -> None:
    words = {"F": "forward-compute", "B": "backward-compute"}
    lines = [
        (words[row["op"]], row["mb"], row["stage"], row["start"] * 1e6, (row["end"] - row["start"]) * 1e6)
        for row in rows()
    ]
    lines.insert(0, ("op", "microbatch", "pp_rank", "start_us", "duration_us"))
    (folder / "trace.csv").write_text("\n".join(delimiter.join(map(str, line)) for line in lines))


def a_list_for_each_rank(folder: Path) -> None:
    made = [[{**row, "stage": None} for row in rows(1e3, "_time_ms") if row["stage"] == rank] for rank in range(4)]
    write(folder / "ranks.json", made)


def a_list_for_each_column(folder: Path) -> None:
    made = rows(1e9, "_ns")
    write(folder / "columns.json", {column: [row[column] for row in made] for column in made[0]})


def names_in_columns(folder: Path) -> None:
    lines = [f"{row['stage']}{row['op']}{row['mb']}\t{row['start']}\t{row['end'] - row['start']}" for row in rows()]
    (folder / "names.csv").write_text("\n".join(["name\tstart_s\tduration_s", *lines]))


FORMS: dict[str, Any] = {
    "a timeline": a_timeline,
    "Perfetto": lambda folder: write(folder / "trace.json.gz", to_perfetto(measured())),
    "ours under torch's profiler": lambda folder: by_rank(folder, "penstock {a}", profiler=True),
    "a process is a stage, as in Schedule1F1B": lambda folder: by_rank(folder, "{word} {k}"),
    "microbatch, chunk and piece, as of Sail's zero bubbles": lambda folder: by_rank(folder, "{o}{k}.0.0"),
    "words": lambda folder: write(folder / "trace.json", named(measured(), "{o} {s} {k}")),
    "without a microbatch, as of DeepSpeed": lambda folder: write(
        folder / "trace.json", named(measured(), "{word}Pass(buffer_id=0)")
    ),
    "semicolons": lambda folder: columns(folder, ";"),
    "rows": lambda folder: write(folder / "rows.json", rows()),
    **{
        form.__name__: form
        for form in (
            *(ranges_of_torch, in_arguments, parts_of_other_names),
            *(columns, a_list_for_each_rank, a_list_for_each_column, names_in_columns),
        )
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_says_the_same(form: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    FORMS[form](tmp_path / "run")
    found = as_json("explain", str(tmp_path / "run"))
    assert (found["schedule"], found["ranks"], found["microbatches"], found["replicas"]) == ("1f1b", 4, 8, 1)
    assert found["changes"][0]["text"].startswith("stage 2 takes 1.33 times the mean (rank 2)")
    assert found["step_seconds"] == pytest.approx(measured().makespan_seconds, rel=0.01)
    assert abs(found["replay_error"]) < 0.02
    assert found["notes"] == []


@pytest.mark.parametrize("name", ["{o}{k}.{c}.0", "{word}_step_mb{k}_vpp{c}", "fwd"])
@pytest.mark.parametrize(("schedule", "folds"), [("interleaved-1f1b", False), ("zb-v", True)])
def test_chunks_of_ranks_become_stages(schedule: str, folds: bool, name: str, tmp_path: Path) -> None:
    """In a loop or in a V, which only the times show; microbatches may be arguments, and each rank has a clock."""
    timeline = simulate(generate(schedule, 4, 8), StageCost(1.0, 1.0, 1.0))
    for rank in range(4):
        events = []
        for span in timeline.spans(rank):
            action = span.action
            chunk = action.stage // 4
            word = "forward" if action.op is Op.F else "backward"
            op = action.op.value.replace("I", "B")
            text = name.format(
                o=op, word=word if action.op is not Op.W else "backward_weight", k=action.microbatch, c=chunk
            )
            args = {}
            if name == "fwd":
                text, args = op, {"micro_batch_id": action.microbatch, "model_chunk_id": str(chunk)}
            if name.startswith("{word}") and action.op is Op.I:
                text = text.replace("backward_step", "backward_input")
            events.append(
                {"ph": "X", "name": text.replace("weight_step", "weight"), "pid": 7, "args": args}
                | {"ts": (span.start_seconds + 100 * rank) * 1e6, "dur": (span.end_seconds - span.start_seconds) * 1e6}
            )
        write(tmp_path / f"rank{rank}.json", events)
    assert as_json("explain", str(tmp_path))["schedule"] == schedule


def test_pieces_of_a_sequence_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "trace.json", named(measured(), "{o}{k}.0.1"))
    assert "pieces of the sequence are not supported" in refusal("explain", str(file))


@pytest.mark.parametrize("name", ["{word}Pass(buffer_id=0)", "stage {s} {word}"])
def test_steps_of_ops_that_are_only_named_end_where_all_is_run_back(name: str, tmp_path: Path) -> None:
    sizes = [8, 4, 8]
    events, unix = [], 0.0
    for size in sizes:
        made = simulate(generate("1f1b", 4, size), StageCost(1.0, 1.0, 1.0))
        events += named(made, name, unix=unix)
        unix += made.makespan_seconds
    file = str(write(tmp_path / "trace.json", events))
    found = [as_json("explain", file, "--step", str(step)) for step in range(3)]
    assert [one["microbatches"] for one in found] == sizes
    (note,) = found[0]["notes"]
    assert "steps differ: step 0 is 1f1b with 8 microbatches, step 1 1f1b with 4" in note


def test_names_that_are_not_read_are_counted(tmp_path: Path) -> None:
    """Of a profiler's trace, those of user code; marks of steps and of optimizers are known."""
    events = named(measured(), "{a}")
    names = ("Optimizer.step#AdamW.step", "3F9 [/x]", "3F9 [/x]", "ProfilerStep#3")
    other = [{**events[0], "name": name} for name in names]
    other += [{**events[0], "name": "aten::mm", "cat": "cpu_op"}]
    found = as_json("explain", str(write(tmp_path / "trace.json", events + other)))
    expected = "2 of 66 events are not read, such as '3F9 [/x]'; --pattern reads others"
    assert found["notes"] == [expected]
    file = write(tmp_path / "few.json", [*events[1:], *other])
    assert "no complete step" in (said := refusal("explain", str(file)))
    assert "2 of 65 events are not read" in said


def test_names_of_other_tools_are_read_by_a_pattern(tmp_path: Path) -> None:
    file = str(write(tmp_path / "trace.json", named(measured(), "layer{s}/{o}#{k}")))
    assert "--pattern reads others" in refusal("explain", file)
    found = as_json("explain", file, "--pattern", r"layer(?P<stage>\d+)/(?P<op>[FB])#(?P<microbatch>\d+)")
    assert found["changes"][0]["text"].startswith("stage 2 takes 1.33 times the mean (rank 2)")
    assert "expected named groups op and microbatch" in refusal("explain", file, "--pattern", r"(\d+)")
    assert "no regular expression" in refusal("explain", file, "--pattern", "(")


def test_in_a_trace_with_weight_gradients_b_is_that_of_the_input(tmp_path: Path) -> None:
    """As in the papers on zero bubbles, and in the names of their authors' runtime."""
    made = simulate(generate("zb-h1", 4, 8), StageCost(1.0, 1.0, 1.0))
    files = [tmp_path / f"rank{rank}.json" for rank in range(4)]
    for rank, file in enumerate(files):
        events = named(made, "{o}{k}.0.0", rank=rank)
        write(file, [{**event, "name": event["name"].replace("I", "B")} for event in events])
    assert as_json("explain", *map(str, files))["schedule"] == "zb-h1"


def test_several_steps_in_one_trace(tmp_path: Path) -> None:
    """Without marks, the second time that a process runs an action is its second step; of three, the median counts."""
    events = []
    for number, seconds in enumerate((0.01, 0.03, 0.02)):
        events += named(measured(seconds), "{a}", unix=10.0 * number)
    file = str(write(tmp_path / "trace.json", events))
    assert as_json("explain", file)["step"] == 2
    assert len(as_json("explain", file)["steps"]) == 3
    assert as_json("explain", file, "--step", "1")["step_seconds"] == pytest.approx(measured(0.03).makespan_seconds)
    assert "step 2, the median of 3" in output("explain", file)


def test_timelines_of_several_steps(tmp_path: Path) -> None:
    """Each begins at 0: in one file as a list, or a file each."""
    steps = [measured(seconds).to_dict() for seconds in (0.01, 0.03, 0.02)]
    whole = str(write(tmp_path / "timelines.json", steps))
    (tmp_path / "run").mkdir()
    for number, step in enumerate(steps):
        write(tmp_path / "run" / f"step{number + 9}.json", step)
    for asked in (whole, str(tmp_path / "run")):
        found = as_json("explain", asked)
        assert (found["step"], found["notes"]) == (2, [])
        times = [measured(seconds).makespan_seconds for seconds in (0.01, 0.03, 0.02)]
        assert list(found["steps"].values()) == pytest.approx(times)
    said = output("explain", whole, "--step", "all", columns=120)
    assert [line.split()[0] for line in said.splitlines() if "s  " in line and line[0].isdigit()] == ["0", "1", "2"]
    assert "1 of 3 steps over 1.1 times the median, step 1 most (1.50x)" in said
    assert "expected the number of a step, or all" in refusal("explain", whole, "--step", "x")


def test_marks_of_the_profiler_tell_steps(tmp_path: Path) -> None:
    """The first step is cut off: it is left out, and the second one is whole."""
    late = [event for event in named(measured(), "{a}") if event["ts"] > 30_000]
    marks = [
        {"ph": "X", "name": f"ProfilerStep#{n}", "pid": 4000, "ts": at, "dur": 1.0} for n, at in ((7, 0.0), (8, 1e6))
    ]
    file = write(tmp_path / "trace.json", late + named(measured(), "{a}", unix=1.0) + marks)
    found = as_json("explain", str(file))
    assert found["step"] == 8
    assert "step 7" in found["notes"][0]


def test_ranges_of_the_device_count(tmp_path: Path) -> None:
    """The host is done long before; only where the device is recorded."""
    device = [{**event, "cat": "gpu_user_annotation"} for event in named(measured(), "{a}")]
    host = [{**event, "dur": 1.0} for event in named(measured(), "{a}")]
    found = as_json("explain", str(write(tmp_path / "trace.json", host + device)))
    assert found["step_seconds"] == pytest.approx(measured().makespan_seconds)


# -- the screen -------------------------------------------------------------------------------------------------------


def test_the_screen_says_what_to_do_first(tmp_path: Path) -> None:
    (file,) = a_timeline(tmp_path)
    said = output("explain", str(file), "--what-if", "link=0", columns=100)
    head, _, rest = said.partition("What to change first")
    assert head.startswith("1f1b: 4 ranks, 8 microbatches")
    assert rest.splitlines()[1].startswith("at most -")
    assert head.splitlines()[0].endswith("simulated, with its costs' unit for a second")
    assert "stage 2 takes 1.33 times the mean (rank 2): move layers to other stages" in rest.splitlines()[1]
    assert "What if" in rest
    assert len(said.splitlines()) < 40
    assert max(map(len, said.splitlines())) <= 100


def profile(tmp_path: Path, seconds: list[float]) -> str:
    units = tuple(UnitCost(f"layers.{n}", one, one, one) for n, one in enumerate(seconds))
    made = Profile(units, "cpu", "float32", {"layers.0.weight": (1, 1)})
    made.save(tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def test_a_profile_tells_which_cut_and_what_was_wrong(tmp_path: Path) -> None:
    """Stage 2 has six units, which take 1.25 times what the profile says: one should go to each neighbor."""
    (file,) = a_timeline(tmp_path)
    units = [*[0.005] * 4, 0.0015, 0.0015, 0.003, 0.003, 0.0015, 0.0015, *[0.005] * 2]
    asked = ("explain", str(file), "--profile", profile(tmp_path, units), "--cuts", "layers.2,layers.4,layers.10")
    found = as_json(*asked)
    moves = "begin stage 2 at layers.5 instead of layers.4; begin stage 3 at layers.9 instead of layers.10"
    assert found["changes"][0]["text"].endswith(moves)
    costs = [StageCost(one, one, one) for one in (0.01, 0.011875, 0.01125, 0.011875)]
    moved = simulate(generate("1f1b", 4, 8), costs, LinkCost(0.0001)).makespan_seconds
    assert found["changes"][0]["step_seconds"] == pytest.approx(moved, rel=1e-3)
    assert [stage["predicted_seconds"] for stage in found["stages"]] == pytest.approx([0.03, 0.03, 0.036, 0.03])
    assert "largest error at stage 2: 1.25x the prediction" in " ".join(output(*asked).split())
    asked = (*asked[:3], profile(tmp_path, [0.03, 0.03, 0.0, 0.03]), "--cuts", "layers.1,layers.2,layers.3")
    assert "largest error at stage 2: 45.00 ms, predicted 0" in " ".join(output(*asked).split())


def test_cuts_that_are_guessed_are_said_and_doubted(tmp_path: Path) -> None:
    """By its own units, the profile would cut the model where it was not."""
    (file,) = a_timeline(tmp_path)
    likely = as_json("explain", str(file), "--profile", profile(tmp_path, [0.01] * 4))
    assert any("taken to be the profile's own best (layers.1, layers.2, layers.3)" in n for n in likely["notes"])
    assert not any("probably others" in note for note in likely["notes"])
    doubted = as_json("explain", str(file), "--profile", profile(tmp_path, [0.04, 0.005, 0.005, 0.005]))
    assert any("They were probably others: stages take" in note for note in doubted["notes"])
    assert not any("instead of layers" in change["text"] for change in doubted["changes"])


def test_a_replay_that_takes_longer_than_the_step_is_no_unexplained_time(tmp_path: Path) -> None:
    found = explain(load_trace(a_timeline(tmp_path)))
    less = {**found.where.added_seconds, TimeCategory.REST: -0.01 * found.step.seconds}
    show(replace(found, where=replace(found.where, added_seconds=less)), Console(file=(file := StringIO()), width=200))
    assert "the replay is too slow -1.0%" in file.getvalue()
    assert "unexplained" not in file.getvalue().partition("What to change")[0]
    unsure = replace(found, changes=(), worst_error=0.231)
    assert unsure.nothing == "no significant improvement: every change is within the replay's error, 23.1%"
    assert replace(unsure, worst_error=0.001).nothing == "no change was found that saves 0.5% of a step or more"


@pytest.mark.parametrize(("limit", "advised"), [(None, ["gpipe", "1f1b"]), (320.0, ["1f1b"]), (310.0, [])])
def test_no_schedule_is_advised_for_which_a_run_has_no_memory(
    limit: float | None, advised: list[str], tmp_path: Path
) -> None:
    """Of 100 a microbatch and 16 of a stage's parameters and Adam; 1F1B keeps three microbatches on rank 0."""
    folder = a_run(tmp_path / "run")
    run = replace(ABOUT, schedule="naive", activation_bytes=(100,) * 3, memory_limit=limit)
    write(folder / "run.json", run.to_dict())
    for step in (2, 5):
        naive = simulate(generate("naive", 3, 6), StageCost(0.01, 0.01, 0.01))
        write(folder / "timelines" / f"{step}.json", naive.to_dict())
    found = as_json("explain", str(folder))
    notes = {one["text"].split()[1]: one["note"] for one in found["changes"] if one["text"].startswith("schedule")}
    assert [*notes] == advised
    write(folder / "run.json", replace(run, gradient_bytes=()).to_dict())  # what it needs is not known
    assert as_json("explain", str(folder))["changes"]
    if advised:
        assert notes["1f1b"] == "rank 0 keeps 3 times the activations, up to 3 microbatches instead of 1"


@pytest.mark.parametrize(("rows", "advised"), [(12, True), (11, False), (4, False)])
def test_microbatches_of_one_row_are_not_to_be_cut(rows: int, advised: bool, tmp_path: Path) -> None:
    folder = a_run(tmp_path / "run")
    write(folder / "run.json", replace(ABOUT, rows=rows).to_dict())
    notes = [one["note"] for one in as_json("explain", str(folder))["changes"] if "cut the batch" in one["text"]]
    assert [note.partition(":")[0] for note in notes] == [
        "if half a microbatch takes half as long, which was not measured"
    ] * advised


def test_every_list_of_advice_is_the_same(tmp_path: Path) -> None:
    """In the terminal, the report and the studio: in the same order, in the same words."""
    costs = [StageCost(one, one, one) for one in (0.01, 0.01, 0.015, 0.01)]
    path = write(tmp_path / "timeline.json", simulate(generate("zb-h1", 4, 8), costs, LinkCost(0.0001)).to_dict())
    listed = [(one["claim"], one["text"], one["note"]) for one in as_json("explain", str(path))["changes"]]
    assert {claim.startswith("at most") for claim, *_ in listed} == {False, True}
    assert [(one.claim, one.text, one.note) for one in load_contents([path]).improvements] == listed
    studio = open_view(path, path.name)["explanation"]["changes"]
    assert [(one["claim"], one["text"], one["note"]) for one in studio] == listed
    said = " ".join(output("explain", str(path), columns=400).split())
    places = [said.index(" ".join(f"{claim} {text}".split())) for claim, text, _ in listed]
    assert places == sorted(places)
    assert "no significant improvement" not in said


# -- what cannot be explained -----------------------------------------------------------------------------------------


def test_files_that_are_no_trace_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "run.json").write_text('{"format": "penstock run"}')
    (tmp_path / "text.json").write_text("no")
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(b"{}")[:-9])
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (tmp_path / "ops.csv").write_text("op,microbatch,start_us,duration_us,pp_rank\nrun,0,0,1,0\nrun,0,1,1,1\n")
    (tmp_path / "rank.csv").write_text("op,microbatch,start_us,duration_us,pp_rank\nF,0,0,1,first\n")
    (tmp_path / "starts.json").write_text('[{"op": "F", "microbatch": 0, "start": 1.0}]')
    wrong = {
        "rank.csv": "its pp_rank is no number",
        "starts.json": "has no column duration_us; expected op, microbatch, start_us, and duration_us or end_us",
        "missing.json": "No such file",
        "missing": "no such folder; a training script records one with penstock.pipeline(..., run_dir='runs/NAME')",
        "empty": "has no file that ends in .json",
        "runs": ".csv.gz; it has runs in it: first",
        "text.json": "is not JSON",
        "cut.json.gz": "cannot be unpacked",
        "other.json": "expected a timeline",
        "other.csv": "has no column op",
        "ops.csv": "their names are 'run'",
    }
    for name, said in wrong.items():
        assert said in refusal("explain", str(tmp_path / name)), name


@pytest.mark.parametrize(
    ("column", "place", "value", "said"),
    [
        ("actions", 0, "1000000000F0", "numbered from 0"),
        ("end_seconds", -1, float("inf"), "finite"),
    ],
)
def test_timelines_with_impossible_numbers_are_refused(
    tmp_path: Path, column: str, place: int, value: Any, said: str
) -> None:
    given = measured().to_dict()
    given["ranks"][0][column][place] = value
    assert said in refusal("explain", str(write(tmp_path / "timeline.json", given)))


def test_the_missing_last_rank_is_told_by_what_is_sent_to_it(tmp_path: Path) -> None:
    event = {"ph": "X", "pid": 1, "tid": 1, "dur": 1.0}
    events = [{**event, "name": f"penstock {name}", "ts": at} for at, name in enumerate(("0F0", "0SEND_F0", "0B0"))]
    file = write(tmp_path / "rank0.json", {"traceEvents": events})
    assert "no rank has stage 1" in refusal("explain", str(file))


def test_cuts_need_a_profile(tmp_path: Path) -> None:
    (file,) = a_timeline(tmp_path)
    assert "requires --profile" in refusal("explain", str(file), "--cuts", "a")
    text = refusal("explain", str(file), "--profile", profile(tmp_path, [1.0] * 9), "--cuts", "a,b,c")
    assert "is no unit" in text


@pytest.mark.parametrize("perfetto", [False, True])
def test_a_rank_that_was_held_up_lacks_no_other(perfetto: bool, tmp_path: Path) -> None:
    """The system may stop a process at any moment, also while it has nothing to wait for."""
    spans, at = [], 0.0
    for number, action in enumerate(f"0{op}{mb}" for mb in range(8) for op in "FB"):
        waited = 0.5 if number == 11 else 0.0
        spans.append(Span(0, Action.parse(action), at + waited, at + waited + 0.1, waited))
        at += waited + 0.1
    timeline = merged([spans])
    assert "step takes 2.1" in output(
        "explain", str(write(tmp_path / "t.json", (to_perfetto(timeline) if perfetto else timeline.to_dict())))
    )


def test_events_at_no_time_are_refused(tmp_path: Path) -> None:
    metadata: dict[str, Any] = {"ph": "M", "name": "thread_name", "pid": 1}  # has no time
    first, *others = named(measured(), "{a}")
    for key, wrong, said in (
        ("ts", None, f"{first['name']!r} is at ts None; expected a number of microseconds"),
        ("ts", "soon", f"{first['name']!r} is at ts 'soon'; expected a number of microseconds"),
        ("dur", -5.0, "expected microseconds of 0 or more"),
        ("dur", float("nan"), "numbers must be finite"),
    ):
        file = write(tmp_path / "t.json", [metadata, {**first, key: wrong}, *others])
        assert said in refusal("explain", str(file))
