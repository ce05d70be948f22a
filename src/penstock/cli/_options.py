"""How a verb declares its options, and groups of them as dataclasses that several verbs share; how it prints JSON."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console

from penstock._base.errors import ArgumentError
from penstock._base.files import finite
from penstock.cli._as_typed import flag
from penstock.network import MAX_HOSTS
from penstock.schedule import MICROBATCHES

CUT = "Number of microbatches"
"""Help of `--microbatches`, with the default of verbs that have no batch and of those that have one."""
USUAL = f"default {MICROBATCHES}"
USUAL_OF_BATCH = f"{USUAL}, or the batch size if that is smaller"

REQUIRED: Any = MISSING
"""The default of an option that has none."""


def options_on(panel: str | None) -> Callable[..., Any]:
    """What makes an option, `option(help, *flags, default=None, **more)`, on a panel of the help page; None: the first
    one. It stands where the default of a dataclass's field or of a verb's parameter does."""

    def option(text: str, *flags: str, default: Any = None, **more: Any) -> Any:
        return field(
            default=default, metadata={"typer": typer.Option(*flags, help=text, rich_help_panel=panel, **more)}
        )

    return option


option = options_on(None)
output_option = options_on("Output")


def argument(text: str, *, default: Any = None, **more: Any) -> Any:
    """As an option, but named by its place."""
    return field(default=default, metadata={"typer": typer.Argument(help=text, **more)})


JSON = output_option("Print only one JSON object.", "--json", default=False)
RUN = argument("Directory of a run.", metavar="FOLDER", default=REQUIRED)


def print_json(value: Any) -> None:
    """Prints one JSON value, without NaN and infinity."""
    print(json.dumps(finite(value), allow_nan=False))


def screen() -> Console:
    """Where a verb prints its tables."""
    return Console(highlight=False)


def spread(verb: Callable[..., None]) -> Callable[..., None]:
    """Prepares a verb for Typer: replaces each dataclass parameter with one option per field, and limits all counts."""
    hints = get_type_hints(verb)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(verb).parameters.items():
        parameters += _of_group(groups[name]) if name in groups else [_as_typer(name, hints[name], parameter.default)]

    @wraps(verb)
    def called(**given: Any) -> None:
        for name, value in given.items():
            if type(value) is int and "seed" not in name:
                check_count(flag(name), value)
        made = {name: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        verb(**made, **given)

    vars(called)["__signature__"] = inspect.Signature(parameters)
    called.__doc__ = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(verb) or "")  # Typer would keep the line breaks
    return called


def _of_group(group: Any) -> Iterator[inspect.Parameter]:
    """One per field, those of the class itself before those that it inherits."""
    hints = get_type_hints(group)
    for one in sorted(fields(group), key=lambda one: one.name not in vars(group)["__annotations__"]):
        yield _as_typer(one.name, hints[one.name], one)


def _as_typer(name: str, kind: Any, given: Any) -> inspect.Parameter:
    if not isinstance(given, Field):  # a context
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind)
    default = inspect.Parameter.empty if given.default is MISSING else given.default
    annotation = Annotated[kind, given.metadata["typer"]]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_LIMITS = {
    "--devices": 20_000,
    "--global-batch-size": 100_000,
    "--microbatches": 10_000,
    "--microbatch-sizes": 100_000,
    "--hosts": MAX_HOSTS,
}
_LIMITS |= dict.fromkeys(("--ranks", "--replicas", "--threads", "--stages-per-rank", "--stages"), 10_000)
_MAX_OF_ANYTHING = 1_000_000_000


def check_count(option: str, count: int) -> int:
    """Returns the number. Raises ArgumentError if it is more than any job has: it would only exhaust time or memory."""
    most = _LIMITS.get(option, _MAX_OF_ANYTHING)
    if count > most:
        raise ArgumentError(f"{option} {count}: expected at most {most:,}; pass a smaller number")
    return count


def integers(option: str, text: str) -> list[int]:
    """The numbers in `1,2,4`. Raises ArgumentError if one is not an integer."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        expected = "comma-separated integers, as in 1,2,4" if "," in text else "an integer, such as 4"
        raise ArgumentError(f"{option} {text}: expected {expected}") from None
