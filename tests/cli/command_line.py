"""Runs the command `penstock` in this process, and reads what it prints."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from penstock.cli import app


def penstock(*arguments: str, columns: int = 80) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(app, list(arguments))


def output(*arguments: str, columns: int = 80) -> str:
    done = penstock(*arguments, columns=columns)
    assert done.exit_code == 0, done.output
    return done.stdout


def as_json(*arguments: str) -> Any:
    """The one JSON value that is all of the output."""
    return json.loads(output(*arguments, "--json"), parse_constant=pytest.fail)


def refusal(*arguments: str) -> str:
    """The one line that says what is wrong, without its start."""
    done = penstock(*arguments)
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("penstock: error: ")
    return line.removeprefix("penstock: error: ")
