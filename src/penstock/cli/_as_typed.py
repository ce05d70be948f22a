"""Errors in the terms that the user typed: `--ranks 0` where the library says `ranks=0`, each on one line."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

import typer
from typer.core import TyperGroup

from penstock._base.errors import ArgumentError
from penstock._base.words import did_you_mean
from penstock.cli._old_names import old_options

_OTHERS = {"join-seconds": "join-timeout", "stall-seconds": "stall-timeout"}
"""Library arguments whose options have a different name; others are called as an option was."""

_VALUE = r"(?:'[^']*'|-?\d[\w.+-]*(?<![.])|-?inf|nan)"
_GIVEN = re.compile(rf"(?<![\w(.])(\w+)=(?:({_VALUE})|\[([^\]]*)\]|(?=[\s).,;]|$))")
_FIRST = re.compile(r"(\w+) is (-?\d[\w.+-]*(?<![.])|-?inf|nan)(?=[:,])")


def flag(name: str) -> str:
    """The option of a parameter of that name."""
    return f"--{name.replace('_', '-')}"


def in_options(text: str, options: Collection[str], command: str | None = None) -> str:
    """Rewrites a library's message so that it names the options that the arguments came from, where there are any.

    A message that begins with an option is the command line's own and stays as it is: it may quote a file.
    """
    if text.startswith("--"):
        return text

    names = {**_OTHERS, **old_options(command)}

    def replaced(found: re.Match[str]) -> str:
        name, *rest = (group for group in found.groups() if group is not None)
        option = flag(name)
        if option not in options:
            option = flag(names.get(option.removeprefix("--"), ""))
        if option not in options:
            return f"{rest[0]} stages" if name == "stages" and rest and rest[0].isdecimal() else found[0]
        return " ".join([option, *map(_typed, rest)])

    text = _FIRST.sub(replaced, text, count=1) if _FIRST.match(text) else text
    return _GIVEN.sub(replaced, text)


def _typed(value: str) -> str:
    """A value as a user would type it: without quotes, integers without decimals, names joined by commas."""
    return re.sub(r"^(-?\d+)\.0$", r"\1", value.replace("'", "").replace(", ", ","))


def options_of(command: Any) -> Iterator[str]:
    """The options of a command and its subcommands."""
    for parameter in command.params:
        yield from parameter.opts
    for below in getattr(command, "commands", {}).values():
        yield from options_of(below)


def usage_error(error: Any) -> str:
    """What click found wrong with a command's arguments, in one line; empty: it has a page of help to show."""
    if isinstance(error, typer.BadParameter) and (text := _bad_value(error)) is not None:
        return text
    message = " ".join(error.format_message().split()).rstrip(".")
    where = " ".join(["penstock", *(error.ctx.command_path.split()[1:] if error.ctx else ())])
    return "" if message.startswith("Usage: ") else f"{where}: {message}; see {where} --help"


def _bad_value(error: typer.BadParameter) -> str | None:
    """What was given and what was expected; None if that is unknown."""
    message, cause = error.message, error.__cause__
    option = error.param.opts[0] if error.param is not None else ""
    quoted = re.match(r"(?:Value error, )?'(.*?)' is not ", message)
    if quoted is not None:
        given = quoted[1]
    elif errors := getattr(cause, "errors", None):  # pydantic's
        given = str(errors()[0]["input"])
    else:
        return None
    if choices := re.search(r"is not one of (.*?)\.?$", message):
        return f"{option} {given}: expected one of {choices[1].replace(chr(39), '')}"
    if "integer" in message:
        return f"{option} {given}: expected an integer, such as 4"
    if "number" in message or "float" in message:
        return f"{option} {given}: expected a number, such as 1.5"
    return None


class Commands(TyperGroup):
    """A command with subcommands. Given an unknown name, it lists them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-"):
            whole = " ".join(["penstock", *ctx.command_path.split()[1:]])
            raise ArgumentError(
                f"{whole} has no command {args[0]!r}: {did_you_mean(args[0].lower(), names)}it has {', '.join(names)}"
            )
        return super().resolve_command(ctx, args)
