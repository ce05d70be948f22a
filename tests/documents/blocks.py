"""The code blocks of the documents, the commands in them, and how a story of blocks is followed."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCUMENTS = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
_FENCED = re.compile(r"^```([^`\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_COMMAND = re.compile(r"(\$ )?(sudo |penstock |torchrun |make |pip |python )")
_SPOKEN = re.compile(r"\bpenstock(?:\.[A-Za-z_]\w*)+")


@dataclass(frozen=True, slots=True)
class Block:
    """What stands between two fences."""

    path: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.name}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """Each command's words, without what only has to do with how it is started here; empty for what is printed."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language or not _COMMAND.match(lines[0]):
            return []
        found = [line.removeprefix("$ ").removeprefix("sudo ") for line in lines if _COMMAND.match(line)]
        return [shlex.split(line, comments=True) for line in found]


def blocks() -> list[Block]:
    """Every one, document by document."""
    return [block for path in DOCUMENTS for block in _of(path)]


def _of(path: Path) -> Iterator[Block]:
    text = path.read_text(encoding="utf-8")
    for found in _FENCED.finditer(text):
        if found[1].startswith("{"):  # a directive: a figure, say, which the build of the site draws
            continue
        yield Block(path, text[: found.start()].count("\n") + 1, found[1], found[2])


def follow(found: list[Block], names: dict[str, Any]) -> None:
    """Runs blocks of Python in order; what a block of plain text shows is what the one before it printed."""
    printed: str | None = None
    for block in found:
        if block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block.text, str(block), "exec"), names)
            printed = out.getvalue()
        elif not block.commands:
            assert printed == block.text, block
            printed = None


def spoken_names() -> list[str]:
    """Each dotted name of the library, `penstock.schedule.read_csv`, wherever it stands."""
    return sorted({name for path in DOCUMENTS for name in _SPOKEN.findall(path.read_text(encoding="utf-8"))})
