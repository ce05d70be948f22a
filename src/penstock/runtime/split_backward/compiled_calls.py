"""Runs compiled code whose products are tapped (`compiled_products.py`), and takes what its backward leaves there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import PartitionError
from penstock.runtime.exact import rules as exact
from penstock.runtime.exact.saved import SavedTensor
from penstock.runtime.split_backward.weight_gradients import Form, Term, cast_back, total_of, value_of
from penstock.runtime.split_backward.weight_uses import Waiting, WeightUses, running


class Parameter(NamedTuple):
    """Stands for a parameter: the number of the code's input."""

    place: int


class Kept(NamedTuple):
    """Stands for what is kept of a call: its number in the plan's list."""

    place: int


class TapOf(NamedTuple):
    """Something kept is the gradient of a tap."""

    place: int


class ResultOf(NamedTuple):
    """Something kept is a further result of the code."""

    place: int


Source = Parameter | TapOf | ResultOf


class Tap(NamedTuple):
    """An input that exists for its gradient; a size may depend on the code's other inputs."""

    sizes: tuple[int | Callable[[Sequence[Any]], int], ...]
    dtype: torch.dtype
    device: torch.device

    def make(self, inputs: Sequence[Any]) -> Tensor:
        """The tap: a tensor with the memory of one element."""
        sizes = [size if isinstance(size, int) else size(inputs) for size in self.sizes]
        return torch.empty_strided(sizes, [0] * len(sizes), dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Product:
    """A tapped product.

    Attributes:
        form: makes a plan of the call.
        args: the call's arguments; instead of tensors, what stands for them, or None if the plan does not look at them.
        weights: its weights, by their places among the code's inputs.
        tap: the number of the tap whose gradient is that of its result.
        kept: where what the plan keeps comes from: its input, and more.
        contiguous: whether the input is contiguous; compiled code may hand it out in another order.
    """

    form: Form
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    weights: tuple[int, ...]
    tap: int
    kept: tuple[Source, ...]
    contiguous: bool

    @property
    def parameters(self) -> set[int]:
        """The places of the parameters that the plan looks at."""
        given = (*self.args, *self.kwargs.values(), *self.kept)
        return {*self.weights, *(one.place for one in given if isinstance(one, Parameter))}

    def terms(self, parameters: Mapping[int, Tensor], grad: Tensor, input: Tensor, *more: Tensor) -> Sequence[Term]:
        """The gradients of the weights."""
        kept = (input.contiguous() if self.contiguous else input, *more)

        def found(arg: Any) -> Any:
            if isinstance(arg, Kept):
                return kept[arg.place]
            return parameters[arg.place] if isinstance(arg, Parameter) else arg

        plan = self.form(*map(found, self.args), **{key: found(arg) for key, arg in self.kwargs.items()})
        assert plan is not None, "the form took the same call when it was compiled"
        same = [one.to(grad.dtype) if one.is_floating_point() else one for one in kept]  # autocast casts kernels
        return cast_back(plan.gradients(grad, *same), plan.weights, grad.dtype)


@dataclass(frozen=True)
class TappedCode:
    """Compiled code with taps.

    Attributes:
        compiled: takes the inputs, with weights without their graph, and taps; gives the results and further ones.
        weights: the places of the weights among the inputs.
        results: the number of results, without further ones.
    """

    compiled: Callable[..., Any]
    products: tuple[Product, ...]
    weights: tuple[int, ...]
    taps: tuple[Tap, ...]
    results: int

    @cached_property
    def parameters(self) -> frozenset[int]:
        """The places of all parameters that plans look at."""
        return frozenset().union(*(product.parameters for product in self.products))

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The weights' places; those in one group share a call, so that they wait together or not at all."""
        groups: list[set[int]] = []
        for product in self.products:
            joined = set(product.weights).union(*(group for group in groups if group & {*product.weights}))
            groups = [group for group in groups if not group <= joined] + [joined]
        return tuple(tuple(sorted(group)) for group in groups)

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Runs the code."""
        parameters = {place: inputs[place] for place in self.parameters}
        uses = running()
        groups = (tuple(parameters[place] for place in group) for group in self.groups)
        put_off = None if uses is None else uses.begin_compiled(groups)
        waiting = {p for p in self.weights if uses is not None and put_off is not None and uses.waits(parameters[p])}
        run = _Run(self, parameters, uses, put_off, waiting)
        now = [inputs[place] for place in self.weights if place not in waiting]
        taps: tuple[Tensor, ...] = _Taps.apply(run, inputs, _ANCHOR, *now)  # type: ignore[no-untyped-call]
        given = list(inputs)
        for place in self.weights:
            given[place] = given[place].detach()
        results: Sequence[Any] = self.compiled(*given, *taps)
        run.further = results[self.results :]
        return results[: self.results]


@dataclass
class _Run:
    """One run of the code: what its backward needs beside what autograd keeps.

    Attributes:
        put_off: takes the weight gradients that wait.
        waiting: the places of their weights.
        further: the further results.
    """

    code: TappedCode
    parameters: Mapping[int, Tensor]
    uses: WeightUses | None
    put_off: list[Waiting] | None
    waiting: Collection[int]
    further: Sequence[Tensor] = ()

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Puts off the weight gradients that can wait, and returns the others."""
        _refuse_graph_of_gradients()
        if self.uses is not None:
            self.uses.begin_backward(self.put_off)
        terms: defaultdict[int, list[Tensor]] = defaultdict(list)
        with torch.no_grad():
            for product in reversed(self.code.products):  # in autograd's order
                grad = grads[product.tap]
                if grad is None:
                    continue
                weights = tuple(self.parameters[place] for place in product.weights)
                call = Waiting(weights, partial(product.terms, self.parameters), self._kept(product, grads), grad)
                if self.put_off is not None and product.weights[0] in self.waiting:
                    self.put_off.append(call)
                    continue
                with exact.outside_autocast(grad.device.type):
                    for place, term in zip(product.weights, call.terms(), strict=True):
                        terms[place].append(value_of(term))
            sums = {place: total_of(self.parameters[place], values) for place, values in terms.items()}
        return [sums.get(place) for place in self.code.weights if place not in self.waiting]

    def _kept(self, product: Product, grads: Sequence[Tensor | None]) -> list[SavedTensor]:
        kept: list[SavedTensor] = []
        for source in product.kept:
            if isinstance(source, TapOf):
                value = grads[source.place]
            else:
                value = (self.parameters if isinstance(source, Parameter) else self.further)[source.place]
            assert value is not None, "what is kept comes with the result's gradient"
            kept.append(SavedTensor.of(value))
        return kept


_ANCHOR = torch.empty(0, requires_grad=True)
"""Makes taps take a gradient where all weights wait. (A weight must not be among the inputs then: autograd would call
its hooks without a gradient.)"""


class _Taps(torch.autograd.Function):
    """Makes the taps of a run, and passes their gradients to it."""

    @staticmethod
    def forward(ctx: Any, run: _Run, inputs: Sequence[Any], anchor: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.run = run
        return tuple(tap.make(inputs) for tap in run.code.taps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        return None, None, None, *ctx.run.backward(grads)


class Tapped(torch.autograd.Function):
    """Within the code: a product's result, as it is. In backward, the taps get the result's gradient and the input."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, tap: Tensor, input: Tensor | None, input_tap: Tensor | None) -> Tensor:
        ctx.save_for_backward(*(() if input is None else (input,)))
        return result.clone()  # not a view, which could not be updated in place

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        _refuse_graph_of_gradients()
        given = grads[0]
        kept = ctx.saved_tensors
        return given, given, None, kept[0] if kept else None


def _refuse_graph_of_gradients() -> None:
    """Raises PartitionError in a backward that is itself recorded: weights without their graph would be constants in
    it, and what they owe to it would be lost.
    """
    if torch.is_grad_enabled():
        raise PartitionError(
            "the forward of a compiled stage takes a gradient with create_graph=True, which leads to its weights, and "
            "the schedule splits its backward; leave compile= out, or pass a schedule that does not split it: "
            "penstock.schedule.merge_backward makes one"
        )


def tapped(result: Tensor, tap: Tensor, input: Tensor | None = None, input_tap: Tensor | None = None) -> Tensor:
    """The call that compiled graphs have of `Tapped`."""
    value: Tensor = Tapped.apply(result, tap, input, input_tap)  # type: ignore[no-untyped-call]
    return value
