"""The backward of one stage in two parts: I passes the inputs' gradients on, W computes those of the weights.

In a forward whose backward is split, a call whose weight gradient can wait (`weight_gradients`) gets the weight without
its graph, so the backward at I skips it. What W needs, the call's input and the gradient of its output, is kept;
everything else is freed at I. All other gradients are computed by plain autograd at I: those of biases, norms, weights
in other calls, and weights whose use cannot be seen (inside attention modules and LSTMs, blocks that the model
compiles, recomputed segments). Compiled stages report what can wait (`compiled_products`). If nothing in a
stage can wait, it has a full backward at I and an empty W.

The first microbatch runs unsplit, to learn which parameters can wait: those whose uses were all seen. The gradient of a
parameter with any other use is not put off at all, since a microbatch's terms are summed in autograd's order. If layers
are left out by chance, all microbatches up to the first in which the whole stage runs are unsplit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from penstock._base.compat import WithoutGradients
from penstock._base.compat_compiler import compiled as compiled_as
from penstock._base.gradients import gradient_dtype
from penstock.partition import gates_of
from penstock.runtime.exact import rules as exact
from penstock.runtime.exact.rules import Keeper
from penstock.runtime.gradients.dtensors import is_distributed
from penstock.runtime.split_backward.weight_gradients import MatrixProduct, Term, evaluate, sum_terms
from penstock.runtime.split_backward.weight_uses import DeferredGrads, WeightUses, get_base

PutOff = tuple[list[DeferredGrads], set[int] | None, list[tuple[nn.Parameter, Tensor]]]
"""What a microbatch has for W: calls whose gradients wait, by `id` the parameters of which its forward put any off
(None: it was unsplit), and gradients that are already there."""


class SplitBackward:
    """The split backwards of one stage, for microbatches that use its weights alike.

    Args:
        parameters: returns the stage's parameters, by name, once a forward begins.
        module: the stage's code.
        in_order: whether F, and I or B, come in ascending order of microbatch, and all microbatches use its weights
            alike, so that I adds to `.grad` in that order. Otherwise its terms are kept until W.
        keeper: keeps what W needs of a forward; None: it stays as it is.
        compiled: whether the whole stage is compiled. All compiled code is, with `SplittingBackend`.
    """

    def __init__(
        self,
        parameters: Callable[[], Mapping[str, nn.Parameter]],
        module: nn.Module,
        device: torch.device,
        *,
        in_order: bool,
        keeper: Keeper | None = None,
        compiled: bool = False,
    ) -> None:
        modules = list(module.modules())
        self._compiled_modules = modules[:1] if compiled else [part for part in modules if compiled_as(part)]
        self._get_parameters = parameters
        self._module = module
        self._parameters_read = False
        self._parameters: list[nn.Parameter] = []
        self._anchor = torch.empty(0, device=device, requires_grad=True)
        self._without_gradients = WithoutGradients()
        self._in_order = in_order
        self._learning = False
        self._deferred: list[nn.Parameter] = []  # those whose gradient waits
        self._keeper = keeper
        self._compiled: frozenset[int] = frozenset()  # by id, the parameters of compiled code
        self._uses = WeightUses(())
        self._put_off: dict[int, PutOff] = {}

    @property
    def share(self) -> float:
        """The share of the trained elements whose gradient waits for W; known after a forward."""
        total = sum(p.numel() for p in self._parameters)
        waiting = sum(p.numel() for p in self._parameters if id(p) in self._uses.can_wait)
        return waiting / total if total else 0.0

    @property
    def decided(self) -> bool:
        """Whether it is known which parameters can wait."""
        return self._uses.decided

    @property
    def has_empty_w(self) -> bool:
        """Whether it is known that nothing in compiled code waits for W, though the stage trains matrices."""
        nothing_waits = self.decided and not self._uses.can_wait
        return nothing_waits and bool(self._compiled_modules) and any(p.dim() > 1 for p in self._parameters)

    def begin_step(self) -> None:
        """Drop anything left by a step that raised."""
        self._learning = False
        self._put_off.clear()

    def forward(self, microbatch: int, *, runs_again: bool = False) -> AbstractContextManager[None]:
        """Wrap a microbatch's forward. `runs_again`: whether I runs it anew, and starts from that run."""
        if not self._parameters_read:
            self._read_parameters()
        if not self._uses.decided:
            self._learning = True
            return self._uses.learning()
        if runs_again:
            return exact.NOTHING
        waiting, ids, _ = self._put_off[microbatch] = [], set(), []
        return self._uses.putting_off(waiting, ids, self._anchor)

    def _read_parameters(self) -> None:
        """Read the parameters. Sharded ones are whole only now, and distributed ones never wait."""
        self._parameters_read = True
        parameters = self._get_parameters()
        self._parameters = [p for p in parameters.values() if p.requires_grad]
        self._compiled = frozenset(id(p) for part in self._compiled_modules for p in part.parameters())
        splittable = [p for p in self._parameters if not is_distributed(p)]
        self._uses = WeightUses(splittable, self._keeper, compiled=self._compiled)

    def learn(self, roots: Iterable[GradientEdge | None]) -> None:
        """Called after a forward: `roots` are what its backward starts from."""
        if self._learning:
            self._learning = False
            if not all(gate.has_run for gate in gates_of(self._module)):
                return  # calls that were left out were not seen
            self._uses.decide([root.node for root in roots if root is not None])
            self._deferred = [p for p in self._parameters if id(p) in self._uses.can_wait]

    def input_gradients(self, microbatch: int) -> AbstractContextManager[None]:
        """Wrap the backward of a microbatch, at I: keep until W what is added to a `.grad`.

        Where I keeps the order of microbatches, this is only for parameters of which its forward put off no gradient,
        unlike that of the first microbatch: a linear layer's operators depend on its input's strides, as where padding
        is trimmed (`x[:, : lengths.max()]`). Others would come after what I adds for later microbatches.
        """
        _, ids, early = self._put_off.setdefault(microbatch, ([], None, []))
        if not self._in_order:
            return self._diverting_gradients(early, self._parameters)
        if ids is None:
            return exact.NOTHING
        handled = self._compiled | ids
        missed = [p for p in self._deferred if id(p) not in handled and not p._post_accumulate_grad_hooks]
        return self._diverting_gradients(early, missed) if missed else exact.NOTHING

    def weight_gradients(self, microbatch: int) -> None:
        """Run W: sum each parameter's terms of a microbatch in autograd's order, and add them to `.grad` once."""
        waiting, _, early = self._put_off.pop(microbatch, ([], None, []))
        remaining: dict[int, int] = {}  # a `Counter` takes longer to make
        for call in waiting:
            for key in call.keys:
                remaining[key] = remaining.get(key, 0) + 1
        terms: defaultdict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        waiting.reverse()
        with self._without_gradients, exact.outside_autocast(self._anchor.device.type):
            for parameter, grad in early:
                _add(parameter, grad)
            early.clear()
            while waiting:  # frees what a call kept once its gradient is there
                call = waiting.pop()
                for key, weight, term in zip(call.keys, call.weights, call.terms(), strict=True):
                    remaining[key] -= 1
                    if not remaining[key] and key not in terms and _adds_in_place(weight, term):
                        continue
                    terms[key].append((weight, evaluate(term)))
                    if not remaining[key]:
                        _accumulate(terms.pop(key))

    @contextmanager
    def _diverting_gradients(
        self, early: list[tuple[nn.Parameter, Tensor]], parameters: Sequence[nn.Parameter]
    ) -> Iterator[None]:
        """Divert whatever is added to the `.grad` of these parameters to `early`."""

        def keep(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            assert parameter.grad is not None
            early.append((parameter, parameter.grad))
            parameter.grad = None

        before = [p.grad for p in parameters]
        handles = []
        for parameter in parameters:
            parameter.grad = None
            handles.append(parameter.register_post_accumulate_grad_hook(keep))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for parameter, grad, handle in zip(parameters, before, handles, strict=True):
                handle.remove()
                parameter.grad = grad


def _adds_in_place(weight: Tensor, term: Term) -> bool:
    """Add a parameter's only term of a microbatch to its `.grad` as it is computed. False if that cannot be."""
    if exact.computes_apart(weight.device) or not isinstance(term, MatrixProduct) or _needs_autograd(weight):
        return False
    grad = weight.grad
    if grad is None or grad.dtype != term.first.dtype:
        return False
    term.add_to(grad)
    return True


def _needs_autograd(weight: Tensor) -> bool:
    """Whether autograd must add a weight's terms: it runs the backward of views in its usual order, and calls hooks."""
    parameter = get_base(weight)
    sparse = parameter.grad is not None and parameter.grad.is_sparse
    hooked = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    return parameter is not weight or bool(hooked) or sparse


def _accumulate(terms: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add a parameter's terms to its `.grad`. All are of the parameter itself, or all of views of it."""
    (weight, total), *others = terms
    if _needs_autograd(weight):
        grads = [grad.to(weight.dtype) for weight, grad in terms]  # autocast's are in its lower precision
        torch.autograd.backward([get_gradient_edge(weight) for weight, _ in terms], grads)
        return
    _add(weight, sum_terms(weight, [term for _, term in terms]) if others else total)


def _add(parameter: Tensor, grad: Tensor) -> None:
    """Do what autograd's AccumulateGrad does: take over the first gradient if it has the parameter's layout."""
    if parameter.grad is None:
        grad = grad.to(gradient_dtype(parameter))
        parameter.grad = grad if _matches_layout(grad, parameter) else _copy_as(parameter, grad)
    else:
        parameter.grad += grad


def _copy_as(parameter: Tensor, grad: Tensor) -> Tensor:
    if not exact.is_dense(tuple(parameter.shape), parameter.stride()):
        return grad.contiguous()
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)


def _matches_layout(grad: Tensor, parameter: Tensor) -> bool:
    if grad.layout is not torch.strided:
        return True
    if not exact.is_dense(tuple(parameter.shape), parameter.stride()):
        return grad.is_contiguous()
    strides = zip(grad.shape, grad.stride(), parameter.stride(), strict=True)
    return all(grad_stride == stride if size != 1 else grad_stride != 0 for size, grad_stride, stride in strides)


def weight_use_key(module: nn.Module) -> Hashable:
    """A key that is equal for recorded forwards that use weights alike: the calls that get a weight, and their plain
    arguments, since a unit may branch on those. Names of values, which are numbered, are not in it."""
    if not isinstance(module, fx.GraphModule):
        return type(module).__qualname__
    weights = dict(module.named_parameters(remove_duplicate=False))
    units = {name[:end] for name in weights for end, letter in enumerate(name) if letter == "."}
    names = {node: str(node.target) for node in module.graph.nodes if node.op == "get_attr" and node.target in weights}

    def plain(argument: fx.Node) -> Any:
        return names.get(argument, "")

    return tuple(
        (node.op, str(node.target), repr(fx.node.map_arg((node.args, node.kwargs), plain)))
        for node in module.graph.nodes
        if (node.op == "call_module" and node.target in units)
        or any(operand in names for operand in node.all_input_nodes)
    )
