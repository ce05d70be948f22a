"""`penstock plan --transformer`: a plan from a model's numbers and a device's specifications."""

import pytest
from command_line import as_json, output, penstock, refusal

from penstock.plan.transformer import transformer

JOB = ("plan", "--transformer", "llama3-70b", "--device", "h100", "--seq-length", "4096", "--global-batch-size", "64")
GROUPS = (*JOB, "--devices", "64", "--tensor-parallel", "8", "--optimizer-shards", "4", "--schedule", "1f1b")


def test_groups_of_devices_are_planned_as_one_each() -> None:
    best = as_json(*GROUPS)["plans"][0]
    choice = best["choice"]
    assert choice["replicas"] * choice["ranks"] == 8
    assert choice["replicas"] * choice["microbatches"] * choice["rows"] == 64
    assert {*best["limit_bytes"]} == {80e9}
    more = as_json(*GROUPS, "--memory", "96000000000")["plans"][0]
    assert {*more["limit_bytes"]} == {96e9}, "also where the device's specifications state less"
    assert all(name.startswith("layers.") for name in best["cuts"])


def test_the_estimate_says_what_it_rests_on() -> None:
    plans, text = as_json(*GROUPS)["plans"], output(*GROUPS, columns=200)
    assert "from NVIDIA H100 SXM 80GB's specifications: 70% of the peak" in text
    assert "70,553,706,496 parameters. dp and pp count groups of 8 devices." in text
    flops = transformer("llama3-70b").flops(64 * 4096, 4096)
    assert f"{flops / plans[0]['step_seconds'] / 64 / 1e12:.0f} TFLOP/s per device" in text


def test_what_would_fit_counts_devices_not_groups() -> None:
    job = "plan --transformer llama3-70b --device h100 --global-batch-size 128 --schedule 1f1b"
    done = penstock(*job.split(), "--devices", "16", "--tensor-parallel", "8", columns=400)
    assert done.exit_code == 1
    devices = int(done.stdout.partition("--devices ")[2].partition(":")[0])
    assert not devices % 8


def test_as_many_share_the_optimizer_as_there_are_replicas() -> None:
    """A plan with so many replicas needs what it needs if that number is given."""
    job = (*GROUPS[:-4], "--schedule", "1f1b", "--memory", "800GB")
    best = as_json(*job, "--optimizer-shards", "dp")["plans"][0]
    replicas = best["choice"]["replicas"]
    assert replicas > 1
    fixed = as_json(*job, "--optimizer-shards", str(replicas))["plans"]
    same = next(plan for plan in fixed if plan["choice"] == best["choice"])
    assert same["memory_bytes"] == pytest.approx(best["memory_bytes"], rel=1e-6)
    assert same["optimizer_seconds"] == pytest.approx(best["optimizer_seconds"], rel=1e-6)
    assert "'many': expected a number, or dp" in refusal(*job, "--optimizer-shards", "many")


def test_more_shards_than_replicas_are_told() -> None:
    replicas = as_json(*GROUPS[:-4], "--optimizer-shards", "64", "--schedule", "1f1b")["plans"][0]["choice"]["replicas"]
    text = output(*GROUPS[:-4], "--optimizer-shards", "64", "--schedule", "1f1b", columns=200)
    assert f"Pass --optimizer-shards {replicas} or fewer." in text
