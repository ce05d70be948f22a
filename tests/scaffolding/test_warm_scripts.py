"""Scripts in forks end as in an interpreter: with its statuses and words, and with what `atexit` has registered."""

import signal
from pathlib import Path

import pytest

from scaffolding.warm_scripts import WarmScript, lines_of_script

pytestmark = pytest.mark.distributed


def test_a_script_that_fails_fails_the_test() -> None:
    with pytest.raises(AssertionError, match=r"(?s)^1\nbegun\n.*Traceback .*ValueError: a reason"):
        lines_of_script("print('begun'); raise ValueError('a reason')")
    with pytest.raises(AssertionError, match=r"^None\n"):
        lines_of_script("import signal; signal.pause()", seconds=0.5)


@pytest.mark.parametrize(("end", "status"), [("", 0), ("sys.exit(3)", 3), ("sys.exit('a reason')", 1)])
def test_statuses_are_an_interpreters(end: str, status: int) -> None:
    with WarmScript(
        f"import atexit, sys; atexit.register(print, 'late'); print(sys.argv[1]); {end}", "first"
    ) as script:
        assert script.out.read() == "first\nlate\n"
        assert script.status() == status
        assert script.errors() == ("a reason\n" if status == 1 else "")


def test_a_file_runs_in_our_folder_with_its_environment_until_it_is_told_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "script.py"
    file.write_text("import os, signal; print(sorted(os.environ), os.getcwd(), flush=True); signal.pause()")
    for number, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 1)):
        with WarmScript(file, environment={"A": "1"}) as script:
            assert script.out.readline() == f"['A', 'OMP_NUM_THREADS'] {tmp_path}\n"
            script.send_signal(number)
            assert script.status() == status
