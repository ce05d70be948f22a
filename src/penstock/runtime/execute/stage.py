"""Binds the actions of a stage: makes a function for each, with all that can be looked up before a step.

Between the forward and the backward of a microbatch, a stage keeps little besides what autograd itself keeps: the edges
to start backward from, and a slot for the gradient of each input; or, if the forward runs again in backward, what it
needs for that. Values and gradients are dropped as soon as they are passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from penstock._base.compat import gradient_edge
from penstock._base.errors import PartitionError
from penstock._base.marks import NOW
from penstock._base.stages import needs_backward
from penstock.runtime.exact import rules as exact
from penstock.runtime.features.feature import (
    NOTHING,
    Context,
    Forward,
    MakeFeature,
    Rerun,
    StageContext,
    Start,
    calls,
    contexts,
    within,
)
from penstock.runtime.features.registry import FEATURES, make_user_feature
from penstock.runtime.gradients.dtensors import is_distributed
from penstock.runtime.loss.loss import LossHead, no_gradient_error
from penstock.runtime.microbatch_kinds import distinct
from penstock.runtime.split_backward.backward import SplitBackward, weight_use_key
from penstock.runtime.transport.routes import Route, StageTraffic, TrafficBuilder
from penstock.schedule import Op

Values = list[Tensor | None]

Enter = Callable[[], Context]
"""Makes what some work is wrapped in."""


class BoundStage:
    """One stage of one bound schedule, with its features: those of `features/registry.py`, and the user's own.

    `await_inputs`, `forward` and so on each make the function that runs one action.

    Attributes:
        features: the outermost first.
        split_backwards: what runs the backwards that are split.
        batch: the model's inputs by position among the stage's inputs, for each microbatch that has yet to run.
        batch_gradients: the gradients of the model's inputs, by microbatch and position.

    Raises:
        ArgumentError: two choices cannot be combined.
        PartitionError: the stage does something that the schedule, or a choice, does not allow.
    """

    def __init__(self, stage: StageContext, builder: TrafficBuilder) -> None:
        custom: list[MakeFeature] = [partial(make_user_feature, "features", make) for make in stage.binding.features]
        for make in (*FEATURES, *custom):
            feature = make(stage)
            if feature is not None:
                stage = replace(stage, stages=feature.rewrite(stage.stages), made=(*stage.made, feature))
        self.index, self.features = stage.index, stage.made
        self.is_first = stage.binding.schedule.placement.is_first(stage.index)
        self._context = stage
        self._functions = [_stage_function(stage, microbatch) for microbatch in range(len(stage.stages))]
        self._splits = _split_backwards(stage)
        self.split_backwards = distinct(split for split in self._splits if split is not None)
        kinds = stage.binding.kinds
        by_kind = [builder.traffic(self.index, kind) for kind in range(len(kinds.metas))]
        self._kinds = [by_kind[kind] for kind in kinds.by_microbatch]
        self._anchor = torch.empty(0, device=stage.device, requires_grad=True)
        self._saved: dict[int, tuple[list[GradientEdge | None], dict[int, list[Tensor]]]] = {}
        self._reruns: dict[int, Rerun] = {}
        self._mail: dict[tuple[int, int], Values] = {}
        """What waits to be sent, by the stage that gets it (a later one: values; an earlier one: gradients) and
        microbatch."""
        self.batch: dict[int, Mapping[int, Tensor]] = {}
        self.batch_gradients: dict[tuple[int, int], Tensor] = {}

    def begin_step(self, batch: Sequence[Mapping[int, Tensor]], start: Start) -> None:
        """Take a step's inputs, and drop anything left by a step that raised."""
        for leftover in (self.batch, self.batch_gradients, self._saved, self._reruns, self._mail):
            leftover.clear()
        self.batch.update(enumerate(batch))
        for split in self.split_backwards:
            split.begin_step()
        for feature in self.features:
            feature.begin_step(start)

    def traffic(self, microbatch: int) -> StageTraffic:
        """Return what passes through the stage with a microbatch."""
        return self._kinds[microbatch]

    def await_inputs(self, microbatch: int) -> Callable[[], list[Any]]:
        """Wait for everything that a microbatch's forward needs."""
        kind = self._kinds[microbatch]
        return _make_await(microbatch, kind.values_in, len(kind.meta.inputs), self.batch)

    def await_grads(self, microbatch: int) -> Callable[[], Values]:
        """Wait for everything that a microbatch's backward needs: a gradient, or None, for each root."""
        kind, head, reruns = self._kinds[microbatch], self._context.head, self._reruns
        if head is None:
            return _make_await(microbatch, kind.grads_in, len(kind.root_outputs) + len(kind.root_inputs), {})
        return lambda: [] if microbatch in reruns else [head.seed(microbatch)]

    def forward(self, microbatch: int) -> Callable[[list[Any]], None]:
        """Run the stage, keep what backward starts from, and pass the outputs on."""
        head, kind, reruns = self._context.head, self._kinds[microbatch], self._reruns
        pass_on = self._make_pass_on(microbatch, kind.values_out, len(kind.meta.outputs))
        keep_output = None if head is None else partial(head.keep, microbatch)
        enter = contexts(self.features, "forward", microbatch, runs_again=False)
        run = self._make_forward(microbatch, enter, pass_on or keep_output)
        keeping = calls(self.features, "keep", microbatch)
        if not keeping:
            return run
        enter = contexts(self.features, "forward", microbatch, runs_again=True)
        run_and_drop = self._make_forward(microbatch, enter, pass_on, drops_graph=True)
        split = None if head is None else self._splits[microbatch]

        def forward_or_keep(args: list[Any]) -> None:
            rerun: Rerun | None = None
            if split is None or split.decided:  # it learns from the graph of the loss, which must not be called twice
                for keep in keeping:
                    rerun = keep(args) if rerun is None else rerun
            if rerun is None:
                run(args)
            else:
                run_and_drop(args)
                reruns[microbatch] = rerun

        return forward_or_keep

    def _make_forward(
        self, microbatch: int, enter: Enter | None, finish: Callable[[Values], None] | None, drops_graph: bool = False
    ) -> Callable[[list[Any]], None]:
        """Run the stage's code, and the loss if there is one. Empty the inputs.

        Args:
            enter: makes what this run is wrapped in.
            finish: passes the outputs on, or keeps them.
            drops_graph: whether backward starts from a later run. Only that one computes the loss, which may count or
                write into its target.
        """
        stage, kind, index, anchor = self._context, self._kinds[microbatch], self.index, self._anchor
        tracked, root_inputs, root_outputs = kind.tracked, kind.root_inputs, kind.root_outputs
        untracked_outputs, split = kind.untracked_outputs, self._splits[microbatch]
        code, plain = self._functions[microbatch], [Tensor] * len(kind.meta.outputs)
        if split is not None:
            code = within(partial(split.forward, microbatch, runs_again=drops_graph), code)
        code = within(contexts(self.features, "code", microbatch), code)
        begin = self._make_begin(microbatch, stage=index)
        head, saved = (None, None) if drops_graph else (stage.head, self._saved if stage.training else None)
        lacks_loss = drops_graph and stage.head is not None  # whose graph shows how the weights are used
        learn = None if split is None or lacks_loss else split.learn

        def run_forward(args: list[Any]) -> None:
            NOW.stage, NOW.microbatch = index, microbatch
            with NOTHING if enter is None else enter():
                if begin is not None:
                    begin()
                slots: dict[int, list[Tensor]] = {}
                for position in tracked:
                    args[position], slots[position] = exact.as_graph_input(anchor, args[position])
                input_edges = [gradient_edge(args[position]) for position in root_inputs] if root_inputs else []
                outputs: list[Any] = [*code(*args)]
                args.clear()
                if [*map(type, outputs)] != plain:
                    self._check_outputs(kind, outputs)
                for position in untracked_outputs:
                    if outputs[position].requires_grad:
                        raise self._unexpected_gradient(kind, position)
                roots: list[GradientEdge | None] = [] if head is None else self._loss_edges(head, microbatch, outputs)
                for position in root_outputs:
                    roots.append(gradient_edge(outputs[position]) if outputs[position].requires_grad else None)
                if learn is not None:
                    learn(roots)
            if saved is not None:
                saved[microbatch] = [*roots, *input_edges], slots
            if finish is not None:
                finish(outputs)

        return run_forward

    def _make_begin(self, microbatch: int, **options: Any) -> Callable[[], None] | None:
        """Set the random streams, if anything draws."""
        streams = self._context.streams
        if streams is None:
            return None
        return partial(streams.begin, microbatch, self._context.draw_offsets(microbatch), **options)

    def _make_pass_on(self, microbatch: int, routes: Sequence[Route], count: int) -> Callable[[Values], None] | None:
        """Pass `count` values on to stages of this rank, and keep the rest until the schedule sends them."""
        keep = self._mail.__setitem__
        puts: list[Callable[[Values], None]] = [
            partial(keep, (route.stage, microbatch)) if route.remote else partial(route.channel.send, microbatch)
            for route in routes
        ]
        if [route.positions for route in routes] == [(*range(count),)]:
            (put_all,) = puts
            return lambda values: put_all(exact.detach_or_copy(values))

        def pass_on(values: Values) -> None:
            detached = exact.detach_or_copy(values)
            for route, put in zip(routes, puts, strict=True):
                put([None if position is None else detached[position] for position in route.positions])

        return pass_on if puts else None

    def backward(self, microbatch: int) -> Callable[[Values], None]:
        """Run B or I, and pass the gradients of the inputs on."""
        index, kind, head = self.index, self._kinds[microbatch], self._context.head
        saved, reruns, model_inputs, inputs = self._saved, self._reruns, kind.model_inputs, len(kind.meta.inputs)
        enter, begin = contexts(self.features, "backward", microbatch), self._make_begin(microbatch, is_rerun=True)
        run_again = self._make_rerun(microbatch) if calls(self.features, "keep", microbatch) else None
        autograd = self._make_autograd(microbatch)
        pass_on = self._make_pass_on(microbatch, kind.grads_out, inputs)

        def run_backward(grads: Values) -> None:
            NOW.stage, NOW.microbatch = index, microbatch
            with NOTHING if enter is None else enter():
                if run_again is not None and microbatch in reruns:
                    run_again()
                    grads = grads if head is None else [head.seed(microbatch)]
                roots, slots = saved.pop(microbatch)
                if begin is not None:
                    begin()
                autograd(roots, grads)
                for position in model_inputs:
                    if slot := slots[position]:
                        gradient = slot[0].detach().resolve_conj().resolve_neg().clone()
                        self.batch_gradients[microbatch, position] = gradient
                if pass_on is not None:
                    values: Values = [None] * inputs
                    for position, slot in slots.items():
                        if slot:
                            values[position] = slot.pop()
                    pass_on(values)

        return run_backward

    def _make_rerun(self, microbatch: int) -> Callable[[], None]:
        """Run a forward again on the same inputs to get its graph, and drop what was kept for that."""
        head, reruns, enter = self._context.head, self._reruns, contexts(self.features, "again", microbatch)
        run = self._make_forward(microbatch, enter, None if head is None else partial(head.keep, microbatch))

        def run_again() -> None:
            rerun = reruns.pop(microbatch)
            with rerun.as_before():
                run(rerun.args())

        return run_again

    def _make_autograd(self, microbatch: int) -> Callable[[list[GradientEdge | None], Values], None]:
        """Run backward from the roots that have a gradient. Empty the gradients."""
        run, split = within(contexts(self.features, "autograd", microbatch), exact.backward), self._splits[microbatch]
        if split is not None:
            run = within(partial(split.input_gradients, microbatch), run)

        def autograd(roots: list[GradientEdge | None], grads: Values) -> None:
            pairs = [pair for pair in zip(roots, grads, strict=True) if pair[0] is not None and pair[1] is not None]
            grads.clear()
            if pairs:
                run(*zip(*pairs, strict=True))

        return autograd

    def weight_backward(self, microbatch: int) -> Callable[[], None]:
        """Run W: the part of a microbatch's backward that the I part put off."""
        split, index = self._splits[microbatch], self.index
        assert split is not None
        run = within(contexts(self.features, "weights", microbatch), partial(split.weight_gradients, microbatch))

        def run_weights() -> None:
            NOW.stage, NOW.microbatch = index, microbatch
            run()

        return run_weights

    def send(self, microbatch: int, route: Route) -> Callable[[], None]:
        """Send the outputs of a microbatch, or the gradients of its inputs, to a stage on another rank."""
        send, take, key = route.channel.send, self._mail.pop, (route.stage, microbatch)
        return lambda: send(microbatch, take(key))

    def _loss_edges(self, head: LossHead, microbatch: int, outputs: Sequence[Tensor]) -> list[GradientEdge | None]:
        loss = head(microbatch, outputs)
        if loss is None:
            return []
        if loss.requires_grad:
            return [gradient_edge(loss)]
        if self._context.training and needs_backward(self._kinds[microbatch].meta):
            raise no_gradient_error()
        return [None]

    def _check_outputs(self, kind: StageTraffic, outputs: Sequence[Tensor]) -> None:
        """Raise PartitionError for outputs that other stages could not take."""
        if len(outputs) != len(kind.meta.outputs):  # a single tensor has its rows
            names = ", ".join(value.name for value in kind.meta.outputs)
            raise PartitionError(
                f"the code of stage {self.index} returned {len(outputs)} values (or a tensor of as many rows) instead "
                f"of a tuple of {len(kind.meta.outputs)}: {names}; look at the front end, and at forward_of of features"
            )
        for output, value in zip(outputs, kind.meta.outputs, strict=True):
            if is_distributed(output):
                raise PartitionError(
                    f"value {value.name!r} leaves stage {self.index} as a DTensor, of which each process holds a "
                    "part; have the plan of parallelize_module give whole tensors there (RowwiseParallel, or "
                    "PrepareModuleOutput with desired_layouts=Replicate() and use_local_output=True), or move the cut"
                )

    def _unexpected_gradient(self, kind: StageTraffic, position: int) -> PartitionError:
        return PartitionError(
            f"value {kind.meta.outputs[position].name!r} of stage {self.index} takes a gradient, but did "
            "not when the model was recorded. If requires_grad was changed, build the pipeline again. If a "
            "block before it leaves its parameters out by chance, take all such blocks apart with split_inside=[...]; "
            "if for some inputs, move the cut behind one that never does (cuts=[...])"
        )


def _make_await(
    microbatch: int, routes: Sequence[Route], count: int, batch: dict[int, Mapping[int, Tensor]]
) -> Callable[[], list[Any]]:
    """Wait for what other stages send, and take a microbatch's part of the batch, if there is any."""
    receivers = [(route.positions, route.channel.receive) for route in routes]

    def await_values() -> list[Any]:
        values: list[Any] = [None] * count
        for positions, receive in receivers:
            for position, value in zip(positions, receive(microbatch), strict=True):
                if position is not None:
                    values[position] = value
        if batch:
            for position, value in batch.pop(microbatch).items():
                values[position] = value
        return values

    return await_values


def _stage_function(stage: StageContext, microbatch: int) -> Forward:
    """Return what runs the stage's code for a microbatch (the same function, unless sizes or kinds differ)."""
    microbatch_stage = stage.stages[microbatch]
    run: Forward = microbatch_stage.module.forward
    for feature in stage.made:
        run = feature.forward_of(run, microbatch_stage)
    return run


def _split_backwards(stage: StageContext) -> list[SplitBackward | None]:
    """Return what runs the split backward of each microbatch; None for one that is not split.

    Microbatches that use the stage's weights differently have one each, which learns from the first of them what can
    wait for W.
    """
    split = {*stage.microbatches(Op.I)}
    partitions = stage.binding.partitions
    uses = {id(p): weight_use_key(p.stages[stage.index].module) for p in distinct(partitions)}
    keys = [(kind, uses[id(p)]) for kind, p in zip(stage.binding.kinds.by_microbatch, partitions, strict=True)]
    first = {key: microbatch for microbatch, key in reversed([*enumerate(keys)]) if microbatch in split}
    splits = {key: _make_split(stage, microbatch, is_uniform=len({*keys}) == 1) for key, microbatch in first.items()}
    return [splits[key] if k in split else None for k, key in enumerate(keys)]


def _make_split(stage: StageContext, microbatch: int, *, is_uniform: bool) -> SplitBackward:
    in_order = stage.in_order(Op.F) and stage.in_order(Op.B, Op.I)
    return SplitBackward(
        stage.parameters,
        stage.binding.partitions[microbatch].stages[stage.index].module,
        stage.device,
        in_order=in_order and is_uniform,
        keeper=stage.keeper,
        compiled=stage.binding.compile is not None,
    )
