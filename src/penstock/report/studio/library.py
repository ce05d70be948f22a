"""The runs folder: its entries, and the paths of names from addresses. Nothing outside is reached."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from penstock._base.errors import ArgumentError, PenstockError
from penstock._base.files import read_json
from penstock.trace.formats import SUFFIXES
from penstock.trace.runs.about import FORMAT
from penstock.trace.runs.folder import ABOUT
from penstock.trace.runs.summary import snapshot_or_error

_MAX_ENTRIES = 500
_MAX_DEPTH = 4
_MAX_FILES = 20_000
MAX_BYTES = 64 << 20
"""Maximum size of a file that the studio opens, packed or not."""
_MAX_ABOUT = 2 << 20
"""Maximum size of run.json, which is read for each run whenever the list is requested."""
_NUMBER = re.compile(r"\d+")
_Read = TypeVar("_Read")


@dataclass(frozen=True, slots=True)
class Library:
    """A runs folder.

    Attributes:
        root: the folder; it need not be there yet.
    """

    root: Path

    def entries(self) -> list[dict[str, Any]]:
        """Return the entries that can be opened, newest first, as plain values for JSON.

        `name` is its path in the runs folder, with slashes; `kind` "run", "file", or "folder": of files whose names
        differ by a number, which are opened together; `modified` in seconds since 1970. For a run, `damage` is why it
        cannot be read, and `summary` has its metrics, as `RunSnapshot.to_dict` gives them, if it can.
        """
        return sorted(self._scan(), key=lambda entry: -entry["modified"])[:_MAX_ENTRIES]

    def _scan(self) -> Iterator[dict[str, Any]]:
        root, count = self._real_root, 0
        for directory, folders, files in os.walk(root):  # follows no links
            folder = Path(directory)
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            depth = len(folder.relative_to(root).parts)
            count += 1 + len(files)
            if count > _MAX_FILES or depth >= _MAX_DEPTH:
                folders.clear()
            if (run := self._read_run(folder)) is not None:
                yield self._entry(folder, "run", **run)
                folders.clear()
                continue
            names = [name for name in files if name.endswith(SUFFIXES) and not name.startswith(".")]
            names = [name for name in names if self._is_file(folder / name)]
            if folder != root and len(names) > 1 and len({_NUMBER.sub("#", name) for name in names}) == 1:
                yield self._entry(folder, "folder")  # of a file for each rank, or each step
            else:
                yield from (self._entry(folder / name, "file") for name in names)

    def _is_file(self, path: Path) -> bool:
        """Whether a file is one that may be opened: none that a link leads to elsewhere."""
        inside = not os.path.islink(path) or Path(os.path.realpath(path)).is_relative_to(self._real_root)
        return inside and os.path.isfile(path)  # neither raises, as Path's do in a folder that may not be searched

    def _read_run(self, folder: Path) -> dict[str, Any] | None:
        """Return the summary of the run in a folder, or its damage; None if there is no run of this tool."""
        about = folder / ABOUT
        if not self._is_file(about):
            return None
        try:
            if about.stat().st_size > _MAX_ABOUT:
                raise _too_large(ABOUT)
            data = read_json(about, ABOUT)
            if not (isinstance(data, dict) and data.get("format") == FORMAT):
                return None
        except ArgumentError as error:
            return {"damage": str(error)}
        summary = snapshot_or_error(folder)
        return {"damage": self._hide_root(summary)} if isinstance(summary, str) else {"summary": summary.to_dict()}

    def _entry(self, path: Path, kind: str, damage: str = "", summary: Any = None) -> dict[str, Any]:
        try:
            modified = (path / ABOUT if kind == "run" else path).stat().st_mtime
        except OSError:
            modified = 0.0
        name = path.relative_to(self._real_root).as_posix()
        return {"name": name, "kind": kind, "modified": modified, "damage": damage, "summary": summary}

    def read(self, name: str, reader: Callable[[Path], _Read], parts: Sequence[str] | None = None) -> _Read:
        """Read the file or folder of this name. `parts`: as for `path`.

        Raises:
            ArgumentError: there is none, the reader refused, or the file is gone. Names are those in the runs folder,
                so that none reveals its path.
        """
        path = self.path(name, parts)
        try:
            return reader(path)
        except OSError as error:
            raise ArgumentError(f"{name[:80]!r} cannot be read: {error.strerror or error}") from error
        except PenstockError as error:
            raise ArgumentError(self._hide_root(str(error))) from error

    def _hide_root(self, text: str) -> str:
        """Remove the location of the runs folder from a message."""
        return text.replace(f"{self._real_root}{os.sep}", "")

    def path(self, name: str, parts: Sequence[str] | None = None) -> Path:
        """Return the file or folder of this name.

        Args:
            parts: of a folder, the files and folders in it that will be read; None: all.

        Raises:
            ArgumentError: the name is none, leads out of the runs folder (by itself, or by a link in it), or is of
                nothing there, of something that is no file, or of too much.
        """
        steps = name.split("/")
        if not name or "\0" in name or "\\" in name or ":" in name or any(step in ("", ".", "..") for step in steps):
            raise ArgumentError(
                f"{name[:80]!r}: no run of this name in the runs directory; expected one of the list, such as 'gpt'"
            )
        try:
            path = self.root.joinpath(*steps).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):
            raise ArgumentError(f"there is no {name[:80]!r} in the runs folder") from None
        self._check_inside(path, name, self._real_root)
        if path.is_dir():
            self._check_folder(path, name, parts)
        elif not path.is_file():
            raise ArgumentError(f"{name[:80]!r} is neither a file nor a folder")
        elif path.stat().st_size > MAX_BYTES:  # what it unpacks to is for its reader, in a process of its own
            raise _too_large(name)
        return path

    def _check_folder(self, folder: Path, name: str, parts: Sequence[str] | None) -> None:
        """Check that every file of a folder may be read: none leads elsewhere or waits for a writer."""
        tops = [folder] if parts is None else [folder / part for part in parts]
        within = (
            Path(directory, entry)
            for top in tops
            for directory, folders, files in os.walk(top)
            for entry in (*folders, *files)
        )
        root, total_bytes = self._real_root, 0
        for count, path in enumerate(chain(tops, within)):  # what is at the top is checked before it is looked into
            try:
                real = path.resolve(strict=True) if path.is_symlink() else path
                self._check_inside(real, name, root)
                file_bytes = real.stat().st_size if real.is_file() else 0
                if path == folder / ABOUT and file_bytes > _MAX_ABOUT:
                    raise _too_large(name)
                total_bytes += file_bytes
                if not (real.is_file() or real.is_dir()) and real.exists():
                    raise ArgumentError(f"{name[:80]!r} contains something that is neither a file nor a folder")
            except OSError:
                continue  # a file that is being replaced, or a broken link, which cannot be read either
            if count > _MAX_FILES or total_bytes > 16 * MAX_BYTES:
                raise _too_large(name)

    def _check_inside(self, path: Path, name: str, root: Path) -> None:
        if not path.is_relative_to(root):
            raise ArgumentError(f"{name[:80]!r} leads out of the runs folder, so it is not opened")

    @property
    def _real_root(self) -> Path:
        return self.root.resolve()


def _too_large(name: str) -> ArgumentError:
    return ArgumentError(
        f"{name[:80]!r} is too large for the studio, which opens up to {MAX_BYTES >> 20} MiB; use `penstock explain`"
    )
