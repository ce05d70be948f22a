"""`penstock simulate`: the figures are the library's, the rows train one model, and what is wrong is said in a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import as_json, output, penstock, refusal

from penstock.cli import _schedule_options
from penstock.report.text import make_format
from penstock.schedule import ScheduleSpec, add_communication, generate, names, schedule_specs, write_csv
from penstock.schedule.generators import ScheduleParams
from penstock.simulate import idle_time_by_cause, memory
from penstock.simulate import simulate as library
from penstock.simulate.costs import LinkCost, StageCost

NUMBERS = ("--ranks", "8", "--microbatches", "24")
COSTS = ("--forward", "18522", "--backward-input", "18086", "--backward-weight", "9337", "--link-latency", "601")
STAGE = {"forward": 3, "backward_input": 4, "backward_weight": 2}


def test_json_is_what_the_library_says() -> None:
    made = as_json("simulate", "--schedule", "zb-v", *NUMBERS, *COSTS)
    schedule = generate("zb-v", 8, 24)
    timeline = library(schedule, StageCost(18522, 18086, 9337), LinkCost(601))
    assert made["makespan"] == timeline.makespan_seconds
    assert made["span"] == timeline.span_seconds
    assert made["bubble_rate"] == timeline.bubble_rate
    work = 24 * 2 * (18522 + 18086 + 9337)
    assert made["bubble_rate"] == pytest.approx((made["span"] - work) / made["span"])
    by_cause = idle_time_by_cause(schedule, timeline)
    assert made["idle"] == [{cause.value: time for cause, time in causes.items()} for causes in by_cause]
    path = made["critical_path"]
    assert sum(path[key] for key in ("F", "I", "W", "link")) == made["makespan"]
    assert "memory" not in made


def test_memory_of_split_backwards_goes_in_two_parts() -> None:
    options = ("simulate", "--schedule", "zb-h1", *NUMBERS, "--memory-activation", "100")
    whole, parts = as_json(*options), as_json(*options, "--memory-weight-grad", "40")
    schedule, stage = generate("zb-h1", 8, 24), StageCost(1, 1, 1, activation_bytes=100, weight_gradient_bytes=40)
    held = [one.peak_activations for one in memory(schedule, stage, library(schedule, stage))]
    assert [one["activations"] for one in parts["memory"]] == held
    assert sum(held) < sum(one["activations"] for one in whole["memory"]), "all of it until W, if nothing else is said"


# -- --schedule all ---------------------------------------------------------------------------------------------------


def test_all_has_a_row_for_each_schedule_the_shortest_span_first() -> None:
    made = as_json("simulate", "--schedule", "all", *NUMBERS, *COSTS)
    assert {row["name"] for row in made["schedules"]} == set(names())
    assert made["not_allowed"] == []
    spans = [row["span"] for row in made["schedules"]]
    assert spans == sorted(spans)
    by_name = {row["name"]: row for row in made["schedules"]}
    assert by_name["zb-h1"] == as_json("simulate", "--schedule", "zb-h1", *NUMBERS, *COSTS)
    halves = StageCost(18522 / 2, 18086 / 2, 9337 / 2)
    assert by_name["zb-v"]["span"] == library(generate("zb-v", 8, 24), halves, LinkCost(601)).span_seconds


@pytest.mark.parametrize("verb", ["simulate", "draw"])
def test_whose_costs_they_are_is_said_where_a_rank_has_several_stages(verb: str) -> None:
    options = (verb, "--ranks", "4", "--microbatches", "8", "--forward", "2", "--schedule")
    assert "per stage; a rank has 2 stages" in output(*options, "zb-v")
    assert "per stage; a rank has" not in output(*options, "1f1b")


def test_all_names_the_rule_that_a_schedule_breaks() -> None:
    made = as_json("simulate", "--schedule", "all", "--ranks", "3", "--microbatches", "5")
    reasons = {one["name"]: one["reason"] for one in made["not_allowed"]}
    assert set(reasons) == {"chimera", "dualpipe"}
    assert reasons["chimera"].startswith("works with an even number of ranks")
    text = output("simulate", "--schedule", "all", "--ranks", "3", "--microbatches", "5")
    assert "chimera   works with an even number of ranks" in text
    assert "costs: per microbatch and rank, divided evenly among its stages" in text
    two = as_json("simulate", "--schedule", "all", *NUMBERS, "--stages-per-rank", "2")
    assert {row["chunks"] for row in two["schedules"]} == {2}
    assert "1f1b" in {one["name"] for one in two["not_allowed"]}


def test_all_puts_neighboring_stages_of_a_file_together(write: Any) -> None:
    stages = [
        {**STAGE, "forward": 1 + stage, "output_bytes": 2 * stage, "activation": 1, "parameters": stage}
        for stage in range(4)
    ]
    path = write({"stages": stages, "links": {"latency": 1, "bandwidth": 4}})
    made = as_json("simulate", "--schedule", "all", "--ranks", "2", "--microbatches", "4", "--costs", path)
    by_name = {row["name"]: row for row in made["schedules"]}
    whole = [StageCost(3, 8, 4, output_bytes=2), StageCost(7, 8, 4, output_bytes=6)]
    assert by_name["1f1b"]["span"] == library(generate("1f1b", 2, 4), whole, LinkCost(1, 4)).span_seconds
    assert [one["parameters"] for one in by_name["1f1b"]["memory"]] == [1, 5]
    parts = [StageCost(1 + stage, 4, 2, output_bytes=2 * stage) for stage in range(4)]
    assert by_name["zb-v"]["span"] == library(generate("zb-v", 2, 4), parts, LinkCost(1, 4)).span_seconds
    four = ("simulate", "--schedule", "all", "--ranks", "4", "--microbatches", "4", "--costs", path)
    assert "costs: per stage of the model, from the file" in output(*four)
    three = as_json(*four)
    reasons = {one["name"]: one["reason"] for one in three["not_allowed"]}
    assert "has 4 stages, which cannot be combined into 8" in reasons["zb-v"]


def test_each_stage_has_its_own_costs(write: Any) -> None:
    stages = [
        {**STAGE, "output_bytes": 6, "activation": 8, "weight_grad": 3, "parameters": 10, "gradients": 11},
        {**STAGE, "forward": 5, "activation": 4, "optimizer": 20, "overlapped": 9},
    ]
    links = [{"from": 0, "to": 1, "latency": 1, "bandwidth": 2}, {"from": 1, "to": 0, "latency": 7}]
    path = write({"stages": stages, "links": links})
    made = as_json("simulate", "--schedule", "zb-h1", "--ranks", "2", "--microbatches", "6", "--costs", path)
    known = [
        StageCost(3, 4, 2, 6, 8, 3, 10, 11),
        StageCost(5, 4, 2, activation_bytes=4, weight_gradient_bytes=4, optimizer_bytes=20, overlapped_seconds=9),
    ]
    schedule = generate("zb-h1", 2, 6)
    timeline = library(schedule, known, {(0, 1): LinkCost(1, 2), (1, 0): LinkCost(7)})
    held = memory(schedule, known, timeline)
    assert made["makespan"] == timeline.makespan_seconds
    assert [one["activations"] for one in made["memory"]] == [one.peak_activations for one in held]
    assert [(one["parameters"], one["gradients"], one["optimizer"]) for one in made["memory"]] == [
        (10, 11, 0),
        (0, 0, 20),
    ]
    assert [one["peak"] for one in made["memory"]] == [one.peak for one in held]
    assert made["peak_activations"] == [held[0].peak_activations / 8, held[1].peak_activations / 4]
    text = output("simulate", "--schedule", "zb-h1", "--ranks", "2", "--microbatches", "6", "--costs", path)
    heads = ["memory", "of", "rank", "parameters", "gradients", "optimizer", "activations", "peak"]
    assert heads in [line.split() for line in text.splitlines()]


WORK = ("forward", "backward_input", "backward_weight")


@pytest.mark.parametrize(
    ("given", "all_three", "says"),
    [
        ({"forward": 0.001}, (0.001, 0.001, 0.001), "I = W = F = 0.001, as I and W were not given"),
        ({"backward_weight": 2}, (2, 2, 2), "F = I = W = 2, as F and I were not given"),
        ({"forward": 3, "backward_weight": 2}, (3, 3, 2), "I = F = 3, as I was not given"),
        ({"comm": 0.5}, (1, 1, 1), "F = I = W = 1, as F, I and W were not given"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_costs_that_are_not_given_follow_from_those_that_are(
    given: dict[str, float], all_three: tuple[float, ...], says: str
) -> None:
    """No 1 stands beside an F of 0.001, and whatever prints a time says what it assumed."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    which = ("--ranks", "2", "--microbatches", "4")
    made = as_json("simulate", "--schedule", "zb-h1", *which, *options)
    link = LinkCost(given.get("comm", 0.0))
    assert made["makespan"] == library(generate("zb-h1", 2, 4), StageCost(*all_three), link).makespan_seconds
    expected = {name: value for name, value in zip(WORK, all_three, strict=True) if name not in given}
    for verb in (
        ["simulate", "--schedule", "zb-h1"],
        ["draw", "--schedule", "zb-h1"],
        ["search", "--time-limit", "0.1"],
    ):
        assert as_json(*verb, *which, *options)["assumed"] == expected
        assert says in output(*verb, *which, *options, columns=120)
    assert says in output("simulate", "--schedule", "all", *which, *options, columns=120)


def test_nothing_is_assumed_where_nothing_or_all_is_given() -> None:
    which = ("simulate", "--schedule", "1f1b", *NUMBERS)
    for options in ((), COSTS, ("--memory-activation", "3")):
        assert "assumed" not in as_json(*which, *options)
        assert "ssumed" not in output(*which, *options)


# -- a schedule from a file -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "form"),
    [("1f1b", "compute_only"), ("zb-v", "compute_comms"), ("zb-v", "text with messages")],
)
def test_schedule_of_a_file_is_timed_as_the_one_of_the_name(tmp_path: Path, name: str, form: Any) -> None:
    schedule, path = generate(name, 4, 8), tmp_path / "mine.csv"
    if form.startswith("text"):
        path.write_text(str(add_communication(schedule) if "messages" in form else schedule))
    else:
        write_csv(schedule, path, form)
    made, named = (
        as_json("simulate", *which, "--forward", "2", "--link-latency", "0.25")
        for which in (("--csv", str(path)), ("--schedule", name, "--ranks", "4", "--microbatches", "8"))
    )
    assert made.pop("name") == (name if form.startswith("text") else "mine")
    assert named.pop("name") == name
    assert made == named


WINDOWED = ("--schedule", "interleaved-1f1b", "--ranks", "2", "--microbatches", "4", "--stages-per-rank", "3")


def test_memory_by_window(write: Any) -> None:
    """Whole parameters take memory from UNSHARD to RESHARD; a file of the text is timed alike."""
    peaks = []
    for window in (1, 2, 3):
        sharded = ("--unshard-window", str(window))
        costs = ("--memory-activation", "1", "--memory-unsharded", "10")
        made = as_json("simulate", *WINDOWED, *sharded, *costs)
        assert [held["unsharded"] for held in made["memory"]] == [10 * window] * 2
        peaks.append([held["peak"] for held in made["memory"]])
        path = write(output("draw", *WINDOWED, *sharded, "--text"), "mine.txt")
        assert as_json("simulate", "--csv", path, *costs) == made
        assert made["makespan"] == as_json("simulate", *WINDOWED)["makespan"], "gathers take no time here"
    assert peaks == [[17, 15], [27, 25], [37, 35]]
    assert "unsharded" in output("simulate", *WINDOWED, "--unshard-window", "2", "--memory-unsharded", "1")
    assert "unsharded" not in output("simulate", *WINDOWED, "--memory-activation", "1")


def test_schedules_without_room_in_the_window_say_so() -> None:
    made = as_json("simulate", "--schedule", "all", "--ranks", "2", "--unshard-window", "1", "--memory-unsharded", "8")
    by_name = {one["name"]: one["memory"][0]["unsharded"] for one in made["schedules"]}
    assert (by_name["1f1b"], by_name["interleaved-1f1b"]) == (8, 4), "a rank's costs, divided among its chunks"
    reasons = {one["name"]: one["reason"] for one in made["not_allowed"]}
    assert reasons["dualpipe-v"].startswith("--unshard-window 1: rank 0 has (")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("0F0,0B0\n1F0,1X0\n", "mine.csv: row 2, column 2, '1X0': expected stage, op and microbatch"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n", "mine.csv holds no legal schedule: missing: rank 1 has no 1B1"),
        ("a: 1 microbatch, stages on ranks 0\nrank 1: 0F0", "mine.csv: 'rank 1: 0F0': expected the actions of rank 0"),
    ],
)
def test_bad_schedule_in_a_file(write: Any, content: str, says: str) -> None:
    assert says in refusal("simulate", "--csv", write(content, "mine.csv"))


# -- what is printed --------------------------------------------------------------------------------------------------


def test_table_fits_and_leaves_no_digit_out() -> None:
    text = output("simulate", "--schedule", "all", *NUMBERS, *COSTS)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "1,310,405" in text


def test_row_of_a_rank() -> None:
    text = output("simulate", "--schedule", "1f1b", "--ranks", "2", "--microbatches", "4", "--link-latency", "0.5")
    lines = [line.split() for line in text.splitlines()]
    assert ["makespan", "17.0"] in lines
    assert ["rank", "busy", "up", "F", "B", "link", "down", "act."] in lines
    made = as_json("simulate", "--schedule", "1f1b", "--ranks", "2", "--microbatches", "4", "--link-latency", "0.5")
    causes = ("warm-up", "waiting for forward", "waiting for backward", "link", "cool-down")
    shown = [made["idle"][0][cause] for cause in causes]
    assert ["0", "12.0", *(f"{time:.1f}" for time in shown), "2"] in lines


@pytest.mark.parametrize("value", [1e-320, 1e-200, 3e30])
def test_extreme_numbers_have_an_exponent(value: float) -> None:
    assert len(make_format([value, 0.0])(value)) < 12
    assert make_format([value, 0.0])(0.0) == "0"


def test_a_link_in_the_words_of_the_other_verbs() -> None:
    job = ("simulate", "--schedule", "1f1b", "--ranks", "4", "--microbatches", "8", "--forward", "0.01")
    sized = (*job, "--output-bytes", "1e6")
    seconds = as_json(*sized, "--link", "40gbit delay 30us")["makespan"]
    assert seconds == as_json(*sized, "--link-latency", "30e-6", "--bandwidth", "5e9")["makespan"]
    assert "the time of a message depends on its size" in refusal(*job, "--link", "40gbit delay 30us")
    assert "pass only one of the two" in refusal(*sized, "--link-latency", "2", "--link", "40gbit")


# -- several numbers of ranks or microbatches: speed-up against one device, on one model throughout -------------------


def test_gpipes_table_2() -> None:
    """Huang et al., "GPipe": what pipelines of 2, 4 and 8 could reach with 32 microbatches, without communication."""
    made = as_json("simulate", "--schedule", "gpipe", "--ranks", "1,2,4,8", "--microbatches", "32")
    assert [cell["speedup"] for cell in made["sweep"]] == pytest.approx([1, 1.94, 3.66, 6.56], abs=0.005)
    assert [cell["efficiency"] * cell["ranks"] for cell in made["sweep"]] == [c["speedup"] for c in made["sweep"]]


def test_chunks_and_copies_train_the_same_model() -> None:
    """However many stages: one device takes as long, and with many microbatches each schedule nears its ranks."""
    names = "1f1b,interleaved-1f1b,zb-v,hanayo,dualpipe"
    made = as_json("simulate", "--schedule", names, "--ranks", "2,4", "--microbatches", "64", "--forward", "6")
    assert {cell["one_device"] for cell in made["sweep"]} == {64 * 18}
    assert all(cell["efficiency"] * cell["ranks"] == cell["speedup"] for cell in made["sweep"])
    assert [cell["name"] for cell in made["sweep"]] == [name for name in names.split(",") for _ in range(2)]
    assert all(0.8 < cell["efficiency"] <= 1 for cell in made["sweep"])


def test_what_a_schedule_does_not_allow_is_shown_and_not_fatal() -> None:
    options = ("simulate", "--schedule", "gpipe,chimera", "--ranks", "1,2", "--microbatches", "3,4")
    lines = output(*options).splitlines()
    chimera = lines.index("chimera")
    assert [line.split() for line in lines[chimera + 2 : chimera + 4]] == [
        ["1", "-", "-"],
        ["2", "-", "2.00", "(100%)"],
    ]
    assert any(line.startswith("chimera, p = 1, m = 3, 4: works with an even number of ranks") for line in lines)
    assert len(as_json(*options)["not_allowed"]) == 3
    says = refusal("simulate", "--schedule", "chimera", "--ranks", "1,3", "--microbatches", "4")
    assert says.startswith("--schedule chimera: no schedule works with these numbers: chimera works with an even")


# -- schedules too large to make are refused at once; what takes a while says so, on stderr ----------------------------


@pytest.mark.parametrize("entry", schedule_specs(), ids=lambda entry: entry.name)
def test_actions_are_counted_before_they_are_made(entry: ScheduleSpec) -> None:
    numbers = ScheduleParams(4, 6, entry.chunks)
    made = generate(entry.name, 4, 6)
    counted = sum(len(row) for row in made.rows)
    if entry.name.startswith("dualpipe"):  # some of its backwards are not split
        assert counted <= entry.actions(numbers) <= 1.5 * counted
    else:
        assert entry.actions(numbers) == counted


def test_long_work_is_announced_with_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("simulate", "--schedule", "gpipe", "--ranks", "4", "--microbatches", "8", "--json")
    assert penstock(*options).stderr == ""
    monkeypatch.setattr(_schedule_options, "ANNOUNCED", 60)
    for numba, hint in ((True, "\n"), (None, "; numba makes it several times faster (pip ")):
        monkeypatch.setattr(_schedule_options, "find_spec", lambda _, numba=numba: numba)
        done = penstock(*options)
        assert done.stderr.startswith(f"penstock: timing 64 actions; this may take a while{hint}")
        assert json.loads(done.stdout)["makespan"] == 33
