"""One action of a schedule and its text: what a rank does for one microbatch on one stage.

The text is PyTorch's (`torch.distributed.pipelining`), so schedules can be exchanged with it: `0F1`, `2I0`, `1SEND_F0`,
`0UNSHARD`, `(0F7;7B3)OVERLAP_F_B`. Only messages between stages that are not neighbors need more: `0SEND_F1>3`.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from penstock._base.errors import ScheduleError
from penstock._base.files import quoted


class Op(enum.Enum):
    """The kind of action. The value is its text; `code` is the small integer that represents it in columns."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's own name for it
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"

    code: int

    def __init__(self, text: str) -> None:
        self.code = len(type(self).__members__)

    @property
    def is_compute(self) -> bool:
        """F, B, I or W: takes time on the device."""
        return self in _COMPUTE

    @property
    def is_backward(self) -> bool:
        """B, I or W."""
        return self in _BACKWARD

    @property
    def is_send(self) -> bool:
        return self in (Op.SEND_F, Op.SEND_B)

    @property
    def is_receive(self) -> bool:
        return self in (Op.RECV_F, Op.RECV_B)

    @property
    def is_communication(self) -> bool:
        """A message between two stages; `Action.peer` names the other one."""
        return self in _NEIGHBOR


OPS = tuple(Op)
"""`OPS[op.code] is op`."""

SENDS = frozenset((Op.SEND_F.code, Op.SEND_B.code))
"""The codes of the ops that send."""

_COMPUTE = (Op.F, Op.B, Op.I, Op.W)
_BACKWARD = (Op.B, Op.I, Op.W)
_NEIGHBOR = {Op.SEND_F: 1, Op.RECV_F: -1, Op.SEND_B: -1, Op.RECV_B: 1}
_OTHER_END = {Op.SEND_F: Op.RECV_F, Op.RECV_F: Op.SEND_F, Op.SEND_B: Op.RECV_B, Op.RECV_B: Op.SEND_B}
_TEXT = re.compile(rf"([0-9]+)({'|'.join(op.value for op in Op)})([0-9]*)(?:([<>])([0-9]+))?")
_OVERLAP_TEXT = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")


@dataclass(frozen=True, slots=True)
class Action:
    """One op of one microbatch on one stage.

    Attributes:
        stage: the stage's global index.
        op: what is done.
        microbatch: which microbatch. For `REDUCE_GRAD`, the number of the group of tied stages to reduce (None: the
            replicas of the stage itself). None for `UNSHARD` and `RESHARD`.
        peer: the stage at the other end of a message; None for everything else. Defaults to the neighbor that the
            direction implies: `Action(1, Op.SEND_F, 0) == Action(1, Op.SEND_F, 0, peer=2)`.

    Raises:
        ScheduleError: a microbatch or peer is missing or meaningless for the op, or a number is negative.
    """

    stage: int
    op: Op
    microbatch: int | None = None
    peer: int | None = None

    def __post_init__(self) -> None:
        if self.stage < 0:
            raise ScheduleError(f"{self.op.value} on stage {self.stage}: stages are counted from 0")
        if self.microbatch is None:
            if self.op in _COMPUTE or self.op in _NEIGHBOR:
                raise ScheduleError(f"{self.op.value} on stage {self.stage} needs a microbatch, as in {self.stage}F0")
        elif self.microbatch < 0:
            raise ScheduleError(f"{self.op.value} of microbatch {self.microbatch}: microbatches are counted from 0")
        if self.op in _NEIGHBOR:
            peer = self.stage + _NEIGHBOR[self.op] if self.peer is None else self.peer
            if peer < 0 or peer == self.stage:
                raise ScheduleError(f"{self.op.value} on stage {self.stage} with stage {peer}: name the other stage")
            object.__setattr__(self, "peer", peer)
        elif self.peer is not None:
            raise ScheduleError(f"{self.op.value} exchanges no message, so it has no peer (given: {self.peer})")

    def __hash__(self) -> int:
        # Integers only: as fast as it gets, and the same in every process.
        return hash((self.stage, self.op.code, self.microbatch, self.peer))

    def __str__(self) -> str:
        text = f"{self.stage}{self.op.value}{'' if self.microbatch is None else self.microbatch}"
        if self.peer is None or self.peer == self.stage + _NEIGHBOR[self.op]:
            return text
        return f"{text}{'>' if self.op.is_send else '<'}{self.peer}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse what `str` wrote for an action. Raise ScheduleError if `text` is not an action.

        >>> Action.parse("2I0")
        Action(stage=2, op=<Op.I: 'I'>, microbatch=0, peer=None)
        """
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                f"{quoted(text)} is not an action; expected stage, op and microbatch, as in 0F1 or 0SEND_F1>3"
            )
        stage, op, microbatch, arrow, peer = match.groups()
        if arrow and arrow != (">" if Op(op).is_send else "<"):
            raise ScheduleError(f"{quoted(text)}: a send names its target with '>', a receive its source with '<'")
        return cls(int(stage), Op(op), int(microbatch) if microbatch else None, int(peer) if peer else None)

    @property
    def parts(self) -> tuple[Action, ...]:
        """The action itself; the counterpart of `Overlap.parts`."""
        return (self,)

    @property
    def other_end(self) -> Action:
        """The other half of a message: the receive of this send, or the send of this receive."""
        if self.peer is None:
            raise ScheduleError(f"{self} exchanges no message")
        return Action(self.peer, _OTHER_END[self.op], self.microbatch, self.stage)


@dataclass(frozen=True, slots=True)
class Overlap:
    """A forward and the backward of another microbatch that a rank may run at the same time, as DualPipe does.

    Code that does not know about overlaps treats it as its parts, in order.
    """

    forward: Action
    backward: Action

    def __post_init__(self) -> None:
        if self.forward.op is not Op.F or self.backward.op not in (Op.B, Op.I):
            raise ScheduleError(f"{self}: an overlap is a forward and then a backward, as in (0F7;7B3)OVERLAP_F_B")

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"

    @property
    def parts(self) -> tuple[Action, ...]:
        return (self.forward, self.backward)


def parse_item(text: str) -> Action | Overlap:
    """Parse one item of a row: an action, or two that overlap. Raise ScheduleError if it is neither."""
    match = _OVERLAP_TEXT.fullmatch(text.strip())
    if match is None:
        return Action.parse(text)
    return Overlap(Action.parse(match[1]), Action.parse(match[2]))
