"""Forward and backward of one microbatch on one stage; the backward whole (B) or split (I and W).

What a stage keeps for a microbatch between the two is no more than autograd itself keeps: the edges to start backward
from, and a slot for the gradient of each input; or, where the forward is run again in backward, what it needs for that.
Values and gradients are dropped as soon as they are handed on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.errors import PartitionError
from penstock.runtime import exact
from penstock.runtime.backward_counts import BackwardCounts
from penstock.runtime.backward_draws import BackwardDraws
from penstock.runtime.backward_updates import BackwardUpdates
from penstock.runtime.deferred_norm import DeferredNorms
from penstock.runtime.distribution import is_distributed
from penstock.runtime.forward_state import ForwardState
from penstock.runtime.loss import LossHead, no_gradient
from penstock.runtime.offload import Offload
from penstock.runtime.recompute import Keeper, Rerun
from penstock.runtime.repeated_updates import RepeatedUpdates
from penstock.runtime.routes import Root, Route, Routes
from penstock.runtime.split_backward import SplitBackward
from penstock.runtime.streams import Streams
from penstock.stages import StageMeta, needs_backward

if TYPE_CHECKING:
    from penstock.runtime.frame import Sharded  # which imports torch's FSDP


@dataclass(slots=True)
class _Saved:
    roots: list[GradientEdge | None]
    slots: dict[int, list[Tensor]]


@dataclass(frozen=True, slots=True)
class Extras:
    """What a stage does beside its forward and backward, where it was asked for.

    Attributes:
        keeper: keeps what the forwards of the microbatches `again` need to be run again in backward.
        offload: keeps what other forwards save for backward on the host.
        norms: takes the statistics of batch norms.
        sharded: what `fully_shard` was applied to; its gradients are reduced in the backward of microbatch `last`.
        forward_state: keeps what modules leave in their attributes for their own backward.
        repeated: orders the updates of modules that run themselves again in backward.
        updates: refuses other updates of buffers in backward.
        counts: refuses what a backward adds up elsewhere, where the stage has copies.
    """

    keeper: Keeper | None = None
    again: Collection[int] = frozenset()
    offload: Offload | None = None
    norms: DeferredNorms | None = None
    sharded: Sharded | None = None
    last: int | None = None
    forward_state: ForwardState | None = None
    repeated: RepeatedUpdates | None = None
    updates: BackwardUpdates | None = None
    counts: BackwardCounts | None = None

    @contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        """Around a forward, when it is run first."""
        with (
            nullcontext() if self.updates is None else self.updates.forward(microbatch),
            nullcontext() if self.counts is None else self.counts.forward(),
            nullcontext() if self.forward_state is None else self.forward_state.forward(microbatch),
            nullcontext() if self.repeated is None else self.repeated.forward(microbatch),
        ):
            yield

    @contextmanager
    def in_backward(self, microbatch: int) -> Iterator[None]:
        """Around autograd's backward of a microbatch."""
        with (
            nullcontext() if self.repeated is None else self.repeated.backward(microbatch),
            nullcontext() if self.updates is None else self.updates.refused(microbatch),
            nullcontext() if self.counts is None else self.counts.refused(),
        ):
            yield


@dataclass(slots=True)
class _Outbox:
    mail: dict[tuple[int, int], list[Tensor | None]] = field(default_factory=dict)

    def dispatch(self, routes: Sequence[Route], microbatch: int, values: Sequence[Tensor | None]) -> None:
        """Hands values on to stages of this rank, and keeps the rest until the schedule sends them."""
        for route in routes:
            message = [values[position] for position in route.positions]
            if route.remote:
                self.mail[route.stage, microbatch] = message
            else:
                route.channel.send(microbatch, message)


class StageRunner:
    """Runs one stage of one program.

    Args:
        functions: the stage's forward for each microbatch (the same function, unless sizes differ).
        roots: where gradients come in.
        head: what follows the last stage; None on others.
        streams: random streams, if anything on this stage draws.
        draw_offsets: how often each module that draws was called on earlier stages.
        split: runs the backward of some microbatches in two parts; None where all are whole.
        extras: for a training program.
    """

    def __init__(
        self,
        meta: StageMeta,
        functions: Sequence[Callable[..., Sequence[Tensor]]],
        roots: Sequence[Root],
        routes: Routes,
        head: LossHead | None,
        streams: Streams | None,
        draw_offsets: Mapping[str, int],
        device: torch.device,
        training: bool,
        split: SplitBackward | None = None,
        extras: Extras = Extras(),
    ) -> None:
        self.meta = meta
        self.routes = routes
        self._functions = functions
        self._head = head
        self._streams = streams
        self._draw_offsets = draw_offsets
        self._training = training
        self._draws = BackwardDraws(meta.index, device, streams)
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._tracked = [p for p, i in enumerate(meta.inputs) if training and i.meta.requires_grad]
        self._untracked_outputs = [p for p, o in enumerate(meta.outputs) if training and not o.meta.requires_grad]
        self._root_outputs = [root.position for root in roots if root.is_output]
        self._root_inputs = [root.position for root in roots if not root.is_output]
        self.split = split
        self._extras = extras
        self.reduces = True
        """Whether the gradients of a sharded stage are reduced in this step."""
        self._saved: dict[int, _Saved] = {}
        self._kept: dict[int, Rerun] = {}
        self._values = _Outbox()
        self._grads = _Outbox()
        self.batch: list[Mapping[int, Tensor]] = []
        """For each microbatch, the model's inputs by their position among the stage's inputs."""

    def begin_step(self, batch: Sequence[Mapping[int, Tensor]]) -> None:
        """Takes a step's inputs, and drops what a step that raised may have left."""
        self.batch = list(batch)
        self._saved.clear()
        self._kept.clear()
        self._values.mail.clear()
        self._grads.mail.clear()
        if self.split is not None:
            self.split.begin_step()
        for extra in (self._extras.offload, self._extras.forward_state, self._extras.repeated):
            if extra is not None:
                extra.begin_step()

    def gather(self, microbatch: int) -> list[Any]:
        """Waits for everything that the forward of a microbatch needs."""
        args: list[Any] = [None] * len(self.meta.inputs)
        for route in self.routes.values_in:
            for position, value in zip(route.positions, route.channel.receive(microbatch), strict=True):
                args[position] = value
        if self.batch:
            inputs, self.batch[microbatch] = self.batch[microbatch], {}
            for position, value in inputs.items():
                args[position] = value
        return args

    def forward(self, microbatch: int, args: list[Any]) -> None:
        """Runs the stage; keeps what backward starts from; hands the outputs on."""
        extras = self._extras
        if extras.norms is not None:
            extras.norms.begin(microbatch)
        if extras.keeper is not None and microbatch in extras.again:
            self._kept[microbatch] = extras.keeper.keep(microbatch, args)
            versions = extras.keeper.stray_versions()
            with extras.forward(microbatch):
                outputs = self._run(microbatch, args, runs_again=True)[1]
            extras.keeper.check(versions)
        else:
            with (
                extras.forward(microbatch),
                nullcontext() if extras.offload is None else extras.offload.packing(microbatch),
            ):
                saved, outputs = self._run(microbatch, args)
            if self._training:
                self._saved[microbatch] = saved
        self._values.dispatch(self.routes.values_out, microbatch, [exact.settled(output) for output in outputs])

    def _run(self, microbatch: int, args: list[Any], *, runs_again: bool = False) -> tuple[_Saved, Sequence[Tensor]]:
        """The forward, and the loss: what backward starts from, and the outputs with their graph. Empties `args`.

        Args:
            runs_again: backward will not start from this run, but from another one.
        """
        if self._streams is not None:
            self._streams.begin(microbatch, self._draw_offsets, stage=self.meta.index)
        slots: dict[int, list[Tensor]] = {}
        for position in self._tracked:
            args[position], slots[position] = exact.receive(self._anchor, args[position])
        passed_on = [get_gradient_edge(args[position]) for position in self._root_inputs]
        split = self._split_of(microbatch)
        if self._extras.sharded is not None:
            # A weight that autocast has cast for another microbatch would get its gradient after the reduction of all:
            # in backward, what was made first comes last.
            torch.clear_autocast_cache()
        if split is None:
            outputs = self._functions[microbatch](*args)
        else:
            with split.forward(microbatch, runs_again=runs_again):
                outputs = self._functions[microbatch](*args)
        args.clear()
        self._check_whole(outputs)
        if self._training:
            self._check_untracked(outputs)
        if self._head is not None:
            # One that runs again has its loss from then alone: a loss may count, or write into its target. But from
            # its graph a split is learned.
            root = None if runs_again and split is None else self._head(microbatch, outputs)
            roots = [self._loss_edge(root)] if root is not None else []
        else:
            roots = [_edge(outputs[position]) for position in self._root_outputs]
        if split is not None:
            split.learn(roots)
        return _Saved([*roots, *passed_on], slots), outputs

    def _again(self, microbatch: int) -> _Saved:
        """Runs a forward again, on what it ran on, for its graph."""
        keeper, kept = self._extras.keeper, self._kept.pop(microbatch)
        assert keeper is not None
        state = self._extras.forward_state
        with kept.buffers.in_place(), nullcontext() if state is None else state.again(microbatch):
            return self._run(microbatch, keeper.args_of(kept))[0]

    def collect(self, microbatch: int) -> list[Tensor | None]:
        """Waits for everything that the backward of a microbatch needs: a gradient, or None, for each root."""
        if self._head is not None:
            return [] if microbatch in self._kept else [self._head.seed(microbatch)]
        grads: list[Tensor | None] = [None] * (len(self._root_outputs) + len(self._root_inputs))
        for route in self.routes.grads_in:
            for position, grad in zip(route.positions, route.channel.receive(microbatch), strict=True):
                grads[position] = grad
        return grads

    def backward(self, microbatch: int, grads: list[Tensor | None]) -> None:
        """Runs B or I; hands the gradients of the inputs on."""
        state = self._extras.forward_state
        with nullcontext() if state is None else state.backward(microbatch):
            self._backward(microbatch, grads)

    def _backward(self, microbatch: int, grads: list[Tensor | None]) -> None:
        if self._extras.norms is not None:
            self._extras.norms.pause()
        if self._extras.offload is not None:
            self._extras.offload.bring(microbatch)
        again = microbatch in self._kept
        saved = self._again(microbatch) if again else self._saved.pop(microbatch)
        if again and self._head is not None:
            grads = [self._head.seed(microbatch)]
        if self._streams is not None:
            self._streams.begin(microbatch, self._draw_offsets, again=True)
        present = [(r, g) for r, g in zip(saved.roots, grads, strict=True) if r is not None and g is not None]
        grads.clear()
        split = self._split_of(microbatch)
        if present and split is None:
            with self._reducing(microbatch), self._extras.in_backward(microbatch), self._draws.refused():
                exact.backward([root for root, _ in present], [grad for _, grad in present])
        elif present and split is not None:
            with split.input_gradients(microbatch), self._extras.in_backward(microbatch), self._draws.refused():
                exact.backward([root for root, _ in present], [grad for _, grad in present])
        slots = saved.slots
        given = [exact.settled(slots[p][0]) if slots.get(p) else None for p in range(len(self.meta.inputs))]
        self._grads.dispatch(self.routes.grads_out, microbatch, given)

    def weight_backward(self, microbatch: int) -> None:
        """Runs W: what I left of a microbatch's backward."""
        assert self.split is not None
        updates = self._extras.updates
        with nullcontext() if updates is None else updates.refused_at_w(microbatch), self._draws.refused():
            self.split.weight_gradients(microbatch)

    def send_values(self, microbatch: int, route: Route) -> None:
        """Sends the outputs of a microbatch to a stage on another rank."""
        route.channel.send(microbatch, self._values.mail.pop((route.stage, microbatch)))

    def send_grads(self, microbatch: int, route: Route) -> None:
        """Sends the gradients of a microbatch's inputs to a stage on another rank."""
        route.channel.send(microbatch, self._grads.mail.pop((route.stage, microbatch)))

    def _reducing(self, microbatch: int) -> AbstractContextManager[None]:
        """Around the backward in which a sharded stage reduces its gradients."""
        sharded = self._extras.sharded if self.reduces and microbatch == self._extras.last else None
        return nullcontext() if sharded is None else sharded.reducing()

    def _split_of(self, microbatch: int) -> SplitBackward | None:
        return self.split if self.split is not None and microbatch in self.split.microbatches else None

    def _loss_edge(self, loss: Tensor) -> GradientEdge | None:
        if loss.requires_grad:
            return get_gradient_edge(loss)
        if self._training and needs_backward(self.meta):
            raise no_gradient()
        return None

    def _check_whole(self, outputs: Sequence[Tensor]) -> None:
        for output, meta in zip(outputs, self.meta.outputs, strict=True):
            if type(output) is not Tensor and is_distributed(output):
                raise PartitionError(
                    f"value {meta.name!r} leaves stage {self.meta.index} as a DTensor, of which each process holds a "
                    "part; have the plan of parallelize_module give whole tensors there (RowwiseParallel, or "
                    "PrepareModuleOutput with desired_layouts=Replicate() and use_local_output=True), or move the cut"
                )

    def _check_untracked(self, outputs: Sequence[Tensor]) -> None:
        for position in self._untracked_outputs:
            if outputs[position].requires_grad:
                raise PartitionError(
                    f"value {self.meta.outputs[position].name!r} of stage {self.meta.index} takes a gradient, but did "
                    "not when the model was recorded. If requires_grad was changed, build the pipeline again. If a "
                    "block before it leaves its parameters out by chance, take all such blocks apart with opens=[...]; "
                    "if for some inputs, move the cut behind one that never does (cuts=[...])"
                )


def _edge(output: Tensor) -> GradientEdge | None:
    return get_gradient_edge(output) if output.requires_grad else None
