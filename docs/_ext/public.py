"""The reference: docstrings as they are written for readers of the code, made ready for Sphinx."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from sphinx.application import Sphinx

_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)(\w?)|(\|)")


def ready(_app: Sphinx, _what: str, _name: str, _it: Any, _options: Any, lines: list[str]) -> None:
    """Single backticks are code; an indented block is a drawing, an example or a table, and keeps its lines."""
    made: list[str] = []
    for is_literal, group in groupby(list(_marked(lines)), key=lambda marked: marked[0]):
        text = "\n".join(line for _, line in group)
        if is_literal:
            before = next((line for line in reversed(made) if line.strip()), "")
            made += ["", " " * (len(before) - len(before.lstrip())) + "::", "", *text.split("\n")]
        else:
            made += _CODE.sub(_as_code, text).split("\n")
    lines[:] = made


def _as_code(found: re.Match[str]) -> str:
    code, letter, bar = found.groups()
    return "\\|" if bar else f"``{code}``" + (f"\\ {letter}" if letter else "")


def _marked(lines: list[str]) -> Iterator[tuple[bool, str]]:
    """Each line, and whether it belongs to a block that is indented behind an empty line."""
    outside, literal, empty = 0, False, False
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if line.strip():
            literal = indent > outside if literal else empty and indent >= outside + 4
            outside = outside if literal else indent
        empty = not line.strip()
        yield literal, line


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", ready, priority=10)
    return {"parallel_read_safe": True}
