"""Names of a pipeline's actions in traces: the table to which `--pattern` adds.

A name gives the op, and the stage and microbatch, as far as the event's arguments do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from penstock._base.errors import ArgumentError
from penstock._base.files import quoted
from penstock.schedule import Op

OPS = {
    **{op.value.lower().replace("_", "-"): op for op in Op},
    **dict.fromkeys(("fwd", "forward", "forward-compute", "forward-pass", "forward-step"), Op.F),
    **dict.fromkeys(("bwd", "backward", "backward-compute", "backward-pass", "backward-step"), Op.B),
    **dict.fromkeys(("dgrad", "input-gradient", "backward-input"), Op.I),
    **dict.fromkeys(("wgrad", "weight-gradient", "backward-weight"), Op.W),
    "forward-send": Op.SEND_F, "forward-recv": Op.RECV_F, "backward-send": Op.SEND_B, "backward-recv": Op.RECV_B,
}  # fmt: skip
"""Words for an op, in lower case, with a hyphen between two."""

STAGES_METADATA = "process_labels"
"""The metadata of every process of our own traces that has the total number of stages, so that a missing
rank is noticed, and whether ranks took turns or shared cores."""

FIELDS = {
    "stage": ("stage", "pp-stage", "pipeline-stage", "s"),
    "microbatch": ("microbatch", "micro-batch", "minibatch", "mb", "m"),
    "chunk": ("chunk", "model-chunk", "vpp", "vp-stage"),
    "sequence": ("sequence",),
    "step": ("step", "iteration", "iter"),
    "rank": ("rank", "pp-rank"),
    "replica": ("replica", "dp-rank"),
    "buffer": ("buffer",),
}
"""Words for numbers, in names, arguments and columns; `id` or `index` may follow. A chunk is one of a rank's stages."""


def _alternatives(words: Iterable[str]) -> str:
    return "|".join(sorted(words, key=len, reverse=True)).replace("-", "[-_ ]?")


_LABELS = "|".join(f"(?P<{field}>{_alternatives(words)})" for field, words in FIELDS.items())
_ID = "(?:[-_ ]?(?:id|idx|index))?"
_PART = re.compile(
    rf"(?P<op>{_alternatives(OPS)})(?![a-z])|(?:(?:{_LABELS}){_ID}[-_ =:#]*)?(?P<number>[0-9]{{1,9}})"
    r"|(?:pp|penstock)(?![a-z0-9])|[^a-z0-9.]+",
    re.IGNORECASE,
)
"""A part of a name: an op, or a number with or without its label, or what is skipped."""
_FIELD = re.compile(rf"(?:{_LABELS}){_ID}", re.IGNORECASE)
_STAGE, _NUMBER = "(?P<stage>[0-9]{1,9})", "(?P<microbatch>[0-9]{1,9})"
PATTERNS = {
    rf"PP:{_STAGE}(?P<op>[FBIW]){_NUMBER}": True,  # torch's _PipelineScheduleRuntime
    rf"(?P<op>Forward|Backward) {_NUMBER}": True,  # torch's ScheduleGPipe
    rf"(?P<op>[FBW]){_NUMBER}\.(?P<chunk>[0-9]+)\.(?P<sequence>[0-9]+)": False,  # sail-sg's zero bubble
}
"""Each pattern, and whether such a range begins with the wait for its input. Other names are read part by part: an op,
and numbers with a label, or else first the stage (of two) and then the microbatch."""

_ZEROS = str.maketrans("123456789", "000000000")
_COMPILED = [(re.compile(pattern), waits) for pattern, waits in PATTERNS.items()]


@dataclass(frozen=True, slots=True)
class ParsedName:
    """The contents of an event's name and arguments. Without a stage, it is the process's only one, or that of its
    chunk; without a microbatch, the next of this op. `waits`: it begins with the wait for its input."""

    op: Op
    numbers: Mapping[str, int]
    waits: bool = False


def compile_pattern(text: str | None) -> re.Pattern[str] | None:
    """Compile the user's pattern. Raise ArgumentError if it is not a regular expression with the groups op and
    microbatch."""
    try:
        pattern = None if text is None else re.compile(text)
    except re.error as error:
        raise ArgumentError(f"--pattern {text!r} is no regular expression: {error}") from None
    if pattern is not None and not {"op", "microbatch"} <= pattern.groupindex.keys():
        raise ArgumentError(
            f"--pattern {text!r}: expected named groups op and microbatch, and stage where it is not the process's "
            r"only one, such as '(?P<op>fwd|bwd)-(?P<stage>\d+)-(?P<microbatch>\d+)'"
        )
    return pattern


_BY_WORD = {word.replace("-", ""): op for word, op in OPS.items()}


@cache
def field_for(key: str) -> str | None:
    """Return the field that an argument or a column stands for."""
    match = _FIELD.fullmatch(key)
    return None if match is None else match.lastgroup


def extract_numbers(args: Mapping[Any, Any]) -> dict[str, int]:
    """Return the fields among arguments or columns that have a number."""
    fields = {field: str(value).removesuffix(".0") for key, value in args.items() if (field := field_for(str(key)))}
    return {field: int(text) for field, text in fields.items() if text.isdecimal() and len(text) < 19}


def read_name(name: Any, args: Any, pattern: re.Pattern[str] | None = None) -> ParsedName | None:
    """Parse the name of an event; None if it names no action. Raise ArgumentError for a piece of a microbatch."""
    arguments: Mapping[str, Any] = args if isinstance(args, Mapping) else {}
    text = arguments["action"] if isinstance(arguments.get("action"), str) else name
    if not isinstance(text, str):
        return None
    op, positions, waits = _match_name(text if pattern else text.translate(_ZEROS), pattern)  # alike but for digits
    if op is None:
        return None
    numbers = extract_numbers(arguments) if arguments else {}
    for field, span in positions:
        if (digits := text[span].removesuffix(".0")).isdecimal() and len(digits) < 19:
            numbers[field] = int(digits)
    if numbers.get("sequence"):
        raise ArgumentError(f"{quoted(text)}: microbatches in pieces of the sequence are not supported")
    return ParsedName(op, numbers, waits)


@lru_cache(maxsize=4096)  # a trace has few names and many events
def _match_name(text: str, pattern: re.Pattern[str] | None) -> tuple[Op | None, list[tuple[str, slice]], bool]:
    """Return a name's op, where in it each number is, by its field, and whether it begins with a wait."""
    patterns = [(pattern, False), *_COMPILED] if pattern is not None else _COMPILED
    matches = ((regex.fullmatch(text), waits) for regex, waits in patterns)
    match, waits = next((pair for pair in matches if pair[0]), (None, False))
    spans = {f: slice(*match.span(f)) for f, value in match.groupdict().items() if value} if match else _scan(text)
    op = _BY_WORD.get(re.sub("[-_ ]", "", text[spans["op"]].lower())) if "op" in spans else None
    return op, [(field, span) for key, span in spans.items() if (field := field_for(key))], waits


def _scan(text: str) -> dict[str, slice]:
    """Return where the op and the numbers of a name are; empty if anything else is in it."""
    parts = [*_PART.finditer(text)]
    labeled = [(next((field for field in FIELDS if part[field]), part.lastgroup), part) for part in parts]
    spans = {f: slice(*part.span("op" if f == "op" else "number")) for f, part in labeled if f not in (None, "number")}
    bare = [slice(*part.span("number")) for field, part in labeled if field == "number"]
    unlabeled = [field for field in ("microbatch", "stage") if field not in spans]
    ops = sum(field == "op" for field, _ in labeled)
    is_complete = "".join(part[0] for part in parts) == text and ops == 1 and len(bare) <= len(unlabeled)
    return {**spans, **dict(zip(unlabeled, reversed(bare), strict=False))} if is_complete else {}
