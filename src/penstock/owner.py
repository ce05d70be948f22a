"""The owner of a folder that only one job may write: a file in the folder names its process, for as long as it writes.

The file is created with O_EXCL, which is atomic over NFS too. On the owner's machine, its process number and start time
show whether it still runs. On other machines its heartbeat does: the file's time, which changes every few seconds. No
clocks are compared. An owner that was suspended for longer may have lost its folder; its next `claim` is refused.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import weakref
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Literal

from penstock.errors import ArgumentError
from penstock.files import STRICT, read_json, validate
from penstock.words import printable

NAME = ".owner.json"
BEAT_SECONDS = 5.0
STALE_SECONDS = 30.0
"""Without a heartbeat, an owner on another machine has ended after this time."""
_LOOK_SECONDS = 0.5


ProcessState = Literal["running", "stopped", "gone", "unknown"]


@dataclass(frozen=True, slots=True)
class Process:
    """A process that others on the same machine can look up: machine, id, and start time, since ids are reused."""

    __pydantic_config__ = STRICT
    machine: str
    pid: int
    started: str

    def __post_init__(self) -> None:  # another process may have sent it
        if not (isinstance(self.machine, str) and type(self.pid) is int and isinstance(self.started, str)):
            raise TypeError(f"not a process: {self!r}")

    @classmethod
    def here(cls) -> Process:
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
        except OSError:
            return cls(socket.gethostname(), os.getpid(), "")
        return cls(" ".join([boot, *spaces]), os.getpid(), _stat(os.getpid())[1])

    def state(self) -> ProcessState:
        """What the kernel says about the process; `unknown` from another machine or without /proc."""
        if not self.started or self.machine != Process.here().machine:
            return "unknown"
        try:
            letter, started = _stat(self.pid)
        except OSError:
            return "gone"
        if started != self.started or letter in "ZX":
            return "gone"
        return "stopped" if letter == "T" else "running"


def _stat(pid: int) -> tuple[str, str]:
    """State and start time. The name before them is in parentheses and may contain anything."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that owns a folder; its host and start, for messages."""

    __pydantic_config__ = STRICT
    process: Process
    host: str = field(compare=False)
    started: str = field(compare=False)

    def __str__(self) -> str:
        return f"process {self.process.pid} on {printable(self.host)}, started at {printable(self.started)}"

    def state(self) -> ProcessState:
        """That of its process, which may be in another network of this machine."""
        here = Process.here().machine
        is_here = self.process.machine.split()[:2] == here.split()[:2]
        return (replace(self.process, machine=here) if is_here else self.process).state()


@dataclass(slots=True)
class _Claim:
    """A folder that this process owns: its open file, whose time is the heartbeat, and for whom it owns it."""

    file: BinaryIO
    made_folder: bool
    holders: set[int] = field(default_factory=set)


_claims: dict[Path, _Claim] = {}
_lock = threading.RLock()


def claim(folder: Path, holder: object, what: str) -> None:
    """Make this process the owner of a folder, until every holder has been released or is gone, or the process ends.

    Waits up to `STALE_SECONDS` for a heartbeat if a process on another machine is the owner.

    Args:
        folder: is created if missing.
        holder: for whom this process owns it: whatever closes.
        what: names the folder in messages.

    Raises:
        ArgumentError: another process is the owner.
        OSError: the folder or the file cannot be written.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    file = Path(os.path.realpath(folder), NAME)
    is_new = _take(file, what)
    with _lock:
        if is_new or file not in _claims:
            _claims[file] = held = _Claim(file.open("ab"), made)
            threading.Thread(target=_keep_beating, args=(file, held), name="penstock-owner", daemon=True).start()
        if id(holder) not in _claims[file].holders:
            _claims[file].holders.add(id(holder))
            weakref.finalize(holder, release, id(holder))


def release(holder: int) -> None:
    """Give up all folders that this process owns for a holder alone, by its `id`."""
    with _lock:
        for file, held in list(_claims.items()):
            held.holders.discard(holder)
            if not held.holders:
                del _claims[file]
                with contextlib.suppress(OSError):
                    held.file.close()
                    if _read(file)[0] == this_process():  # a forked process does not own what its parent does
                        file.unlink()
                        if held.made_folder:
                            file.parent.rmdir()  # if nothing was written there


def this_process() -> Owner:
    process, now = Process.here(), time.time()
    if process.started:
        now -= time.clock_gettime(time.CLOCK_BOOTTIME) - int(process.started) / os.sysconf("SC_CLK_TCK")
    return Owner(process, socket.gethostname(), datetime.fromtimestamp(now, UTC).isoformat(" ", "seconds"))


def _take(file: Path, what: str) -> bool:
    """Create the file; False if this process is the owner already."""
    me, first, until, is_told = this_process(), None, 0.0, False
    while not _create(file, me):
        try:
            owner, _ = found = _read(file)
        except FileNotFoundError:
            continue  # given up meanwhile
        if owner == me:
            return False
        state = owner.state() if owner else "unknown"
        has_ended, runs = state == "gone", state in ("running", "stopped")
        if state == "unknown":
            if first is None:
                first, until = found, time.monotonic() + STALE_SECONDS
            elif not is_told:  # the first time, it may just be being written
                is_told = True
                said = f"waiting up to {STALE_SECONDS:.0f} s for a heartbeat of {owner or 'the process that owns it'}"
                print(f"penstock: {what}: {said}", file=sys.stderr, flush=True)
            has_ended, runs = time.monotonic() > until, found != first
        if runs:
            raise ArgumentError(
                f"{what}: {owner or 'another process'} writes there; expected a folder of this job's own: pass another "
                f"one, or, if that job has ended, remove {file}"
            )
        if has_ended:
            _remove_stale(file, found)
        else:
            time.sleep(_LOOK_SECONDS)
    return True


def _remove_stale(file: Path, stale: tuple[Owner | None, int]) -> None:
    """Remove the file of an owner that has ended, unless another process has replaced it in the meantime."""
    lock, until = file.with_name(".owner.lock"), time.monotonic() + STALE_SECONDS
    while True:
        with contextlib.suppress(FileExistsError):
            lock.mkdir()
            break
        time.sleep(_LOOK_SECONDS)
        if time.monotonic() > until:  # its process was killed in here
            with contextlib.suppress(FileNotFoundError):
                lock.rmdir()
    try:
        with contextlib.suppress(FileNotFoundError):
            if _read(file) == stale:
                file.unlink()
    finally:
        lock.rmdir()


def _create(file: Path, owner: Owner) -> bool:
    try:
        with file.open("xb") as new:
            try:
                new.write(json.dumps(asdict(owner)).encode() + b"\n")
                new.flush()
                os.fsync(new.fileno())
            except BaseException:
                file.unlink()
                raise
    except FileExistsError:
        return False
    return True


def _read(file: Path) -> tuple[Owner | None, int]:
    """The owner, None if the file is damaged or being written, and its last heartbeat. Raises OSError."""
    owner = None
    with contextlib.suppress(ArgumentError):
        owner = validate(Owner, read_json(file), str(file))
    return owner, file.stat().st_mtime_ns


def _keep_beating(file: Path, held: _Claim) -> None:
    """Show other machines that this process lives, as long as it owns the folder."""
    while _claims.get(file) is held:
        with contextlib.suppress(OSError, ValueError):  # which is closed just now
            os.utime(held.file.fileno())
        time.sleep(BEAT_SECONDS)
