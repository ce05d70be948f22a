"""`penstock --help` lists every verb by its name."""

from __future__ import annotations

import re

import pytest
from command_line import output

from penstock.cli import VERBS


def test_each_verb_is_listed_by_its_name() -> None:
    listed = re.findall(r"^│ ([a-z]+) +[A-Z]", output("--help").partition("Commands")[2], re.MULTILINE)
    assert listed == list(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_no_word_between_colons_becomes_a_picture(verb: str) -> None:
    assert re.findall(r"[\u2600-\u27bf\U0001f300-\U0001faff]", output(verb, "--help")) == []
