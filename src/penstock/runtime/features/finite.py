"""Finds NaN and Inf in the action that makes them: `check_finite=True`.

Whatever leaves a stage is checked: values that take a gradient, the loss, gradients of inputs and parameters. Inside a
stage an infinity may be intended (a mask), so it is only noted there, and reported once something bad leaves the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_hook

from penstock._base.errors import NonFiniteError
from penstock._base.pytree import flatten
from penstock.runtime.features.feature import Feature, Forward, StageContext, Start, recorded_code
from penstock.runtime.front_end import Partition, Stage
from penstock.runtime.loss.loss import LossHead
from penstock.runtime.microbatch_kinds import distinct
from penstock.schedule import Action, Op

NAN, INF = "NaN", "Inf"


class FiniteStage(Feature):
    """Checks what one stage of one rank computes in training.

    Args:
        partitions: one per microbatch.
        stage: with everything that any microbatch uses there.
        head: what follows the last stage; None on other stages.
    """

    @classmethod
    def of(cls, stage: StageContext) -> FiniteStage | None:
        """Build the feature if `check_finite=True` asks for it."""
        enabled = stage.training and stage.binding.check_finite
        return cls(stage.number, stage.binding.partitions, stage.recorded, stage.head) if enabled else None

    def __init__(self, rank: int, partitions: Sequence[Partition], stage: Stage, head: LossHead | None) -> None:
        index = stage.meta.index
        self._rank = rank
        self._metas = [partition.stages[index].meta for partition in partitions]
        self._parameters = stage.parameters
        self._head = head
        self._origins = [partition.origins for partition in partitions]
        codes = (partition.stages[index].module for partition in distinct(partitions))
        self._names = {id(module): name for code in codes for name, module in code.named_modules()}
        self._last: tuple[_Checker, Sequence[Tensor]] | None = None
        self._gradients: list[str] = []
        self._inputs: list[str] = []
        self._looks_at_gradients = True

    def begin_step(self, start: Start) -> None:
        """Leave infinite gradients to the scaler in a step with a scaled loss."""
        self._looks_at_gradients = start.loss_scale == 1.0
        self._last = None

    def forward_of(self, run: Forward, stage: Stage) -> Forward:
        """Return the stage's forward, run call by call."""
        module = recorded_code(stage, "check_finite=True")

        def forward(*args: Any) -> Sequence[Tensor]:
            for value, arg in zip(stage.meta.inputs, args, strict=True):
                if isinstance(arg, Tensor) and arg.requires_grad:
                    arg.register_hook(partial(self._note, self._inputs, value.name))  # type: ignore[no-untyped-call]
            checker = _Checker(module, self._names, partial(self._note, self._gradients))
            outputs: Sequence[Tensor] = checker.run(*args)
            self._last = checker, outputs
            return outputs

        return forward

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        self._gradients.clear()
        self._inputs.clear()
        yield
        last, self._last = self._last, None
        if last is not None and self._head is not None:  # if the stage runs again, its loss comes in backward
            self._check_loss(action, *last)
        elif last is not None and action.op is Op.F:
            self._check_outputs(action, *last)
        if action.op is not Op.F and self._looks_at_gradients:
            self._check_backward(action)

    def _note(self, locations: list[str], location: str, gradient: Tensor | None) -> None:
        """Check a gradient in a hook, which torch calls with None for a part of a `chunk` that the loss does not
        use."""
        if self._looks_at_gradients and gradient is not None and nonfinite_kind(gradient):
            locations.append(location)

    def _check_outputs(self, action: Action, checker: _Checker, outputs: Sequence[Tensor]) -> None:
        assert action.microbatch is not None
        for value, output in zip(self._metas[action.microbatch].outputs, outputs, strict=True):
            kind = nonfinite_kind(output) if value.meta.requires_grad else None
            if kind:
                origin = self._origin(action, value.name)
                text = f"value {value.name!r}{origin}, which leaves stage {action.stage}, holds {kind}"
                self._raise(action, text, checker, kind)

    def _check_loss(self, action: Action, checker: _Checker, outputs: Sequence[Tensor]) -> None:
        assert self._head is not None
        assert action.microbatch is not None
        loss = self._head.losses[action.microbatch]
        kind = None if loss is None or not self._head.has_weight(action.microbatch) else nonfinite_kind(loss)
        if kind is None:
            return
        output_kinds = {nonfinite_kind(output) for output in outputs}
        inherited = next((k for k in (kind, NAN, INF) if k in output_kinds), None)
        if inherited is None:
            self._raise(action, f"the loss is {kind}: the loss function made it of an output that is finite")
        self._raise(action, f"the loss is {kind}", checker, inherited)

    def _check_backward(self, action: Action) -> None:
        parameters = [name for name, p in self._parameters.items() if p.grad is not None and nonfinite_kind(p.grad)]
        if not parameters and not self._inputs:
            return
        culprits = [f"the gradient of parameter {name!r}" for name in parameters]
        culprits += [f"the gradient of value {name!r}{self._origin(action, name)}" for name in self._inputs]
        ending = f" and {len(culprits) - 3} more are" if len(culprits) > 3 else " is" if len(culprits) == 1 else " are"
        text = ", ".join(culprits[:3]) + ending + " not finite"
        if self._gradients:
            text += f"; backward met it first in the gradient of what {self._gradients[0]} returned"
        self._raise(action, text)

    def _origin(self, action: Action, name: str) -> str:
        assert action.microbatch is not None
        origin = self._origins[action.microbatch].get(name)
        places = [] if origin is None else [f"module {origin.module!r}" if origin.module else "", origin.source_line]
        return " (made by " + ", ".join(filter(None, places)) + ")" if any(places) else ""

    def _raise(self, action: Action, text: str, checker: _Checker | None = None, kind: str = "") -> NoReturn:
        if checker is not None:
            text += f": {checker.find_origin(kind)}"
        bad = [name for name, p in self._parameters.items() if nonfinite_kind(p)]
        if bad:
            text += f". Not finite before this action: parameter {bad[0]!r}" + (" and others" if bad[1:] else "")
        raise NonFiniteError(f"rank {self._rank}, action {action}, microbatch {action.microbatch}: {text}")


class _Checker(fx.Interpreter):
    """Runs a stage's code call by call; notes which results hold NaN or Inf, and where in a module they first do."""

    def __init__(self, module: fx.GraphModule, names: dict[int, str], note: Callable[[str, Tensor], None]) -> None:
        super().__init__(module)
        self.extra_traceback = False  # the model's errors keep their text
        self._names = names
        self._note = note
        self._first: dict[fx.Node, dict[str, str]] = {}
        self._inside: dict[str, str] = {}

    def run(self, *args: Any, **options: Any) -> Any:
        with_hook = register_module_forward_hook(self._after_module)
        try:
            return super().run(*args, **options)
        finally:
            with_hook.remove()

    def run_node(self, n: fx.Node) -> Any:
        """Run one call."""
        self._inside = {}
        result = super().run_node(n)
        if n.op != "output":
            self._inspect(result, _describe(n), self._first.setdefault(n, {}) if n.op != "get_attr" else {})
        return result

    def find_origin(self, kind: str) -> str:
        """Return the call that made the bad results: its result is bad, and none of its arguments are."""
        output = next(node for node in self.graph.nodes if node.op == "output")
        bad = self._bad_arguments(output, kind)
        if not bad:
            return "made by a call that could not be found again"
        while earlier := self._bad_arguments(bad[0], kind):
            bad = earlier
        origin = self._first[bad[0]][kind]
        if bad[0].op == "placeholder":
            return f"{origin} has it already"
        infinite = kind == NAN and self._bad_arguments(bad[0], INF)
        return f"made by {origin}" + (f", out of Inf, made by {self._first[infinite[0]][INF]}" if infinite else "")

    def _bad_arguments(self, node: fx.Node, kind: str) -> list[fx.Node]:
        return [argument for argument in node.all_input_nodes if kind in self._first.get(argument, {})]

    def _after_module(self, module: nn.Module, args: Any, result: Any) -> None:
        name = self._names.get(id(module))
        if name:
            self._inspect(result, f"module {name!r}", self._inside)

    def _inspect(self, result: Any, location: str, first_locations: dict[str, str]) -> None:
        for tensor in flatten(result).leaves:
            if not isinstance(tensor, Tensor):
                continue
            for kind in _nonfinite_kinds(tensor):
                first_locations.setdefault(kind, self._inside.get(kind, location))
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._note, location))  # type: ignore[no-untyped-call]


def _describe(node: fx.Node) -> str:
    """Describe a node of a stage: a module, or a call with its line and the module that contains it."""
    scope, line = node.meta.get("where", ("", ""))
    if node.op == "placeholder":
        return f"what comes in as {node.name!r}"
    if node.op == "call_module":
        return f"module {str(node.target)!r}"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    return f"{name}() at {line or 'an unknown line'} in " + (
        f"module {scope!r}" if scope else "the model's own forward"
    )


def nonfinite_kind(tensor: Tensor) -> str | None:
    """NAN, INF, or None for a finite tensor."""
    return next(iter(_nonfinite_kinds(tensor)), None)


def _nonfinite_kinds(tensor: Tensor) -> Iterable[str]:
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    if not (tensor.is_floating_point() or tensor.is_complex()) or bool(torch.isfinite(tensor).all()):
        return ()
    return [kind for kind, test in ((NAN, torch.isnan), (INF, torch.isinf)) if bool(test(tensor).any())]
