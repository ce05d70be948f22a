"""What a rank is doing, and how a run ends when a rank cannot continue.

Plain values, without torch: ranks exchange them as JSON, in which they are lists, and users see them as one line.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

from penstock._base.formatting import one_line, printable_line

Kind = Literal["raised", "lost", "left", "stalled"]

_MAX_CHARACTERS = 2000
_MAX_NAMED = 4


class Position(NamedTuple):
    """What a rank's main thread is doing: an action, a wait for other ranks, or nothing of Penstock's (no text).

    Attributes:
        action: the action's text, such as `2B3` or `1RECV_F0`; empty outside a step.
        peers: the ranks it waits for; empty while it computes.
    """

    action: str = ""
    peers: tuple[int, ...] = ()

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> Position:
        """Read one from JSON. Raise ValueError or TypeError for anything else."""
        action, peers = values
        return cls(printable_line(str(action), _MAX_CHARACTERS), tuple(int(peer) for peer in peers))

    def __str__(self) -> str:
        if self.peers:
            return f"waits for {self.action} from {name_ranks(self.peers)}"
        return f"runs {self.action}" if self.action else "is not running a step"


OUTSIDE = Position()


class Watched(Protocol):
    """An object with the rank's position, so that a watchdog can report which rank waits for which."""

    position: Position


class Failure(NamedTuple):
    """Why a pipeline cannot continue. If there are several failures, every rank gives the first one as the cause.

    Attributes:
        rank: the rank at fault.
        action: what it was doing; None outside a step. For a lost rank, that of its last beat.
        error: type and message of the exception, or what is known about the lost rank, on one line.
        kind: `raised` an exception; `lost`: killed, stopped or out of reach; `left`: ended its program while another
            still waited for it; `stalled`: alive, but another waited for it for too long.
    """

    rank: int
    action: str | None
    error: str
    kind: Kind = "raised"

    @classmethod
    def of(cls, rank: int, action: str | None, error: BaseException, device: DeviceLag | None = None) -> Failure:
        """Build the failure of a rank that raised `error`, and where its device was."""
        suffix = "" if device is None else f"; {device}"
        return cls(rank, action or None, printable_line(one_line(error), _MAX_CHARACTERS) + suffix, "raised")

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> Failure:
        """Read one from JSON. Raise ValueError or TypeError for anything else."""
        rank, action, error, kind = values
        if kind not in get_args(Kind):
            raise ValueError(f"not a kind of failure: {kind!r}")
        action_text = None if action is None else printable_line(str(action), _MAX_CHARACTERS)
        return cls(int(rank), action_text, printable_line(str(error), 2 * _MAX_CHARACTERS), kind)

    def __str__(self) -> str:
        position_text = f"at {self.action}" if self.action else "outside of a step"
        descriptions = {
            "raised": f"failed {position_text}",
            "lost": f"was lost, last seen {position_text}",
            "left": "has exited",
            "stalled": f"stalled {position_text}",
        }
        return f"rank {self.rank} {descriptions[self.kind]}: {self.error}"


class DeviceLag(NamedTuple):
    """A device that has not caught up with its host.

    Attributes:
        position: what it runs, or which message it waits for.
        finished: the last action that it finished; empty if that is not known.
    """

    position: Position
    finished: str = ""

    def __str__(self) -> str:
        return f"its device {self.position}" + (f", after {self.finished}" if self.finished else "")


class RankStatus(NamedTuple):
    """A rank as its last beat showed it.

    Attributes:
        position: where its host is.
        seconds: for how long neither its host nor its device has moved on.
        left: whether it has left.
        device: where its device is; None if that has caught up with the host, or is the host.
    """

    position: Position = OUTSIDE
    seconds: float = 0.0
    left: bool = False
    device: DeviceLag | None = None

    @classmethod
    def from_list(cls, values: Sequence[Any]) -> RankStatus:
        """Read one from JSON. Raise ValueError or TypeError for anything else."""
        position, seconds, left, device = values
        lag = None
        if device is not None:
            position_values, finished = device
            lag = DeviceLag(Position.from_list(position_values), printable_line(str(finished), _MAX_CHARACTERS))
        return cls(Position.from_list(position), float(seconds), bool(left), lag)

    @property
    def positions(self) -> tuple[Position, ...]:
        """Where its device is, if that is behind, and its host."""
        return (self.position,) if self.device is None else (self.device.position, self.position)

    @property
    def doing(self) -> Position:
        """What it does first: what the host does or waits for comes after what its device has yet to do."""
        return self.positions[0]

    @property
    def peers(self) -> tuple[int, ...]:
        """All ranks that it waits for, on its host or its device."""
        return tuple(peer for position in self.positions for peer in position.peers)

    def fits(self, ranks: int) -> bool:
        """Whether it waits for no more than these ranks."""
        return len(self.peers) <= 2 * ranks and all(0 <= peer < ranks for peer in self.peers)


def wait_chain(rank: int, statuses: Sequence[RankStatus]) -> tuple[int, str]:
    """Follow waits from `rank` to the rank at their end.

    Returns that rank and the chain in words: "rank 2 has waited 31 s for 1RECV_F0 from rank 1; rank 1 is outside of a
    step". A rank whose device is behind is where its device is. Of several peers it follows the first one that is not
    waiting itself, and also names others that are not. A cycle of waits ends where it closes.
    """
    parts: list[str] = []
    visited: set[int] = set()
    idle: list[int] = []
    while rank not in visited:
        visited.add(rank)
        status = statuses[rank]
        peers = status.doing.peers
        if peers and not status.left:
            text = f"{_subject(rank, status)} has waited {status.seconds:.0f} s for {status.doing.action}"
            parts.append(f"{text} from {name_ranks(peers)}{_format_notes(status)}")
            idle = [peer for peer in peers if not statuses[peer].doing.peers]
            rank = idle[0] if idle else peers[0]
            continue
        parts += [_describe_rank(peer, statuses[peer]) for peer in (rank, *idle[1:_MAX_NAMED])]
        if len(idle) > _MAX_NAMED:
            parts.append(f"and {len(idle) - _MAX_NAMED} more that do not wait")
        break
    return rank, "; ".join(parts)


def long_action(rank: int, statuses: Sequence[RankStatus], partners: Sequence[int]) -> str:
    """Describe a rank that has been in one action for long, and does not wait as far as is known.

    It names those of its `partners`, with which it may meet in a collective within an action, that are elsewhere.
    """
    current = statuses[rank].doing
    elsewhere = [partner for partner in partners if statuses[partner].doing != current][:_MAX_NAMED]
    descriptions = [f"{_describe_rank(partner, statuses[partner])}, with the same stages" for partner in elsewhere]
    return "; ".join([_describe_rank(rank, statuses[rank]), *descriptions])


def _describe_rank(rank: int, status: RankStatus) -> str:
    if status.left:
        return f"rank {rank} has exited"
    return f"{_subject(rank, status)} {status.doing}{_format_notes(status, f'{status.seconds:.0f} s so far')}"


def _subject(rank: int, status: RankStatus) -> str:
    return f"rank {rank}" if status.device is None else f"the device of rank {rank}"


def _format_notes(status: RankStatus, *first_notes: str) -> str:
    """Format in parentheses `first_notes`, what a device that is behind has finished last, and where its host is."""
    notes = [*first_notes]
    if status.device is not None:
        notes += [f"it has finished {status.device.finished}"] if status.device.finished else []
        notes += [f"the host {status.position}"] if status.position != status.doing else []
    return f" ({'; '.join(notes)})" if notes else ""


def notify(text: str) -> None:
    """Print one line for the user. Errors of writing it are ignored."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"penstock: {text}\n")


def name_ranks(ranks: Sequence[int]) -> str:
    """Format `rank 1`, or `ranks 1, 2`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
