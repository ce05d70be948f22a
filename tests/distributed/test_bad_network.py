"""Loss, delay, reordering, stalls and broken frames never change a gradient, only time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from bad_network_job import LOST_AFTER, STEPS, Trained, demonstrate, train

from penstock.testing import BadNetwork
from penstock.trace.runs import read_run
from scaffolding.ranks import Ranks

JOB = Path(__file__).with_name("bad_network_job.py")
SCHEDULES = ("1f1b", "zb-h1")
ALL_AT_ONCE = (
    "50mbit delay 1ms 500us 25% distribution normal loss 2% duplicate 2% corrupt 2% reorder 3% stall 100ms every 1s"
)

MakesNetworks = Callable[..., AbstractContextManager[BadNetwork]]

pytestmark = pytest.mark.distributed


@pytest.fixture(autouse=True)
def _models_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By jobs, too: pytest finds them by its own settings."""
    folders = [str(JOB.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(folders))


def trained_over(
    network: BadNetwork, ranks: int, folder: Path, schedules: Sequence[str] = SCHEDULES
) -> list[dict[str, Trained]]:
    """By rank, and there by schedule."""
    network.run([str(JOB), str(folder), *schedules], ranks=ranks, timeout=250).check()
    return [torch.load(folder / f"trained.{rank}") for rank in range(ranks)]


def assert_same_bits(found: Sequence[dict[str, Trained]], pool: Ranks) -> None:
    """What ranks have trained, against the same ranks over loopback and shared memory."""
    for schedule in found[0]:
        for rank, expected in enumerate(pool.run(train, schedule)):
            of_rank = found[rank][schedule]
            assert of_rank.keys() == expected.keys()
            assert sum("gradient" in name for name in of_rank) > STEPS
            different = [name for name, value in expected.items() if not torch.equal(value, of_rank[name])]
            assert not different, f"rank {rank}, {schedule}: {different}"


def counted(network: BadNetwork, name: str) -> int:
    """How often a thing happened to a frame, on any link."""
    return sum(link[way][name] for link in network.told()["links"] for way in ("up", "down"))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_everything_at_once_changes_no_bit(
    bad_network: MakesNetworks, request: pytest.FixtureRequest, tmp_path: Path, ranks: int
) -> None:
    with bad_network(2, ALL_AT_ONCE, seed=1) as network:
        found = trained_over(network, ranks, tmp_path, SCHEDULES[1:])
        happened = {name: counted(network, name) for name in ("lost", "duplicated", "corrupted", "reordered")}
    assert all(happened.values()), happened
    assert_same_bits(found, request.getfixturevalue(f"ranks{ranks}"))


@pytest.mark.long
def test_silence_that_is_allowed_for_changes_no_bit(
    bad_network: MakesNetworks, ranks2: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaves.toml").write_text('[[event]]\nat = "step 1"\nhost = 1\ngone = true\nfor = "8s"\n')
    with bad_network(2, "100mbit", scenario=tmp_path / "leaves.toml") as network:
        ended = network.run([str(JOB), str(tmp_path), *SCHEDULES], ranks=2, timeout=250)
        assert ended.status
        assert "no sign of life for" in ended.said
        monkeypatch.setenv(LOST_AFTER, "30")
        found = trained_over(network, 2, tmp_path)
        assert counted(network, "host_gone")
    assert_same_bits(found, ranks2)


def losses(folder: Path) -> list[float | None]:
    """Of the demonstration's steps."""
    return [step.loss for step in read_run(folder).steps()]


@pytest.mark.long
@pytest.mark.usefixtures("bad_network")  # skips where there can be none
def test_demo_over_one_percent_loss_learns_the_same_bits(tmp_path: Path, ranks2: Ranks) -> None:
    network = ["--hosts", "2", "--link", "100mbit delay 5ms loss 1%", "--link-for", "1=50mbit loss 1%"]
    settings = ["--steps", "2", "--microbatches", "4"]
    bad, good = tmp_path / "bad", tmp_path / "good"
    command = ["run", "--ranks", "2", "--threads", "1", *network, "-m", "penstock.demo", *settings, "--out", str(bad)]
    done = subprocess.run(
        [sys.executable, "-m", "penstock", *command], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "of 52 gradients are bitwise identical" in done.stdout
    assert "network    2 hosts, 100mbit delay 5ms loss 1%, by a switch in user space" in done.stderr
    assert "host 1     link 50mbit loss 1%" in done.stderr
    assert " lost" in done.stderr
    ranks2.run(demonstrate, [*settings, "--out", str(good)])
    assert len(losses(bad)) == 2
    assert losses(bad) == losses(good)
