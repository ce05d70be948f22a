"""docs/recording.md: what its examples follow trains, and what they refuse is refused in the words of the page."""

from __future__ import annotations

import linecache
import re
from itertools import pairwise
from typing import Any

import pytest
from blocks import ROOT, blocks

from penstock._base.errors import PartitionError

PAGE = [block for block in blocks() if block.path == ROOT / "docs" / "recording.md"]
MODEL, *EXAMPLES = (block for block in PAGE if block.language == "python")
REFUSED = {one: other for one, other in pairwise(PAGE) if one.language and not other.language}


def run(text: str, names: dict[str, Any]) -> None:
    """Runs it as a file: messages show its lines."""
    linecache.cache["net.py"] = (len(text), None, text.splitlines(keepends=True), "net.py")
    exec(compile(text, "net.py", "exec"), names)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_an_example_does_what_the_page_says(number: int) -> None:
    names: dict[str, Any] = {"__name__": "net"}
    run(MODEL.text, names)
    example = EXAMPLES[number]
    if example not in REFUSED:
        run(example.text, names)
        return
    with pytest.raises(PartitionError) as raised:
        run(example.text, names)
    said = f"{raised.type.__name__}: {raised.value}"
    assert " ".join(REFUSED[example].text.split()) in said


def test_examples_are_numbered_as_the_text_refers_to_them() -> None:
    text = (ROOT / "docs" / "recording.md").read_text()
    assert [int(number) for number in re.findall(r"^\*\*(\d+)\. ", text, re.MULTILINE)] == [
        *range(1, len(EXAMPLES) + 1)
    ]
    assert {int(number) for number in re.findall(r"\(example (\d+)\)", text)} <= {*range(1, len(EXAMPLES) + 1)}
    assert len(EXAMPLES) == 10
    assert len(REFUSED) == 3
