"""`penstock run --hosts`: ranks on hosts, the end of each job, what is said of the network, and nothing left behind."""

import json
import os
import pwd
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import has_ended, penstock, refusal, stay

from penstock.distributed.launch.processes import Outcome
from penstock.network import namespaces, nodes, reaper
from penstock.network.namespaces import why_not
from scaffolding.patient import TEST_SECONDS, end_of, finished, started

pytestmark = pytest.mark.timeout(TEST_SECONDS)

_MISSING = why_not()
hosts_needed = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))

SHOW = """
import glob, json, os, socket, sys, time
rank = os.environ["RANK"]
names = ("WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
found = [sys.argv[1:], [os.environ[name] for name in names], [name for _, name in socket.if_nameindex()]]
with open(os.environ["PENSTOCK_STEP_FILE"], "wb") as file:
    file.write((7).to_bytes(8, "little"))
with open(f"hidden.{rank}", "w") as file:
    json.dump(found, file)
os.write(1, f"from rank {rank}\\n".encode())
os.rename(f"hidden.{rank}", f"shown.{rank}")
while len(glob.glob("shown.*")) < 4:
    time.sleep(0.02)
sys.exit(3 if rank == "2" else 0)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "stay.py").write_text(stay(deaf=0))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job_of(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return started(sys.executable, "-m", "penstock", "run", *arguments, folder=folder)


@pytest.fixture
def staying(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A job on two hosts that stays, and the ids of its ranks and of the processes that they started."""
    with job_of(folder, "--ranks", "2", "--hosts", "2", "stay.py") as process:
        assert process.stdout
        pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split()]
        yield process, pids
        process.kill()


def left_of(launcher: int) -> list[str]:
    """The namespaces that a process has made."""
    return [name for name in reaper.list_namespaces() if name.startswith(f"penstock-{launcher}-")]


@hosts_needed
@pytest.mark.distributed
def test_ranks_are_spread_over_hosts_and_the_first_failure_is_the_jobs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    soon = replace(nodes.PATIENCE, failed_seconds=1.0)  # how long the other host's agent is waited for
    monkeypatch.setitem(nodes.run.__kwdefaults__, "patience", soon)
    options = ("--hosts", "2", "--threads", "3", "--link", "100mbit")
    done = penstock("run", "-n", "4", *options, "show.py", "--lr", "1")
    assert done.exit_code == 3, done.output
    assert sorted(capfd.readouterr().out.splitlines()) == [f"from rank {rank}" for rank in range(4)]
    for rank in range(4):
        arguments, (world, host, local, threads, interface), devices = json.loads(
            (folder / f"shown.{rank}").read_text()
        )
        assert arguments == ["--lr", "1"]
        assert (world, host, local, threads) == ("4", str(rank // 2), str(rank % 2), "3")
        assert sorted(devices) == sorted(["lo", interface])
    assert done.stderr.splitlines() == [
        "penstock: network    2 hosts, 100mbit, by the kernel's tbf",
        "penstock: rank 2 ended with exit status 3",
    ]
    assert left_of(os.getpid()) == []


@pytest.mark.long  # distributed/launch/test_named_ends.py
@hosts_needed
@pytest.mark.distributed
def test_a_script_runs_as_the_user_that_is_named() -> None:
    code = (
        "from importlib.metadata import version; from penstock.distributed.launch.user import User; "
        "User('nobody'); version('torch')"
    )
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for program in (sys.executable, "/usr/bin/python3"):  # the tests' own may be in root's home
            if finished(program, "-c", code, folder=folder, **environment).returncode == 0:
                break
        else:
            pytest.skip("no Python that has torch can be read by another user")
        (folder / "train.py").write_text(
            "import os, pathlib, time\n"
            "os.write(1, f'{os.getresuid()} {os.getgroups()}\\n'.encode())\n"
            "pathlib.Path(f'rank{os.environ[\"RANK\"]}').touch()\n"
            "while not pathlib.Path('rank0').exists():\n"  # rank 1 ends rank 0
            "    time.sleep(0.01)\n"
            "raise SystemExit(3 * (os.environ['RANK'] == '1'))\n"
        )
        account = pwd.getpwnam("nobody")
        os.chown(folder, account.pw_uid, account.pw_gid)
        options = ("-n", "2", "--hosts", "1", "--user", "nobody")
        done = finished(program, "-m", "penstock", "run", *options, "train.py", folder=folder, **environment)
        assert done.returncode == 3, done.stderr
        assert done.stdout == f"{(account.pw_uid,) * 3} {[account.pw_gid]}\n" * 2
        assert [(folder / f"rank{rank}").stat().st_uid for rank in range(2)] == [account.pw_uid] * 2
        assert done.stderr.splitlines()[-1] == "penstock: rank 1 ended with exit status 3"


@hosts_needed
def test_a_script_is_said_to_run_as_root_under_sudo(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "run", lambda *_, **__: Outcome(0))
    monkeypatch.setenv("SUDO_USER", "ada")
    done = penstock("run", "-n", "1", "--hosts", "1", "show.py")
    said = "penstock: show.py runs as root, not as ada; pass --user ada to change that"
    assert done.stderr.splitlines()[0] == said


@hosts_needed
@pytest.mark.distributed
@pytest.mark.long
def test_death_of_an_agent_ends_all_hosts_and_is_named(staying: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, pids = staying
    agent = int(Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
    host = Path(f"/proc/{pids[0]}/environ").read_bytes().split(b"\0GROUP_RANK=")[1][:1].decode()
    os.kill(agent, signal.SIGKILL)
    done = end_of(process)
    assert done.returncode == 128 + signal.SIGKILL
    agent_is = f"the agent of host {host} (ranks {host} to {host})"
    assert done.stderr.splitlines()[-1] == f"penstock: {agent_is} was killed by SIGKILL"
    assert all(has_ended(pid) for pid in pids)
    assert left_of(process.pid) == []


@hosts_needed
def test_shaper_that_cannot_is_refused_before_anything_is_made(folder: Path) -> None:
    options = ("--hosts", "2", "--link", "1mbit loss 1%", "--shaper", "tbf")
    assert "tbf limits only the rate: 1mbit loss 1%" in refusal("run", "-n", "2", *options, "show.py")
    assert left_of(os.getpid()) == []


def test_without_root_it_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    says = refusal("run", "-n", "2", "--hosts", "2", "--link", "1mbit", "show.py")
    assert "this is user 1000: run it with sudo. Without --hosts" in says
