"""What one microbatch takes on a stage while it is there, by running the stage's code and backward on fake tensors.

Nothing is computed, and no memory is taken.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.compat import fake_mode, quiet, size_of, storage_of
from penstock.partition.run.loan import untouched_generators
from penstock.partition.state.reach import Reach
from penstock.stages import TensorMeta
from penstock.trees import flatten


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes that one microbatch takes on a stage, besides parameters, buffers and gradients of parameters.

    Attributes:
        kept: from its forward to its backward, inputs included.
        working: what its forward or its backward takes besides that while it runs, at most.
    """

    kept: int
    working: int


def footprint(module: nn.Module, inputs: Sequence[TensorMeta], *, with_loss: bool = False) -> Footprint | None:
    """Runs a stage's code and its backward on fake tensors. None if it does not run on these.

    Args:
        module: takes `inputs` and returns its outputs. What its forward leaves behind is taken back.
        inputs: of one microbatch.
        with_loss: whether a loss follows: one that the module returns, or else `usual_loss`.
    """
    reach = Reach(module)
    try:
        with untouched_generators(), quiet(), fake_mode(), _OnHost(), torch.enable_grad():
            return _run(module, inputs, with_loss)
    except Exception:  # a model's own code may raise anything on fake tensors
        return None
    finally:
        reach.restore()


def usual_loss(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Takes as much memory as cross entropy: it keeps the logarithms of probabilities. A model's own loss is taken as
    it is.
    """
    own = [output for output in outputs if output.dim() == 0 and output.requires_grad]
    if own:
        return own
    trained = [output for output in outputs if output.requires_grad]
    return [nn.functional.log_softmax(output, -1).select(-1, 0).mean() for output in trained]


def _run(module: nn.Module, inputs: Sequence[TensorMeta], with_loss: bool) -> Footprint:
    held = {name: _like(tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    for tensor in held.values():
        if tensor.requires_grad:  # so that backward adds to it, as in any microbatch but the first
            tensor.grad = torch.empty_like(tensor)
    known = [*held.values(), *(t.grad for t in held.values() if t.grad is not None)]
    leaves = [_made(meta).requires_grad_() if meta.requires_grad else None for meta in inputs]
    with Allocations([*known, *(leaf for leaf in leaves if leaf is not None)]) as seen:
        # a copy of a leaf may be updated in place, and stands for what arrives
        pairs = zip(leaves, inputs, strict=True)
        given = tuple(_made(meta) if leaf is None else leaf.clone() for leaf, meta in pairs)
        outputs: list[Tensor] = list(functional_call(module, dict(held), given))
        del given
        if with_loss:
            outputs = usual_loss(outputs)
        in_forward, roots, grads = seen.peak, list[GradientEdge](), list[tuple[Any, ...]]()
        for output in outputs:
            if output.requires_grad:
                roots.append(get_gradient_edge(output))
                grads.append((tuple(output.shape), output.stride(), output.dtype))
        del output
        outputs.clear()
        kept = seen.peak = seen.now
        if roots:
            seeds = [torch.empty_strided(shape, stride, dtype=dtype) for shape, stride, dtype in grads]
            torch.autograd.backward(roots, seeds)
        return Footprint(kept, max(in_forward, seen.peak) - kept)


class Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors that operators make, while they live.

    Args:
        known: tensors whose memory does not count.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._living: dict[int, Any] = {storage_of(tensor): None for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in flatten(made).leaves:
            if isinstance(tensor, Tensor) and storage_of(tensor) not in self._living:
                self._count(tensor)
        return made

    def _count(self, tensor: Tensor) -> None:
        number, size = storage_of(tensor), size_of(tensor)

        def gone(_: Any) -> None:
            if self._living.pop(number, None) is not None:
                self.now -= size

        self._living[number] = weakref.ref(tensor.untyped_storage(), gone)
        self.now += size
        self.peak = max(self.peak, self.now)


class _OnHost(TorchFunctionMode):
    """What code of a model without weights makes is on the host, as its fake tensors are: on the meta device, attention
    would take the kernel that keeps all probabilities."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cpu = torch.device("cpu")
        args = [cpu if isinstance(arg, torch.device) and arg.type == "meta" else arg for arg in args]
        named = {k: cpu if isinstance(v, torch.device) and v.type == "meta" else v for k, v in (kwargs or {}).items()}
        return func(*args, **named)


def _like(tensor: Tensor) -> Tensor:
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    return made.requires_grad_(tensor.requires_grad)


def _made(meta: TensorMeta) -> Tensor:
    dtype: torch.dtype = getattr(torch, meta.dtype)
    return torch.empty_strided(meta.shape, meta.stride, dtype=dtype)
