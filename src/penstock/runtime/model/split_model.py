"""A model cut for the ranks of one pipeline: its partitions by input signature, and the part this process holds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.compat import autocast_kinds, autocast_state, plain_tensors
from penstock._base.errors import ArgumentError, PartitionError, PenstockError, warn
from penstock._base.marks import computing
from penstock._base.stages import ties
from penstock.partition import KEPT_PARTITIONS
from penstock.partition.names import unwrapped
from penstock.runtime.batch.outline import Outline, explaining_cut
from penstock.runtime.execute.engine import Engine
from penstock.runtime.execute.executor import BoundSchedule, Mode
from penstock.runtime.features.frame import Frames, Parallelize
from penstock.runtime.front_end import FrontEnd, Partition, Stage
from penstock.runtime.gradients.sharding import ShardedStage, check_sharding
from penstock.runtime.gradients.sums import tie_groups
from penstock.runtime.loss.loss_tensors import PREFIXES, add_loss_tensors, collect_tensors, is_trained, notes
from penstock.runtime.microbatch_kinds import merge_stages, with_copies
from penstock.runtime.model.originals import Originals, undo_on_error
from penstock.runtime.model.ownership import (
    Materialize,
    check_held_locally,
    check_no_overlaps,
    find_holders,
    move_to_single_device,
    take_over,
)
from penstock.schedule import Placement


class SplitModel:
    """The model of one pipeline.

    If each process is one rank, the pipeline takes the model over: parameters of other ranks' stages move to the meta
    device, which frees their memory but keeps what is needed to record another input signature.

    Attributes:
        model: the model, or the chain of the given layers.
        modules: every module, once.
        names: maps every name of a parameter or buffer in the unsplit model, tied ones included, to its first name.
        tie_groups: the parameters that several ranks hold.
    """

    def __init__(
        self,
        partitioner: FrontEnd,
        example: Outline,
        placement: Placement,
        engine: Engine,
        *,
        rule: Materialize | None,
        parallelize: Parallelize | None = None,
        loss: Callable[..., Any] | None = None,
    ) -> None:
        self._loss_tensors = collect_tensors(loss)
        self._loss_only: dict[str, Tensor] | None = None
        self._frames: Frames | None = None
        self._stages: Sequence[Stage] = ()
        self._engine = engine
        self._placement = placement
        self._partitioner = partitioner
        self.model, self.names = partitioner.model, partitioner.names
        self.modules = list(self.model.modules())
        # A forward may branch on values, so all ranks must record the same ones.
        example = engine.control.share(example)
        self._example = example
        self._derived: dict[tuple[str, int], tuple[Partition, Partition]] = {}  # see `_derive`
        self._known_parameters: set[str] = set()  # the example's, and those already warned about
        with engine.control.agreed():
            move_to_single_device(self.model, engine)
            with engine.control.working("the recording of the model"):
                self._record(training=True)
        self._measure_units()
        self._adopt_division()
        holders = find_holders(self.model, engine)
        with engine.control.agreed():
            stages = merge_stages(self._record(training=True))
            check_no_overlaps(stages, lambda stage: self._memory_of(placement.rank_of[stage]))
            shared = ties([stage.meta for stage in stages])
            self._check_copies(stages, parallelize)
            check_held_locally(self.model, stages, placement, *holders)
            with engine.control.working("the making of its weights"):
                if take_over(self.model, stages, placement.rank_of, engine, rule):
                    self._derived.clear()
                    self._partitioner.forget()
        engine.control.copy_from_first_process(self._held_tensors())
        if parallelize is not None:
            with engine.control.agreed(PenstockError):  # because the user's function may wait for other processes
                with engine.control.working("parallelize="):
                    self._parallelize(parallelize, shared)
        self.sharded_stages: frozenset[int] = frozenset().union(*engine.control.gather_pipeline(set(self.sharded)))
        self._stages = merge_stages(self.partitions(training=True))
        self.tie_groups = () if engine.world.is_local else tie_groups(shared, placement.rank_of)
        parameters = dict(self.held_parameters())
        engine.tie(self.tie_groups, lambda name: parameters[name])
        self._originals = Originals(self.model, partitioner.opened_modules())
        self.loss_notes = notes(loss, self._loss_only or {})

    @property
    def cuts(self) -> tuple[str, ...]:
        return self._partitioner.cuts or ()

    def partitions(self, *, training: bool, outline: Outline | None = None) -> list[Partition]:
        """Return the partition of each microbatch, in the modules' current modes, on this process's devices.

        Args:
            outline: the microbatches, the same on every rank; None: those that the pipeline was made with.

        Raises:
            PartitionError: a forward cannot be recorded, or needs parameters where they are not held.
        """
        recorded = self._record(training=training, outline=outline)
        placed = [self._derive(partition, self._place) for partition in recorded]
        if training and not self._known_parameters:
            self._known_parameters = {name for stage in merge_stages(placed) for name in stage.parameters}
        for partition in placed:
            self._check_tensors_held(partition, training=training)
        while len(self._derived) > 2 * KEPT_PARTITIONS:
            del self._derived[next(iter(self._derived))]
        return placed

    def look(self, *, training: bool) -> Mode:
        """Look at the model before a step: return its `mode`.

        Raises:
            ArgumentError: it no longer holds the parameters that the pipeline was made with.
        """
        if self._frames is None:  # sharding replaces the parameters
            self._originals.check_unchanged()
        return self.mode(training=training)

    def mode(self, *, training: bool) -> Mode:
        """Return what a recording depends on besides its inputs."""
        with plain_tensors():  # those of other ranks would look at each call
            trained = tuple(map(_requires_grad, (*self._originals.parameters, *(self._loss_only or {}).values())))
        autocast = tuple(autocast_state(torch.device(kind)) for kind in autocast_kinds())
        settings = tuple(map(_training, self.modules)), trained, autocast
        return Mode(training, settings, self._partitioner.attributes())

    @contextmanager
    def accepting_own_changes(self, bound: BoundSchedule) -> Iterator[None]:
        """Wrap a step: its own changes to the model's attributes need no new recording. See `undo_on_error`."""
        loss_buffers = {tensor for tensor in (self._loss_only or {}).values() if not isinstance(tensor, nn.Parameter)}
        uncertain = {stage.buffers[name] for stage in self._local_stages() for name in stage.may_update}
        updated = {*bound.updated, *uncertain, *loss_buffers} if bound.training else None
        parameters = [parameter for _, parameter in self.held_parameters()]
        with undo_on_error(self.modules, parameters, updated, local=self._engine.world.is_local):
            yield
            self._originals.settle()
            self._partitioner.settle(bound.kind.mode.attributes)

    def all_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return every parameter of the unsplit model, without duplicates, in the model's order."""
        names = self.names()
        named = [(names[name], parameter) for name, parameter in self.model.named_parameters()]
        model_names, loss_tensors = set(names.values()), (self._loss_only or {}).items()
        return named + [(name, p) for name, p in loss_tensors if is_trained(p) and name not in model_names]  # type: ignore[misc]

    def all_names(self) -> list[str]:
        """Return the names of every parameter and persistent buffer of the unsplit model, without duplicates."""
        names = self.names()
        saved = {*map(unwrapped, self.model.state_dict(keep_vars=True))}
        named_tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        model_names = [names[name] for name, _ in named_tensors if unwrapped(name) in saved]
        return [*dict.fromkeys((*model_names, *(self._loss_only or ())))]

    def held_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters of this process's stages, without duplicates, in the unsplit model's order."""
        by_name = {name: p for stage in self._local_stages() for name, p in stage.parameters.items()}
        return [(name, by_name[name]) for name, _ in self.all_parameters() if name in by_name]

    def held_buffers(self) -> list[tuple[str, Tensor]]:
        """Return the buffers of this process's stages, without duplicates, in the unsplit model's order."""
        names = self.names()
        buffers = {name: b for stage in self._local_stages() for name, b in stage.buffers.items()}
        order = [names[name] for name, _ in self.model.named_buffers()]
        return [(name, buffers[name]) for name in dict.fromkeys((*order, *(self._loss_only or ()))) if name in buffers]

    def held_unused(self) -> list[tuple[str, Tensor]]:
        """Return the parameters and persistent buffers that no stage uses, if this process is rank 0, which keeps
        them."""
        if 0 not in self._engine.ranks:
            return []
        used = {name for stage in self._stages for name in (*stage.parameters, *stage.buffers)}
        saved, names = set(self.all_names()), self.names()
        named_tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        return [(names[raw], tensor) for raw, tensor in named_tensors if names[raw] in saved - used]

    @property
    def sharded(self) -> Mapping[int, ShardedStage]:
        """The stages of this process that `fully_shard` was applied to."""
        return {} if self._frames is None else self._frames.sharded

    def _parallelize(self, function: Parallelize, shared: Mapping[str, Sequence[int]]) -> None:
        """Apply the user's function to this process's stages. Earlier recordings are discarded and made again."""
        partitions = self.partitions(training=True)
        local_stages = [stage for stage in partitions[0].stages if self._is_local(stage)]
        _check_same_parameters(merge_stages(partitions), partitions[0].stages)
        self._frames = Frames(self.model, local_stages, function)
        self._derived.clear()
        self._partitioner.forget()
        for stage in merge_stages(self.partitions(training=True)):
            if self._is_local(stage):
                check_sharding(stage, self._engine.world.divided, shared)

    def _measure_units(self) -> None:
        """Let the first process measure how long the model's units take, while the others wait: they share its cores. A
        front end without `weigh` has no use for it."""
        weigh: Callable[..., None] | None = getattr(self._partitioner, "weigh", None)
        with self._engine.control.agreed():
            if weigh is None or not self._engine.world.is_first:
                return
            with self._engine.control.working("the measuring of its units"), self._recording(training=True):
                args, kwargs = self._example.fill(self._engine.recording_device)[0]
                weigh(args, kwargs)
            self._derived.clear()

    def _adopt_division(self) -> None:
        """Cut where the first process does: the work of a block, and how long it takes, differ between processes."""
        division = self._engine.control.share(self._partitioner.division, role="everyone")
        if division != self._partitioner.division:
            self._derived.clear()
            self._partitioner.divide(division)

    def _is_local(self, stage: Stage) -> bool:
        return self._placement.rank_of[stage.meta.index] in self._engine.ranks

    def _held_tensors(self) -> list[Tensor]:
        """Return every parameter and buffer of this process's stages, in the model's order."""
        stages = merge_stages(self._record(training=True))
        local_stages = [stage for stage in stages if self._is_local(stage)]
        by_name = {name: t for stage in local_stages for name, t in (*stage.parameters.items(), *stage.buffers.items())}
        return [by_name[name] for name in sorted(by_name)]

    @contextmanager
    def _recording(self, *, training: bool, outline: Outline | None = None) -> Iterator[None]:
        """Set the modes of a recording of these microbatches, within a context."""
        plain = nullcontext() if self._frames is None else self._frames.off()
        with torch.set_grad_enabled(training), plain, computing(0, 0), explaining_cut(outline or self._example):
            yield

    def _record(self, *, training: bool, outline: Outline | None = None) -> list[Partition]:
        microbatches = outline or self._example
        with self._recording(training=training, outline=outline):
            examples = microbatches.fill(self._engine.recording_device)
            return [self._derive(self._partitioner(args, kwargs), self._complete) for args, kwargs in examples]

    def _check_tensors_held(self, partition: Partition, *, training: bool) -> None:
        """Refuse a recording that needs tensors of other processes.

        Each process holds what its stages need for the example's microbatches, but another may take another branch.
        """
        if self._engine.world.is_local:
            if training:
                self._warn_about_new_parameters(partition)
            return
        rank_of = self._placement.rank_of
        available = {(rank_of[stage.meta.index], name) for stage in self._stages for name in _names(stage)}
        for stage in partition.stages if available else ():
            for name in _names(stage):
                if (rank_of[stage.meta.index], name) not in available:
                    raise PartitionError(
                        f"for this batch the model's forward uses {name!r} on stage {stage.meta.index}, which it did "
                        "not for the pipeline's example, so that the rank of this stage does not hold it; pass an "
                        "example that takes the same branch, or other cuts"
                    )

    def _warn_about_new_parameters(self, partition: Partition) -> None:
        """Warn of parameters that the example did not need, as with layer drop (51 files of transformers)."""
        used = {name: p for stage in partition.stages for name, p in stage.parameters.items()}
        known_names = self._known_parameters
        new = [name for name, parameter in used.items() if parameter.requires_grad and name not in known_names]
        known_names.update(used)
        if new:
            warn(
                f"for this batch the model's forward uses {new[0]!r}, which it did not for the pipeline's example: "
                "pipe.parameters() does not have it, so an optimizer made from that never trains it. Pass the "
                "optimizer model.parameters(), or pass an example that takes the same branch (in several processes "
                "such a batch is refused)"
            )

    def _derive(self, partition: Partition, make: Callable[[Partition], Partition]) -> Partition:
        """Return what a method makes of a partition, made once."""
        key = make.__name__, id(partition)
        if key not in self._derived:  # stored with the original: an id is unique only while its object lives
            self._derived[key] = partition, make(partition)
        return self._derived[key][1]

    def _complete(self, partition: Partition) -> Partition:
        """Return the partition with the loss's tensors, and the stages of all pipelines."""
        complete = add_loss_tensors(partition, self._name_loss_tensors(partition))
        return with_copies(complete, self._placement.pipelines)

    def _name_loss_tensors(self, partition: Partition) -> Mapping[str, Tensor]:
        """Return the loss's tensors that no stage holds, by their names in state dicts. A loss may be a part of the
        model."""
        if self._loss_only is None:
            ids = {id(t) for stage in partition.stages for t in (*stage.parameters.values(), *stage.buffers.values())}
            names = {id(t): name for name, t in (*self.model.named_parameters(), *self.model.named_buffers())}
            prefix = next(p for p in PREFIXES if not any(name.startswith(p) for name in names.values()))
            unheld = {name: tensor for name, tensor in self._loss_tensors.items() if id(tensor) not in ids}
            self._loss_only = {names.get(id(tensor), prefix + name): tensor for name, tensor in unheld.items()}
        return self._loss_only

    def _place(self, partition: Partition) -> Partition:
        """Return the partition with this process's stages on their devices."""
        return replace(partition, stages=tuple(map(self._place_stage, partition.stages)))

    def _place_stage(self, stage: Stage) -> Stage:
        rank = self._placement.rank_of[stage.meta.index]
        if rank not in self._engine.ranks:
            return stage
        device = self._engine.devices[rank]
        placed = stage if device == stage.device else stage.on(device)
        if self._frames is None:
            return placed
        frame = self._frames[stage.meta.index]
        frame.adopt(placed.module)
        return replace(placed, frame=frame)

    def _local_stages(self) -> list[Stage]:
        return [stage for stage in self._stages if self._is_local(stage)]

    def _memory_of(self, rank: int) -> Hashable:
        """Return where a rank's parameters are: in its process, or, if one process drives all ranks, on its device."""
        return str(self._engine.devices[rank]) if self._engine.world.is_local else rank

    def _check_copies(self, stages: Sequence[Stage], parallelize: Parallelize | None) -> None:
        if parallelize is not None and self._placement.pipelines > 1:
            raise ArgumentError(
                "parallelize= works on one copy of each stage, and this schedule has several; take one with one copy "
                "(dualpipe-v for dualpipe)"
            )
        if not self._engine.world.is_local:
            return
        stages_by_name: dict[str, list[int]] = {}
        for stage in stages:
            for name in _names(stage):
                stages_by_name.setdefault(name, []).append(stage.meta.index)
        for name, indices in stages_by_name.items():
            devices = {str(self._engine.devices[self._placement.rank_of[stage]]) for stage in indices}
            if len(devices) > 1:
                raise ArgumentError(
                    f"devices: {name!r} is used on stages {indices}, which one process would have to hold on "
                    f"{sorted(devices)}; choose cuts that keep its uses on one device, or run one process per device "
                    "under torchrun, where copies are kept equal"
                )


_requires_grad, _training = attrgetter("requires_grad"), attrgetter("training")


def _check_same_parameters(used: Sequence[Stage], first_stages: Sequence[Stage]) -> None:
    """Raise PartitionError if some microbatch uses parameters that the first, whose stages are sharded, does not, as
    with layer drop."""
    for merged, stage in zip(used, first_stages, strict=True):
        for name in merged.parameters:
            if name not in stage.parameters:
                raise PartitionError(
                    f"parallelize=: the example's first microbatch does not use {name!r} on stage {stage.meta.index}, "
                    "but another does; pass an example whose first microbatch uses every parameter"
                )


def _names(stage: Stage) -> tuple[str, ...]:
    return (*stage.meta.parameters, *stage.meta.buffers)
