"""The named schedules, one family per file, and the registry of their names.

A generator is a pure function of the number of ranks, microbatches and chunks. It writes only F, B, I and W;
passes add messages and reductions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from penstock._base.aliases import accept_aliases, accept_old_names, schedule_of_peer
from penstock._base.errors import ArgumentError, check_counts
from penstock._base.formatting import did_you_mean
from penstock.schedule.generators.chimera import chimera
from penstock.schedule.generators.dualpipe import dualpipe, dualpipe_v
from penstock.schedule.generators.gpipe import gpipe, looped_bfs
from penstock.schedule.generators.hanayo import hanayo
from penstock.schedule.generators.interleaved import interleaved_1f1b
from penstock.schedule.generators.naive import naive
from penstock.schedule.generators.one_f_one_b import one_f_one_b
from penstock.schedule.generators.v_shape import one_f_one_b_v, v_half, v_min
from penstock.schedule.generators.zero_bubble import zb_h1, zb_h2
from penstock.schedule.generators.zero_bubble_v import zb_v
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule

__all__ = [
    "Constraint",
    "ScheduleParams",
    "ScheduleSpec",
    "chimera",
    "dualpipe",
    "dualpipe_v",
    "generate",
    "gpipe",
    "hanayo",
    "interleaved_1f1b",
    "looped_bfs",
    "naive",
    "names",
    "one_f_one_b",
    "one_f_one_b_v",
    "schedule_specs",
    "v_half",
    "v_min",
    "zb_h1",
    "zb_h2",
    "zb_v",
]


@dataclass(frozen=True, slots=True)
class ScheduleParams:
    """The numbers that a schedule is generated for."""

    ranks: int
    microbatches: int
    stages_per_rank: int = 1


@dataclass(frozen=True, slots=True)
class Constraint:
    """A condition on the numbers that a schedule works for: the argument, and the condition in words and as a test."""

    argument: str
    text: str
    holds: Callable[[int], bool]


_ONE_CHUNK = Constraint("stages_per_rank", "exactly 1 stage per rank", lambda chunks: chunks == 1)
_TWO_CHUNKS = Constraint("stages_per_rank", "exactly 2 stages per rank, placed as a V", lambda chunks: chunks == 2)
_WAVES = Constraint("stages_per_rank", "an even number of stages per rank, 2 per wave", lambda chunks: chunks % 2 == 0)
_EVEN_RANKS = Constraint(
    "ranks", "an even number of ranks, since its two pipelines meet in the middle", lambda ranks: ranks % 2 == 0
)
_EVEN_MICROBATCHES = Constraint(
    "microbatches", "an even number of microbatches, half for each copy", lambda m: m % 2 == 0
)


@accept_old_names(splits="splits_backward", broken="violated_constraint")
@dataclass(frozen=True, slots=True)
class ScheduleSpec:
    """A named schedule, and what to expect of it.

    `memory` and `idle` are Python formulas in p ranks, m microbatches, v chunks, the rank r, and F, I and W,
    the times that one microbatch takes on one rank. They hold for any times (except for an `if` in the formula), if
    links cost nothing and m is a multiple of p and at least 2p.

    Attributes:
        name: the name that `generate` takes.
        make: generates the schedule.
        rule: the order of work, in one line.
        memory: the largest number of microbatches whose activations rank r holds; None if there is no formula.
        idle: how long the rank with the longest span waits within it; None if there is no formula.
        bubble: the share of its span in which a rank waits, if F, I and W take equally long; None if there is no
            formula.
        rules: which numbers it works for.
        chunks: the default that it is generated with.
        placement: where stages are: "loop", "V", "wave" or "bidirectional".
        splits_backward: whether backwards are split into I and W.
        aliases: other names that `generate` takes.
    """

    name: str
    make: Callable[[ScheduleParams], Schedule]
    rule: str
    memory: str | None = None
    idle: str | None = None
    bubble: str | None = None
    rules: tuple[Constraint, ...] = ()
    chunks: int = 1
    placement: str = "loop"
    splits_backward: bool = False
    aliases: tuple[str, ...] = ()

    def violated_constraint(self, numbers: ScheduleParams) -> Constraint | None:
        """Return the first constraint that the parameters violate."""
        return next((rule for rule in self.rules if not rule.holds(getattr(numbers, rule.argument))), None)

    def refusal(self, numbers: ScheduleParams) -> str:
        """Describe which constraint the parameters violate; empty if they satisfy all."""
        rule = self.violated_constraint(numbers)
        return "" if rule is None else f"works with {rule.text}"

    def actions(self, numbers: ScheduleParams) -> int:
        """Return the maximum number of F, B, I and W in the schedule: one that splits backwards may leave some
        whole."""
        return (3 if self.splits_backward else 2) * numbers.ranks * numbers.stages_per_rank * numbers.microbatches

    def placed(self, numbers: ScheduleParams) -> Placement:
        """Return the placement of the schedule's stages without generating the schedule."""
        return _PLACEMENTS[self.placement](numbers)

    def fits(self, numbers: ScheduleParams, placement: Placement) -> bool:
        """Whether the schedule works for these numbers, with its stages placed so; it need not be made for that."""
        return self.violated_constraint(numbers) is None and self.placed(numbers) == placement


_PLACEMENTS: dict[str, Callable[[ScheduleParams], Placement]] = {
    "loop": lambda n: Placement.loop(n.ranks, n.stages_per_rank),
    "V": lambda n: Placement.v(n.ranks),
    "wave": lambda n: Placement.wave(n.ranks, n.stages_per_rank // 2),
    "bidirectional": lambda n: Placement.bidirectional(n.ranks),
}


_on_a_v = partial(ScheduleSpec, rules=(_TWO_CHUNKS,), chunks=2, placement="V")
_two_copies = partial(ScheduleSpec, rules=(_ONE_CHUNK, _EVEN_RANKS, _EVEN_MICROBATCHES), placement="bidirectional")

_GENERATORS = {
    generator.name: generator
    for generator in (
        ScheduleSpec(
            "naive",
            lambda n: naive(n.ranks, n.microbatches, n.stages_per_rank),
            rule="a microbatch goes all the way forward and back before the next one starts",
            memory="1",
            idle="(p - 1)*m*(F + I + W)",
            bubble="(p - 1)/p",
        ),
        ScheduleSpec(
            "gpipe",
            lambda n: gpipe(n.ranks, n.microbatches, n.stages_per_rank),
            rule="all forwards, then all backwards",
            memory="m",
            idle="(p - 1)*(F + I + W)/v",
            bubble="(p - 1)/(v*m + p - 1)",
            aliases=("afab",),
        ),
        ScheduleSpec(
            "1f1b",
            lambda n: one_f_one_b(n.ranks, n.microbatches),
            rule="p - 1 - r forwards, then a forward and a backward in turn, then the backwards left over",
            memory="min(p - r, m)",
            idle="(p - 1)*(F + I + W)",
            bubble="(p - 1)/(m + p - 1)",
            rules=(_ONE_CHUNK,),
        ),
        ScheduleSpec(
            "interleaved-1f1b",
            lambda n: interleaved_1f1b(n.ranks, n.microbatches, n.stages_per_rank),
            rule="1F1B over several stages per rank, in groups of p microbatches",
            memory="(v*p + p - 2*r - 1)/v",
            idle="(p - 1)*(F + I + W)/v",
            bubble="(p - 1)/(v*m + p - 1)",
            chunks=2,
        ),
        ScheduleSpec(
            "looped-bfs",
            lambda n: looped_bfs(n.ranks, n.microbatches, n.stages_per_rank),
            rule="all microbatches through a chunk before the next chunk, forward and then back",
            memory="m",
            idle="(p - 1)*(F + I + W)/v",
            bubble="(p - 1)/(v*m + p - 1)",
            chunks=2,
        ),
        ScheduleSpec(
            "zb-h1",
            lambda n: zb_h1(n.ranks, n.microbatches),
            rule="1F1B with split backwards; weight gradients r microbatches late",
            memory="min(p, m)",
            idle="(p - 1)*max(I, F + I - W)",
            bubble="(p - 1)/(3*m + p - 1)",
            rules=(_ONE_CHUNK,),
            splits_backward=True,
        ),
        ScheduleSpec(
            "zb-h2",
            lambda n: zb_h2(n.ranks, n.microbatches),
            rule="ZB-H1 with twice the distance between ranks; weight gradients 2r microbatches late",
            memory="min(2*p - 1, m)",
            idle="(p - 1)*max(0, I - F, F + I - 2*W)",
            bubble="0",
            rules=(_ONE_CHUNK,),
            splits_backward=True,
        ),
        _on_a_v(
            "zb-v",
            lambda n: zb_v(n.ranks, n.microbatches),
            rule="two chunks on a V, F, I and W of either in turn",
            memory="min(p, m)",
            idle="0 if F == I == W else None",
            bubble="0",
            splits_backward=True,
        ),
        _on_a_v(
            "v-half",
            lambda n: v_half(n.ranks, n.microbatches),
            rule="two chunks on a V, in a block that holds half of 1F1B's memory",
            memory="(p + 2)//2",
            splits_backward=True,
        ),
        _on_a_v(
            "v-min",
            lambda n: v_min(n.ranks, n.microbatches),
            rule="two chunks on a V, in a block that holds a third of 1F1B's memory",
            memory="(p + 4)//3",
            splits_backward=True,
        ),
        _on_a_v(
            "1f1b-v",
            lambda n: one_f_one_b_v(n.ranks, n.microbatches),
            rule="1F1B on a V, in a block that holds two thirds of 1F1B's memory",
        ),
        ScheduleSpec(
            "hanayo",
            lambda n: hanayo(n.ranks, n.microbatches, n.stages_per_rank),
            rule="down the ranks and up again in waves; backwards first, then the highest forward",
            rules=(_WAVES,),
            chunks=2,
            placement="wave",
        ),
        _two_copies(
            "chimera",
            lambda n: chimera(n.ranks, n.microbatches),
            rule="two copies of the model in opposite directions, each in the other's bubbles",
            memory="p//2 + min(r + 1, p - r)",
        ),
        _two_copies(
            "dualpipe",
            lambda n: dualpipe(n.ranks, n.microbatches),
            rule="two copies in opposite directions, forwards of one together with backwards of the other",
            memory="p + 1",
            idle="(p/2 - 1)*max(2*F, 3*F - W) if F == I else None",
            bubble="(p - 2)/(3*m + p - 2)",
            splits_backward=True,
        ),
        _on_a_v(
            "dualpipe-v",
            lambda n: dualpipe_v(n.ranks, n.microbatches),
            rule="DualPipe cut in half: one copy, two chunks on a V",
            memory="(2*p + 1)/2",
            idle="(p - 1)*max(2*F, 3*F - W)/2 if F == I else None",
            bubble="(p - 1)/(3*m + p - 1)",
            splits_backward=True,
        ),
    )
}


_BY_NAME = _GENERATORS | {alias: entry for entry in _GENERATORS.values() for alias in entry.aliases}

MICROBATCHES = 8
"""How many microbatches a batch is cut into by default."""

MICROBATCHES_HINT = "microbatches= sets the number of pieces of a batch"
"""For messages: elsewhere, "chunks" are the pieces of a batch."""


def names() -> tuple[str, ...]:
    """Return the names of all schedules, without duplicates; some also have `aliases`."""
    return tuple(_GENERATORS)


def schedule_specs() -> tuple[ScheduleSpec, ...]:
    """Return the registry, in the order of `names`."""
    return tuple(_GENERATORS.values())


def schedule_spec(name: str) -> ScheduleSpec:
    """Return the entry with this name or alias, ignoring case. Raise ArgumentError if there is none."""
    spec = _BY_NAME.get(name.lower())
    if spec is None:
        peers = schedule_of_peer(name)
        hint = f"did you mean {peers}? " if peers else did_you_mean(name.lower(), _BY_NAME, 0.4)
        raise ArgumentError(
            f"schedule={name!r} is not a known schedule; {hint}expected one of {', '.join(_GENERATORS)}"
        )
    return spec


@accept_aliases(chunks="stages_per_rank")
def generate(name: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """Generate the schedule with this name, without messages.

    >>> print(generate("zb-h1", ranks=2, microbatches=2))
    zb-h1: 2 microbatches, stages on ranks 0 1
    rank 0: 0F0 0F1 0I0 0W0 0I1 0W1
    rank 1: 1F0 1I0 1F1 1I1 1W0 1W1

    Args:
        name: one of `names()`, or an alias of one.
        ranks: how many ranks, at least 1.
        microbatches: how many microbatches, at least 1; fewer than ranks is fine.
        stages_per_rank: how many stages of the model each rank owns, at least 1; None: the schedule's default.

    Raises:
        ArgumentError: the name is unknown, a number is less than 1, or the schedule's definition does not allow it.
    """
    entry = schedule_spec(name)
    numbers = ScheduleParams(ranks, microbatches, entry.chunks if stages_per_rank is None else stages_per_rank)
    check_counts(**{argument: getattr(numbers, argument) for argument in ScheduleParams.__slots__})
    if (rule := entry.violated_constraint(numbers)) is not None:
        value = getattr(numbers, rule.argument)
        hint = f" ({MICROBATCHES_HINT})" if rule.argument == "stages_per_rank" else ""
        raise ArgumentError(
            f"{rule.argument}={value}: {name} works with {rule.text}; choose another number or schedule{hint}"
        )
    return entry.make(numbers)
