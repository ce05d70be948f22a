"""Actions in words, in one form for pictures, traces and pages: a sentence for each op, with places to be filled in.

`{microbatch}` and the like are values; what stands in brackets is left out where one of its values is not known. A page
gets `sentences` as data and fills them in itself, for the action under the pointer (static/words.js).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from types import MappingProxyType

from penstock.schedule.action import Action, Op


class Kind(StrEnum):
    """What a rank does, as far as words and colors are concerned. The value is its part of a CSS variable's name."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's own name for it
    W = "W"
    COMMUNICATION = "communication"
    WAIT = "wait"

    @classmethod
    def of(cls, op: Op) -> Kind:
        """The kind of an op; messages, reductions and gathers are all communication."""
        return cls(op.value) if op.is_compute else cls.COMMUNICATION


WORDS: Mapping[Kind, str] = MappingProxyType(
    {
        Kind.F: "forward",
        Kind.B: "backward",
        Kind.I: "input gradient",
        Kind.W: "weight gradient",
        Kind.COMMUNICATION: "communication",
        Kind.WAIT: "waiting",
    }
)
"""What legends call them."""

_OTHERS = {
    Op.SEND_F: "send activations",
    Op.RECV_F: "receive activations",
    Op.SEND_B: "send gradients",
    Op.RECV_B: "receive gradients",
    Op.REDUCE_GRAD: "reduce gradients",
    Op.UNSHARD: "gather parameters",
    Op.RESHARD: "free gathered parameters",
}

_OPTIONAL = re.compile(r"\[([^\]]*)\]")
_PLACE = re.compile(r"\{(\w+)\}")


def sentence(op: Op, slices: int = 1) -> str:
    """`forward[ of microbatch {microbatch}], stage {stage}`. `slices`: of the schedule, as in `Schedule.slices`."""
    what = WORDS[Kind.of(op)] if op.is_compute else _OTHERS[op]
    piece = "slice {slice} of microbatch {microbatch}" if slices > 1 else "microbatch {microbatch}"
    if op is Op.REDUCE_GRAD:
        piece = "tie {number}"
    return f"{what}[ of {piece}], stage {{stage}}[ {'to' if op.is_send else 'from'} stage {{peer}}]"


def sentences(slices: int = 1) -> dict[str, str]:
    """Those of all ops, by the op's name."""
    return {op.value: sentence(op, slices) for op in Op}


def said_of(action: Action, slices: int = 1) -> str:
    """An action in words: `forward of microbatch 3, stage 1`."""
    number = action.microbatch
    text = _with_known(action.op, slices, has_number=number is not None, has_peer=action.peer is not None)
    piece, rest = divmod(number or 0, slices)
    return text.format(stage=action.stage, peer=action.peer, number=number, microbatch=piece, slice=rest)


@cache
def _with_known(op: Op, slices: int, *, has_number: bool, has_peer: bool) -> str:
    """A sentence without brackets: of these, those whose values are known."""
    known = {"microbatch": has_number, "slice": has_number, "number": has_number, "peer": has_peer}
    return _OPTIONAL.sub(
        lambda part: part[1] if all(map(known.get, _PLACE.findall(part[1]))) else "", sentence(op, slices)
    )
