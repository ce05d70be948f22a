"""Former names of commands and options are accepted until 0.2, and not shown in `--help`."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import typer
from command_line import output

from penstock.cli import VERBS, app
from penstock.cli._old_names import OLD_COMMANDS, OLD_OPTIONS, OLD_OPTIONS_OF, old_options


@cache
def command(verb: str) -> Any:
    return typer.main.get_command(app).get_command(None, verb)  # type: ignore[attr-defined]


def shown(verb: str) -> set[str]:
    return {name for option in command(verb).params for name in (*option.opts, *option.secondary_opts)}


CASES = [(verb, old, new) for verb in VERBS for old, new in old_options(verb).items() if f"--{new}" in shown(verb)]


def test_every_former_name_is_one_of_some_command() -> None:
    assert {old for _, old, _ in CASES} == {*OLD_OPTIONS, *(old for names in OLD_OPTIONS_OF.values() for old in names)}


@pytest.mark.parametrize(("verb", "old", "new"), CASES)
def test_an_option_has_its_former_name(verb: str, old: str, new: str) -> None:
    (option,) = (one for one in command(verb).params if f"--{new}" in (*one.opts, *one.secondary_opts))
    value = [] if option.is_flag else [{"gradient-dtype": "float32", "op": "max"}.get(old, "1")]
    of_new, of_old, default = (
        command(verb).make_context(verb, args, resilient_parsing=True).params[option.name]
        for args in ([f"--{new}", *value], [f"--{old}", *value], [])
    )
    assert of_new == of_old != default or old == "whole-batch"
    assert f"--{old}" not in shown(verb)


@pytest.mark.parametrize(("old", "new"), OLD_COMMANDS.items())
def test_a_command_has_its_former_name(old: str, new: str) -> None:
    assert output(old, "--help") == output(new, "--help")
    assert old not in VERBS


def test_a_scripts_own_options_keep_their_names() -> None:
    context = command("run").make_context("run", ["-n", "2", "train.py", "--chunks", "3"])
    assert context.params["command"] == ["train.py", "--chunks", "3"]
