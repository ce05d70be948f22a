"""One job owns a folder: a second one is refused, and one that has ended is recognized."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from penstock import ArgumentError
from penstock._base import owner

REFUSED = (
    rf"^run: process \d+ on {socket.gethostname()}, started at 20[^;]* is writing to it; "
    "pass a folder that no other job uses, or, if that job has"
)


class Holder:
    """What closes."""


def elsewhere(folder: Path) -> str:
    """What another process is told that claims a folder; empty: it owned that until it ended."""
    hears, says = os.pipe()
    child = os.fork()
    if not child:
        holder = Holder()
        try:
            owner.claim(folder, holder, "run")
        except ArgumentError as error:
            os.write(says, str(error).encode())
        finally:
            os._exit(0)
    os.close(says)
    with open(hears) as heard:
        os.waitpid(child, 0)
        return heard.read()


def test_a_folder_is_owned_until_all_holders_have_gone(tmp_path: Path) -> None:
    """Under whatever name; but the file of the owner is no link, which might lead to another file."""
    folder, first, second = tmp_path / "runs" / "gpt", Holder(), Holder()
    for holder in (first, second, first):
        owner.claim(folder, holder, "run")
    (tmp_path / "link").symlink_to(folder, target_is_directory=True)
    assert elsewhere(folder)
    assert elsewhere(tmp_path / "link").startswith(f"run: process {os.getpid()} on {socket.gethostname()}, started at")
    owner.release(id(second))
    assert elsewhere(folder)
    del holder, first
    assert not folder.exists(), "it was made for the claim, and nothing was written there"
    owner.claim(folder, second, "run")
    (folder / "steps").write_text("")
    owner.release(id(second))
    assert os.listdir(folder) == ["steps"]
    (folder / owner.NAME).symlink_to(folder / "steps")
    with pytest.raises(OSError, match="symbolic"):
        owner.claim(folder, second, "run")


def test_the_way_out_that_is_named_is_one(tmp_path: Path) -> None:
    """After it, the one that owned the folder is refused."""
    hears, says = os.pipe()
    child = os.fork()
    if not child:
        holder = Holder()
        owner.claim(tmp_path, holder, "run")
        os.write(says, b"o")
        signal.pause()
    os.read(hears, 1)
    try:
        os.kill(child, signal.SIGSTOP)
        holder = Holder()
        file = tmp_path / owner.NAME
        with pytest.raises(ArgumentError, match=REFUSED) as refused:
            owner.claim(tmp_path, holder, "run")
        assert str(refused.value).endswith(f" ended, remove {file}")
        file.unlink()
        owner.claim(tmp_path, holder, "run")
        file.unlink()
        assert not elsewhere(tmp_path)
        owner.claim(tmp_path, holder, "run")
        assert elsewhere(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(hears)
        os.close(says)


@pytest.mark.parametrize("text", ["", "[" * 50_000, '"process 1 on box, started at 2026-01-01"', "\x1b[31m"])
def test_what_an_ended_owner_left_keeps_nobody_out(tmp_path: Path, text: str) -> None:
    file, holder = tmp_path / owner.NAME, Holder()
    file.write_text(text)
    owner.claim(tmp_path, holder, "run")
    assert file.read_text().startswith(f'"process {os.getpid()} on ')
    file.write_text(text)
    assert (told := elsewhere(tmp_path)).isprintable()
    assert len(told) < 400 + len(str(file))


def test_a_fork_gives_up_nothing_and_keeps_nothing(tmp_path: Path) -> None:
    holder = Holder()
    owner.claim(tmp_path, holder, "run")
    ends, waits = os.pipe()
    child = os.fork()
    if not child:
        owner.release(id(holder))
        os.close(waits)
        os.read(ends, 1)
        os._exit(0)
    try:
        assert elsewhere(tmp_path)
        owner.release(id(holder))
        assert not elsewhere(tmp_path), "the fork still lives, as workers of a DataLoader may"
    finally:
        os.close(ends)
        os.close(waits)
        os.waitpid(child, 0)


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
def test_of_many_that_come_at_once_one_becomes_the_owner(tmp_path: Path, stale: bool) -> None:
    for number in range(3):
        folder = tmp_path / str(number)
        if stale:
            assert not elsewhere(folder)
            assert os.listdir(folder) == [owner.NAME]
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


def test_a_full_disk_or_one_without_locks_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    def without(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    holder = Holder()
    monkeypatch.setattr(owner.os, "pwrite", full)
    owner.claim(tmp_path, holder, "run")
    assert elsewhere(tmp_path).startswith("run: another process is writing to it; ")
    owner.release(id(holder))
    assert not os.listdir(tmp_path)
    monkeypatch.setattr(owner.fcntl, "flock", without)
    with pytest.warns(UserWarning, match=r"^run: no locks on this file system \(Function not implemented\), so a sec"):
        owner.claim(tmp_path, holder, "run")
    assert not elsewhere(tmp_path)
