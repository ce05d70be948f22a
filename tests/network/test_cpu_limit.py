"""Slow hosts: their processes get the share of one core that was asked for, others all of it, and nothing is left."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from makers import is_gone, maker, wait_until

from penstock._base.errors import FabricError
from penstock.network import cpu_limit, reaper
from penstock.network.cpu_limit import CpuLimiter, quota
from penstock.network.machines import Machines, clean
from penstock.network.namespaces import why_not

pytestmark = pytest.mark.alone

_MISSING = why_not()
hosts_needed = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))
every_version = pytest.mark.parametrize("version", [2, 1], indirect=True)

PYTHON = [sys.executable, "-I", "-S", "-c"]
BUSY = "import os; print(os.getpid(), flush=True)\nwhile True: pass"
FAMILY = """
import os, time
pids = [os.getpid()]
for _ in range(5):
    pids.append(os.fork())
    end = time.process_time() + 0.007
    while pids[-1] == 0 or time.process_time() < end:
        pass
print(*pids, flush=True)
while True: pass
"""
FORKING = f"echo $$; while :; do {sys.executable} -I -S -c 1; done"


@pytest.fixture
def version(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The only version that is tried; the test is skipped where it does not work."""
    asked: int = request.param
    emulation = f"penstock-{os.getpid()}-{reaper.start_ticks(os.getpid())}-99999"
    try:
        CpuLimiter(emulation, {0: 0.5}, asked)
    except OSError as error:
        pytest.skip(f"cgroup v{asked}: {error}")
    reaper.remove(emulation)
    assert reaper.list_cgroups(emulation) == []
    monkeypatch.setattr(cpu_limit, "VERSIONS", (asked,))
    return asked


def _fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _used(pids: list[int]) -> float:
    """Processor seconds of processes and of the children that they have waited for."""
    ticks = sum(int(field) for pid in pids for field in _fields(pid)[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def _prefer(emulation: str, pids: Iterable[int]) -> None:
    """Gives these more than others on a machine that has much to do: only the quota shall hold them back."""
    for pid in pids:
        os.setpriority(os.PRIO_PROCESS, pid, -15)
        session = Path(f"/proc/{pid}/autogroup")  # each session is weighed as one, where the kernel is made so
        if session.exists():
            session.write_text("-15")
    for group in reaper.list_cgroups(emulation):
        for name, weight in (("cpu.shares", "100000"), ("cpu.weight", "10000")):
            if (group / name).exists():
                (group / name).write_text(weight)


@contextlib.contextmanager
def _running(line: list[str]) -> Iterator[list[int]]:
    """A command that first prints the ids of its processes: whoever starts it has the first, to wait for or to kill."""
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            pids = [int(word) for word in process.stdout.readline().split()]
            assert pids[0] == process.pid
            yield pids
        finally:
            os.killpg(process.pid, signal.SIGKILL)


# -- the share --------------------------------------------------------------------------------------------------------


@hosts_needed
@every_version
@pytest.mark.parametrize("work", [[*PYTHON, FAMILY], ["/bin/sh", "-c", FORKING]], ids=["family", "short children"])
def test_a_slow_host_gets_its_share_and_another_is_not_held_back(version: int, work: list[str]) -> None:
    share = 0.25
    with Machines(2, slow={1: share}) as made:
        assert f"cgroup v{version} " in made.describe()["held_back_by"]
        with _running(made.command(1, work)) as slow, _running(made.command(0, [*PYTHON, BUSY])) as free:
            _prefer(made.id, [*slow, *free])
            start, slow_before, free_before = time.monotonic(), _used(slow), _used(free)
            while True:
                time.sleep(0.1)
                free_used = _used(free) - free_before
                slow_used = _used(slow) - slow_before
                elapsed = time.monotonic() - start
                # Where others leave this test little, it takes a while to see that both get on.
                progress = slow_used >= 0.2 * share * elapsed and free_used > 1.3 * share * elapsed
                if (elapsed > 2 and progress) or elapsed > 60:
                    break
        assert slow_used <= 1.25 * share * elapsed
        assert progress


@hosts_needed
@every_version
def test_a_command_is_in_the_group_with_all_that_it_starts(version: int) -> None:
    with Machines(2, slow={1: 0.5}) as made:
        (group,) = reaper.list_cgroups(made.id)
        line = made.command(
            1, ["/bin/sh", "-c", 'cat /proc/self/cgroup "$1"; echo $MORE', "sh", "/dev/null"], {"MORE": "a b"}
        )
        done = subprocess.run(line, check=True, capture_output=True, text=True)
        assert f"/{group.name}\n" in done.stdout
        assert done.stdout.endswith("\na b\n")
        line = made.command(0, ["cat", "/proc/self/cgroup"])
        assert group.name not in subprocess.run(line, check=True, capture_output=True, text=True).stdout
        group.rmdir()
        line = made.command(1, ["echo", "not held back"])
        done = subprocess.run(line, check=False, capture_output=True, text=True)
        assert done.returncode != 0
        assert done.stdout == ""


# -- what is left -----------------------------------------------------------------------------------------------------


@hosts_needed
@every_version
@pytest.mark.parametrize("how", ["end", signal.SIGKILL])
def test_nothing_of_a_slow_host_outlives_the_maker(version: int, how: signal.Signals | str) -> None:
    """However it ends: test_namespaces.py."""
    with maker(*[how] if isinstance(how, str) else [], "slow", str(version)) as (process, emulation, worker, keeps):
        if isinstance(how, signal.Signals):
            assert len(reaper.list_cgroups(emulation)) == 1
            process.send_signal(how)
        process.wait(60)
        wait_until(lambda: is_gone(emulation))
        wait_until(lambda: all(reaper.start_ticks(pid) is None for pid in (worker, keeps)))


@hosts_needed
@every_version
def test_clean_removes_a_group_whose_maker_has_ended(version: int) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    emulation = f"penstock-{ended.pid}-1-5"
    CpuLimiter(emulation, {0: 0.5}, version)
    assert f"{emulation}-h0-cpu" in clean()
    assert reaper.list_cgroups(emulation) == []


@hosts_needed
@every_version
def test_a_command_that_has_joined_the_group_but_not_yet_the_host_is_ended_too(version: int) -> None:
    with Machines(2, slow={1: 0.5}) as made:
        assert made._cpu_limiter is not None
        process = subprocess.Popen(made._cpu_limiter.command(1, ["sleep", "300"], []))
        (group,) = reaper.list_cgroups(made.id)
        wait_until(lambda: str(process.pid) in (group / "cgroup.procs").read_text().split())
    assert process.wait(60) == -signal.SIGKILL
    assert reaper.list_cgroups(made.id) == []


# -- what is refused --------------------------------------------------------------------------------------------------


@hosts_needed
def test_where_nothing_works_no_host_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper, "group_mounts", list)
    monkeypatch.setattr(Machines, "_create", lambda self: pytest.fail("made hosts"))
    with pytest.raises(
        FabricError,
        match=r"no host can be slowed .*no cgroup v2 .*no cgroup v1 .*omit --slow",
    ):
        with Machines(2, slow={1: 0.5}):
            pass


@hosts_needed
@every_version
def test_a_group_that_cannot_be_limited_is_refused_with_the_reason(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_limit, "quota", lambda share: (1, 1))
    refused = r"no host can be slowed on this machine: .*cgroup v\d \(cpu\.\S+\): .*Invalid argument"
    with pytest.raises(FabricError, match=refused):
        Machines(3, slow={1: 0.5, 2: 0.5}).__enter__()
    assert not any(f"penstock-{os.getpid()}-" in group.name for group in reaper.list_cgroups())


# -- cgroups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (1.0, (10_000, 10_000)),
        (0.25, (2500, 10_000)),
        (0.1, (1000, 10_000)),
        (0.05, (1000, 20_000)),
        (0.001, (1000, 1_000_000)),
    ],
)
def test_quotas(share: float, expected: tuple[int, int]) -> None:
    assert quota(share) == expected


def test_where_cgroups_are_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaper, "GROUPS", tmp_path)
    assert reaper.group_mounts() == []
    for name, file, text in (("unified", "cgroup.controllers", "cpuset hugetlb\n"), ("cpu", "cgroup.procs", "1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    assert reaper.group_mounts() == [(1, tmp_path / "cpu")]
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io\n")
    assert reaper.group_mounts() == [(2, tmp_path), (1, tmp_path / "cpu")]


@pytest.mark.parametrize(
    ("own", "parent"),
    [
        ("/", ""),
        ("/a.slice/b.slice/c.scope", "a.slice"),
        ("/d.slice", ""),
        ("/../other", ""),
        ("/gone", ""),
    ],
)
def test_a_group_of_version_2_stands_where_the_cpu_is_handed_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, parent: str
) -> None:
    for folder, handed in (("", "cpu memory"), ("a.slice", "cpu"), ("a.slice/b.slice", "memory"), ("d.slice", "")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "cgroup.subtree_control").write_text(f"{handed}\n")
    (tmp_path / "a.slice/b.slice/c.scope").mkdir()
    monkeypatch.setattr(reaper, "group_mounts", lambda: [(1, Path("/none")), (2, tmp_path)])
    monkeypatch.setattr(cpu_limit, "_own_group", lambda version: own)
    CpuLimiter("penstock-1-2-3", {5: 0.25}, 2)
    made = tmp_path / parent / "penstock-1-2-3-h5-cpu"
    assert reaper.list_cgroups("penstock-1-2-3") == [made]
    assert (made / "cpu.max").read_text() == "2500 10000"
    for folder in ("", "a.slice"):  # nothing hands the processor down
        (tmp_path / folder / "cgroup.subtree_control").write_text("memory")
    with pytest.raises(OSError, match="delegates the cpu controller"):
        CpuLimiter("penstock-1-2-4", {5: 0.25}, 2)
    monkeypatch.setattr(reaper, "group_mounts", lambda: [(2, tmp_path)])
    with pytest.raises(OSError, match="no cgroup v1"):
        CpuLimiter("penstock-1-2-4", {5: 0.25}, 1)
    assert reaper.list_cgroups("penstock-1-2-4") == []
