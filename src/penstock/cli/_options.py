"""Groups of options that several verbs share: dataclasses whose fields have Typer's annotations."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from penstock._base.errors import ArgumentError
from penstock.network import MAX_HOSTS
from penstock.schedule import MICROBATCHES

OUTPUT_PANEL = "Output"

CUT = "Number of pieces that the batch is cut into"
"""Help of `--microbatches`, with the default of verbs that have no batch and of those that have one."""
USUAL = f"default {MICROBATCHES}"
USUAL_OF_BATCH = f"{USUAL}, or its number of rows if that is less"


def options_on(panel: str | None) -> Callable[..., Any]:
    """What makes an option, `option(help, *flags, **more)`, on a panel of the help page; None: the first one."""

    def option(text: str, *flags: str, **more: Any) -> Any:
        return typer.Option(*flags, help=text, rich_help_panel=panel, **more)

    return option


option = options_on(None)
output_option = options_on(OUTPUT_PANEL)

Json = Annotated[bool, output_option("Print only one JSON object.", "--json")]


def spread(verb: Callable[..., None]) -> Callable[..., None]:
    """Prepares a verb for Typer: replaces each dataclass parameter with one option per field, and limits all counts."""
    hints = get_type_hints(verb, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(verb).parameters.items():
        if name in groups:
            parameters += _options(groups[name])
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @wraps(verb)
    def called(**given: Any) -> None:
        for name, value in given.items():
            if type(value) is int and "seed" not in name:
                check_count(f"--{name.replace('_', '-')}", value)
        made = {name: kind(**{f.name: given.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        verb(**made, **given)

    vars(called)["__signature__"] = inspect.Signature(parameters)
    called.__doc__ = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(verb) or "")  # Typer would keep the line breaks
    return called


_LIMITS = {
    "--devices": 20_000,
    "--global-batch": 100_000,
    "--microbatches": 10_000,
    "--microbatch-sizes": 100_000,
    "--hosts": MAX_HOSTS,
}
_LIMITS |= dict.fromkeys(("--ranks", "--replicas", "--threads", "--chunks", "--stages"), 10_000)
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


def _options(group: Any) -> list[inspect.Parameter]:
    """One per field, those of the class itself before those that it inherits."""
    hints = get_type_hints(group, include_extras=True)
    kind, required = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    return [
        inspect.Parameter(
            f.name, kind, default=required if f.default is MISSING else f.default, annotation=hints[f.name]
        )
        for f in sorted(fields(group), key=lambda f: f.name not in vars(group)["__annotations__"])
    ]
