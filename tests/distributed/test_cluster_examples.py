"""The examples for Slurm and Kubernetes train on two machines what one process trains.

Slurm and Kubernetes are played: the one's commands by scripts that start a process on each machine, the other by host
names and the command of its container.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import yaml

from penstock.testing import BadNetwork

ROOT = Path(__file__).parents[2]
SCRIPT = ("examples/train_resumable.py", "--steps=20")
SECONDS = 200.0
NAMES = ("node-a.cluster", "node-b.cluster")
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

MakesNetworks = Callable[..., AbstractContextManager[BadNetwork]]

pytestmark = [pytest.mark.distributed, pytest.mark.long]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one process prints."""
    command = [sys.executable, *SCRIPT, f"--folder={tmp_path_factory.mktemp('alone')}"]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS, check=True
    )
    assert done.stdout.splitlines()[-1].startswith("step  20  loss")
    return done.stdout.splitlines()


def steps(printed: str) -> list[str]:
    return [line for line in printed.splitlines() if line.startswith("step ")]


ENTER = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec env -u GLOO_SOCKET_IFNAME "$@"'


def enter(network: BadNetwork, folder: Path, names: Sequence[str] = NAMES) -> list[list[str]]:
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
        "scontrol": f"#!/bin/sh\n[ \"$*\" = 'show hostnames node-[a-b]' ] && printf '%s\\n' {' '.join(NAMES)}\n",
        "srun": "#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\n" + starts + "\nwait -n && wait -n\n",
    }
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    given = {"JOB_ID": "7", "JOB_NODELIST": "node-[a-b]", "JOB_NUM_NODES": "2", "CPUS_PER_TASK": "2"}
    path = f"{folder}:{ENVIRONMENT['PATH']}"
    return {**ENVIRONMENT, "PATH": path, **{f"SLURM_{name}": value for name, value in given.items()}}


def test_slurm(bad_network: MakesNetworks, tmp_path: Path, alone: list[str]) -> None:
    with bad_network(2, None) as network:
        environment = play_slurm(enter(network, tmp_path), tmp_path)
        command = ["bash", "examples/slurm/train.sbatch", *SCRIPT, f"--folder={tmp_path}/saved"]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    assert done.returncode == 0, done.stderr
    assert steps(done.stdout) == alone


def test_kubernetes(bad_network: MakesNetworks, tmp_path: Path, alone: list[str]) -> None:
    service, job = yaml.safe_load_all((ROOT / "examples/kubernetes/job.yaml").read_text())
    name, pods = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert service["metadata"]["name"] == pods["subdomain"]
    (container,) = pods["containers"]
    assert container["volumeMounts"] == [{"name": pods["volumes"][0]["name"], "mountPath": "/checkpoints"}]
    assert container["args"][-3:] == [*SCRIPT, "--folder=/checkpoints"]
    environment = {**ENVIRONMENT, **{variable["name"]: variable["value"] for variable in container["env"]}}
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
