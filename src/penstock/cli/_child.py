"""Runs a command that calls the user's code in a child, so that a parent knows whether it had a result.

The user's code can end its process with status 0 in ways that nothing inside survives: `os._exit`, C's `_exit`,
`os.execv`. The parent believes in a result only if the child says so at its end, through a pipe.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable

from penstock.distributed.launch.agent import end_with_parent
from penstock.distributed.launch.endings import shell_status

_VERBS = {"verify", "blame", "inspect", "profile", "simulate", "show", "search", "plan", "fabric"}
_WAITED = {signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


def calls_a_target(arguments: list[str]) -> bool:
    """Whether a command line, not of a rank of torchrun, names a verb that may take a TARGET."""
    return "TORCHELASTIC_RUN_ID" not in os.environ and not _VERBS.isdisjoint(arguments)


def in_child(command: Callable[[], int]) -> int:
    """Returns the exit status of a command that runs in a child: 2 if that ended well without a result."""
    reads, writes = os.pipe()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the kernel sends none where it is ignored, which children inherit
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)
    parent, child = os.getpid(), os.fork()
    if child == 0:
        os.close(reads)
        if not end_with_parent(parent):
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        status = command()
        os.write(writes, bytes([status]))
        os.close(writes)
        return status
    os.close(writes)
    ended = 0
    while ended == 0:
        sent = signal.sigwaitinfo(_WAITED)
        if sent.si_signo != signal.SIGCHLD and sent.si_code <= 0:  # to this process alone, unlike the terminal's Ctrl-C
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, sent.si_signo)
        ended, found = os.waitpid(child, os.WNOHANG)
    said = os.read(reads, 1)
    status = said[0] if said else shell_status(os.waitstatus_to_exitcode(found))
    if said or status:
        return status
    print(
        "penstock: error: TARGET ended the process with status 0 before the command had a result; remove the call of "
        "os._exit or os.execv",
        file=sys.stderr,
    )
    return 2
