"""A command that is stuck says where, in every process; one that ends gives what it printed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scaffolding import patient
from scaffolding.patient import abort, finished, started

STUCK = """
import os, sys, time
def {name}():
    print("ready", flush=True)
    time.sleep(600)
{first}
{name}()
"""


def test_all_processes_of_a_stuck_command_tell_where_they_stand(tmp_path: Path) -> None:
    (tmp_path / "inner.py").write_text(STUCK.format(name="waits_inside", first=""))
    first = "import subprocess; subprocess.Popen([sys.executable, 'inner.py'], start_new_session=True)"
    (tmp_path / "outer.py").write_text(STUCK.format(name="waits_outside", first=first))
    process = started(sys.executable, "outer.py", folder=tmp_path)
    assert process.stdout is not None
    assert [process.stdout.readline(), process.stdout.readline()] == ["ready\n"] * 2
    abort(process.pid)
    _, said = process.communicate()
    assert "in waits_inside" in said
    assert "in waits_outside" in said


def test_a_command_that_takes_too_long_fails_with_its_words(tmp_path: Path) -> None:
    """However far it came: nothing here depends on the time."""
    with pytest.raises(pytest.fail.Exception, match=r"did not end within 0\.1 s"):
        finished(sys.executable, "-c", "import time; time.sleep(600)", folder=tmp_path, seconds=0.1)


def test_a_command_that_ends_gives_what_it_printed(tmp_path: Path) -> None:
    done = finished(
        sys.executable, "-c", "import os; print(os.environ['A']); raise SystemExit(3)", folder=tmp_path, A="1"
    )
    assert (done.returncode, done.stdout) == (3, "1\n")
    assert patient.COMMAND_SECONDS < patient.TEST_SECONDS
