"""The user whose rights a script has on hosts that only root can make: `penstock run --user`."""

from __future__ import annotations

import contextlib
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock._base.errors import ArgumentError
from penstock._base.formatting import printable_line


@dataclass(frozen=True, slots=True)
class User:
    """A user of this machine.

    Raises:
        ArgumentError: there is no such user, or this Python and Penstock cannot be read by it.
    """

    name: str

    def __post_init__(self) -> None:
        try:
            check = self.command([sys.executable, "-P", "-c", "from penstock.distributed.launch import agent"])
            result = subprocess.run(check, capture_output=True, text=True, check=False)
        except KeyError:
            raise ArgumentError(f"user {self.name!r} does not exist: pass the name of a user of this machine") from None
        if result.returncode:
            raise ArgumentError(
                f"user {self.name!r} cannot run {sys.executable} with Penstock ({printable_line(result.stderr, 200)}): "
                "use a Python, such as a virtual environment, that this user can read"
            )

    @property
    def _account(self) -> pwd.struct_passwd:
        return pwd.getpwnam(self.name)

    def command(self, argv: Sequence[str]) -> list[str]:
        """Return the command by which root runs `argv` as this user."""
        account = self._account
        ids = (f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--init-groups")
        return ["setpriv", *ids, "env", f"HOME={account.pw_dir}", f"USER={self.name}", f"LOGNAME={self.name}", *argv]

    def take_ownership(self, path: Path) -> None:
        """Give a file to this user."""
        os.chown(path, self._account.pw_uid, self._account.pw_gid)

    @contextlib.contextmanager
    def acting(self) -> Iterator[None]:
        """Read and write files with the rights of this user: root must not write where that user says."""
        account, groups = self._account, os.getgroups()
        os.setgroups(os.getgrouplist(self.name, account.pw_gid))
        os.setegid(account.pw_gid)
        os.seteuid(account.pw_uid)
        try:
            yield
        finally:
            os.seteuid(os.getuid())
            os.setegid(os.getgid())
            os.setgroups(groups)
