"""Reads all files from outside, and writes all files that users keep.

A reader takes regular files only, limits what they unpack to and how many values they parse to, and checks types by the
annotations of a dataclass (pydantic). A writer writes beside its target and renames, so that a failure leaves the
older file as it was. Every error is an `ArgumentError` of one line: the file, its content, and what was expected.
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
from penstock._base.formatting import strip_control_chars

T = TypeVar("T")
FilePath = str | os.PathLike[str]

MAX_BYTES = 128 << 20
"""Maximum size of a file, once unpacked."""
MAX_TEXT_BYTES = 64 << 20
"""Maximum size of a text file: Python takes up to four bytes per character, plus its lines and cells."""
MAX_VALUES = 4_000_000
"""Maximum number of lists, objects and entries in JSON or CSV, which take about 100 bytes each in memory."""
MAX_QUOTED = 80
"""Maximum number of characters of a value that an error quotes."""

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
_NAME_SEPARATORS = re.compile(r"[=,\n]|#.*")
_numbers = itertools.count()


def read_bytes(
    path: FilePath,
    label: str | None = None,
    max_bytes: int | None = None,
    start: int = 0,
    thin: Callable[[bytearray], bytes | bytearray] | None = None,
) -> bytes:
    """Read a regular file, and unpack it if it is packed by gzip.

    Args:
        label: names the file in messages, such as "plan 'plan.json'"; None: its path.
        max_bytes: once unpacked; None: `MAX_BYTES`.
        start: the offset to begin at.
        thin: takes the bytes read so far and returns those to keep; dropped bytes do not count toward the limit.

    Raises:
        ArgumentError: there is no such file, it cannot be read or unpacked, or it has more than `max_bytes`.
    """
    label = os.fspath(path) if label is None else label
    max_bytes = MAX_BYTES if max_bytes is None else max_bytes
    try:
        # O_NONBLOCK: a pipe's other end is not waited for
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if kind := _kind(os.fstat(file.fileno()).st_mode):
                raise ArgumentError(f"{label} is {kind}; expected a regular file")
            file.seek(start)
            data, packed, members, unpack, thinned_size = bytearray(), 0, 0, None, 0
            while chunk := file.read(_CHUNK_BYTES):
                packed += len(chunk)
                if members == 0 and not data and chunk.startswith(b"\x1f\x8b"):
                    members, unpack = 1, zlib.decompressobj(_GZIP)
                while chunk:
                    data += unpack.decompress(chunk, _CHUNK_BYTES) if unpack else chunk
                    if thin and len(data) > thinned_size + _THINNED_BYTES:
                        packed -= len(data)
                        data = bytearray(thin(data))
                        packed, thinned_size = packed + len(data), len(data)
                    if max(len(data), packed) > max_bytes:
                        size = "has" if packed > max_bytes else "unpacks to"
                        raise ArgumentError(f"{label} {size} more than {max_bytes >> 20} MiB, {_LIMIT}")
                    chunk = unpack.unconsumed_tail if unpack else b""
                    if unpack and unpack.eof and (chunk := unpack.unused_data.lstrip(b"\0")):
                        members, unpack = members + 1, zlib.decompressobj(_GZIP)
                    if members > _MAX_MEMBERS:
                        raise ArgumentError(f"{label} has more than {_MAX_MEMBERS:,} packed parts")
            if unpack and not unpack.eof:
                raise ArgumentError(f"{label} cannot be unpacked: it is cut off")
            return bytes(thin(data) if thin else data)
    except OSError as error:
        raise ArgumentError(f"{label} cannot be read: {error.strerror or error}") from None
    except zlib.error as error:
        raise ArgumentError(f"{label} cannot be unpacked: {error}") from None


def read_text(path: FilePath, label: str | None = None, max_bytes: int | None = None) -> str:
    """Read a file of UTF-8 text, by default of up to `MAX_TEXT_BYTES`. Raise ArgumentError as `read_bytes` does, and
    for other encodings."""
    try:
        return read_bytes(path, label, MAX_TEXT_BYTES if max_bytes is None else max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{label or os.fspath(path)} is not UTF-8 text: {error}") from None


def read_json(
    path: FilePath, label: str | None = None, thin: Callable[[bytearray], bytes | bytearray] | None = None
) -> Any:
    """Read a file of JSON as plain values. Raise ArgumentError if it cannot be read or is not JSON."""
    label = os.fspath(path) if label is None else label
    return parse_json(read_bytes(path, label, thin=thin), label)


def json_or_none(path: FilePath) -> Any:
    """Read a file of JSON; None if there is none, or it is something else."""
    with contextlib.suppress(ArgumentError):
        return read_json(path)
    return None


def read_toml(path: FilePath, label: str | None = None) -> dict[str, Any]:
    """Read a file of TOML. Raise ArgumentError if it cannot be read, is not TOML, or has more than 1 MiB."""
    label = os.fspath(path) if label is None else label
    text = read_text(path, label, 1 << 20)
    if any(name.count(".") > 50 for name in _NAME_SEPARATORS.split(text)):  # tomllib takes the square of their number
        raise ArgumentError(f"{label}: a name has too many parts")
    try:
        return tomllib.loads(text)
    except (RecursionError, ValueError) as error:  # a number of too many digits is a ValueError
        raise ArgumentError(f"{label} is not TOML: {quoted(str(error))}") from None


def parse_json(data: str | bytes, label: str) -> Any:
    """Parse JSON into plain values. NaN and Infinity are not JSON.

    Raises:
        ArgumentError: it is something else, has more than `MAX_VALUES` values, or is nested too deeply.
    """
    from pydantic_core import from_json

    check_value_count(data, label)
    try:
        return from_json(data.removeprefix(b"\xef\xbb\xbf") if isinstance(data, bytes) else data, allow_inf_nan=False)
    except ValueError as error:
        reason = "its values are nested too deeply" if "recursion" in str(error) else str(error)
        constants: Any = ("NaN", "Infinity") if isinstance(data, str) else (b"NaN", b"Infinity")
        hint = "; numbers must be finite, without NaN or Infinity" if any(c in data for c in constants) else ""
        raise ArgumentError(f"{label} is not JSON: {reason}{hint}") from None


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


def parse_csv(text: str, label: str, delimiter: str = ",") -> Iterator[list[str]]:
    """Yield the rows of CSV. Raise ArgumentError: it is something else, or has more than `MAX_VALUES` values."""
    check_value_count(text, label)
    rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    try:
        yield from rows
    except csv.Error as error:
        raise ArgumentError(f"{label}, line {rows.line_num}, is not CSV: {error}") from None


def check_value_count(data: str | bytes, label: str) -> None:
    """Raise ArgumentError if JSON or CSV would have more than `MAX_VALUES` values, before they are made."""
    separators: Any = "\n[{,;\t" if isinstance(data, str) else [b"\n", b"[", b"{", b",", b";", b"\t"]
    lines, *values = map(data.count, separators)
    if max(lines, sum(values)) > MAX_VALUES:  # files with indentation have a line for each value, too
        raise ArgumentError(f"{label} has more than {MAX_VALUES:,} values, {_LIMIT}")


STRICT: Any = {"strict": True, "extra": "forbid", "allow_inf_nan": False}
"""`__pydantic_config__` of every dataclass that `validate` makes: pydantic asks each dataclass for its own."""


def validate(kind: type[T], value: Any, label: str) -> T:
    """Make a dataclass (with `__pydantic_config__ = STRICT`), or a container of some, from the plain values of a file.

    Annotations decide: a float takes a finite number, a bool is no number, a tuple takes a list. Unknown names are
    errors, as are missing ones.

    Args:
        label: names the file, or the part of it, in messages.

    Raises:
        ArgumentError: names the first wrong value and what was expected.
    """
    from pydantic import ValidationError

    try:
        return _validator(kind).validate_python(value)  # type: ignore[no-any-return, arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"]).removeprefix(".")
        is_own = first["type"] == "unexpected_keyword_argument" and len(first["loc"]) == 1 and is_dataclass(kind)
        names = f"; expected one of {', '.join(field.name for field in fields(kind))}" if is_own else ""  # type: ignore[arg-type]
        raise ArgumentError(f"{label}: {_describe_error(first, path[:MAX_QUOTED])}{names}") from None


def _describe_error(error: Any, path: str) -> str:
    if error["type"] == "missing":
        return f"{path} is missing"
    if error["type"] == "unexpected_keyword_argument":
        return f"{path} is unknown to this version"
    if error["type"] == "value_error":  # raised by the class itself, which names its own fields
        return f"{path}: {error['ctx']['error']}" if path else str(error["ctx"]["error"])
    expected = _JSON_TYPES.get(error["type"], error["msg"].removeprefix("Input should be "))
    return f"{f'{path}=' if path else 'top-level value: '}{quoted(error['input'])}: expected {expected}"


_JSON_TYPES = {
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
        return [_for_json(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    changed: Any = {key: _for_json(item) for key, item in schema.items()}
    if schema.get("type") == "dataclass":
        ref = changed.pop("ref", None)
        return core_schema.no_info_before_validator_function(_limit_entries, changed | {"strict": False}, ref=ref)
    if schema.get("type") in _BOUNDS:
        return _BOUNDS[schema["type"]] | changed
    if schema.get("type") in ("list", "tuple", "dict", "set", "frozenset"):
        return changed | {"strict": False, "fail_fast": True}
    return changed


_BOUNDS: dict[str, dict[str, float]] = {
    "int": {"ge": -(1 << 63), "le": (1 << 63) - 1},
    "float": {"ge": -1e100, "le": 1e100},
}
"""Ranges of numbers whose type sets no other: products of a few stay finite."""


def _limit_entries(value: Any) -> Any:
    """Raise ValueError if a future dataclass has too many entries: each unknown one would be an error."""
    if isinstance(value, dict) and len(value) > _MAX_ENTRIES:
        raise ValueError(f"it has {len(value):,} entries; expected at most {_MAX_ENTRIES:,}")
    return value


def quoted(value: Any) -> str:
    """Quote the value in at most 80 printable characters, for errors."""
    text = strip_control_chars(reprlib.repr(value))
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED - 3]}..."


def _kind(mode: int) -> str:
    """Return the kind of a file that is not a regular one, by its mode; otherwise an empty string."""
    return next((name for is_kind, name in _KINDS.items() if is_kind(mode)), "")


def write_text(path: FilePath, text: str, label: str | None = None) -> None:
    """Write a file of UTF-8 text. Raise ArgumentError as `replacing` does."""
    with replacing(path, label) as new:
        new.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")  # a file name may be any bytes


def write_json(path: FilePath, value: Any, label: str | None = None) -> None:
    """Write a value as JSON, a line per entry. Raise ArgumentError as `replacing` does."""
    write_text(path, json.dumps(value, indent=1) + "\n", label)


def write_json_line(path: FilePath, value: Any) -> None:
    """Write as `write_json` does, in one line, but raise OSError."""
    with atomic(path) as new:
        new.write_bytes(json.dumps(value).encode() + b"\n")


@contextlib.contextmanager
def replacing(path: FilePath, label: str | None = None) -> Iterator[Path]:
    """Yield the path of a new file, which takes the place of the one at `path` when the block ends.

    If the block raises, what it wrote is removed, and the old file is as it was.

    Args:
        label: names the file in messages, such as an option; None: its path.

    Raises:
        ArgumentError: the file cannot be written, or `path` is not a regular file.
    """
    label = os.fspath(path) if label is None else label
    try:
        with atomic(path) as new:
            yield new
    except OSError as error:
        raise ArgumentError(f"{label} cannot be written: {error.strerror or error}") from None


class _StopError(Exception):
    """Ends the block of `replacing` before anything is written."""


def check_writable(path: FilePath | None, label: str | None = None) -> None:
    """Raise ArgumentError as `replacing` would, before the slow work whose result it takes. None: do nothing."""
    if path is not None:
        with contextlib.suppress(_StopError), replacing(path, label):
            raise _StopError


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
