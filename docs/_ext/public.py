"""The reference: docstrings as they are written for readers of the code, made ready for Sphinx."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from sphinx.application import Sphinx

_CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)(\w?)|(\|)")
_SEVERAL = re.compile(r"( {4})(\w+(?:, \w+)+): (.*)")


def ready(_app: Sphinx, what: str, _name: str, _it: Any, _options: Any, lines: list[str]) -> None:
    """Single backticks are code; an indented block is a drawing, an example or a table, and keeps its lines."""
    made = (
        ["..", ""] if what in ("property", "attribute", "data") else []
    )  # a comment, or what ends in a colon would be taken for a type
    for is_literal, group in groupby(list(_marked(list(_each_by_itself(lines)))), key=lambda marked: marked[0]):
        text = "\n".join(line for _, line in group)
        if is_literal:
            before = next((line for line in reversed(made) if line.strip()), "")
            made += ["", " " * (len(before) - len(before.lstrip())) + "::", "", *text.split("\n")]
        else:
            made += _CODE.sub(_as_code, text).split("\n")
    lines[:] = made


def _each_by_itself(lines: list[str]) -> Iterator[str]:
    """Attributes that share a line (`shape, dtype: of the tensor`), on one each: napoleon would take one for a type."""
    inside = False
    for line in lines:
        inside = line.strip() == "Attributes:" or (inside and (not line.strip() or line.startswith(" ")))
        found = _SEVERAL.fullmatch(line) if inside else None
        if found is None:
            yield line
        else:
            *others, last = found[2].split(", ")
            yield from (f"{found[1]}{name}: with `{last}`: {found[3]}" for name in others)
            yield f"{found[1]}{last}: {found[3]}"


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
