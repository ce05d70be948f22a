"""Runs scripts in forks of the server that the pools of ranks come from.

Each is a process of its own that may be killed, but what takes an interpreter seconds to import is there already.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn, TextIO

from scaffolding.ranks import server

Script = str | Path
"""The text of a script, as for `python -c`, or its file."""


class WarmScript:
    """A script that runs, with one thread, in the folder of its caller and with its variables, or `environment`.

    Use it as a context manager: the process is killed at the end of the block.
    """

    def __init__(self, script: Script, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> None:
        context = server()
        reader, writer = context.Pipe(duplex=False)
        self._errors = tempfile.NamedTemporaryFile()  # noqa: SIM115 (closed by __exit__)
        place = os.getcwd(), dict(os.environ if environment is None else environment)
        self._process = context.Process(
            target=_work, args=(script, [*map(str, arguments)], *place, writer, self._errors.name)
        )
        self._process.start()
        writer.close()
        with reader:
            self.out: TextIO = os.fdopen(os.dup(reader.fileno()))

    def __enter__(self) -> WarmScript:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self.out.close()
        self._errors.close()

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def status(self, seconds: float = 250.0) -> int | None:
        """The exit status, negative for a signal; None if it still runs after so many seconds."""
        self._process.join(seconds)
        return self._process.exitcode

    def errors(self) -> str:
        """What it has written to stderr."""
        return Path(self._errors.name).read_text()


def lines_of_script(
    script: Script, *arguments: str | Path, seconds: float = 250.0, environment: Mapping[str, str] | None = None
) -> list[str]:
    """The lines that a script prints. Fails the test if it does not end well, and in time."""
    with WarmScript(script, *arguments, environment=environment) as process:
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.extend(process.out))
        reader.start()  # or it would wait for room in the pipe
        status = process.status(seconds)
        if status is None:
            process.send_signal(signal.SIGKILL)
        reader.join()
        assert status == 0, f"{status}\n{''.join(said)}{process.errors()}"
    return [line.removesuffix("\n") for line in said]


def _work(
    script: Script, arguments: list[str], folder: str, environment: dict[str, str], out: Connection, errors: str
) -> None:
    import torch

    gc.freeze()  # a collection would copy the memory of everything imported
    torch.set_num_threads(1)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment, OMP_NUM_THREADS="1")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's workers ignore it
    os.dup2(out.fileno(), 1)
    out.close()
    with open(errors, "w") as file:
        os.dup2(file.fileno(), 2)
    _exit_as_an_interpreter(partial(_run, script, arguments))


def _run(script: Script, arguments: list[str]) -> None:
    if isinstance(script, Path):
        sys.argv = [str(script), *arguments]
        sys.path.insert(0, str(script.parent))
        runpy.run_path(str(script), run_name="__main__")
    else:
        sys.argv = ["-c", *arguments]
        exec(compile(script, "<string>", "exec"), {"__name__": "__main__"})


def _exit_as_an_interpreter(run: Callable[[], None]) -> NoReturn:
    """Else a fork ends without what `atexit` has registered, and says in words of its own what it raised."""
    status = 0
    try:
        run()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
