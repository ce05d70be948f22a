"""One rank's program: a script or a module, run as `python script.py` and `python -m module` run it.

`python -m penstock.distributed.launch.rank SCRIPT [ARGUMENTS]`, or `-m MODULE [ARGUMENTS]`. If it raises, the launcher
is informed, and only the rank that failed first prints a traceback.
"""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import signal
import sys
import time
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import FrameType, ModuleType, TracebackType
from typing import NoReturn

from penstock._base.errors import PlanError, RankFailedError
from penstock._base.formatting import one_line
from penstock.distributed.launch.endings import await_culprit, exit_status, first_failure, is_doubtful, note_failure

_DOUBT_SECONDS = 0.5
_PLAIN = RankFailedError, PlanError
"""Errors whose message needs neither a rank nor a traceback."""


def main() -> None:
    """Run the program, and end with its exit status."""
    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGINT, _interrupt)
    try:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the agent blocked it until here
            _run(sys.argv[1:])
        finally:
            if signal.getsignal(signal.SIGINT) is _interrupt:
                signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is left to do needs no traceback
    except BaseException as error:
        status = exit_status(error)
        if status == 0:
            raise
        if is_doubtful(error) and first_failure() is None:
            time.sleep(_DOUBT_SECONDS)  # another rank may have been killed, and the agent end this one
        sys.last_value = error  # as the interpreter does: a pipeline that is open tells the other ranks at exit
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            note_failure(rank, exitcode=status)
        elif not isinstance(error, RankFailedError) or first_failure() is None:
            note_failure(rank, str(error) if isinstance(error, _PLAIN) else f"rank {rank} failed: {one_line(error)}")
        await_culprit(rank)
        first = first_failure()
        if isinstance(error, SystemExit):
            raise
        if not isinstance(error, (KeyboardInterrupt, *_PLAIN)) and (first is None or first.rank == rank):
            error = error.with_traceback(_strip_own_frames(error.__traceback__))
            sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(status)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt, as usual. Python's messages are still shown, but not those of C++, through which it may
    pass."""
    with contextlib.suppress(RuntimeError, ValueError, OSError):
        stream = sys.stderr
        if isinstance(stream, io.TextIOWrapper):  # logging holds it, so it stays the same object
            stream.flush()
            writer = io.BufferedWriter(io.FileIO(os.dup(2), "w"))
            stream.__init__(writer, stream.encoding, stream.errors, line_buffering=True)  # type: ignore[misc]
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    raise KeyboardInterrupt


def _run(command: Sequence[str]) -> None:
    if command[0] == "-m":
        is_ours = command[1].partition(".")[0] == "penstock"
        _begin(command[1:], "" if is_ours else os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        path = os.path.realpath(command[0])
        is_folder = os.path.isdir(path)
        _begin(command, path if is_folder else os.path.dirname(path))
        _run_script(os.path.abspath(os.path.join(command[0], "__main__.py") if is_folder else command[0]))


def _begin(arguments: Sequence[str], folder: str) -> None:
    """Set what a program finds in `sys`."""
    sys.argv[:] = arguments
    if folder and not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, folder)


def _run_script(path: str) -> None:
    """Run a script. Unlike `runpy.run_path`, keep the arguments as typed and the module until the interpreter ends."""
    module = sys.modules["__main__"] = ModuleType("__main__")
    vars(module).update(__file__=path, __cached__=None, __builtins__=__builtins__)
    module.__loader__ = SourceFileLoader("__main__", path)
    with io.open_code(path) as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(module))


def _strip_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Drop the frames of this file and of runpy above the program's."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in _OURS:
        traceback = traceback.tb_next
    return traceback


_OURS = {__file__, "<frozen runpy>", runpy.__file__, "<frozen importlib._bootstrap>"}

if __name__ == "__main__":
    main()
