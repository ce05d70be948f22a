"""The owner of a folder that only one job may write: the process that holds a lock on a file in it.

The kernel releases the lock when the process ends, however it does, as an NFS server does for its clients. A file
system without locks (Lustre mounted without `flock`) keeps no second job out, which is warned of.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import socket
import threading
import time
import weakref
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from penstock._base.errors import ArgumentError, warn
from penstock._base.formatting import printable_line
from penstock._base.process import Process, is_alive

NAME = ".owner.json"
_MAX_CHARACTERS = 200
_OWNER_TEXT = re.compile(r"process ([0-9]{1,9}) on (.*), started")
_WAIT_SECONDS = 1.0


@dataclass(slots=True)
class _Claim:
    """A folder that this process owns: the descriptor of its locked file, and the ids of its holders."""

    descriptor: int
    made_folder: bool
    holders: set[int] = field(default_factory=set)

    def is_of(self, file: Path) -> bool:
        """Whether the file at this path is the locked one: users may remove it."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), file.stat())
        except OSError:
            return False


_claims: dict[Path, _Claim] = {}
_lock = threading.RLock()


def claim(folder: Path, holder: object, label: str) -> None:
    """Make this process the owner of a folder, until every holder has been released or is gone, or the process ends.

    Args:
        folder: is created if missing.
        holder: the object that needs it, until it is closed or collected.
        label: names the folder in messages.

    Raises:
        ArgumentError: another process is the owner.
        OSError: the folder or the file cannot be written.
    """
    made_folder = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    file = Path(os.path.realpath(folder), NAME)
    with _lock:
        stale = _claims.get(file)
        if stale is None or not stale.is_of(file):
            _claims[file] = _take(file, made_folder, label)
            if stale is not None:
                _claims[file].holders |= stale.holders
                os.close(stale.descriptor)
        if id(holder) not in _claims[file].holders:
            _claims[file].holders.add(id(holder))
            weakref.finalize(holder, release, id(holder))


def release(holder: int) -> None:
    """Remove a holder, by its `id`, and give up the folders that no other holder needs."""
    with _lock:
        for file, entry in list(_claims.items()):
            entry.holders.discard(holder)
            if not entry.holders:
                del _claims[file]
                with contextlib.suppress(OSError):
                    if entry.is_of(file):
                        file.unlink()
                    if entry.made_folder:
                        file.parent.rmdir()  # if nothing was written there
                os.close(entry.descriptor)


def _take(file: Path, made_folder: bool, label: str) -> _Claim:
    while True:
        entry = _Claim(os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644), made_folder)
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(os.close, entry.descriptor)
            _lock_file(entry.descriptor, file, label)
            if entry.is_of(file):  # else another process has just given it up
                with contextlib.suppress(OSError):  # a full disk: the text is for messages alone
                    os.ftruncate(entry.descriptor, 0)
                    os.pwrite(entry.descriptor, json.dumps(_describe_this_process()).encode() + b"\n", 0)
                cleanup.pop_all()
                return entry


def _lock_file(descriptor: int, file: Path, label: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ArgumentError(
            f"{label}: {_describe_owner(descriptor)} is writing to it; pass a folder that no other job uses, or, if "
            f"that job has ended, remove {file}"
        ) from None
    except OSError as error:
        warn(
            f"{label}: no locks on this file system ({error.strerror}), so a second job in this folder will not be "
            "detected"
        )


def _describe_owner(descriptor: int) -> str:
    """Describe the lock's holder. It writes its name right after it takes the lock; until then the file is empty, or
    names one that has ended."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
        text = printable_line(os.pread(descriptor, _MAX_CHARACTERS, 0).decode(errors="replace"), _MAX_CHARACTERS).strip(
            '"'
        )
        match = _OWNER_TEXT.match(text)
        if (match and (match[2] != socket.gethostname() or is_alive(int(match[1])))) or time.monotonic() > deadline:
            return text or "another process"
        time.sleep(0.01)


def _describe_this_process() -> str:
    process, started = Process.here(), time.time()
    if process.started:
        started -= time.clock_gettime(time.CLOCK_BOOTTIME) - int(process.started) / os.sysconf("SC_CLK_TCK")
    text = datetime.fromtimestamp(started, UTC).isoformat(" ", "seconds")
    return f"process {process.pid} on {socket.gethostname()}, started at {text}"


def _forget_claims() -> None:
    """Leave the locks to the process that this one was forked from; a copy of a descriptor would keep them."""
    global _lock  # noqa: PLW0603  (the hooks of a fork take no arguments)
    _lock = threading.RLock()  # another thread may have held it
    for entry in _claims.values():
        os.close(entry.descriptor)
    _claims.clear()


os.register_at_fork(after_in_child=_forget_claims)
