"""The command `penstock`: one file per verb, imported on demand. No verb loads torch before it runs.

To add a verb, write `cli/<verb>.py` with a function `<verb>`, and add it to `VERBS`. The defaults of its parameters are
options (`_options.py`), or their types are groups of options. Optional: `EPILOG`, the end of `--help`, and `SETTINGS`,
Typer's `context_settings`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from importlib import import_module
from typing import Annotated, Any

import typer

from penstock._base import __version__
from penstock._base.aliases import peer_remedy
from penstock._base.errors import ArgumentError, PartitionError, PenstockError, VerificationError, format_warning
from penstock._base.formatting import strip_control_chars
from penstock.cli._errors import Commands, in_options, iterate_options, usage_error
from penstock.cli._old_names import OLD_COMMANDS, old_options
from penstock.distributed.launch.endings import describe_signal

VERBS = (
    *("run", "demo", "init", "inspect", "profile", "verify", "blame", "export", "schedules", "simulate", "search"),
    *("draw", "plan", "explain", "report", "top", "runs", "compare", "devices", "fabric", "studio"),
)
"""The verbs in the order of `--help`."""

_NOTHING_LEFT = "no process is left running"


class _Verbs(Commands):
    """The verbs. Imports the module of a verb on lookup, and reports Penstock's errors in one line."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, [*(OLD_COMMANDS.get(name, name) for name in args[:1]), *args[1:]])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        from penstock.cli._options import spread

        module = import_module(f"penstock.cli.{cmd_name}")
        verb = getattr(module, "app", None)  # of a verb with verbs of its own
        if verb is None:
            verb = typer.Typer(add_completion=False)
            epilog, settings = getattr(module, "EPILOG", None), getattr(module, "SETTINGS", None)
            verb.command(cmd_name, epilog=epilog, context_settings=settings)(spread(getattr(module, cmd_name)))
        command, old = typer.main.get_command(verb), old_options(cmd_name)
        command.name = cmd_name  # shown in the list of verbs
        command.context_settings["token_normalize_func"] = lambda name: old.get(name, name)
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            number = error.args[0] if error.args and isinstance(error.args[0], int) else signal.SIGINT
            text, status = f"{describe_signal(number)}; {_NOTHING_LEFT}", 128 + number
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second one ends at once
        except (PenstockError, OSError) as error:
            if isinstance(error, BrokenPipeError):  # the reader of the output has stopped, as `head` does
                _flush()
                raise typer.Exit(1) from None
            if ctx.params["debug"] or os.environ.get("PENSTOCK_DEBUG") == "1":
                raise
            notes = [note.removeprefix("penstock: ") for note in getattr(error, "__notes__", ())]
            text = "; ".join([_describe(error) if isinstance(error, OSError) else str(error), *notes])
            status = 1 if isinstance(error, VerificationError) else 2
            if isinstance(error, ArgumentError | PartitionError) and (
                verb := self.get_command(ctx, ctx.invoked_subcommand or "")
            ):
                text = in_options(text, set(iterate_options(verb)), ctx.invoked_subcommand)
        except Exception as error:  # click's UsageError, which Typer does not export
            if not hasattr(error, "format_message"):
                raise
            verb, name = self.get_command(ctx, ctx.invoked_subcommand or ""), getattr(error, "option_name", "")
            remedy = in_options(peer_remedy(name), set(iterate_options(verb)) if verb else (), ctx.invoked_subcommand)
            text = f"{ctx.invoked_subcommand} has no option {name}; {remedy}" if "--" in remedy else usage_error(error)
            if not text:
                raise
            status = 2
        _flush()
        print(f"penstock: {'error: ' if status <= 2 else ''}{strip_control_chars(text)}", file=sys.stderr)
        raise typer.Exit(status)


app = typer.Typer(cls=_Verbs, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(value: bool) -> None:
    if value:
        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
def _penstock(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Pipeline parallelism for PyTorch: any model, any schedule, the same gradients as on one device."""


def main() -> None:
    """Run the console script. Exit with 0, 1 if a verification failed, 2 on an error, or the job's status."""
    for name in ("stdout", "stderr"):  # closed, as by `>&-`: no other file may get its number
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (until this process ends)
    if len(os.environ.get("COLUMNS", "")) > 4:  # rich would fill lines of that length
        del os.environ["COLUMNS"]
    with contextlib.suppress(AttributeError):  # a replacement by tests
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    sys.exit(_run())


def _run() -> int:
    """Run the command and return its exit status."""
    status: Any = 0
    write_error: OSError | None = None
    warnings.formatwarning = format_warning
    try:
        app(prog_name="penstock")
    except SystemExit as error:
        status = error.code
        if isinstance(getattr(error.__context__, "__cause__", None), KeyboardInterrupt):  # outside of any verb
            print(f"penstock: {describe_signal(signal.SIGINT)}; {_NOTHING_LEFT}", file=sys.stderr)
    except OSError as error:  # while printing help
        write_error = error
    write_error = _flush() or write_error
    if isinstance(write_error, BrokenPipeError):
        return int(status or 1)  # as rich does
    if write_error:
        print(f"penstock: error: {_describe(write_error)}", file=sys.stderr)
    return int(status or (2 if write_error else 0))


def _flush() -> OSError | None:
    """Flush standard output. If that fails, drop the rest and return the error."""
    try:
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter flushes again at exit
        return error
    return None


def _describe(error: OSError) -> str:
    """Describe an error in one line: the file and the reason."""
    return f"{error.filename or 'cannot write all output'}: {error.strerror or error}"
