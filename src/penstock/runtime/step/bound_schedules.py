"""Chooses the bound schedule for a batch: one for each kind of batch and mode, under a number that all ranks know.

Only the first stage's rank looks at inputs. It begins every step with an announcement: the number of the bound schedule
to run, or that a new one is needed, followed by what the other ranks need of the batch to record it too. The
announcement includes everything that ranks must agree on in a step: a rank that disagrees gets an error, and no rank
waits for another in vain.
"""

from __future__ import annotations

import hashlib
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from penstock._base.compat import gradient_edge
from penstock._base.errors import ArgumentError, ShapeError, warn
from penstock._base.pytree import flatten
from penstock.partition.state.block_state import refuse_samples
from penstock.runtime.batch.cut import CutBatch, input_signature
from penstock.runtime.batch.outline import Outline
from penstock.runtime.exact import rules as exact
from penstock.runtime.execute.engine import Engine
from penstock.runtime.execute.executor import BatchKind, BoundSchedule, Mode
from penstock.runtime.features.compiled import Compile, effective_compile, schedule_arguments
from penstock.runtime.features.deferred_norm import DeferredNorms, check_deferrable
from penstock.runtime.features.feature import Binding
from penstock.runtime.front_end import Partition
from penstock.runtime.microbatch_kinds import MicrobatchKinds, distinct
from penstock.runtime.model.split_model import SplitModel
from penstock.schedule import Schedule, truncate_microbatches
from penstock.schedule.lowering import GatherPlan, lower_evaluation, lower_training

CACHED_SCHEDULES = 32
"""How many bound schedules a pipeline keeps; a further one replaces the least recently used, of evaluation first."""

_NEW = -1


OutputsOption = bool | int | Literal["all"]
"""Who gets a step's outputs: True, the rank of the last stage; "all" ranks; or the rank with that number."""

_IN_PLACE, _ALL, _FIRST_RANK = range(3)
_OUTPUTS = {_IN_PLACE: "True or False", _ALL: "'all'"}


class Call(NamedTuple):
    """What all ranks must agree on in a step. Numbers only, since it is sent.

    Attributes:
        outputs: who gets the outputs: 0 where they stay in place, with True and with False; 1: all ranks; 2: rank 0,
            and so on.
    """

    training: bool
    outputs: int
    timeline: bool

    @classmethod
    def of(cls, training: bool, outputs: OutputsOption, timeline: bool, ranks: int) -> Call:
        """Return the call for a user's arguments. Raise ArgumentError if `outputs` is none of the choices."""
        if isinstance(outputs, bool):
            return cls(training, _IN_PLACE, timeline)
        if outputs == "all":
            return cls(training, _ALL, timeline)
        if isinstance(outputs, int) and 0 <= outputs < ranks:
            return cls(training, _FIRST_RANK + outputs, timeline)
        raise ArgumentError(f"outputs={outputs!r}: expected True, False, 'all' or a rank from 0 to {ranks - 1}")

    def output_ranks(self, ranks: int) -> range | None:
        """Return the ranks that get the outputs; None if these stay in place."""
        if self.outputs == _IN_PLACE:
            return None
        return range(ranks) if self.outputs == _ALL else range(self.outputs - _FIRST_RANK, self.outputs - _ALL)


class BoundSchedules:
    """The bound schedules of one pipeline. Every process makes the same calls in the same order.

    Args:
        order: computations alone, for the largest number of microbatches that a batch has.
        binding: makes a binding, with the user's choices that are the same for all batches.
        compile: what the user asks for.
        sharded: the sharded stages, as they are to be gathered.
        norms: batch norms whose statistics are deferred in training, if any.
    """

    def __init__(
        self,
        engine: Engine,
        split: SplitModel,
        order: Schedule,
        binding: Callable[..., Binding],
        compile: Compile,
        sharded: GatherPlan,
        norms: DeferredNorms | None,
    ) -> None:
        self.engine, self.model_parts, self.order = engine, split, order
        self._binding, self._compile, self._sharded, self.norms = binding, compile, sharded, norms
        self._source = order.placement.rank_of[0]  # the first stage's rank announces
        self._announcer = engine.world.numbers[self._source]
        self._announces = self._source in engine.ranks
        self._bound: OrderedDict[int, BoundSchedule] = OrderedDict()
        self._digest: tuple[Hashable, int] = (None, 0)

    def __iter__(self) -> Iterator[BoundSchedule]:
        """Iterate over the bound schedules, the most recently used one last."""
        return iter([*self._bound.values()])

    def add(self, cut: CutBatch | None, outline: Outline, *, training: bool) -> BoundSchedule:
        """Record microbatches, and bind a schedule to them. `cut` is None on ranks that do not look at inputs."""
        partitions = self.model_parts.partitions(training=training, outline=outline)
        stages = [stage for partition in distinct(partitions) for stage in partition.stages]
        refuse_samples([memory for stage in stages for memory in stage.remembered], outline.sizes)
        recorded = [input_signature(flatten(example)) for example in outline.examples]
        as_announced = self._announces or cut is None or [input_signature(piece) for piece in cut.pieces] == recorded
        leaves = [] if cut is None else [leaf for piece in cut.pieces for leaf in piece.leaves]
        kind = BatchKind(
            sizes=outline.sizes,
            mode=self.model_parts.mode(training=training),
            signature=cut.signature if cut is not None and as_announced else None,
            plain_values=[leaf for leaf in leaves if not isinstance(leaf, Tensor)],
        )
        added = self._bind(partitions, kind, training)
        self._bound[added.number] = added
        if len(self._bound) > CACHED_SCHEDULES:
            evaluations = (n for n, bound in self._bound.items() if not bound.training and bound is not added)
            evicted = self._bound.pop(next(evaluations, next(iter(self._bound))))
            for transport in self.engine.transports.values():
                transport.release(evicted.number)  # all ranks, between the same two steps
            if added.number == CACHED_SCHEDULES:  # numbers start at 0
                warn(_TOO_MANY)
        return added

    def _bind(self, partitions: Sequence[Partition], kind: BatchKind, training: bool) -> BoundSchedule:
        order, split = truncate_microbatches(self.order, len(partitions)), self.model_parts
        kinds = MicrobatchKinds.from_partitions(partitions).metas
        reference = self.order if self.engine.world.data_parallel > 1 else None
        norms = self.norms if training else None
        with self.engine.agreed_at_first():
            if training:
                ties = [group.stages for group in split.tie_groups]
                order = lower_training(order, kinds, ties, self._sharded, reference)
            else:
                order = lower_evaluation(order, kinds, self._sharded, reference)
            if norms is not None:
                check_deferrable(partitions, split.model)
            compile = effective_compile(self._compile, split.model, partitions[0].stages)
            binding = self._binding(
                partitions,
                order,
                training=training,
                norms=norms,
                deferred=frozenset(map(id, norms.buffers() if norms else ())),
                sharded=split.sharded,
                compile=schedule_arguments(compile, self.order),
            )
        return self.engine.bind(binding, kind)

    def next(self, cut: CutBatch | None, call: Call) -> BoundSchedule:
        """Return the bound schedule for this step.

        Args:
            cut: the batch; None on ranks that do not look at inputs.

        Raises:
            ArgumentError: this rank asks for something other than the announcing rank.
            PartitionError: the batch is of a new kind, and cannot be recorded.
        """
        mode = self.model_parts.look(training=call.training)
        match = self._find(cut, mode) if cut is not None and self._announces else None
        number = self._announce(_NEW if match is None else match.number, call, mode.settings)
        if number == _NEW:
            local_outline = Outline.of(cut) if cut is not None and self._announces else None
            outline = self.engine.control.share(local_outline, self._source)
            assert outline is not None
            return self.add(cut, outline, training=call.training)
        bound = self._bound[number]
        if bound.kind.mode != mode:
            raise ArgumentError(
                "a plain attribute of the model has changed on this rank, but not on the one that has the inputs; "
                "change it on every rank alike"
            )
        self._bound.move_to_end(number)
        return bound

    def inputs(self, bound: BoundSchedule, cut: CutBatch) -> list[list[Tensor]]:
        """Return the tensors that the first stage receives for each microbatch, in its order.

        Raises:
            ShapeError: another rank, which also has inputs, announced a batch of another kind.
        """
        is_same_batch = self._announces or (
            (cut.sizes, cut.signature) == (bound.kind.sizes, bound.kind.signature) and _reads_same_values(bound, cut)
        )
        if not is_same_batch:
            raise ShapeError(
                f"rank {self.engine.world.number} got another batch than rank {self._announcer}: microbatches of "
                f"{list(cut.sizes)} rows, there of {list(bound.kind.sizes)}, or other shapes, dtypes, plain values, or "
                "values that the forward branches on; give both the same batch"
            )
        pairs = zip(bound.partitions, cut.pieces, strict=True)
        return [partition.arrange(piece.leaves) for partition, piece in pairs]

    def backward_to_batch(self, bound: BoundSchedule, cut: CutBatch | None) -> None:
        """Give the batch's tensors the gradients of their microbatches, in one backward to where these were cut."""
        gradients = dict(ChainMap(*(stage.batch_gradients for stage in bound.stages)))
        first_metas = (partition.stages[0].meta for partition in bound.partitions)
        has_copies = bound.schedule.placement.pipelines > 1
        if has_copies and any(value.meta.requires_grad for meta in first_metas for value in meta.inputs):
            # Each first stage has those of some microbatches.
            gradients = dict(ChainMap(*self.engine.control.gather_pipeline(gradients)))
        if cut is None or not gradients:
            return
        numbered = enumerate(zip(bound.positions, self.inputs(bound, cut), strict=True))
        tensors = {
            (k, position): x for k, (positions, xs) in numbered for position, x in zip(positions, xs, strict=True)
        }
        edges = [gradient_edge(tensors[key]) for key in gradients]
        exact.backward(edges, [gradient.to(tensors[key].device) for key, gradient in gradients.items()])

    def _find(self, cut: CutBatch, mode: Mode) -> BoundSchedule | None:
        for bound in reversed(self._bound.values()):
            key = bound.kind.sizes, bound.kind.signature, bound.kind.mode
            if key == (cut.sizes, cut.signature, mode) and _reads_same_values(bound, cut):
                return bound
        return None

    def _announce(self, number: int, call: Call, settings: Hashable) -> int:
        """Return the announced number. Raise ArgumentError unless this rank asks for the same."""
        local_numbers = [*map(int, call), self.compute_digest(settings)]
        number, *announced = self.engine.announce([number, *local_numbers], self._source)
        if announced == local_numbers:
            return number
        differing = next(
            index for index, pair in enumerate(zip(local_numbers, announced, strict=True)) if len(set(pair)) > 1
        )
        theirs, ours = (_DESCRIPTIONS[differing](values[differing]) for values in (announced, local_numbers))
        raise ArgumentError(
            f"rank {self._announcer} runs {theirs}, this rank ({self.engine.world.number}) {ours}; every rank must "
            "make the same calls, with the same outputs= and timeline=, and set train(), eval(), requires_grad_() and "
            "autocast alike"
        )

    def compute_digest(self, settings: Hashable) -> int:
        """Return a number for the settings that all processes must share, small enough for exact sums in float64."""
        if self._digest[0] != settings:
            digest = hashlib.blake2b(repr(settings).encode(), digest_size=5).digest()
            self._digest = settings, int.from_bytes(digest, "little")
        return self._digest[1]


def _reads_same_values(bound: BoundSchedule, cut: CutBatch) -> bool:
    """Whether the forward reads the same values from these inputs as when it was recorded."""
    pairs = zip(bound.partitions, cut.pieces, strict=True)
    return all(partition.holds(piece.leaves) for partition, piece in pairs)


_DESCRIPTIONS: tuple[Callable[[int], str], ...] = (
    lambda training: "a training step" if training else "an evaluation",
    lambda outputs: f"with outputs={_OUTPUTS.get(outputs, outputs - _FIRST_RANK)}",
    lambda timeline: "with a timeline" if timeline else "without a timeline",
    lambda _: "with different modes, requires_grad flags or autocast",
)

_TOO_MANY = (
    f"penstock: more than {CACHED_SCHEDULES} input signatures. Each new one (a shape, a dtype, a plain value that "
    "changes) is recorded unless only a length is new, which takes longer than a step, and the least recently used is "
    "evicted. "
    "Pad batches to a few shapes, and pass numbers that change as 0-dimensional tensors"
)
