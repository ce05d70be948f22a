"""Counts what the units of a recording do, forward and backward, by running them on tensors without memory.

They run as on a CPU, whatever device they are for: operators are those that torch calls there. So scaled attention is
one kernel, as fused ones are, and what would be fused by a compiler is not.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.balance import Operations, Profile
from penstock.compat import FakeTensorMode, fake_mode, quiet, size_of, storage_of
from penstock.hardware import Operation
from penstock.partition.cut.balance import Candidate
from penstock.partition.measure.costs import (
    Times,
    UnmeasurableError,
    cut_finely,
    first_runs,
    profile_of,
    unit_costs,
)
from penstock.partition.measure.running import entering, forward_and_saved, seeded
from penstock.partition.recording.recording import Recording
from penstock.partition.run.loan import fake_like, untouched_generators
from penstock.partition.stages.stage import Stage
from penstock.partition.state.provenance import tensors_of
from penstock.partition.state.reach import Reach
from penstock.partition.watch.observer import argument_names
from penstock.partition.watch.work import Operation as Call
from penstock.partition.watch.work import group_of, operations_of
from penstock.stages import MODEL_INPUT
from penstock.trees import flatten
from penstock.words import in_a_line

CPU = torch.device("cpu")

OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_")
"""Operators that do not read the tensor that they update."""


def count(
    recording: Recording, model: nn.Module, units: Sequence[Candidate], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Profile:
    """The profile of a recording's units without any times, with the operations of one unit of each kind.

    Weights may be on the meta device. Changes nothing of the model, nor any random generator.

    Raises:
        UnmeasurableError: a unit does not run on fake tensors.
    """
    kept, split = cut_finely(recording, model, units)
    mode, reach = fake_mode(), Reach(model)
    with torch.enable_grad(), untouched_generators(), warnings.catch_warnings(), quiet():
        warnings.simplefilter("ignore")  # the first step says the same
        try:
            values = _inputs(recording, args, kwargs, mode)
            found = first_runs(split, values, lambda stage, given: CountedUnit(stage, given, recording, mode))
        except Exception as error:
            raise UnmeasurableError(f"running its units on fake tensors fails ({in_a_line(error)})") from error
        finally:
            reach.restore()
    return profile_of(recording, model, unit_costs(kept, split, found), args, kwargs, 0)


class CountedUnit:
    """A unit that ran once, on fakes of its parameters and inputs.

    Attributes:
        outputs, saved: see `Run`.
    """

    def __init__(self, stage: Stage, inputs: Sequence[Tensor], recording: Recording, mode: FakeTensorMode) -> None:
        self._inputs = [(value, i.meta.requires_grad) for value, i in zip(inputs, stage.meta.inputs, strict=True)]
        with mode:
            here = stage if stage.device == CPU else stage.on(CPU)
        tensors = {id(t): t for t in (*recording.held.values(), *here.module.parameters(), *here.module.buffers())}
        memo: dict[int, Any] = {key: fake_like(tensor, mode, CPU) for key, tensor in tensors.items()}
        with mode:
            self._module = copy.deepcopy(here.module, memo)
            own = {storage_of(t) for t in (*self._module.parameters(), *self._module.buffers())}
            self._trained = [p for p in self._module.parameters() if p.requires_grad]
            for parameter in self._trained:
                parameter.grad = torch.empty_like(parameter)  # gradients are added up over microbatches
            self._run(own)

    def times(self) -> Times:
        """None were taken."""
        return Times()

    def operations(self) -> Operations:
        """What was counted."""
        return self._operations

    def _run(self, own: set[int]) -> None:
        leaves, given = entering(self._inputs)
        with Counting() as forward:
            made, self.saved = forward_and_saved(self._module, own, given)
        self.outputs: Sequence[Tensor] = [value.detach() for value in made]
        roots, seeds = seeded(made)
        with Counting() as backward:
            if roots:
                torch.autograd.backward(roots, seeds)
        whole = backward.found
        passes_on = any(leaf.requires_grad for leaf in leaves)
        partly = self._input_gradient() if passes_on and self._trained else whole if passes_on else ()
        self._operations = Operations(forward.found, whole, partly)

    def _input_gradient(self) -> tuple[Operation, ...]:
        leaves, given = entering(self._inputs)
        roots, seeds = seeded(self._module(*given))
        counting = Counting()
        with counting:
            torch.autograd.grad(roots, [leaf for leaf in leaves if leaf.requires_grad], seeds, allow_unused=True)
        return counting.found


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of every kernel while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found: Counter[tuple[int, int, str]] = Counter()

    @property
    def found(self) -> tuple[Operation, ...]:
        """What ran, the same operations together."""
        return tuple(Operation(*what, count) for what, count in self._found.items())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload) and group_of(func) != "free":
            self._found[_counted(Call(func, args, kwargs, result))] += 1
        return result


def _counted(call: Call) -> tuple[int, int, str]:
    """Operations, bytes and dtype of one kernel."""
    given = tensors_of((*call.args, *call.kwargs.values()))
    made = tensors_of(call.result if isinstance(call.result, (list, tuple)) else (call.result,))
    group, name = group_of(call.func), call.func.overloadpacket.__name__
    read = _bytes(given[1:] if name in OVERWRITES else given)
    if group == "lookup":  # of its table, only the rows that are asked for
        read = _bytes(given[1:]) + _bytes(made)
    elif name.endswith("_like") or name.startswith("new_"):
        read = 0
    factor = next((tensor for tensor in given if tensor.is_floating_point()), None)
    if group != "product" or factor is None:
        return 0, read + _bytes(made), "float32"
    return _unmasked(call), read + _bytes(made), _dtype_of(name, factor)


def _unmasked(call: Call) -> int:
    """A product's operations; of causal attention, those below the diagonal."""
    flops = operations_of(call)
    given = dict(zip(argument_names(call.func), call.args, strict=False)) | dict(call.kwargs)
    if given.get("is_causal"):
        length = int(given["query"].shape[-2])
        return flops * (length + 1) // (2 * length)
    return flops


def _dtype_of(name: str, factor: Tensor) -> str:
    """The dtype of a product, where torch may compute in less than float32 with that."""
    if factor.dtype == torch.float32:
        allowed = torch.get_float32_matmul_precision() != "highest"
        return "tf32" if (torch.backends.cudnn.allow_tf32 if "conv" in name else allowed) else "float32"
    return str(factor.dtype).removeprefix("torch.")


def _bytes(tensors: Sequence[Tensor]) -> int:
    """What tensors take of memory: of an expanded one, what is there."""
    return sum(min(tensor.numel() * tensor.element_size(), size_of(tensor)) for tensor in tensors)


def _inputs(
    recording: Recording, args: Sequence[Any], kwargs: Mapping[str, Any], mode: FakeTensorMode
) -> dict[tuple[int, str], Tensor]:
    """The model's inputs, as fakes."""
    leaves = flatten((tuple(args), dict(kwargs))).leaves
    given = {(MODEL_INPUT, node.name): leaves[place] for node, place in recording.inputs.items()}
    return {
        key: fake_like(value, mode, CPU).requires_grad_(False) if isinstance(value, Tensor) else value
        for key, value in given.items()
    }
