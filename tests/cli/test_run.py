"""`penstock run` hands on arguments, exit status and signals, says errors in one line, and leaves no process behind."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import has_ended, refusal, stay
from command_line import penstock as in_process

from penstock import ArgumentError
from penstock.plan import ParallelConfig, Plan
from scaffolding.patient import PENSTOCK, TEST_SECONDS, finished

pytestmark = pytest.mark.timeout(TEST_SECONDS)

SHOW = """
import json, os, sys, time
rank = os.environ["RANK"]
with open(f"{rank}.json", "w") as file:
    told = (os.environ.get(name) for name in ("WORLD_SIZE", "OMP_NUM_THREADS", "PENSTOCK_PLAN"))
    json.dump([sys.argv[1:], *told], file)
os.replace(f"{rank}.json", f"shown.{rank}")
if "fail" in sys.argv and rank == "1":
    while not os.path.exists("shown.0"):
        time.sleep(0.01)
    sys.exit(3)
"""

STOP = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(1)
os.write(1, f"{time.monotonic()}".encode())
sys.exit(3)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "stop.py").write_text(STOP)
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "stay.py").write_text(stay(deaf=1))
    return tmp_path


def penstock(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return finished(*PENSTOCK, *arguments, folder=folder, **{"OMP_NUM_THREADS": None, **environment})


@pytest.fixture
def staying(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A job of two ranks that stay, and the ids of its ranks and of the processes that they started."""
    command, temporary = [*PENSTOCK, "run", "--ranks", "2", "stay.py"], folder / "tmp"
    temporary.mkdir()
    to_us: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=folder, env={**os.environ, "TMPDIR": str(temporary)}, **to_us) as process:
        assert process.stdout
        pids = [int(pid) for _ in range(2) for pid in process.stdout.readline().split()]
        yield process, pids
        process.kill()
        for pid in pids:
            if not has_ended(pid, seconds=0):
                os.kill(pid, signal.SIGKILL)


def agent_of(launcher: int) -> int:
    return int(Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()[0])


@pytest.mark.distributed
def test_arguments_reach_every_rank_and_the_threads_are_shared_out(folder: Path) -> None:
    given = ["--ranks", "7", "-m", "--unknown=1", "--run", "x", "--log", "--", "y"]
    (folder / "tmp").mkdir()
    done = penstock(folder, "run", "--ranks", "2", "show.py", *given, TMPDIR=str(folder / "tmp"))
    assert (done.returncode, done.stderr) == (0, "")
    assert not any((folder / "tmp").iterdir()), "torchrun would leave a folder for logs"
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for rank in range(2):
        shown = json.loads((folder / f"shown.{rank}").read_text())
        assert shown == [given, "2", threads, None]


def test_a_plan_a_module_with_chosen_threads_and_its_exit_status(folder: Path) -> None:
    plan = Plan(ParallelConfig(1, 2, 1, "1f1b", 4, 2), ("4",), (), (1.0, 1.0), 9.0, 0.0, {}, (1.0, 1.0), (2.0, 2.0))
    plan.save(folder / "plan.json")
    options = ("--plan", "plan.json", "--threads", "5", "-m", "show", "fail", "--lr", "1")
    done = penstock(folder, "run", *options, OMP_NUM_THREADS="9")
    assert done.returncode == 3
    assert done.stderr.splitlines() == ["penstock: rank 1 ended with exit status 3"]
    shown = json.loads((folder / "shown.0").read_text())
    assert shown == [["fail", "--lr", "1"], "2", "5", str(folder / "plan.json")]
    says = refusal("run", "--plan", str(folder / "plan.json"), "--ranks", "3", "told.py")
    assert says.endswith("plan.json is for 2 processes; omit --ranks")


@pytest.mark.distributed
def test_killed_rank_is_named_and_what_it_started_is_ended(folder: Path) -> None:
    done = penstock(folder, "run", "--ranks", "2", "stay.py", "die")
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr.splitlines()[-1] == "penstock: rank 1 was killed by SIGKILL"
    assert all(has_ended(int(pid), seconds=5) for pid in done.stdout.split())


@pytest.mark.distributed
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_signal_ends_everything(staying: tuple[subprocess.Popen[str], list[int]], number: signal.Signals) -> None:
    process, pids = staying
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert process.stderr
    what = "Ctrl-C" if number == signal.SIGINT else number.name
    assert process.stderr.read() == f"penstock: stopped by {what}; no process is left running\n"
    assert len(pids) == 4
    assert all(has_ended(pid, seconds=5) for pid in pids)


@pytest.mark.distributed
def test_a_stopped_rank_keeps_nobody_waiting(folder: Path) -> None:
    """Torchrun waits half a minute for a rank that heeds no signal."""
    done = penstock(folder, "run", "--ranks", "2", "stop.py")
    ended = time.monotonic()
    assert (done.returncode, done.stderr.splitlines()[-1]) == (3, "penstock: rank 0 ended with exit status 3")
    assert ended - float(done.stdout) < 15


@pytest.mark.distributed
def test_death_of_the_agent_ends_everything(staying: tuple[subprocess.Popen[str], list[int]]) -> None:
    process, pids = staying
    os.kill(agent_of(process.pid), signal.SIGKILL)
    assert process.wait(60) == 128 + signal.SIGKILL
    assert process.stderr
    assert process.stderr.read() == "penstock: the agent of ranks 0 to 1 was killed by SIGKILL\n"
    assert all(has_ended(pid, seconds=5) for pid in pids)


@pytest.mark.distributed
def test_death_of_the_launcher_ends_everything(staying: tuple[subprocess.Popen[str], list[int]], folder: Path) -> None:
    process, pids = staying
    process.kill()
    process.wait(60)
    assert all(has_ended(pid, seconds=30) for pid in pids)
    assert not any((folder / "tmp").iterdir()), "what it kept there is gone with it"


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = ("run", "--ranks", "0", "show.py")
    assert isinstance(in_process("--debug", *wrong).exception, ArgumentError)
    monkeypatch.setenv("PENSTOCK_DEBUG", "1")
    assert isinstance(in_process(*wrong).exception, ArgumentError)
