"""Guides show what their commands print; these need no device, as all is estimated. `...` stands for the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from blocks import ROOT, Block, blocks
from typer.testing import CliRunner

from penstock.cli import app

pytestmark = pytest.mark.long


def _shown() -> Iterator[tuple[list[str], list[Block]]]:
    """Each command that stands above its output, with its own block and those after it that are no commands."""
    for page in ("cuts.md", "planning.md", "schedules.md"):
        printed: list[Block] = []
        for block in blocks():
            if block.path != ROOT / "docs" / "guides" / page or block.language:
                continue
            if block.text.startswith("$ "):
                printed = [block]
                yield block.commands[0], printed
            elif block.commands:
                printed = []
            else:
                printed.append(block)


SHOWN = list(_shown())


@pytest.mark.parametrize(("command", "printed"), SHOWN, ids=[str(printed[0]) for _, printed in SHOWN])
def test_commands_print_what_stands_below_them(
    command: list[str], printed: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    output = CliRunner().invoke(app, command[1:]).output
    first, *others = [block.text.removesuffix("...\n") for block in printed]
    assert output.startswith(first.partition("\n")[2])
    for text in others:
        assert text in output
