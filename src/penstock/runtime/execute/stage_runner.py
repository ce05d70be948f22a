"""Runs forward and backward of one microbatch on one stage. The backward is full (B) or split (I and W).

Between the two, a stage keeps little for a microbatch besides what autograd itself keeps: the edges to start backward
from, and a slot for the gradient of each input; or, if the forward runs again in backward, what it needs for that.
Values and gradients are dropped as soon as they are passed on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from penstock._base.compat import gradient_edge
from penstock._base.errors import PartitionError
from penstock._base.marks import NOW
from penstock._base.stages import MODEL_INPUT, StageMeta, needs_backward
from penstock.runtime.exact import rules as exact
from penstock.runtime.features.context import StageContext
from penstock.runtime.features.feature import Features, Forward, Rerun, Start, within
from penstock.runtime.gradients.distribution import is_distributed
from penstock.runtime.kinds import distinct
from penstock.runtime.loss.loss import no_gradient
from penstock.runtime.split_backward.backward import SplitBackward
from penstock.runtime.transport.routes import Route, RouteBuilder, Routes


class _Saved(NamedTuple):
    roots: list[GradientEdge | None]
    slots: dict[int, list[Tensor]]


class _Kind:
    """How microbatches of one kind pass through a stage.

    Attributes:
        meta, routes: the stage's, for this kind.
        tracked: the positions of the inputs that take a gradient; `given`: of those, the model's own inputs.
        untracked_outputs: the positions of the outputs that take none.
        root_outputs, root_inputs: the positions of those to which gradients come in.
    """

    def __init__(self, number: int, meta: StageMeta, builder: RouteBuilder, *, training: bool) -> None:
        self.meta = meta
        self.routes = builder.routes(meta.index, number)
        self.tracked = [p for p, i in enumerate(meta.inputs) if training and i.meta.requires_grad]
        self.given = [p for p in self.tracked if meta.inputs[p].source == MODEL_INPUT]
        self.untracked_outputs = [p for p, o in enumerate(meta.outputs) if training and not o.meta.requires_grad]
        roots = builder.roots(meta.index, number).values()
        self.root_outputs = [root.position for root in roots if root.is_output]
        self.root_inputs = [root.position for root in roots if not root.is_output]


Mail = dict[tuple[int, int], list[Tensor | None]]
"""What waits to be sent, by the stage that gets it (a later one: values; an earlier one: gradients) and microbatch."""


def _dispatch(routes: Sequence[Route], microbatch: int, values: Sequence[Tensor | None], mail: Mail) -> None:
    """Passes values on to stages of this rank, and keeps the rest until the schedule sends them."""
    for route in routes:
        message = [None if position is None else values[position] for position in route.positions]
        if route.remote:
            mail[route.stage, microbatch] = message
        else:
            route.channel.send(microbatch, message)


class StageRunner:
    """Runs one stage of one program.

    Args:
        stage: the stage and what surrounds it.
        functions: the stage's forward for each microbatch (the same function, unless sizes or kinds differ).
        routes: where values and gradients come from and go to.
        splits: runs each microbatch's backward in two parts; None for one that is not split.
        features: what else the stage does.
    """

    def __init__(
        self,
        stage: StageContext,
        functions: Sequence[Forward],
        routes: RouteBuilder,
        splits: Sequence[SplitBackward | None],
        features: Features,
    ) -> None:
        self.index = stage.index
        self.features = features
        self._splits = splits
        self.splits = distinct(split for split in splits if split is not None)
        self._compute = within(features.code, self._outputs)
        self._functions = functions
        self._head = stage.head
        self._streams = stage.streams
        self._training = stage.training
        self._anchor = torch.empty(0, device=stage.device, requires_grad=True)
        kinds = stage.binding.kinds
        every = [_Kind(k, metas[self.index], routes, training=stage.training) for k, metas in enumerate(kinds.metas)]
        self._kinds = [every[kind] for kind in kinds.of]
        self._draw_offsets = [stage.draw_offsets(microbatch) for microbatch in range(len(kinds.of))]
        self._saved: dict[int, _Saved] = {}
        self._kept: dict[int, Rerun] = {}
        self._mail: Mail = {}
        self.batch: list[Mapping[int, Tensor]] = []
        """For each microbatch, the model's inputs by position among the stage's inputs."""
        self.batch_gradients: dict[tuple[int, int], Tensor] = {}
        """The gradients of the model's inputs, by microbatch and position."""

    def begin_step(self, batch: Sequence[Mapping[int, Tensor]], start: Start) -> None:
        """Takes a step's inputs, and drops anything left by a step that raised."""
        self.batch = list(batch)
        self.batch_gradients.clear()
        self._saved.clear()
        self._kept.clear()
        self._mail.clear()
        for split in self.splits:
            split.begin_step()
        self.features.begin_step(start)

    def routes(self, microbatch: int) -> Routes:
        """Where a microbatch's values and gradients come from and go to."""
        return self._kinds[microbatch].routes

    def await_inputs(self, microbatch: int) -> list[Any]:
        """Waits for everything that a microbatch's forward needs."""
        kind = self._kinds[microbatch]
        args: list[Any] = [None] * len(kind.meta.inputs)
        for route in kind.routes.values_in:
            for position, value in zip(route.positions, route.channel.receive(microbatch), strict=True):
                if position is not None:
                    args[position] = value
        if self.batch:
            inputs, self.batch[microbatch] = self.batch[microbatch], {}
            for position, value in inputs.items():
                args[position] = value
        return args

    def forward(self, microbatch: int, args: list[Any]) -> None:
        """Runs the stage, keeps what backward starts from, and passes the outputs on."""
        NOW.stage, NOW.microbatch = self.index, microbatch
        rerun = None
        if self.features.keeps and not self._learns_from_loss(microbatch):
            rerun = self.features.keep(microbatch, args)
        with self.features.forward(microbatch, runs_again=rerun is not None):
            saved, outputs = self._run_code(microbatch, args, runs_again=rerun is not None)
        if rerun is not None:
            self._kept[microbatch] = rerun
        elif self._training:
            self._saved[microbatch] = saved
        routes = self._kinds[microbatch].routes.values_out
        if routes:
            _dispatch(routes, microbatch, exact.handed_on(outputs), self._mail)
        elif self._head is not None and rerun is None:
            self._head.keep(microbatch, outputs)

    def _run_code(
        self, microbatch: int, args: list[Any], *, runs_again: bool = False
    ) -> tuple[_Saved, list[Tensor | None]]:
        """Runs the forward, and the loss if there is one. Empties `args`.

        Returns what backward starts from, and the outputs with their graph.

        Args:
            microbatch: the microbatch's number.
            args: the stage's inputs.
            runs_again: whether backward starts from another run rather than this one.
        """
        kind = self._kinds[microbatch]
        if self._streams is not None:
            self._streams.begin(microbatch, self._draw_offsets[microbatch], stage=self.index)
        slots: dict[int, list[Tensor]] = {}
        for position in kind.tracked:
            args[position], slots[position] = exact.receive(self._anchor, args[position])
        roots: list[GradientEdge | None] = []
        passed_on = [gradient_edge(args[position]) for position in kind.root_inputs] if kind.root_inputs else []
        split = self._splits[microbatch]
        outputs = self._compute(microbatch, args, split, runs_again)
        args.clear()
        self._check(kind, outputs)
        if self._head is None:
            for position in kind.root_outputs:
                output = outputs[position]
                roots.append(gradient_edge(output) if output.requires_grad else None)
        elif not runs_again:  # only the second run computes the loss, which may count or write into its target
            root = self._head(microbatch, outputs)
            if root is not None:
                roots.append(self._loss_edge(kind.meta, root))
        if split is not None and not (runs_again and self._head is not None):
            split.learn(roots)
        roots += passed_on
        return _Saved(roots, slots), [*outputs]

    def _outputs(
        self, microbatch: int, args: list[Any], split: SplitBackward | None, runs_again: bool
    ) -> Sequence[Tensor]:
        """Runs the stage's code."""
        if split is None:
            return self._functions[microbatch](*args)
        with split.forward(microbatch, runs_again=runs_again):
            return self._functions[microbatch](*args)

    def _again(self, microbatch: int) -> _Saved:
        """Runs a forward again on the same inputs to get its graph, and drops what was kept for that."""
        rerun = self._kept.pop(microbatch)
        with rerun.as_before(), self.features.again(microbatch):
            saved, outputs = self._run_code(microbatch, rerun.args())
        if self._head is not None:
            self._head.keep(microbatch, outputs)
        return saved

    def await_grads(self, microbatch: int) -> list[Tensor | None]:
        """Waits for everything that a microbatch's backward needs: a gradient, or None, for each root."""
        if self._head is not None:
            return [] if microbatch in self._kept else [self._head.seed(microbatch)]
        kind = self._kinds[microbatch]
        grads: list[Tensor | None] = [None] * (len(kind.root_outputs) + len(kind.root_inputs))
        for route in kind.routes.grads_in:
            for position, grad in zip(route.positions, route.channel.receive(microbatch), strict=True):
                if position is not None:
                    grads[position] = grad
        return grads

    def backward(self, microbatch: int, grads: list[Tensor | None]) -> None:
        """Runs B or I, and passes the gradients of the inputs on."""
        NOW.stage, NOW.microbatch = self.index, microbatch
        kind = self._kinds[microbatch]
        with self.features.backward(microbatch):
            again = microbatch in self._kept
            saved = self._again(microbatch) if again else self._saved.pop(microbatch)
            if again and self._head is not None:
                grads = [self._head.seed(microbatch)]
            if self._streams is not None:
                self._streams.begin(microbatch, self._draw_offsets[microbatch], again=True)
            self._run_autograd(microbatch, saved.roots, grads)
            for position in kind.given:
                if slot := saved.slots[position]:
                    self.batch_gradients[microbatch, position] = slot[0].detach().resolve_conj().resolve_neg().clone()
            if kind.routes.grads_out:
                given: list[Tensor | None] = [None] * len(kind.meta.inputs)
                for position, slot in saved.slots.items():
                    if slot:
                        given[position] = slot.pop()
                _dispatch(kind.routes.grads_out, microbatch, exact.handed_on(given), self._mail)

    def _run_autograd(self, microbatch: int, roots: Sequence[GradientEdge | None], grads: list[Tensor | None]) -> None:
        """Runs backward from the roots that have a gradient. Empties `grads`."""
        edges, seeds = [], []
        for root, grad in zip(roots, grads, strict=True):
            if root is not None and grad is not None:
                edges.append(root)
                seeds.append(grad)
        grads.clear()
        if not edges:
            return
        split = self._splits[microbatch]
        if split is None:
            with self.features.autograd(microbatch):
                exact.backward(edges, seeds)
        else:
            with split.input_gradients(microbatch), self.features.autograd(microbatch):
                exact.backward(edges, seeds)

    def weight_backward(self, microbatch: int) -> None:
        """Runs W: the part of a microbatch's backward that the I part put off."""
        NOW.stage, NOW.microbatch = self.index, microbatch
        split = self._splits[microbatch]
        assert split is not None
        with self.features.weights(microbatch):
            split.weight_gradients(microbatch)

    def send(self, microbatch: int, route: Route) -> None:
        """Sends the outputs of a microbatch, or the gradients of its inputs, to a stage on another rank."""
        route.channel.send(microbatch, self._mail.pop((route.stage, microbatch)))

    def _learns_from_loss(self, microbatch: int) -> bool:
        """Whether a split is learned from the graph of this microbatch's loss.

        If so, its forward does not run again, which would call the loss twice.
        """
        split = self._splits[microbatch] if self._head is not None else None
        return split is not None and not split.decided

    def _loss_edge(self, meta: StageMeta, loss: Tensor) -> GradientEdge | None:
        if loss.requires_grad:
            return gradient_edge(loss)
        if self._training and needs_backward(meta):
            raise no_gradient()
        return None

    def _check(self, kind: _Kind, outputs: Sequence[Tensor]) -> None:
        """Raises PartitionError for outputs that other stages could not take."""
        for output, meta in zip(outputs, kind.meta.outputs, strict=True):
            if type(output) is not Tensor and is_distributed(output):
                raise PartitionError(
                    f"value {meta.name!r} leaves stage {self.index} as a DTensor, of which each process holds a "
                    "part; have the plan of parallelize_module give whole tensors there (RowwiseParallel, or "
                    "PrepareModuleOutput with desired_layouts=Replicate() and use_local_output=True), or move the cut"
                )
        for position in kind.untracked_outputs:
            if outputs[position].requires_grad:
                raise PartitionError(
                    f"value {kind.meta.outputs[position].name!r} of stage {self.index} takes a gradient, but did "
                    "not when the model was recorded. If requires_grad was changed, build the pipeline again. If a "
                    "block before it leaves its parameters out by chance, take all such blocks apart with opens=[...]; "
                    "if for some inputs, move the cut behind one that never does (cuts=[...])"
                )
