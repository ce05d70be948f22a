"""How long a model's layers or stages compute on this machine: medians of a few runs on a copy of the model."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ArgumentError
from penstock.partition import Stage
from penstock.stages import MODEL_INPUT
from penstock.traffic.layers import Layer, record
from penstock.trees import flatten, leaf_tensors

REPETITIONS = 5
"""Follows an uncounted run, in which memory is allocated and kernels are chosen."""


def layer_seconds(
    model: nn.Module, layers: Sequence[Layer], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[float, tuple[float, ...]]:
    """The seconds of the forward, and of the backward from each layer's gradients to the next, in backward order.

    Args:
        model: with weights; neither it nor the random generators are changed.
        layers: in the order in which backward finishes them; those with nothing to train take no time.

    Raises:
        ArgumentError: the weights are missing, or no result takes a gradient.
    """
    places = {id(p): place for place, one in enumerate(layers) for p in one.trained}
    clones: dict[int, Any] = {}
    twin = _copied(model, clones)
    ended = [0] * len(layers)

    def stamp(place: int) -> Any:
        def note(parameter: Tensor) -> None:
            _settle(parameter)
            ended[place] = time.perf_counter_ns()

        return note

    for key, place in places.items():
        clones[key].register_post_accumulate_grad_hook(stamp(place))
    runs = [_backward_of_layers(twin, args, kwargs, ended) for _ in range(REPETITIONS + 1)][1:]
    forwards, backwards = zip(*runs, strict=True)
    return statistics.median(forwards), tuple(statistics.median(times) for times in zip(*backwards, strict=True))


def _backward_of_layers(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], ended: list[int]
) -> tuple[float, list[float]]:
    """One run. A layer that ends before one ahead of it took no time itself."""
    model.zero_grad()
    ended[:] = [0] * len(ended)
    with torch.random.fork_rng():
        began = time.perf_counter_ns()
        result = model(*args, **kwargs)
        _settle(result)
        forward_ended = at = time.perf_counter_ns()
        _backward(leaf_tensors(result))
    seconds = []
    for end in ended:
        seconds.append(max(end - at, 0) / 1e9)
        at = max(at, end)
    return (forward_ended - began) / 1e9, seconds


def stage_seconds(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], stages: int, **options: Any
) -> list[tuple[float, float]]:
    """The seconds of each stage's forward and whole backward for one microbatch.

    Raises:
        ArgumentError: the weights are missing.
    """
    partition = record(_copied(model, {}), args, kwargs, stages, **options).partition
    values: dict[tuple[int, str], Tensor] = {}
    given = partition.take(flatten((tuple(args), dict(kwargs))))
    values |= {(MODEL_INPUT, i.name): x for i, x in zip(partition.stages[0].meta.inputs, given, strict=True)}
    measured = []
    for stage in partition.stages:
        made: Sequence[Tensor] = ()
        runs = []
        for _ in range(REPETITIONS + 1):
            inputs = [_entering(values[i.source, i.name], i.meta.requires_grad) for i in stage.meta.inputs]
            made, forward, backward = _run(stage, inputs)
            runs.append((forward, backward))
        # a value that a later stage takes from here, updated in place or not
        values |= {(stage.meta.index, o.name): x.detach() for o, x in zip(stage.meta.outputs, made, strict=True)}
        forwards, backwards = zip(*runs[1:], strict=True)
        measured.append((statistics.median(forwards), statistics.median(backwards)))
    return measured


def _run(stage: Stage, inputs: Sequence[Tensor]) -> tuple[Sequence[Tensor], float, float]:
    with torch.random.fork_rng(), torch.enable_grad():
        began = time.perf_counter_ns()
        made = stage.forward(*inputs)
        _settle(made)
        middle = time.perf_counter_ns()
        if any(one.requires_grad for one in made):
            _backward(made)
        _settle(made)
        ended = time.perf_counter_ns()
    return made, (middle - began) / 1e9, (ended - middle) / 1e9


def _entering(value: Tensor, takes_gradient: bool) -> Tensor:
    """A copy of a value that enters a stage, which may update it in place."""
    if not takes_gradient:
        return value.detach().clone()
    return value.detach().requires_grad_().clone()


def _backward(made: Sequence[Tensor]) -> None:
    """Runs backward from a gradient of ones for each result that takes one."""
    roots = [one for one in made if one.requires_grad]
    if not roots:
        raise ArgumentError("no result of the model takes a gradient, so that there is no backward to measure")
    torch.autograd.backward(roots, [torch.ones_like(one) for one in roots])


def _copied(model: nn.Module, clones: dict[int, Any]) -> nn.Module:
    """A copy of the model; `clones` maps the `id` of each thing in it to its copy."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ArgumentError(
            "compute='measure' runs the model, whose parameters are on the meta device; give it weights, or give the "
            "seconds of a stage's forward"
        )
    return copy.deepcopy(model, clones)


def _settle(result: Any) -> None:
    """Waits for a GPU, which runs asynchronously."""
    if any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in flatten(result).leaves):
        torch.cuda.synchronize()
