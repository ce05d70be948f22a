"""`penstock plan`: what it prints, writes and refuses."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import as_json, output, penstock, refusal
from torch import nn

from penstock.cli._plan_tables import _pipeline_note
from penstock.costs import MeasuredLink, Profile, UnitCost
from penstock.plan import Cluster, ParallelConfig, Sizes, make_plans, read_plan
from penstock.simulate import LinkCost

BLOCK = UnitCost("", 1e-3, 1e-3, 1e-3, 60_000_000, 50_000_000, 50_000_000, 100_000_000, 4_000_000, 4_000_000)
UNITS = tuple(replace(BLOCK, name=f"h.{index}") for index in range(8))
PROFILE = Profile(UNITS, "cpu", "float32", {"weight": (1,)}, inputs={"x": "int64[1, 64]"})
JOB = ("plan", "--devices", "4", "--global-batch-size", "16", "--link", "100gbit delay 5us", "--search-time", "0")


@pytest.fixture
def profile(tmp_path: Path) -> str:
    PROFILE.save(tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


def test_the_best_plan_is_printed_and_written(profile: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    text = output(*JOB, "--profile", profile, "--memory", "2gib", "--out", str(file), columns=200)
    best = make_plans(Sizes({1: PROFILE}), Cluster(4, 2 * 2**30, LinkCost(5e-6, 12.5e9)), 16).best
    assert read_plan(file) == best[0]
    lines = text.splitlines()
    assert lines[0].endswith(f"{best[0].step_seconds:.4g} s/step")
    first = lines[4].split()
    choice = best[0].choice
    numbers = (choice.replicas, choice.ranks, choice.chunks, choice.microbatches, choice.rows)
    assert first[:6] == [choice.schedule, *map(str, numbers)]
    assert float(first[6]) == pytest.approx(best[0].step_seconds, rel=1e-3)
    for name in best[0].cuts:
        assert f" {name} " in text
    found = as_json(*JOB, "--profile", profile, "--memory", "2gib")
    assert [one["step_seconds"] for one in found["plans"]] == [one.step_seconds for one in best]
    assert (found["nearest"], bool(found["lost"])) == (None, True)
    why = text.partition("Rejected plans")[2]
    assert "1f1b: dp=4 pp=1, " in why.partition("Out of memory:")[2]
    assert "% slower: bubble" in why.partition("Slower:")[2]
    assert f"plan={str(file)!r}" in text


@pytest.mark.parametrize(
    ("rows", "options", "said"),
    [
        (1, "", "1 microbatch"),
        (16, "", ""),
        (4, "--microbatches 2 --pipeline 4", "2 microbatches"),
        (64, "--pipeline 4 --link 100mbit", ""),
    ],
    ids=["small batch", "large batch", "as asked", "slow link"],
)
def test_fewer_microbatches_than_ranks_are_said_to_be_too_few(rows: int, options: str, said: str, profile: str) -> None:
    """Ranks that wait for links, or for a heavy stage, have no more to do with a larger batch."""
    job = f"plan --devices 4 --global-batch-size {rows} --search-time 0 {options}".split()
    text = output(*job, "--profile", profile, columns=400)
    assert (" cannot keep 4 ranks busy." in text) is bool(said)
    assert f" of the time: {said} cannot keep" in text or not said


def test_a_plan_without_a_pipeline_names_the_best_one_with_one(profile: str) -> None:
    command = ("plan", "--devices", "4", "--global-batch-size", "16", "--profile", profile, "--search-time", "0")
    link = LinkCost(1e-6, 1.25e12)
    text = output(*command, "--link", "10tbit delay 1us", columns=400)
    every = make_plans(Sizes({1: PROFILE}), Cluster(4, link=link), 16, best=1000).best
    assert every[0].choice.ranks == 1
    piped = min((one for one in every if one.choice.ranks > 1), key=lambda one: one.step_seconds)
    (line,) = (line for line in text.splitlines() if line.startswith("It has no pipeline; "))
    numbers = f": dp={piped.choice.replicas} pp={piped.choice.ranks}"
    assert numbers in line
    assert "It has no pipeline" not in output(*command, "--link", "1gbit delay 5us", columns=400)


@pytest.mark.parametrize(
    ("seconds", "bubble", "said"),
    [
        (0.996, 0.1, ", equivalent."),
        (1.02, 0.1, ", 2.0% slower."),
        (1.02, None, "every plan with one is at least 2.0% slower."),
    ],
)
def test_a_plan_that_is_equivalent_is_not_called_faster(seconds: float, bubble: float | None, said: str) -> None:
    """Of what was not simulated, only a bound is known."""
    alone, piped = (ParallelConfig(4 // ranks, ranks, 1, "1f1b", 1, 1) for ranks in (1, 2))
    best = SimpleNamespace(choice=alone, step_seconds=1.0, lacking_bytes=0.0, bubble=0.0)
    other = SimpleNamespace(choice=piped, step_seconds=seconds, lacking_bytes=0.0, bubble=bubble)
    found: Any = SimpleNamespace(best=[best], rejected=[other], equal=0.005)
    assert _pipeline_note(found, found.best[0]).endswith(said)


def test_times_beyond_the_measured_sizes_are_said_to_be_extended(tmp_path: Path) -> None:
    for size, said in ((4, True), (1, False)):
        file = str(tmp_path / f"{size}.json")
        replace(PROFILE, rows=size).save(file)
        text = output(
            "plan", "--devices", "4", "--global-batch-size", "4", "--profile", file, "--search-time", "0", columns=400
        )
        assert ("but the profile only of 4: times are extrapolated" in text) is said


def test_the_times_of_the_runtime_and_of_the_optimizer_count(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    replace(PROFILE, action_seconds=5e-4, optimizer_byte_seconds=1e-9).save(file)
    for options, seconds in (((), 5e-4), (("--action-overhead", "0"), 0.0)):
        found = as_json(*JOB, "--profile", str(file), *options)["plans"]
        cluster = Cluster(4, link=LinkCost(5e-6, 12.5e9), action_seconds=seconds, optimizer_byte_seconds=1e-9)
        best = make_plans(Sizes({1: PROFILE}), cluster, 16).best
        assert [one["step_seconds"] for one in found] == [one.step_seconds for one in best]
        assert best[0].optimizer_seconds > 0


def test_what_a_plan_must_have(profile: str) -> None:
    odd = ("--devices", "7", "--global-batch-size", "31", "--schedule", "dualpipe")
    assert "dualpipe needs an even number of ranks" in refusal(*JOB, *odd, "--profile", profile)
    asked = ("--profile", profile, "--pipeline", "4", "--microbatches", "8", "--schedule", "gpipe,1f1b")
    plans = as_json(*JOB, *asked)["plans"]
    assert {(one["choice"]["ranks"], one["choice"]["microbatches"]) for one in plans} == {(4, 8)}
    assert {one["choice"]["replicas"] for one in as_json(*JOB, "--profile", profile, "--replicas", "2")["plans"]} == {2}
    assert "--replicas 3: 4 devices cannot be divided by 3" in refusal(*JOB, "--profile", profile, "--replicas", "3")


def test_what_only_a_transformer_on_paper_takes(profile: str) -> None:
    said = refusal(*JOB, "--profile", profile, "--tensor-parallel", "2")
    assert said == "--tensor-parallel 2 requires --transformer; layers of a measured model stay whole; omit it"
    for option, value in (("--seq-length", "2048"), ("--optimizer-shards", "dp")):
        said = refusal(*JOB, "--profile", profile, option, value)
        assert said == f"{option} {value} requires --transformer; omit it"


def test_each_change_that_is_named_does_fit(profile: str) -> None:
    job = ("plan", "--global-batch-size", "16", "--profile", profile, "--search-time", "0", "--schedule", "1f1b")
    done = penstock(*job, "--devices", "2", "--memory", "600mib", columns=400)
    assert done.exit_code == 1
    assert done.stdout.startswith("Nothing fits into 629.1 MB per device.")
    assert " for parameters, gradients and the optimizer, and " in done.stdout
    told = done.stdout.partition("changes fits:")[2]
    devices = told.partition("--devices ")[2].partition(":")[0]
    assert penstock(*job, "--devices", devices, "--memory", "600mib").exit_code == 0
    assert penstock(*job, "--devices", str(int(devices) - 1), "--memory", "600mib").exit_code == 1
    memory = told.partition("--memory ")[2].partition(":")[0]
    assert penstock(*job, "--devices", "2", "--memory", memory).exit_code == 0
    less = f"{int(memory.removesuffix('MiB')) - 1}MiB"
    assert penstock(*job, "--devices", "2", "--memory", less).exit_code == 1


def test_offloading_is_offered_at_a_rate_that_is_named_with_the_time_of_a_step(tmp_path: Path) -> None:
    """Recomputation keeps what stages receive, which is nearly all that these keep."""
    file = tmp_path / "profile.json"
    replace(PROFILE, units=tuple(replace(unit, boundary_bytes=50_000_000) for unit in UNITS)).save(file)
    job = ("plan", "--global-batch-size", "16", "--profile", str(file), "--search-time", "0", "--devices", "2")
    job += ("--schedule", "gpipe", "--microbatches", "16", "--memory", "1500mib")
    done = penstock(*job, columns=400)
    option, rate, text = done.stdout.partition("changes fits:")[2].splitlines()[-3].split('"')[:3]
    assert (option.strip(), text.partition(":")[0]) == ("--offload-link", " (PCIe 4.0, 16 lanes per device)")
    seconds = as_json(*job, "--offload-link", rate)["plans"][0]["step_seconds"]
    assert text.endswith(f", {seconds:.4g} s/step")


def test_devices_of_several_kinds(profile: str) -> None:
    kinds = ("--devices", "2xold,2xnew", "--memory", "old=1gib,new=4gib", "--speed", "old=0.5,new=1")
    job = ("plan", *kinds, "--global-batch-size", "16", "--profile", profile, "--search-time", "0")
    text = output(*job, columns=80)
    assert max(map(len, text.splitlines())) <= 80
    ranks = text.partition("Rank layout of the best plan")[2].partition("Rejected plans")[0]
    assert {"1.1 GB", "4.3 GB"} >= {line[-6:] for line in ranks.splitlines()[3:] if line.strip()}
    found = as_json(*job)["plans"][0]
    assert sorted(found["limit_bytes"])[0] == 2**30
    assert "(old)" in ranks
    assert "(new)" in ranks


def test_one_device_is_told_that_a_pipeline_is_pointless(profile: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    text = output("plan", "--devices", "1", "--global-batch-size", "16", "--profile", profile, "--out", str(file))
    assert "On one device a pipeline is pointless" in text
    assert read_plan(file).choice.devices == 1


def test_links_that_a_profile_measured_count_unless_an_option_says_otherwise(tmp_path: Path) -> None:
    file = str(tmp_path / "links.json")
    replace(PROFILE, links=(MeasuredLink(0, 1, 1e-3, 1e9), MeasuredLink(1, 0, 1e-3, 2e9))).save(file)
    job = ("plan", "--devices", "4", "--global-batch-size", "16", "--profile", file, "--search-time", "0")
    for options, link in (((), LinkCost(1e-3, 1e9)), (("--link", "100gbit delay 5us"), LinkCost(5e-6, 12.5e9))):
        planned = make_plans(Sizes({1: PROFILE}), Cluster(4, link=link), 16)
        found = as_json(*job, *options)["plans"]
        assert [one["step_seconds"] for one in found] == [one.step_seconds for one in planned.best]
    PROFILE.save(file)
    assert "Links were not measured: assuming 30 us latency and 5 GB/s" in output(*job, columns=200)


TARGET = """
import torch
from torch import nn

def make():
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*layers), (torch.randn(16, 64),), torch.randn(16, 64), nn.functional.mse_loss
"""


@pytest.mark.parametrize(
    ("options", "on", "ranks"),
    [
        ((), "cpu", [2]),
        (("--devices-per-host", "1"), "cpu", [1]),
        (("--devices-per-host", "8"), "cpu", [2]),
        ((), "meta", []),
    ],
    ids=["one host", "several hosts", "a host with room", "no CPU"],
)
def test_a_cpu_measures_with_the_threads_of_a_rank(
    options: tuple[str, ...], on: str, ranks: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.py").write_text(TARGET.replace("(16, 64)", f"(16, 64, device={on!r})"))
    counted: list[int] = []
    monkeypatch.setattr("penstock.cli.plan.compute_as_ranks", counted.append)
    monkeypatch.setattr("penstock.cli.plan.profile_target", lambda *_, **__: PROFILE)
    job = f"plan {tmp_path / 'model.py'}:make --devices 2 --global-batch-size 16 --search-time 0".split()
    penstock(*job, *options)
    assert counted == ranks


@pytest.mark.long
def test_a_target_is_measured_planned_and_run(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(TARGET)
    target, file = f"{tmp_path / 'model.py'}:make", tmp_path / "plan.json"
    text = output("plan", target, "--devices", "2", "--global-batch-size", "16", "--out", str(file), columns=200)
    best = text.partition("\nschedule ")[2].splitlines()[1]
    assert re.split(" {2,}", best)[1:3] in (["1", "2"], ["2", "1"])  # names of equal orders are one cell
    found = read_plan(file)
    names = dict(nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))).named_modules())
    assert set(found.cuts) <= names.keys()
    # Two profiles were made, of 16 rows and 2, so that microbatches of all sizes were weighed.
    rows = {
        one["choice"]["rows"] for one in as_json("plan", target, "--devices", "2", "--global-batch-size", "16")["lost"]
    }
    assert rows >= {1, 2, 4, 8}


def test_a_target_or_profiles_of_it(profile: str, tmp_path: Path) -> None:
    assert "pass a TARGET to measure, or --profile" in refusal(*JOB)
    (tmp_path / "model.py").write_text(TARGET)
    target = f"{tmp_path / 'model.py'}:make"
    assert "profile.json" in refusal(*JOB, target, "--profile", profile)  # of another model
    shapes = {f"{n}.0.{name}": shape for n in range(4) for name, shape in (("weight", (64, 64)), ("bias", (64,)))}
    replace(PROFILE, parameters=shapes).save(tmp_path / "own.json")
    assert as_json(*JOB, target, "--profile", str(tmp_path / "own.json"))["plans"]


def test_plans_that_are_alike_share_a_row_and_other_ranks_are_told(profile: str) -> None:
    text = output(
        "plan", "--profile", profile, "--devices", "2", "--global-batch-size", "1", "--search-time", "0", columns=200
    )
    table = text.partition("\nschedule ")[2].partition("\n\n")[0]
    assert any(line.startswith("zb-h1 = zb-h2 ") for line in table.splitlines())
    heavy = [replace(unit, forward_seconds=5e-3 if unit.name == "h.7" else 1e-3, gradient_bytes=0) for unit in UNITS]
    replace(PROFILE, units=tuple(heavy)).save(profile)
    job = ("plan", "--profile", profile, "--devices", "2", "--global-batch-size", "8", "--search-time", "0")
    text = output(*job, "--link", "1tbit delay 1us", columns=200)
    assert "1f1b: dp=2 pp=1" in text
    assert (
        "1f1b: dp=1 pp=2, 8 microbatches of 1" in text.partition("Rejected plans")[2]
    )  # chimera and dualpipe, dp 2 in disguise, are above


def test_kinds_are_named_and_a_last_host_with_fewer_devices(profile: str) -> None:
    job = ("plan", "--profile", profile, "--global-batch-size", "16", "--search-time", "0", "--schedule", "1f1b")
    text = output(*job, "--devices", "4", "--devices-per-host", "3", columns=200)
    assert "note: the last of 2 hosts has 1 of 3 devices" in text
    for options, message in {
        ("--memory", "old=1GiB"): "--memory 'old=1GiB': 'new' is missing; pass old=...,new=...",
        ("--speed", "older=2"): "there is no 'older', --devices has 'old', 'new'",
    }.items():
        assert message in refusal(*job, "--devices", "2xold,2xnew", *options)


NOT_HERE = """
import torch
from torch import nn

def make():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(16)))
    return model, (torch.randn(16, 64),), None, None
"""


def test_a_named_device_gives_memory_and_links_and_estimates(tmp_path: Path) -> None:
    (tmp_path / "cases.py").write_text(NOT_HERE)
    job = ("plan", f"{tmp_path}/cases.py:make", "--devices", "16", "--global-batch-size", "16", "--schedule", "1f1b")
    lines = output(*job, "--device", "h100", columns=200).splitlines()
    assert lines[0] == (
        "note: NVIDIA H100 SXM 80GB; memory 80.0 GB; link 3600gbit delay 5us; "
        "8 devices per host, 400gbit delay 10us between hosts"
    )
    assert lines[1].startswith("note: not measured: an estimate from NVIDIA H100 SXM 80GB's specifications: ")
    ours = output(*job, "--device", "h100", "--memory", "40GiB", "--link", "100gbit", columns=200).splitlines()[0]
    assert ours == "note: NVIDIA H100 SXM 80GB; memory 40GiB; link 100gbit"
    assert as_json(*job, "--device", "h100")["notes"] == [lines[1].removeprefix("note: ")]


def test_a_device_that_leaves_something_open_is_refused(profile: str) -> None:
    job = (*JOB[:5], "--profile", profile)
    assert "the link between devices of a host is unknown; pass --link" in refusal(*job, "--device", "trainium2")
    assert "the profile is of cpu (cpu), not of NVIDIA H100" in refusal(*job, "--device", "h100")
    assert "'h10': not known; did you mean 'h100'" in refusal(*job, "--device", "h10")
    assert "--calibrate has no effect without --device" in refusal(*job, "--calibrate", profile)
    assert as_json(*job)["notes"] == []
