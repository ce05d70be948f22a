"""Standard output that takes nothing, or no such characters: one line or replaced characters, never a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from io import TextIOWrapper

import pytest

from penstock.cli import main

ORDER = "--schedule 1f1b --ranks 2 --microbatches 4"
COMMANDS = ["schedules", "--help", f"simulate {ORDER} --json"]
COMMANDS.append("draw --schedule gpipe --ranks 32 --microbatches 200 --text")  # longer than a buffer


def full() -> TextIOWrapper:
    return open("/dev/full", "w", encoding="utf-8")


def closed() -> TextIOWrapper:
    reads, writes = os.pipe()
    os.close(reads)
    return os.fdopen(writes, "w", encoding="utf-8")


@pytest.mark.parametrize("made", [full, closed])
@pytest.mark.parametrize("command", COMMANDS)
def test_what_cannot_be_written_ends_in_one_line(
    command: str,
    made: Callable[[], TextIOWrapper],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock", *command.split()])
    with made() as out:  # closing it would raise if anything were left to write
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code
    said = capsys.readouterr().err.splitlines()
    if made is closed:  # the reader has gone, as `head` does
        assert said == []
    else:
        assert len(said) == 1
        assert said[0].startswith("penstock: error: cannot write all output: ")


@pytest.mark.parametrize("command", COMMANDS)
def test_characters_that_standard_output_lacks_are_replaced(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock", *command.split()])
    with open(os.devnull, "w", encoding="ascii") as out:
        monkeypatch.setattr(sys, "stdout", out)
        with pytest.raises(SystemExit) as ended:
            main()
    assert (ended.value.code, capsys.readouterr().err) == (0, "")


def test_a_ctrl_c_before_anything_is_loaded_has_no_time_to_come() -> None:
    """Only what runs inside of `main` turns it into one line: the modules before that are few and small."""
    code = "import sys; before = {*sys.modules}; import penstock.__main__; print(*sorted({*sys.modules} - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"typing", "random", "inspect", "pathlib", "signal", "penstock.cli", "numpy"} & {*loaded.split()}
    assert "penstock.__main__" in loaded
