"""One job owns a folder: a second one is refused, and one that has ended is recognized, here and elsewhere."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from penstock import ArgumentError, owner


class Holder:
    """What closes."""


def planted(folder: Path, made: owner.Owner) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / owner.NAME).write_text(json.dumps(asdict(made)))
    return folder / owner.NAME


def owned(folder: Path) -> bool:
    """Whether this process owns a folder, by what is in it."""
    return owner._read(folder / owner.NAME)[0] == owner.this_process()


def of(pid: int, started: str | None = None) -> owner.Owner:
    """A process of this machine; by default the one that has that number now."""
    me = owner.this_process()
    return replace(me, process=replace(me.process, pid=pid, started=started or owner._stat(pid)[1]))


def here(act: Callable[[float], None], sleep: Callable[[float], None] = time.sleep) -> Callable[[float], None]:
    """What sleeps in other threads, as heartbeats do, and acts in this one."""

    def sleeps_or_acts(seconds: float) -> None:
        (act if threading.current_thread() is threading.main_thread() else sleep)(seconds)

    return sleeps_or_acts


ELSEWHERE = owner.Owner(owner.Process("another boot", 1, "2"), "box", "2026-01-01 00:00:00+00:00")


def test_a_folder_is_owned_until_all_holders_have_gone(tmp_path: Path) -> None:
    folder, first, second = tmp_path / "runs" / "gpt", Holder(), Holder()
    for holder in (first, second, first):
        owner.claim(folder, holder, "run")
    assert owned(folder)
    owner.release(id(second))
    assert owned(folder)
    del holder, first
    assert not folder.exists(), "it was made for the claim, and nothing was written there"
    owner.claim(folder, second, "run")
    (folder / "steps").write_text("")
    owner.release(id(second))
    assert os.listdir(folder) == ["steps"]


def test_another_name_of_the_folder_leads_to_the_same_owner(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    planted(tmp_path, of(os.getppid()))
    with pytest.raises(ArgumentError, match=rf"^run: process {os.getppid()} on {socket.gethostname()}, started at 20"):
        owner.claim(tmp_path / "link", Holder(), "run")


def test_one_that_runs_is_named_and_the_way_out_with_it(tmp_path: Path) -> None:
    file = planted(tmp_path, of(os.getppid()))
    with pytest.raises(ArgumentError, match=rf"pass another one, or, if that job has ended, remove {file}$"):
        owner.claim(tmp_path, Holder(), "run")
    file.unlink()
    holder = Holder()
    owner.claim(tmp_path, holder, "run")
    assert owned(tmp_path)


def test_on_this_machine_a_process_is_known_by_number_and_start(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # a zombie now
    ended = of(child)
    planted(tmp_path / "zombie", ended)
    planted(tmp_path / "reused", of(os.getppid(), "1"))
    holder = Holder()
    for name in ("zombie", "reused"):
        owner.claim(tmp_path / name, holder, "run")
        assert owned(tmp_path / name)
        assert os.listdir(tmp_path / name) == [owner.NAME]
    os.waitpid(child, 0)
    planted(tmp_path / "gone", ended)
    owner.claim(tmp_path / "gone", holder, "run")
    assert owned(tmp_path / "gone")


@pytest.mark.parametrize("text", [json.dumps(asdict(ELSEWHERE)), "", "[" * 50_000, '{"pid": "x"}'])
def test_elsewhere_the_heartbeat_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """As it does where the file is damaged."""
    file, looks, now, holder = tmp_path / owner.NAME, 0, time.monotonic(), Holder()
    file.write_text(text)

    def beats(seconds: float) -> None:
        nonlocal looks
        looks += 1
        os.utime(file, ns=(0, looks if looks > 20 else 0))

    def passes(seconds: float) -> None:
        nonlocal now
        now += seconds

    os.utime(file, ns=(0, 0))
    monkeypatch.setattr(owner.time, "monotonic", lambda: now)
    monkeypatch.setattr(owner.time, "sleep", here(beats))
    with pytest.raises(ArgumentError, match="pass another one"):
        owner.claim(tmp_path, holder, "run")
    assert looks == 21
    assert capsys.readouterr().err.startswith("penstock: run: waiting up to 30 s for a heartbeat of ")
    monkeypatch.setattr(owner.time, "sleep", here(passes))
    before = now
    owner.claim(tmp_path, holder, "run")
    assert owned(tmp_path)
    assert 30 < now - before < 31


def test_its_own_heartbeat_is_of_its_own_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Holder()
    owner.claim(tmp_path, holder, "run")
    file = tmp_path / owner.NAME
    assert any(thread.name == "penstock-owner" for thread in threading.enumerate())

    def ends(seconds: float) -> None:
        raise TimeoutError

    def beat() -> None:
        with monkeypatch.context() as patch, contextlib.suppress(TimeoutError):
            patch.setattr(owner.time, "sleep", here(ends))
            owner._keep_beating(file, owner._claims[file])

    os.utime(file, (0, 0))
    beat()
    assert time.time() - file.stat().st_mtime < 60
    file.unlink()  # another machine took it for dead
    planted(tmp_path, ELSEWHERE)
    os.utime(file, (0, 0))
    beat()
    assert file.stat().st_mtime == 0
    owner.release(id(holder))
    assert file.exists()


def test_a_fork_gives_up_nothing(tmp_path: Path) -> None:
    holder = Holder()
    owner.claim(tmp_path, holder, "run")
    child = os.fork()
    if not child:
        owner.release(id(holder))
        os._exit(0)
    os.waitpid(child, 0)
    assert owned(tmp_path)


def comes(folder: Path, start: int, says: int, end: int) -> None:
    """What a process does that says whether it owns the folder, and then waits until all have said so."""
    holder = Holder()
    os.read(start, 1)
    try:
        owner.claim(folder, holder, "run")
        os.write(says, b"o")
    except ArgumentError:
        os.write(says, b"-")
    finally:
        os.read(end, 1)
        os._exit(0)


@pytest.mark.parametrize("stale", [False, True])
def test_of_many_that_come_at_once_one_becomes_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale: bool
) -> None:
    monkeypatch.setattr(owner, "_LOOK_SECONDS", 0.01)
    owner._read(planted(tmp_path, ELSEWHERE))  # imports what the processes need
    for number in range(3):
        folder = tmp_path / str(number)
        if stale:
            planted(folder, of(os.getppid(), "1"))
        pipes = [os.pipe() for _ in range(3)]
        (start, starts), (hears, says), (end, ends) = pipes
        children = []
        for _ in range(6):
            children.append(os.fork())
            if not children[-1]:
                comes(folder, start, says, end)
        os.write(starts, bytes(6))
        said = b""
        while len(said) < 6:
            said += os.read(hears, 6)
        os.write(ends, bytes(6))
        for child in children:
            os.waitpid(child, 0)
        for descriptor in (one for pipe in pipes for one in pipe):
            os.close(descriptor)
        assert sorted(said.decode()) == ["-"] * 5 + ["o"]
        assert not (folder / ".owner.lock").exists()


def test_a_claim_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(owner.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        owner.claim(tmp_path, Holder(), "run")
    assert not os.listdir(tmp_path)
