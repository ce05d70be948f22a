"""A model's layers in the order in which its forward uses them; backward produces their gradients in reverse.

A layer is a module that holds parameters itself. The recording's fake tensors show when a parameter is first used; the
order in which modules were registered says nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock._base.compat import FakeTensor
from penstock._base.pytree import flatten, leaf_tensors
from penstock.partition import NoStreams, Partition, Partitioner
from penstock.schedule import Schedule

Named = tuple[str, nn.Parameter]
"""A parameter and its name in the model; tied ones appear once, under their first name."""


@dataclass(frozen=True)
class Layer:
    """The parameters of one module and dtype that the forward uses.

    Attributes:
        name: the module's, with the dtype if the module has several.
        parameters: in order of use.
    """

    name: str
    parameters: tuple[nn.Parameter, ...]

    @property
    def trained(self) -> tuple[nn.Parameter, ...]:
        return tuple(parameter for parameter in self.parameters if parameter.requires_grad)


@dataclass(frozen=True, slots=True)
class Product:
    """A multiplication by a layer's matrix, a whole attention, which multiplies by two, or a lookup in a matrix.

    Attributes:
        name: the layer's.
        features: in and out; empty for an attention.
        input_bytes, output_bytes: the size of the input and of the output, for one microbatch.
        input_requires_grad: whether the gradient of the input is needed.
        same_input: whether the input is that of the previous product.
        matrix: its name in the model; tied ones have one name.
        is_lookup: whether it looks up rows, like an embedding: the input is row numbers.
    """

    name: str
    features: tuple[int, int] | None
    input_bytes: int
    output_bytes: int
    input_requires_grad: bool
    same_input: bool
    matrix: str = ""
    is_lookup: bool = False


@dataclass(frozen=True)
class ModelRecord:
    """A model as seen by one recording.

    Attributes:
        partition: its stages.
        used: the parameters that the forward uses, in order of first use.
        unused: the names of parameters that should be trained but get no gradient.
        products: in forward order.
    """

    partition: Partition
    used: tuple[Named, ...]
    unused: tuple[str, ...]
    products: tuple[Product, ...] = ()

    @property
    def layers(self) -> tuple[Layer, ...]:
        """In order of first use: a layer's gradients are complete once backward has passed that use."""
        groups: dict[tuple[str, torch.dtype], list[nn.Parameter]] = {}
        for name, parameter in self.used:
            groups.setdefault((name.rpartition(".")[0], parameter.dtype), []).append(parameter)
        modules, result = [module for module, _ in groups], []
        for (module, dtype), parameters in groups.items():
            suffix = f" ({type_name(dtype)})" if modules.count(module) > 1 else ""
            result.append(Layer((module or "(model)") + suffix, tuple(parameters)))
        return tuple(result)


@dataclass(frozen=True)
class TrainingJob:
    """Pipelines that train replicas of a model. Replica d has the hosts d * ranks to (d + 1) * ranks - 1.

    Attributes:
        recorded: the model, cut into the stages of one pipeline.
        order: the computations of one pipeline.
        hosts: how many, for all replicas.
        sharded: the replicas divide the parameters among themselves.
        gradient_dtype: as for `penstock.pipeline`.
    """

    recorded: ModelRecord
    order: Schedule
    hosts: int
    sharded: bool
    gradient_dtype: torch.dtype | None = None

    @property
    def ranks(self) -> int:
        return self.order.ranks

    @property
    def replicas(self) -> int:
        return self.hosts // self.ranks

    def parameters(self, stage: int) -> dict[str, nn.Parameter]:
        """Return the parameters of a stage, also of copies of the model."""
        stages = self.recorded.partition.stages
        return dict(stages[stage % len(stages)].parameters)

    def same_rank(self, rank: int) -> tuple[int, ...]:
        """Return the hosts that are this rank of their pipelines."""
        return tuple(range(rank, self.hosts, self.ranks))


_MATRICES: dict[Any, tuple[tuple[tuple[int, str], tuple[int, str]], bool]] = {
    F.linear: (((0, "input"), (1, "weight")), False),
    torch.addmm: (((1, "mat1"), (2, "mat2")), True),
    F.multi_head_attention_forward: (((0, "query"), (5, "in_proj_weight")), False),
    F.embedding: (((0, "input"), (1, "weight")), True),
}
"""Functions that multiply by a parameter, or look up in it: where they take the input and the matrix, and whether the
matrix is (in, out).
"""


class _Uses(TorchFunctionMode):
    """Notes the order in which a model's parameters are used; those to be trained count if the use gives a gradient."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.order: dict[str, None] = {}
        self.products: list[Product] = []
        self._matrices: dict[tuple[str, bool], nn.Parameter] = {}  # of the first recording: later ones see the same
        self._last_input: Tensor | None = None
        self._model = model
        self._names: dict[int, str] = {}
        self._alive: list[nn.Parameter] = []  # so that no id is reused

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        parameters = [x for x in flatten((args, kwargs or {})).leaves if isinstance(x, nn.Parameter)]
        fakes = [parameter for parameter in parameters if isinstance(parameter, FakeTensor)]
        result = func(*args, **(kwargs or {}))
        outputs = leaf_tensors(result) if fakes else []
        trains = any(tensor.requires_grad and not tensor.is_leaf for tensor in outputs)
        for parameter in fakes:
            name = self._name(parameter)
            if name and (trains if parameter.requires_grad else outputs):
                self.order.setdefault(name)
        if func in _MATRICES and outputs:
            self._add_product(func, args, kwargs or {}, outputs[0])
        return result

    def _add_product(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], output: Tensor) -> None:
        arguments, transposed = _MATRICES[func]
        operand, matrix = (args[at] if at < len(args) else kwargs.get(name) for at, name in arguments)
        if not (isinstance(operand, Tensor) and isinstance(matrix, nn.Parameter) and self._name(matrix)):
            return
        name, is_lookup = self._name(matrix), func is F.embedding
        if self._matrices.setdefault((name, is_lookup), matrix) is not matrix:
            return
        attends = func is F.multi_head_attention_forward
        features = None if attends else (matrix.shape[1 - transposed], matrix.shape[int(transposed)])
        layer, same_input = name.rpartition(".")[0] or "(model)", operand is self._last_input
        sizes = operand.nbytes, output.nbytes
        self.products.append(Product(layer, features, *sizes, operand.requires_grad, same_input, name, is_lookup))
        self._last_input = operand

    def _name(self, parameter: nn.Parameter) -> str:
        if id(parameter) not in self._names:  # each recording makes its own fakes
            for name, candidate in self._model.named_parameters():
                self._names[id(candidate)] = name
                self._alive.append(candidate)
        return self._names.get(id(parameter), "")


def record(
    model: nn.Module | Sequence[nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    stages: int,
    **options: Any,
) -> ModelRecord:
    """Record a model for one microbatch's inputs and cut it. Nothing is computed. `options` are those of `Partitioner`.
    Raise ArgumentError, PartitionError: as for `penstock.inspect`."""
    partitioner = Partitioner(model, stages, streams=NoStreams(), **options)
    uses = _Uses(partitioner.model)
    with torch.enable_grad(), uses:
        partition = partitioner(args, kwargs)
    parameters = dict(partitioner.model.named_parameters())
    unused = tuple(name for name, parameter in parameters.items() if parameter.requires_grad and name not in uses.order)
    return ModelRecord(partition, tuple((name, parameters[name]) for name in uses.order), unused, tuple(uses.products))


def type_name(dtype: torch.dtype) -> str:
    """Return the name that users write, without `torch.`."""
    return str(dtype).removeprefix("torch.")


def sharded_bytes(tensors: Iterable[Tensor], ranks: int) -> int:
    """Return the size of tensors whose rows are divided among ranks like FSDP2's: padded to the same number on each."""
    sizes = [(tensor.shape[0] if tensor.ndim else 1, tensor.nbytes) for tensor in tensors]
    return sum(-(-rows // ranks) * ranks * (size // max(rows, 1)) for rows, size in sizes)
