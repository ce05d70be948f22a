"""`penstock --help` lists every verb by its name."""

from __future__ import annotations

import re

from command_line import output

from penstock.cli import VERBS


def test_each_verb_is_listed_by_its_name() -> None:
    listed = re.findall(r"^│ ([a-z]+) +[A-Z]", output("--help").partition("Commands")[2], re.MULTILINE)
    assert listed == list(VERBS)
