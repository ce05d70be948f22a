"""Runs a partition's stages one after the other on real tensors, autograd on, and compares with the unsplit model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.pytree import flatten, map_tensors
from penstock._base.stages import MODEL_INPUT
from penstock.partition import Partition, default_kwargs
from scaffolding.models import Case


class NoStreams:
    """A source of random numbers for models that draw none: any call is an error."""

    def enter(self, name: str) -> None:
        raise AssertionError(f"{name} draws random numbers")


def run_unsplit(model: nn.Module, case: Case) -> Any:
    """The output on a copy of the inputs, and gradients in the parameters."""
    args, kwargs = fresh(case.args), fresh(case.kwargs)
    output = model(*args, **kwargs, **default_kwargs(model, args, kwargs))
    if torch.is_grad_enabled():
        case.loss(output, case.target).backward()
    return output


def run_chained(partition: Partition, case: Case, sent: bool = False) -> Any:
    """The same through the stages. Every value is checked against the metas.

    `sent`: each stage gets copies, as from another machine (without gradients, which the runtime sends back in order).
    """
    values: dict[tuple[int, str], Tensor] = {}
    given = partition.arrange(flatten((tuple(fresh(case.args)), dict(fresh(case.kwargs)))).leaves)
    first = [i for i in partition.stages[0].meta.inputs if i.source == MODEL_INPUT]
    values.update({(MODEL_INPUT, i.name): t for i, t in zip(first, given, strict=True)})
    outputs: tuple[Tensor, ...] = ()
    for stage in partition.stages:
        inputs = [values[i.source, i.name] for i in stage.meta.inputs]
        inputs = [t.clone() for t in inputs] if sent else inputs
        for i, tensor in zip(stage.meta.inputs, inputs, strict=True):
            check_meta(i.name, i.meta, tensor)
        versions = [t._version for t in inputs]
        outputs = stage.module(*inputs)
        for i, tensor, version in zip(stage.meta.inputs, inputs, versions, strict=True):
            assert i.mutated == (tensor._version != version), i.name
        for o, tensor in zip(stage.meta.outputs, outputs, strict=True):
            check_meta(o.name, o.meta, tensor)
            values[stage.meta.index, o.name] = tensor
    output = partition.build_output(outputs)
    if torch.is_grad_enabled():
        case.loss(output, case.target).backward()
    return output


def check_meta(name: str, meta: Any, tensor: Tensor) -> None:
    found = (
        tuple(tensor.shape),
        tuple(tensor.stride()),
        str(tensor.dtype).removeprefix("torch."),
        tensor.requires_grad,
    )
    assert found == (meta.shape, meta.stride, meta.dtype, meta.requires_grad), name


def fresh(tree: Any) -> Any:
    return map_tensors(torch.clone, tree)


def assert_same(one: Any, other: Any, gradients: bool = False) -> None:
    """Equal bit for bit: two modules (parameters, buffers and, if asked, gradients), or two outputs."""
    if isinstance(one, nn.Module):
        for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
            assert torch.equal(a, b), name
            if gradients:
                assert (a.grad is None) == (b.grad is None), name
                assert a.grad is None or torch.equal(a.grad, b.grad), name
        for (name, a), (_, b) in zip(one.named_buffers(), other.named_buffers(), strict=True):
            assert torch.equal(a, b), name
        assert [m.training for m in one.modules()] == [m.training for m in other.modules()]
        return
    flat_one, _, structure_one = flatten(one)
    flat_other, _, structure_other = flatten(other)
    assert structure_one == structure_other
    for a, b in zip(flat_one, flat_other, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b
