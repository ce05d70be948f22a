"""Loss, delay, reordering, stalls and broken frames never change a gradient, only time."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from bad_network_job import LOST_AFTER, STEPS, Trained, demonstrate, train

from penstock._base.errors import ArgumentError
from penstock.network import nodes, reaper
from penstock.testing import BadNetwork
from penstock.testing import bad_network as make
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


# -- `penstock.testing.bad_network`: jobs end as they should and say so; a machine that cannot is skipped -------------


SCRIPT = """
import os, sys, time
rank = os.environ["RANK"]
print("rank", rank, *sys.argv[1:], file=sys.stderr if rank == "1" else sys.stdout, flush=True)
if "stay" in sys.argv:
    time.sleep(600)
sys.exit(4 if rank == "1" and "fail" in sys.argv else 0)
"""

USER = """
pytest_plugins = ["penstock.testing.fixtures"]

def test_mine(bad_network):
    with bad_network(2, "10mbit"):
        pass
"""


def test_jobs_run_one_after_the_other_and_their_output_is_kept(
    bad_network: MakesNetworks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon = replace(nodes.PATIENCE, failed_seconds=1.0)  # how long the other host's agent is waited for
    monkeypatch.setitem(nodes.run.__kwdefaults__, "patience", soon)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with bad_network(2, "10mbit delay 1ms", host_links={1: "5mbit"}, background=["1mbit to 0"]) as network:
        done = network.run([str(script), "good"]).check()
        assert (done.status, done.said, done.outputs) == (0, "", ("rank 0 good\n", "rank 1 good\n"))
        assert done.seconds > 0
        told = network.told()
        assert told["frames"] > 0
        assert told["links"][0]["down"]["background_bytes"] > 0 == told["links"][1]["down"]["background_bytes"]
        failed = network.run([str(script), "fail"])
        assert failed.status == 4
        with pytest.raises(AssertionError, match=r"rank 1 ended with exit status 4\n(.*\n)*rank 1 fail"):
            failed.check()
        name = network.machines.id
    assert reaper.list_namespaces(name) == []


def test_job_that_takes_too_long_is_ended(bad_network: MakesNetworks, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with bad_network(1, None) as network:
        assert network.told() == {}
        with pytest.raises(TimeoutError, match=r"script\.py stay took more than 3 s"):
            network.run([str(script), "stay"], ranks=1, timeout=3)
        deadline = time.monotonic() + 30  # one that was killed takes its time to go on a crowded machine
        while left := list(reaper._processes(network.machines.id, network.machines.hosts, [])):
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


def test_what_cannot_be_run_is_refused(bad_network: MakesNetworks, tmp_path: Path) -> None:
    with bad_network(2, None) as network:
        with pytest.raises(ArgumentError, match=r"no script 'nothing\.py'"):
            network.run("nothing.py")
        with pytest.raises(ArgumentError, match="3 ranks cannot be spread evenly over 2 hosts"):
            network.run(__file__, ranks=3)


@pytest.mark.parametrize("arguments", [{"own": {1: "1mbit"}}, {"shaper": "tbf"}])
def test_links_of_some_hosts_need_one_of_the_others(arguments: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match="pass link= as well"), make(2, None, **arguments):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("from penstock.network import namespaces; namespaces.os.geteuid = lambda: 1000", "this is user 1000"),
        (
            "import importlib.util as u; f = u.find_spec; u.find_spec = lambda n: None if n == 'numba' else f(n)",
            "numba",
        ),
    ],
)
def test_fixture_skips_with_the_reason(tmp_path: Path, program: str, says: str) -> None:
    (tmp_path / "test_of_a_user.py").write_text(f"{program}\n{USER}")
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "test_of_a_user.py"]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, check=False)
    assert "1 skipped" in done.stdout, done.stdout
    assert says in done.stdout


def test_kit_loads_no_torch() -> None:
    program = "import sys, penstock.testing.fixtures as f; f.network.bad_network; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


# -- the examples for Slurm and Kubernetes train on two machines what one process trains ------------------------------


ROOT = Path(__file__).parents[2]
RESUMABLE = ("examples/train_resumable.py", "--steps=20")
SECONDS = 200.0
NODES = ("node-a.cluster", "node-b.cluster")
ONE_THREAD = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one process prints."""
    command = [sys.executable, *RESUMABLE, f"--folder={tmp_path_factory.mktemp('alone')}"]
    done = subprocess.run(
        command, cwd=ROOT, env=ONE_THREAD, capture_output=True, text=True, timeout=SECONDS, check=True
    )
    assert done.stdout.splitlines()[-1].startswith("step  20  loss")
    return done.stdout.splitlines()


def steps(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("step ")]


ENTER = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec env -u GLOO_SOCKET_IFNAME "$@"'


def enter(network: BadNetwork, folder: Path, names: Sequence[str] = NODES) -> list[list[str]]:
    """What runs the command that follows it on each of two machines, which know each other by `names`.

    A machine's own host name is the first part of its name, which only that machine understands: as for a pod.
    """
    machines, found = network.machines, []
    known = [f"{address} {name}" for address, name in zip(machines.addresses, names, strict=True)]
    for number, name in enumerate(names):
        host, lines = name.partition(".")[0], ["127.0.0.1 localhost", *known]
        lines[1 + number] += f" {host}"
        hosts = folder / f"hosts-{number}"
        hosts.write_text("\n".join([*lines, ""]))
        found.append(machines.command(number, ["unshare", "--uts", "sh", "-c", ENTER, str(hosts), host]))
    return found


def play_slurm(machines: list[list[str]], folder: Path) -> dict[str, str]:
    """Commands that do what Slurm's do. Returns the environment of a batch script."""
    starts = "\n".join(f'{shlex.join(machine)} "$@" &' for machine in machines)
    scripts = {
        "scontrol": f"#!/bin/sh\n[ \"$*\" = 'show hostnames node-[a-b]' ] && printf '%s\\n' {' '.join(NODES)}\n",
        "srun": "#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\n" + starts + "\nwait -n && wait -n\n",
    }
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    given = {"JOB_ID": "7", "JOB_NODELIST": "node-[a-b]", "JOB_NUM_NODES": "2", "CPUS_PER_TASK": "2"}
    path = f"{folder}:{ONE_THREAD['PATH']}"
    return {**ONE_THREAD, "PATH": path, **{f"SLURM_{name}": value for name, value in given.items()}}


@pytest.mark.long
def test_slurm(bad_network: MakesNetworks, tmp_path: Path, alone: list[str]) -> None:
    with bad_network(2, None) as network:
        environment = play_slurm(enter(network, tmp_path), tmp_path)
        command = ["bash", "examples/slurm/train.sbatch", *RESUMABLE, f"--folder={tmp_path}/saved"]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    assert done.returncode == 0, done.stderr
    assert steps(done.stdout) == alone


@pytest.mark.long
def test_kubernetes(bad_network: MakesNetworks, tmp_path: Path, alone: list[str]) -> None:
    service, job = yaml.safe_load_all((ROOT / "examples/kubernetes/job.yaml").read_text())
    name, pods = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert service["metadata"]["name"] == pods["subdomain"]
    (container,) = pods["containers"]
    assert container["volumeMounts"] == [{"name": pods["volumes"][0]["name"], "mountPath": "/checkpoints"}]
    assert container["args"][-3:] == [*RESUMABLE, "--folder=/checkpoints"]
    environment = {**ONE_THREAD, **{variable["name"]: variable["value"] for variable in container["env"]}}
    command = [*container["command"], *container["args"][:-1], f"--folder={tmp_path}/saved"]
    with bad_network(2, None) as network:
        names = [f"{name}-{index}.{pods['subdomain']}" for index in range(2)]
        started = [
            subprocess.Popen([*machine, *command], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
            for machine in enter(network, tmp_path, names)
        ]
        printed = [process.communicate(timeout=SECONDS)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], printed
    assert steps("".join(printed)) == alone
