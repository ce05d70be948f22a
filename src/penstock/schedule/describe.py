"""Actions in words, in one form for pictures, traces and pages: a sentence for each op, with places to be filled in.

`{microbatch}` and the like are values; what stands in brackets is left out where one of its values is not known. A page
gets `SENTENCES` as data and fills them in itself, for the action under the pointer (static/words.js).
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
        """Return the kind of an op. Messages, reductions and gathers are all communication."""
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

_COMMUNICATION_WORDS = {
    Op.SEND_F: "send activations",
    Op.RECV_F: "receive activations",
    Op.SEND_B: "send gradients",
    Op.RECV_B: "receive gradients",
    Op.REDUCE_GRAD: "reduce gradients",
    Op.UNSHARD: "gather parameters",
    Op.RESHARD: "free gathered parameters",
}

_OPTIONAL = re.compile(r"\[([^\]]*)\]")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def _sentence(op: Op) -> str:
    words = WORDS[Kind.of(op)] if op.is_compute else _COMMUNICATION_WORDS[op]
    piece = "tie" if op is Op.REDUCE_GRAD else "microbatch"
    return f"{words}[ of {piece} {{microbatch}}], stage {{stage}}[ {'to' if op.is_send else 'from'} stage {{peer}}]"


SENTENCES: Mapping[str, str] = MappingProxyType({op.value: _sentence(op) for op in Op})
"""One for each op, by the op's name: `forward[ of microbatch {microbatch}], stage {stage}`."""


def describe(action: Action) -> str:
    """Describe an action in words: `forward of microbatch 3, stage 1`."""
    text = _label(action.op, has_number=action.microbatch is not None, has_peer=action.peer is not None)
    return text.format(stage=action.stage, microbatch=action.microbatch, peer=action.peer)


@cache
def _label(op: Op, *, has_number: bool, has_peer: bool) -> str:
    """Return a label without brackets, with those of the two values that are known."""
    present = {"microbatch": has_number, "peer": has_peer}
    return _OPTIONAL.sub(lambda part: part[1] if present[_PLACEHOLDER.findall(part[1])[0]] else "", SENTENCES[op.value])
