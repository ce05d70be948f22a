"""The reference of the command line: what `penstock COMMAND --help` says, on a page, made while the site is built."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal, get_args, get_origin

import typer
from sphinx.application import Sphinx

from penstock.cli import VERBS, app

PAGE = "reference/commands"
_CODE = re.compile(r"""`[^`]*`|"[^"]*"|(?<![\w-])--?[a-z][a-z-]*(?:=[\w.]+)?""")
_KINDS = {int: "INTEGER", float: "NUMBER", bool: ""}


def append_commands(_app: Sphinx, name: str, source: list[str]) -> None:
    if name == PAGE:
        source[0] += "\n".join(line for verb in _verbs() for line in _section(*verb))


def _verbs() -> Iterator[tuple[str, Any]]:
    """Each verb, and the verbs below it."""
    group = typer.main.get_command(app)
    for name in VERBS:
        command = group.get_command(None, name)
        yield f"penstock {name}", command
        for below, nested in getattr(command, "commands", {}).items():
            yield f"penstock {name} {below}", nested


def _section(name: str, command: Any) -> Iterator[str]:
    words = [_usage(parameter) for parameter in command.params if not _is_option(parameter)]
    below = ["COMMAND"] if getattr(command, "commands", None) else []
    yield from ("", f"## {name}", "", *_text(command.help), "")
    yield from ("```text", " ".join([name, "[OPTIONS]", *words, *below]), "```", "")
    panels: dict[str, list[Any]] = {}
    for parameter in command.params:
        if not parameter.hidden and parameter.name != "help":
            panels.setdefault(parameter.rich_help_panel or "", []).append(parameter)
    for panel, parameters in sorted(panels.items(), key=lambda panel: panel[0] != ""):
        yield from ([f"**{_text(panel)[0]}**", ""] if panel else [])
        yield from ("| option | |", "|---|---|")
        yield from (f"| {_names(parameter)} | {_meaning(parameter)} |" for parameter in parameters)
        yield ""
    yield from _text(command.epilog or "")


def _is_option(parameter: Any) -> bool:
    return str(parameter.opts[0]).startswith("-")


def _usage(parameter: Any) -> str:
    name = parameter.name.upper()
    return name if parameter.required else f"[{name}]"


def _names(parameter: Any) -> str:
    if not _is_option(parameter):
        return f"`{parameter.name.upper()}`"
    *others, last = parameter.opts
    names = [*others, f"{last} {_kind(parameter)}".strip()]
    return ", ".join(f"`{name}`" for name in names).replace("|", "\\|")


def _kind(parameter: Any) -> str:
    """What is to be given: `FILE`, `INTEGER`, or one of a few names."""
    if parameter.metavar:
        return str(parameter.metavar)
    return "NAME" if _choices(parameter) else _KINDS.get(parameter.type_descriptor.annotation, "TEXT")


def _choices(parameter: Any) -> list[str]:
    annotation = parameter.type_descriptor.annotation
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return [str(choice.value) for choice in annotation]
    return []


def _meaning(parameter: Any) -> str:
    default = parameter.default
    is_told = default in (None, False, "", ...) or callable(default) or "efault" in (parameter.help or "")
    said = [" ".join(_text(parameter.help or ""))]
    if choices := _choices(parameter):
        said += [f"One of {', '.join(f'`{choice}`' for choice in choices)}."]
    if parameter.required:
        said += ["*Required.*"]
    return " ".join(said if is_told else [*said, f"Default: `{getattr(default, 'value', default)}`."])


def _text(said: str) -> list[str]:
    """Plain text as Markdown: options are code, and nothing else means anything."""
    found = [(code[0], code.span()) for code in _CODE.finditer(said)]
    made, at = "", 0
    for code, (start, end) in found:
        made += _escaped(said[at:start]) + f"`{code.strip('`')}`"
        at = end
    return (made + _escaped(said[at:])).split("\n")


def _escaped(text: str) -> str:
    return re.sub(r"([*_|<\[\]$])", r"\\\1", text)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", append_commands)
    return {"parallel_read_safe": True}
