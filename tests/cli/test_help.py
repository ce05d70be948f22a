"""`penstock --help` lists every verb by its name."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from command_line import output

from penstock.cli import VERBS
from scaffolding.patient import finished


def test_each_verb_is_listed_by_its_name() -> None:
    listed = re.findall(r"^│ ([a-z]+) +[A-Z]", output("--help").partition("Commands")[2], re.MULTILINE)
    assert listed == list(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_no_word_between_colons_becomes_a_picture(verb: str) -> None:
    assert re.findall(r"[\u2600-\u27bf\U0001f300-\U0001faff]", output(verb, "--help")) == []


def test_neither_help_nor_planning_loads_torch(tmp_path: Path) -> None:
    numbers = "--ranks 2 --microbatches 4"
    verbs = ["--help", "schedules", f"simulate --schedule all {numbers}", f"search {numbers} --time-limit 1"]
    verbs += [f"draw --schedule zb-v {numbers} --link-latency 1", "run --ranks 0 x.py"]
    each = "".join(f"\ntry: app({verb.split()})\nexcept SystemExit as end: ended += [end.code]" for verb in verbs)
    look = f"import sys; from penstock.cli import app; ended = []{each}"
    look += "\nassert ended == [0, 0, 0, 0, 0, 2], ended\nassert not {'torch', 'scipy'} & {*sys.modules}"
    done = finished(sys.executable, "-c", look, folder=tmp_path)
    assert done.returncode == 0, done.stderr
