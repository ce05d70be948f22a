"""How long a model's layers or stages compute on this machine: medians of a few runs on a copy of the model."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.errors import ArgumentError
from penstock._base.pytree import flatten, leaf_tensors
from penstock._base.stages import MODEL_INPUT
from penstock.network.fabric.traffic.layers import Layer, record
from penstock.partition.measure.clock import synchronize
from penstock.partition.measure.footprint import backward_roots
from penstock.partition.measure.running import UnitRunner
from penstock.partition.record.fakes import untouched_generators

REPETITIONS = 5
"""Follows an uncounted run, in which memory is allocated and kernels are chosen."""


def layer_seconds(
    model: nn.Module, layers: Sequence[Layer], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[float, list[float]]:
    """Return the seconds of the forward, and of the backward from each layer's gradients to the next, in backward
    order.

    Args:
        model: with weights; neither it nor the random generators are changed.
        layers: in the order in which backward finishes them; those with nothing to train take no time.

    Raises:
        ArgumentError: the weights are missing, or no result takes a gradient.
    """
    _check_weights(model)
    indices = {id(p): index for index, layer in enumerate(layers) for p in layer.trained}
    clones: dict[int, Any] = {}
    twin = copy.deepcopy(model, clones)
    ended = [0] * len(layers)

    def note(index: int, parameter: Tensor) -> None:
        synchronize(parameter.device)
        ended[index] = time.perf_counter_ns()

    for key, index in indices.items():
        clones[key].register_post_accumulate_grad_hook(partial(note, index))
    runs = [_time_layers(twin, args, kwargs, ended) for _ in range(REPETITIONS + 1)][1:]
    forwards, backwards = zip(*runs, strict=True)
    return statistics.median(forwards), [statistics.median(times) for times in zip(*backwards, strict=True)]


def _time_layers(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], ended: list[int]
) -> tuple[float, list[float]]:
    """Run once. A layer that ends before one ahead of it took no time itself."""
    model.zero_grad()
    ended[:] = [0] * len(ended)
    with untouched_generators():
        began = time.perf_counter_ns()
        results = leaf_tensors(model(*args, **kwargs))
        edges, make_gradients = backward_roots(results)
        if not edges:
            raise ArgumentError("no result of the model takes a gradient, so there is no backward to measure")
        gradients = make_gradients()
        synchronize(gradients[0].device)
        forward_ended = at = time.perf_counter_ns()
        torch.autograd.backward(edges, gradients)
    seconds = []
    for end in ended:
        seconds.append(max(end - at, 0) / 1e9)
        at = max(at, end)
    return (forward_ended - began) / 1e9, seconds


def stage_seconds(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], stages: int, **options: Any
) -> list[tuple[float, float]]:
    """Return the seconds of each stage's forward and whole backward for one microbatch. Change nothing, as
    `layer_seconds`. Raise ArgumentError if the weights are missing."""
    _check_weights(model)
    partition = record(model, args, kwargs, stages, **options).partition
    inputs = partition.arrange(flatten((tuple(args), dict(kwargs))).leaves)
    values: dict[tuple[int, str], Tensor] = {
        (MODEL_INPUT, i.name): x for i, x in zip(partition.stages[0].meta.inputs, inputs, strict=True)
    }
    measured = []
    with torch.enable_grad(), untouched_generators():
        for stage in partition.stages:
            unit = UnitRunner(stage, [values[i.source, i.name] for i in stage.meta.inputs])
            outputs = unit.begin()
            for _ in range(REPETITIONS):
                unit.run()
            forward, backward = unit.medians()
            measured.append((forward, backward))
            values |= {(stage.meta.index, o.name): x for o, x in zip(stage.meta.outputs, outputs, strict=True)}
    return measured


def _check_weights(model: nn.Module) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ArgumentError(
            "compute='measure' runs the model, whose parameters are on the meta device; load weights, or pass the "
            "seconds of a stage's forward"
        )
