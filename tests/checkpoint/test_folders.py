"""A crash at any point of a save, also of one that deletes or replaces, leaves a whole checkpoint that is found."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock import ArgumentError
from penstock.checkpoint import folders
from penstock.checkpoint.folders import METADATA, find, latest, prepare, publish


class Crash(BaseException):
    """The process ends here."""


def save(parent: Path, step: int, text: str, keep: int | None = 1) -> None:
    """What a run does, without torch: the data first, the metadata last."""
    aside = prepare(parent, step)
    (aside / "data").write_text(text)
    (aside / METADATA).write_text(text)
    publish(aside, keep, ["data"])


def text_of(path: Path | None) -> str:
    """What is in a checkpoint; all of it is from the same save."""
    assert path is not None
    assert (path / "data").read_text() == (path / METADATA).read_text()
    return (path / "data").read_text()


@contextmanager
def crash_after(monkeypatch: pytest.MonkeyPatch, calls: int, first_deleted: str) -> Iterator[list[str]]:
    """Lets so many changes of the file system happen, one of a tree a file at a time, and then ends the process."""
    done: list[str] = []

    def counted(name: str, act: Any) -> Any:
        def change(*args: Any, **kwargs: Any) -> Any:
            if len(done) == calls:
                raise Crash
            done.append(name)
            return act(*args, **kwargs)

        return change

    def delete(tree: Path) -> None:
        for path in sorted(tree.iterdir(), key=lambda path: path.name != first_deleted):
            counted("unlink", path.unlink)()
        counted("rmdir", tree.rmdir)()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", counted("rename", Path.rename))
        patch.setattr(Path, "mkdir", counted("mkdir", Path.mkdir))
        patch.setattr(Path, "write_text", counted("write", Path.write_text))
        patch.setattr(folders.shutil, "rmtree", delete)
        yield done


@pytest.mark.parametrize("first_deleted", ["data", METADATA])
@pytest.mark.parametrize("step", [5, 6], ids=["the same step again", "the next step"])
def test_a_crash_at_any_point_leaves_the_old_one_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, first_deleted: str
) -> None:
    crashes = 0
    for calls in range(100):
        parent = tmp_path / str(calls)
        save(parent, 5, "old")
        with crash_after(monkeypatch, calls, first_deleted) as done:
            try:
                save(parent, step, "new")
            except Crash:
                crashes += 1
        assert text_of(latest(parent)) in ("old", "new"), done
        assert text_of(find(parent / "step-00000005")) if step == 5 else True
        if len(done) < calls:  # it went to its end
            break
        prepare(parent, 7)  # takes away what is left
        assert text_of(latest(parent)) in ("old", "new"), done
        save(parent, 7, "newest")
        assert [path.name for path in parent.iterdir()] == ["step-00000007"]
        assert text_of(latest(parent)) == "newest"
    assert crashes > 8


@pytest.mark.parametrize("again", [False, True], ids=["the next step", "the same step again"])
def test_a_checkpoint_is_on_the_disk_before_it_gets_its_name_and_then_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """A power cut loses what was not synchronized: a name without its contents must never be all that is left."""
    save(tmp_path, 1, "old")
    aside = prepare(tmp_path, 1 if again else 2)
    (aside / METADATA).write_text("new")
    written, parent = aside.stat().st_ino, tmp_path.stat().st_ino
    done: list[tuple[str, object]] = []
    rename, fsync, rmtree = Path.rename, os.fsync, shutil.rmtree
    monkeypatch.setattr(Path, "rename", lambda path, to: (done.append(("rename", Path(to).name)), rename(path, to))[1])
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(("sync", os.fstat(file).st_ino)), fsync(file))[1])
    monkeypatch.setattr(shutil, "rmtree", lambda path: (done.append(("delete", path.name)), rmtree(path))[1])
    final = publish(aside, 1, [])
    named = done.index(("rename", final.name))
    assert ("sync", written) in done[:named]
    assert done[named + 1] == ("sync", parent)
    assert not any(kind == "delete" for kind, _ in done[: named + 2]), "the old one stays until the new one is safe"
    assert any(kind == "delete" for kind, _ in done)


@pytest.mark.parametrize(("keep", "left"), [(1, [9]), (2, [3, 9]), (None, [1, 3, 9])])
def test_the_last_ones_are_kept(tmp_path: Path, keep: int | None, left: list[int]) -> None:
    for step in (3, 1, 9):
        save(tmp_path, step, str(step), keep=None)
    save(tmp_path, 9, "9", keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == [folders.folder_name(step) for step in left]
    save(tmp_path, 2, "just written, though another is of more steps")
    assert (tmp_path / "step-00000002").exists()


def test_a_file_that_the_first_rank_does_not_see_is_missed(tmp_path: Path) -> None:
    save(tmp_path, 1, "old")
    aside = prepare(tmp_path, 2)
    (aside / METADATA).write_text("")
    with pytest.raises(ArgumentError, match="must be a folder that all ranks see"):
        publish(aside, 1, ["__1_0.distcp"])
    (aside / METADATA).unlink()
    with pytest.raises(ArgumentError, match=r"must be a folder that all ranks see: \.metadata"):
        publish(aside, 1, [])
    assert text_of(latest(tmp_path)) == "old"


def test_a_copy_that_was_broken_off_is_never_found_and_one_that_is_named_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "step-00000002").mkdir()
    assert latest(tmp_path) is None
    save(tmp_path, 1, "old")
    aside = Path(shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000001.old"))
    for name in ("data", METADATA):  # the one that was put aside for it, as after a crash before it is deleted
        (aside / name).write_text("older")
    assert text_of(latest(tmp_path)) == "old"
    assert find(tmp_path) == find(tmp_path / "step-00000001") == tmp_path / "step-00000001"
    assert find(tmp_path / "elsewhere") is None
    with pytest.raises(ArgumentError, match=r"no complete checkpoint .*step-00000002; its folder has step-00000001"):
        find(tmp_path / "step-00000002")
