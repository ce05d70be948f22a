"""Error messages in terms of options: `--ranks 0` where the library has `ranks=0`, one line each."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

import typer
from typer.core import TyperGroup

from penstock._base.errors import ArgumentError
from penstock._base.formatting import did_you_mean
from penstock.cli._old_names import old_options

_ARGUMENT_OPTIONS = {
    "join-seconds": "join-timeout",
    "link-cost": "link",
    "stall-seconds": "stall-timeout",
}
"""Library arguments whose options have another name; former names of options are elsewhere."""

_VALUE = r"(?:'[^']*'|-?\d[\w.+-]*(?<![.])|-?inf|nan)"
_ARGUMENT = re.compile(rf"(?<![\w(.])(\w+)=(?:({_VALUE})|\[([^\]]*)\]|(?=[\s).,;]|$))")
_FIRST = re.compile(r"(\w+) is (-?\d[\w.+-]*(?<![.])|-?inf|nan)(?=[:,])")


def flag(name: str) -> str:
    """Return the option of a parameter."""
    return f"--{name.replace('_', '-')}"


def in_options(text: str, options: Collection[str], command: str | None = None) -> str:
    """Rewrite a message of the library: replace arguments by the options that set them.

    A message that begins with an option comes from the command line and is returned unchanged: it may quote a file.
    """
    if text.startswith("--"):
        return text

    names = {**_ARGUMENT_OPTIONS, **old_options(command)}

    def replace(match: re.Match[str]) -> str:
        name, *values = (group for group in match.groups() if group is not None)
        option = flag(name)
        if option not in options:
            option = flag(names.get(option.removeprefix("--"), ""))
        if option not in options:
            return f"{values[0]} stages" if name == "stages" and values and values[0].isdecimal() else match[0]
        return " ".join([option, *map(_format_value, values)])

    text = _FIRST.sub(replace, text, count=1) if _FIRST.match(text) else text
    return _ARGUMENT.sub(replace, text)


def _format_value(value: str) -> str:
    """Format a value as typed: without quotes, integers without decimals, names joined by commas."""
    return re.sub(r"^(-?\d+)\.0$", r"\1", value.replace("'", "").replace(", ", ","))


def iterate_options(command: Any) -> Iterator[str]:
    """Yield the options of a command and its subcommands."""
    for parameter in command.params:
        yield from parameter.opts
    for subcommand in getattr(command, "commands", {}).values():
        yield from iterate_options(subcommand)


def usage_error(error: Any) -> str:
    """Describe a usage error of click in one line. Return "" if click is to print help instead."""
    if isinstance(error, typer.BadParameter) and (text := _bad_value(error)) is not None:
        return text
    message = " ".join(error.format_message().split()).rstrip(".")
    path = " ".join(["penstock", *(error.ctx.command_path.split()[1:] if error.ctx else ())])
    return "" if message.startswith("Usage: ") else f"{path}: {message}; see {path} --help"


def _bad_value(error: typer.BadParameter) -> str | None:
    """Describe the given and the expected value. Return None if they are unknown."""
    message, cause = error.message, error.__cause__
    option = error.param.opts[0] if error.param is not None else ""
    quoted = re.match(r"(?:Value error, )?'(.*?)' is not ", message)
    if quoted is not None:
        value = quoted[1]
    elif errors := getattr(cause, "errors", None):  # pydantic's
        value = str(errors()[0]["input"])
    else:
        return None
    if choices := re.search(r"is not one of (.*?)\.?$", message):
        return f"{option} {value}: expected one of {choices[1].replace(chr(39), '')}"
    if "integer" in message:
        return f"{option} {value}: expected an integer, such as 4"
    if "number" in message or "float" in message:
        return f"{option} {value}: expected a number, such as 1.5"
    return None


class Commands(TyperGroup):
    """A command with subcommands, which an unknown name lists."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        names = self.list_commands(ctx)
        if args and args[0] not in names and not args[0].startswith("-"):
            path = " ".join(["penstock", *ctx.command_path.split()[1:]])
            raise ArgumentError(
                f"{path} has no command {args[0]!r}: {did_you_mean(args[0].lower(), names)}it has {', '.join(names)}"
            )
        return super().resolve_command(ctx, args)
