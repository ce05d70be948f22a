"""The reference: docstrings as they are written for readers of the code, made ready for Sphinx."""

from __future__ import annotations

from typing import Any

from sphinx.application import Sphinx


def drawings_are_literal(_app: Sphinx, _what: str, _name: str, _it: Any, _options: Any, lines: list[str]) -> None:
    """An indented block behind a colon is a drawing, a table or a command: it keeps its lines."""
    for number, line in enumerate(lines[:-2]):
        after, below = lines[number + 1], lines[number + 2]
        indent = len(line) - len(line.lstrip())
        opens = line.rstrip().endswith(":") and not line.rstrip().endswith("::")
        if opens and not after.strip() and below[: indent + 4].strip() == "" and below.strip():
            lines[number] = line.rstrip() + ":"


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", drawings_are_literal, priority=10)
    return {"parallel_read_safe": True}
