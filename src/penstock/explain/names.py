"""How traces name a pipeline's actions: the one table, to which `--pattern` adds.

A name gives the op, and the stage and microbatch, as far as the event's arguments do not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from penstock.errors import ArgumentError
from penstock.schedule import Op

OPS = {
    **dict.fromkeys(("f", "fwd", "forward", "forward-compute", "forwardpass", "forward-step"), Op.F),
    **dict.fromkeys(("b", "bwd", "backward", "backward-compute", "backwardpass", "backward-step"), Op.B),
    **dict.fromkeys(("i", "dgrad", "input-gradient", "backward-input"), Op.I),
    **dict.fromkeys(("w", "wgrad", "weight-gradient", "backward-weight"), Op.W),
    "forward-send": Op.SEND_F, "forward-recv": Op.RECV_F, "backward-send": Op.SEND_B, "backward-recv": Op.RECV_B,
}  # fmt: skip
"""Words for an op, in lower case, with a hyphen between two."""

_WORD = f"(?P<op>{'|'.join(sorted(OPS, key=len, reverse=True)).replace('-', '[-_ ]')})"
_STAGE, _NUMBER = "(?P<stage>[0-9]{1,9})", "(?P<microbatch>[0-9]{1,9})"
_MICROBATCH = rf"(?:micro[-_ ]?batch|mb|m)[ _=:]*{_NUMBER}"
PATTERNS = {
    rf"(?:penstock )?{_STAGE}(?P<op>[FBIW]){_NUMBER}": False,  # ours, and torch's text of an action
    rf"PP:{_STAGE}(?P<op>[FBIW]){_NUMBER}": True,  # torch's _PipelineScheduleRuntime
    rf"(?P<op>Forward|Backward) {_NUMBER}": True,  # torch's ScheduleGPipe
    rf"(?P<op>[FBW]){_NUMBER}\.0\.[0-9]+": False,  # sail-sg's zero bubble, with one chunk: microbatch, chunk, sequence
    rf"(?:PP::?)?Stage{_STAGE}[-_ :]+{_WORD}[-_ ]?{_NUMBER}": False,
    rf"{_WORD}[ _:/]*(?:stage|s)?[ _=]*{_STAGE}[ _:/,]+(?:microbatch|mb|m)?[ _=]*{_NUMBER}": False,
    rf"{_WORD}[-_ :/]*{_MICROBATCH}": False,
    r"(?P<op>ForwardPass|BackwardPass)(?:\(.*\))?": False,  # DeepSpeed's instructions, in the order of microbatches
    _WORD: False,  # with the rest in arguments
}
"""Each pattern, and whether such a range begins with the wait for its input. Matched without regard to case."""

_COMPILED = [(re.compile(pattern, re.IGNORECASE), waits) for pattern, waits in PATTERNS.items()]
_STAGE_KEYS, _MICROBATCH_KEYS = ("stage", "stage_id"), ("microbatch", "microbatch_id", "micro_batch", "mb", "mb_id")


@dataclass(frozen=True, slots=True)
class Named:
    """What an event's name and arguments say. Without a stage, it is the process's only one; without a microbatch, the
    next of this op."""

    op: Op
    stage: int | None
    microbatch: int | None
    waits: bool = False


def own_pattern(text: str | None) -> re.Pattern[str] | None:
    """The user's pattern. Raises ArgumentError if it is no regular expression with the groups op and microbatch."""
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


def op_named(word: str) -> Op | None:
    """The op that a word stands for."""
    return OPS.get(re.sub("[_ ]", "-", word.lower())) or next((op for op in Op if op.value == word), None)


def read_name(name: Any, args: Any, own: re.Pattern[str] | None = None) -> Named | None:
    """What an event says; None if it names no action."""
    given: Mapping[str, Any] = args if isinstance(args, dict) else {}
    text = given["action"] if isinstance(given.get("action"), str) else name
    groups, waits = _matched(text, own) if isinstance(text, str) else ({}, False)
    op = op_named(groups.get("op", ""))
    stage, microbatch = (_number(groups, given, keys) for keys in (_STAGE_KEYS, _MICROBATCH_KEYS))
    if op is None or (microbatch is None and not str(text).lower().startswith(("forwardpass", "backwardpass"))):
        return None
    return Named(op, stage, microbatch, waits)


@lru_cache(maxsize=4096)  # a trace has few names and many events
def _matched(text: str, own: re.Pattern[str] | None) -> tuple[dict[str, Any], bool]:
    for pattern, waits in [(own, False), *_COMPILED] if own is not None else _COMPILED:
        if found := pattern.fullmatch(text):
            return found.groupdict(), waits
    return {}, False


def _number(groups: Mapping[str, Any], args: Mapping[str, Any], keys: tuple[str, ...]) -> int | None:
    values = [str(value) for value in (groups.get(keys[0]), *map(args.get, keys))]
    return next((int(value) for value in values if value.isdecimal()), None)
