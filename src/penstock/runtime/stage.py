"""Forward and backward of one microbatch on one stage; the backward whole (B) or split (I and W).

What a stage keeps for a microbatch between the two is no more than autograd itself keeps: the edges to start backward
from, and a slot for the gradient of each input. Values and gradients are dropped as soon as they are handed on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock.errors import ArgumentError, PartitionError
from penstock.runtime import exact
from penstock.runtime.distribution import is_distributed
from penstock.runtime.loss import LossHead
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
        head: what stands behind the last stage; None on others.
        streams: random streams, if anything on this stage draws.
        draw_offsets: how often each module that draws was called on earlier stages.
        split: runs the backward of some microbatches in two parts; None where all are whole.
        last: the microbatch of the last backward, where that is when gradients are reduced.
        sharded: what `fully_shard` was applied to, if it was.
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
        last: int | None = None,
        sharded: Sharded | None = None,
    ) -> None:
        self.meta = meta
        self.routes = routes
        self._functions = functions
        self._head = head
        self._streams = streams
        self._draw_offsets = draw_offsets
        self._training = training
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._tracked = [p for p, i in enumerate(meta.inputs) if training and i.meta.requires_grad]
        self._untracked_outputs = [p for p, o in enumerate(meta.outputs) if training and not o.meta.requires_grad]
        self._root_outputs = [root.position for root in roots if root.is_output]
        self._root_inputs = [root.position for root in roots if not root.is_output]
        self.split = split
        self._last = last
        self.reduces = True
        """Whether the gradients of a sharded stage are reduced in this step."""
        self._sharded = sharded
        self._saved: dict[int, _Saved] = {}
        self._values = _Outbox()
        self._grads = _Outbox()
        self.batch: list[Mapping[int, Tensor]] = []
        """For each microbatch, the model's inputs by their position among the stage's inputs."""

    def begin_step(self, batch: Sequence[Mapping[int, Tensor]]) -> None:
        """Takes a step's inputs, and drops what a step that raised may have left."""
        self.batch = list(batch)
        self._saved.clear()
        self._values.mail.clear()
        self._grads.mail.clear()
        if self.split is not None:
            self.split.begin_step()

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
        if self._streams is not None:
            self._streams.begin(microbatch, self._draw_offsets)
        slots: dict[int, list[Tensor]] = {}
        for position in self._tracked:
            args[position], slots[position] = exact.receive(self._anchor, args[position])
        passed_on = [get_gradient_edge(args[position]) for position in self._root_inputs]
        split = self._split_of(microbatch)
        if split is None:
            outputs = self._functions[microbatch](*args)
        else:
            with split.forward(microbatch):
                outputs = self._functions[microbatch](*args)
        args.clear()
        self._check_whole(outputs)
        if self._training:
            self._check_untracked(outputs)
        if self._head is not None:
            root = self._head(microbatch, outputs)
            roots = [self._loss_edge(root)] if root is not None else []
        else:
            roots = [_edge(outputs[position]) for position in self._root_outputs]
        if self._training:
            self._saved[microbatch] = _Saved([*roots, *passed_on], slots)
        if split is not None:
            split.learn(microbatch, roots)
        self._values.dispatch(self.routes.values_out, microbatch, [exact.settled(output) for output in outputs])

    def collect(self, microbatch: int) -> list[Tensor | None]:
        """Waits for everything that the backward of a microbatch needs: a gradient, or None, for each root."""
        if self._head is not None:
            return [self._head.seed(microbatch)]
        grads: list[Tensor | None] = [None] * (len(self._root_outputs) + len(self._root_inputs))
        for route in self.routes.grads_in:
            for position, grad in zip(route.positions, route.channel.receive(microbatch), strict=True):
                grads[position] = grad
        return grads

    def backward(self, microbatch: int, grads: list[Tensor | None]) -> None:
        """Runs B or I; hands the gradients of the inputs on."""
        saved = self._saved.pop(microbatch)
        if self._streams is not None:
            self._streams.begin(microbatch, self._draw_offsets, again=True)
        present = [(r, g) for r, g in zip(saved.roots, grads, strict=True) if r is not None and g is not None]
        grads.clear()
        split = self._split_of(microbatch)
        if present and split is None:
            with self._reducing(microbatch):
                exact.backward([root for root, _ in present], [grad for _, grad in present])
        elif present and split is not None:
            with split.input_gradients(microbatch):
                exact.backward([root for root, _ in present], [grad for _, grad in present])
        slots = saved.slots
        given = [exact.settled(slots[p][0]) if slots.get(p) else None for p in range(len(self.meta.inputs))]
        self._grads.dispatch(self.routes.grads_out, microbatch, given)

    def weight_backward(self, microbatch: int) -> None:
        """Runs W: what I left of a microbatch's backward."""
        assert self.split is not None
        self.split.weight_gradients(microbatch)

    def send_values(self, microbatch: int, route: Route) -> None:
        """Sends the outputs of a microbatch to a stage on another rank."""
        route.channel.send(microbatch, self._values.mail.pop((route.stage, microbatch)))

    def send_grads(self, microbatch: int, route: Route) -> None:
        """Sends the gradients of a microbatch's inputs to a stage on another rank."""
        route.channel.send(microbatch, self._grads.mail.pop((route.stage, microbatch)))

    def _reducing(self, microbatch: int) -> AbstractContextManager[None]:
        """Around the backward in which a sharded stage reduces its gradients."""
        reduces = self._sharded is not None and microbatch == self._last and self.reduces
        return self._sharded.reducing() if self._sharded is not None and reduces else nullcontext()

    def _split_of(self, microbatch: int) -> SplitBackward | None:
        return self.split if self.split is not None and microbatch in self.split.microbatches else None

    def _loss_edge(self, loss: Tensor) -> GradientEdge | None:
        if loss.requires_grad:
            return get_gradient_edge(loss)
        if self._training and needs_backward(self.meta):
            raise ArgumentError(
                "the loss takes no gradient, so that nothing would be trained; return a loss that is computed from the "
                "model's output, without detach() or no_grad"
            )
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
                    "not when the model was recorded; build the pipeline again after changing requires_grad"
                )


def _edge(output: Tensor) -> GradientEdge | None:
    return get_gradient_edge(output) if output.requires_grad else None
