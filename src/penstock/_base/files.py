"""The one gate for files: whatever comes from outside is read here, and whatever users keep is written here.

A reader takes regular files only, limits what they unpack to and how many values they parse to, and checks types by the
annotations of a dataclass (pydantic). A writer writes beside its target and renames, so that a failure leaves the
older file as it was. Every error is an `ArgumentError` of one line: which file, what was found, what was expected.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import itertools
import json
import math
import os
import re
import reprlib
import stat
import tomllib
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from penstock._base.errors import ArgumentError
from penstock._base.words import printable

T = TypeVar("T")
FilePath = str | os.PathLike[str]

MAX_BYTES = 128 << 20
"""Of a file, once unpacked."""
MAX_TEXT_BYTES = 64 << 20
"""Of a file of text: Python takes up to four bytes a character, and lines and cells besides."""
MAX_VALUES = 4_000_000
"""Of a file of JSON or CSV: lists, objects and their entries, which take about 100 bytes each in memory."""
MAX_QUOTED = 80
"""Characters that an error quotes of a value."""

_LIMIT = "the limit for such a file; of a trace, keep only the steps to look at"
_MAX_ENTRIES = 1000
_CHUNK_BYTES, _THINNED_BYTES = 1 << 20, 16 << 20
_MAX_MEMBERS = 10_000
_GZIP = 31  # zlib's window size for gzip's format
_KINDS = {
    stat.S_ISDIR: "a folder",
    stat.S_ISCHR: "a device",
    stat.S_ISBLK: "a device",
    stat.S_ISFIFO: "a pipe",
    stat.S_ISSOCK: "a socket",
}
_NEW = re.compile(r"\.\d+-\d+\.new(\.|$)")
_AROUND_NAMES = re.compile(r"[=,\n]|#.*")
_numbers = itertools.count()


def read_bytes(
    path: FilePath,
    what: str | None = None,
    max_bytes: int | None = None,
    start: int = 0,
    thinned: Callable[[bytearray], bytes | bytearray] | None = None,
) -> bytes:
    """Read a regular file, and unpack it if it is packed by gzip.

    Args:
        what: names the file in messages, such as "plan 'plan.json'"; None: its path.
        max_bytes: once unpacked; None: `MAX_BYTES`.
        start: the place in the file to begin at.
        thinned: is given what has been read and returns what is kept of it; the rest counts for nothing.

    Raises:
        ArgumentError: there is no such file, it cannot be read or unpacked, or it has more than `max_bytes`.
    """
    what = os.fspath(path) if what is None else what
    max_bytes = MAX_BYTES if max_bytes is None else max_bytes
    try:
        # O_NONBLOCK: a pipe's other end is not waited for
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if kind := _kind(os.fstat(file.fileno()).st_mode):
                raise ArgumentError(f"{what} is {kind}; expected a regular file")
            file.seek(start)
            data, packed, members, unpack, whole = bytearray(), 0, 0, None, 0
            while chunk := file.read(_CHUNK_BYTES):
                packed += len(chunk)
                if members == 0 and not data and chunk.startswith(b"\x1f\x8b"):
                    members, unpack = 1, zlib.decompressobj(_GZIP)
                while chunk:
                    data += unpack.decompress(chunk, _CHUNK_BYTES) if unpack else chunk
                    if thinned and len(data) > whole + _THINNED_BYTES:
                        packed -= len(data)
                        data = bytearray(thinned(data))
                        packed, whole = packed + len(data), len(data)
                    if max(len(data), packed) > max_bytes:
                        size = "has" if packed > max_bytes else "unpacks to"
                        raise ArgumentError(f"{what} {size} more than {max_bytes >> 20} MiB, {_LIMIT}")
                    chunk = unpack.unconsumed_tail if unpack else b""
                    if unpack and unpack.eof and (chunk := unpack.unused_data.lstrip(b"\0")):
                        members, unpack = members + 1, zlib.decompressobj(_GZIP)
                    if members > _MAX_MEMBERS:
                        raise ArgumentError(f"{what} has more than {_MAX_MEMBERS:,} packed parts")
            if unpack and not unpack.eof:
                raise ArgumentError(f"{what} cannot be unpacked: it is cut off")
            return bytes(thinned(data) if thinned else data)
    except OSError as error:
        raise ArgumentError(f"{what} cannot be read: {error.strerror or error}") from None
    except zlib.error as error:
        raise ArgumentError(f"{what} cannot be unpacked: {error}") from None


def read_text(path: FilePath, what: str | None = None, max_bytes: int | None = None) -> str:
    """Read a file of UTF-8 text, by default of up to `MAX_TEXT_BYTES`. Raise ArgumentError as `read_bytes` does, and
    for other encodings."""
    try:
        return read_bytes(path, what, MAX_TEXT_BYTES if max_bytes is None else max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{what or os.fspath(path)} is not UTF-8 text: {error}") from None


def read_json(
    path: FilePath, what: str | None = None, thinned: Callable[[bytearray], bytes | bytearray] | None = None
) -> Any:
    """Read a file of JSON as plain values. Raise ArgumentError if it cannot be read or is not JSON."""
    what = os.fspath(path) if what is None else what
    return parse_json(read_bytes(path, what, thinned=thinned), what)


def json_or_none(path: FilePath) -> Any:
    """Read a file of JSON; None if there is none, or it is something else."""
    with contextlib.suppress(ArgumentError):
        return read_json(path)
    return None


def read_toml(path: FilePath, what: str | None = None) -> dict[str, Any]:
    """Read a file of TOML. Raise ArgumentError if it cannot be read, is not TOML, or has more than 1 MiB."""
    what = os.fspath(path) if what is None else what
    text = read_text(path, what, 1 << 20)
    if any(name.count(".") > 50 for name in _AROUND_NAMES.split(text)):  # tomllib takes the square of their number
        raise ArgumentError(f"{what}: a name has too many parts")
    try:
        return tomllib.loads(text)
    except (RecursionError, ValueError) as error:  # a number of too many digits is a ValueError
        raise ArgumentError(f"{what} is not TOML: {quoted(str(error))}") from None


def parse_json(data: str | bytes, what: str) -> Any:
    """Parse JSON into plain values. NaN and Infinity are not JSON.

    Raises:
        ArgumentError: it is something else, has more than `MAX_VALUES` values, or is nested too deeply.
    """
    from pydantic_core import from_json

    check_number_of_values(data, what)
    try:
        return from_json(data.removeprefix(b"\xef\xbb\xbf") if isinstance(data, bytes) else data, allow_inf_nan=False)
    except ValueError as error:
        reason = "its values are nested too deeply" if "recursion" in str(error) else str(error)
        words: Any = ("NaN", "Infinity") if isinstance(data, str) else (b"NaN", b"Infinity")
        finite = "; numbers must be finite, without NaN or Infinity" if any(word in data for word in words) else ""
        raise ArgumentError(f"{what} is not JSON: {reason}{finite}") from None


def finite(value: Any) -> Any:
    """Make a value fit for JSON, which has no NaN and no Infinity: they become null."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): finite(item) for key, item in value.items()}
        case list() | tuple():
            return [finite(item) for item in value]
    return value


def parse_csv(text: str, what: str, delimiter: str = ",") -> Iterator[list[str]]:
    """Yield the rows of CSV. Raise ArgumentError: it is something else, or has more than `MAX_VALUES` values."""
    check_number_of_values(text, what)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        yield from rows
    except csv.Error as error:
        raise ArgumentError(f"{what}, line {rows.line_num}, is not CSV: {error}") from None


def check_number_of_values(data: str | bytes, what: str) -> None:
    """Raise ArgumentError if JSON or CSV would have more than `MAX_VALUES` values, before they are made."""
    marks: Any = "\n[{,;\t" if isinstance(data, str) else [b"\n", b"[", b"{", b",", b";", b"\t"]
    lines, *values = map(data.count, marks)
    if max(lines, sum(values)) > MAX_VALUES:  # files with indentation have a line for each value, too
        raise ArgumentError(f"{what} has more than {MAX_VALUES:,} values, {_LIMIT}")


STRICT: Any = {"strict": True, "extra": "forbid", "allow_inf_nan": False}
"""`__pydantic_config__` of every dataclass that `validate` makes: pydantic asks each dataclass for its own."""


def validate(kind: type[T], given: Any, what: str) -> T:
    """Make a dataclass (with `__pydantic_config__ = STRICT`), or a container of some, from the plain values of a file.

    Annotations decide: a float takes a finite number, a bool is no number, a tuple takes a list. Unknown names are
    errors, as are missing ones.

    Args:
        what: names the file, or the part of it, in messages.

    Raises:
        ArgumentError: names the first value that is wrong, and what was expected in its place.
    """
    from pydantic import ValidationError

    try:
        return _validator(kind).validate_python(given)  # type: ignore[no-any-return, arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]).removeprefix(".")
        is_own = first["type"] == "unexpected_keyword_argument" and len(first["loc"]) == 1 and is_dataclass(kind)
        known = f"; expected one of {', '.join(field.name for field in fields(kind))}" if is_own else ""  # type: ignore[arg-type]
        raise ArgumentError(f"{what}: {_in_words(first, where[:MAX_QUOTED])}{known}") from None


def _in_words(error: Any, where: str) -> str:
    if error["type"] == "missing":
        return f"{where} is missing"
    if error["type"] == "unexpected_keyword_argument":
        return f"{where} is unknown to this version"
    if error["type"] == "value_error":  # raised by the class itself, which names its own fields
        return f"{where}: {error['ctx']['error']}" if where else str(error["ctx"]["error"])
    expected = _OF_JSON.get(error["type"], error["msg"].removeprefix("Input should be "))
    return f"{f'{where}=' if where else 'top-level value: '}{quoted(error['input'])}: expected {expected}"


_OF_JSON = {
    "tuple_type": "a valid array",
    "list_type": "a valid array",
    "dict_type": "an object",
    "dataclass_type": "an object",
}
"""pydantic's words are Python's."""


@cache
def _validator(kind: Any) -> Any:
    from pydantic import TypeAdapter
    from pydantic_core import SchemaValidator

    config = None if is_dataclass(kind) else STRICT
    return SchemaValidator(_for_json(TypeAdapter(kind, config=config).core_schema), config)


def _for_json(schema: Any) -> Any:
    """Adapt the schema: lists may become tuples, and objects dataclasses. A container ends at its first wrong value:
    millions of errors would fill the memory."""
    from pydantic_core import core_schema

    if isinstance(schema, list):
        return [_for_json(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    changed: Any = {key: _for_json(one) for key, one in schema.items()}
    if schema.get("type") == "dataclass":
        ref = changed.pop("ref", None)
        return core_schema.no_info_before_validator_function(_of_few_entries, changed | {"strict": False}, ref=ref)
    if schema.get("type") in _WITHIN:
        return _WITHIN[schema["type"]] | changed
    if schema.get("type") in ("list", "tuple", "dict", "set", "frozenset"):
        return changed | {"strict": False, "fail_fast": True}
    return changed


_WITHIN: dict[str, dict[str, float]] = {
    "int": {"ge": -(1 << 63), "le": (1 << 63) - 1},
    "float": {"ge": -1e100, "le": 1e100},
}
"""What numbers may be where their type says no more: products of a few are numbers still."""


def _of_few_entries(given: Any) -> Any:
    """Check the entries of a future dataclass; each unknown one is an error of its own."""
    if isinstance(given, dict) and len(given) > _MAX_ENTRIES:
        raise ValueError(f"it has {len(given):,} entries; expected at most {_MAX_ENTRIES:,}")
    return given


def quoted(value: Any) -> str:
    """Quote the value in at most 80 printable characters, for errors."""
    text = printable(reprlib.repr(value))
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED - 3]}..."


def _kind(mode: int) -> str:
    """Return what a file is, by its mode, if it is no regular one; otherwise nothing."""
    return next((name for is_kind, name in _KINDS.items() if is_kind(mode)), "")


def write_text(path: FilePath, text: str, what: str | None = None) -> None:
    """Write a file of UTF-8 text. Raise ArgumentError as `replacing` does."""
    with replacing(path, what) as new:
        new.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")  # a file name may be any bytes


def write_json(path: FilePath, value: Any, what: str | None = None) -> None:
    """Write a value as JSON, a line per entry. Raise ArgumentError as `replacing` does."""
    write_text(path, json.dumps(value, indent=1) + "\n", what)


def write_whole(path: FilePath, value: Any) -> None:
    """Write as `write_json` does, in one line, but raise OSError."""
    with atomic(path) as new:
        new.write_bytes(json.dumps(value).encode() + b"\n")


@contextlib.contextmanager
def replacing(path: FilePath, what: str | None = None) -> Iterator[Path]:
    """Yield the path of a new file, which takes the place of the one at `path` when the block ends.

    If the block raises, what it wrote is removed, and the old file is as it was.

    Args:
        what: names the file in messages, such as an option; None: its path.

    Raises:
        ArgumentError: the file cannot be written, or what is there is no regular file.
    """
    what = os.fspath(path) if what is None else what
    try:
        with atomic(path) as new:
            yield new
    except OSError as error:
        raise ArgumentError(f"{what} cannot be written: {error.strerror or error}") from None


class _TriedError(Exception):
    """Nothing is to be written."""


def check_writable(path: FilePath | None, what: str | None = None) -> None:
    """Raise ArgumentError as `replacing` would, before what takes long to make is made. None: no file was asked for."""
    if path is not None:
        with contextlib.suppress(_TriedError), replacing(path, what):
            raise _TriedError


@contextlib.contextmanager
def atomic(path: FilePath) -> Iterator[Path]:
    """Replace a file as `replacing` does, but raise OSError."""
    target = Path(os.path.realpath(path))
    mode = None
    with contextlib.suppress(FileNotFoundError):
        mode = target.stat().st_mode
        if kind := _kind(mode):
            raise OSError(errno.EINVAL, f"it is {kind}; expected a regular file", str(path))
    new = _new_file(target, mode)
    try:
        yield new
        new.replace(target)
    finally:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)


def _new_file(target: Path, mode: int | None) -> Path:
    """Make an empty file beside the target, with its mode. Raise OSError."""
    while True:  # a killed process of the same id may have left some
        new = target.with_name(f".{os.getpid()}-{next(_numbers)}.new{target.suffix[:16]}")
        with contextlib.suppress(FileExistsError), new.open("xb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            return new


def remove_leftovers(folder: FilePath) -> None:
    """Remove the new files of writers in a folder that were killed before they could."""
    for name in os.listdir(folder):
        if _NEW.match(name):
            Path(folder, name).unlink(missing_ok=True)
