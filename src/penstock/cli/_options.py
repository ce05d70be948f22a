"""Declaration of options, and of groups of options (dataclasses) that verbs share; JSON output."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console

from penstock._base.errors import ArgumentError
from penstock._base.files import finite
from penstock.cli._errors import flag
from penstock.network import MAX_HOSTS
from penstock.schedule import MICROBATCHES

CUT = "Number of microbatches"
"""Help of `--microbatches`, with the default of verbs without and with a batch."""
USUAL = f"default {MICROBATCHES}"
USUAL_OR_BATCH_SIZE = f"{USUAL}, or the batch size if that is smaller"

REQUIRED: Any = MISSING
"""Default of a required option."""


def options_on(panel: str | None) -> Callable[..., Any]:
    """Return a function `option(help, *flags, default=None, **more)` for options on a panel of the help; None is the
    first panel. Its result is the default of a dataclass's field or of a verb's parameter."""

    def option(text: str, *flags: str, default: Any = None, **more: Any) -> Any:
        return field(
            default=default, metadata={"typer": typer.Option(*flags, help=text, rich_help_panel=panel, **more)}
        )

    return option


option = options_on(None)
output_option = options_on("Output")


def argument(text: str, *, default: Any = None, **more: Any) -> Any:
    """Declare a positional argument, as `option` declares an option."""
    return field(default=default, metadata={"typer": typer.Argument(help=text, **more)})


JSON = output_option("Print only one JSON object.", "--json", default=False)
RUN = argument("Directory of a run.", metavar="FOLDER", default=REQUIRED)


def print_json(value: Any) -> None:
    """Print one JSON value, without NaN and infinity."""
    print(json.dumps(finite(value), allow_nan=False))


def screen() -> Console:
    """Return the console for tables, which shows texts as they are: names in traces and files are no markup."""
    return Console(highlight=False, markup=False, emoji=False)


def spread(verb: Callable[..., None]) -> Callable[..., None]:
    """Prepare a verb for Typer: replace dataclass parameters by one option per field, and limit all counts."""
    hints = get_type_hints(verb)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(verb).parameters.items():
        parameters += _expand(groups[name]) if name in groups else [_as_typer(name, hints[name], parameter.default)]

    @wraps(verb)
    def call(**values: Any) -> None:
        for name, value in values.items():
            if type(value) is int and "seed" not in name:
                check_count(flag(name), value)
        arguments = {name: kind(**{f.name: values.pop(f.name) for f in fields(kind)}) for name, kind in groups.items()}
        verb(**arguments, **values)

    vars(call)["__signature__"] = inspect.Signature(parameters)
    call.__doc__ = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(verb) or "")  # Typer would keep the line breaks
    return call


def _expand(group: Any) -> Iterator[inspect.Parameter]:
    """Yield one parameter per field, those of the class before inherited ones."""
    hints = get_type_hints(group)
    for option in sorted(fields(group), key=lambda option: option.name not in vars(group)["__annotations__"]):
        yield _as_typer(option.name, hints[option.name], option)


def _as_typer(name: str, kind: Any, option: Any) -> inspect.Parameter:
    if not isinstance(option, Field):  # a context
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind)
    default = inspect.Parameter.empty if option.default is MISSING else option.default
    annotation = Annotated[kind, option.metadata["typer"]]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


_LIMITS = {
    "--devices": 20_000,
    "--global-batch-size": 100_000,
    "--microbatches": 10_000,
    "--microbatch-sizes": 100_000,
    "--hosts": MAX_HOSTS,
}
_LIMITS |= dict.fromkeys(("--ranks", "--replicas", "--threads", "--stages-per-rank", "--stages"), 10_000)
_MAX_COUNT = 1_000_000_000


def check_count(option: str, count: int) -> int:
    """Return `count`. Raise ArgumentError if it is larger than in any real job: it would exhaust time or memory."""
    limit = _LIMITS.get(option, _MAX_COUNT)
    if count > limit:
        raise ArgumentError(f"{option} {count}: expected at most {limit:,}; pass a smaller number")
    return count


def check_suffix(option: str, file: Path | None, *suffixes: str) -> None:
    """Raise ArgumentError if a file has another suffix than its content; no suffix is allowed."""
    if file is not None and file.suffix and file.suffix.lower() not in suffixes:
        better = file.with_suffix(suffixes[0])
        raise ArgumentError(f"{option} {file}: expected a name that ends in {' or '.join(suffixes)}, such as {better}")


def integers(option: str, text: str) -> list[int]:
    """Parse integers such as `1,2,4`. Raise ArgumentError if one is not an integer."""
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        expected = "comma-separated integers, as in 1,2,4" if "," in text else "an integer, such as 4"
        raise ArgumentError(f"{option} {text}: expected {expected}") from None
