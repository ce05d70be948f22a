"""Folders that a user may not search, read or write are named in one line, whatever a command wants there."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import refusal
from torch.nn.functional import mse_loss

import penstock
from network.fabric.made_runs import made_run, write_run
from penstock.schedule import generate
from penstock.schedule.csv import write_csv
from scaffolding import small
from scaffolding.run_folders import a_run

COMMANDS = {
    "read": [
        *("top shut/run --once", "runs shut/run", "compare run shut/run", "explain shut/run", "report shut/run"),
        *("draw --csv shut/s.csv", "simulate --costs shut/c.json --ranks 2", "devices shut/d.toml"),
        *("plan --profile shut/p.json --devices 2 --global-batch-size 8", "export shut/ck o.st"),
        "fabric show shut/fabric",
        *("verify shut/target.py", "inspect shut/target.py:make", "run --ranks 2 shut/train.py"),
    ],
    "write": [
        *(
            "draw --csv s.csv --svg shut/o.svg",
            "draw --csv s.csv --png shut/o.png",
            "report run --out shut/o.html",
        ),
        "init shut/train.py",
    ],
}


def without_the_rights_of_root(act: Callable[[], str]) -> str:
    """What `act` says in a process that has the same user but no capabilities; empty: all was as expected."""
    hears, says = os.pipe()
    child = os.fork()
    if not child:
        said = "the process ended"
        try:
            head, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
            assert ctypes.CDLL(None).capset(head, none) == 0
            said = act()
        except BaseException as error:
            said = repr(error)
        finally:
            os.write(says, said.encode()[:60_000])
            os._exit(0)
    os.close(says)
    with open(hears, errors="replace") as heard:
        text = heard.read()
    os.waitpid(child, 0)
    return text


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    shut = tmp_path / "shut"
    for folder in (tmp_path, shut):
        a_run(folder / "run")
        write_csv(generate("1f1b", 2, 3), folder / "s.csv")
    write_run(made_run(3), shut / "fabric")
    shutil.copytree(shut / "run", shut / "ck")
    for name in ("c.json", "p.json", "d.toml", "target.py", "train.py"):
        (shut / name).write_text("")
    return tmp_path


@pytest.mark.parametrize("folder", ["shut", "shut/run"])
def test_training_goes_on_without_a_record(here: Path, folder: str) -> None:
    def warned() -> str:
        (here / folder).chmod(0)
        x, y = small.batch()
        with pytest.warns(UserWarning, match="Permission denied") as told:
            with penstock.pipeline(small.mlp(), (x,), loss_fn=mse_loss, microbatches=2, run_dir="shut/run") as pipe:
                pipe.step(x, target=y)
        return f"step {pipe.step_count}, {len(told)} warnings"

    try:
        assert without_the_rights_of_root(warned).startswith("step 1, ")
    finally:
        (here / folder).chmod(0o700)


@pytest.mark.parametrize("mode", [0o600, pytest.param(0o000, marks=pytest.mark.long)])
def test_a_command_says_so_in_one_line(here: Path, mode: int) -> None:
    def all_of_them() -> str:
        (here / "shut").chmod(mode)
        wrong = []
        for command in [*COMMANDS["read"], *COMMANDS["write"]]:
            try:
                said = refusal(*command.split())
                assert "shut" in said
                assert any(why in said for why in ("Permission denied", "no script", "no file", "no such")), said
            except AssertionError as error:
                wrong.append(f"{command}: {error}")
        return json.dumps(wrong)

    try:
        assert json.loads(without_the_rights_of_root(all_of_them)) == []
    finally:
        (here / "shut").chmod(0o700)
