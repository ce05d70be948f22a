"""How long a model's layers or stages compute on this machine: medians of a few runs of its units, or of its stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.stages import MODEL_INPUT
from penstock._base.trees import flatten
from penstock.errors import ArgumentError
from penstock.fabric.traffic.layers import Layer, bytes_of, record
from penstock.partition import NoStreams, Partitioner, UnmeasurableError
from penstock.partition.measure.measuring import BUDGET_SECONDS
from penstock.partition.measure.running import RunningUnit
from penstock.partition.run.loan import untouched_generators

REPETITIONS = 5
"""Follows an uncounted run, in which memory is allocated and kernels are chosen."""


def layer_seconds(
    model: nn.Module, layers: Sequence[Layer], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[float, tuple[float, ...]]:
    """The seconds of the forward, and of the backward of each layer: its part of what the unit takes that it is in.

    Args:
        model: with weights; neither it nor the random generators are changed.
        layers: in the order in which backward finishes them.

    Raises:
        ArgumentError: the weights are missing, or units cannot be run.
    """
    _check_weights(model)
    try:
        units = Partitioner(model, 1, streams=NoStreams()).profile(args, kwargs, BUDGET_SECONDS).units
    except UnmeasurableError as error:
        raise ArgumentError(f"compute='measure': the model's layers cannot be measured: {error}") from error
    place, unit_of = 0, dict[str, int]()
    for layer in reversed(layers):  # one that is in no unit of its name runs behind the layer before
        module = layer.name.partition(" (")[0]
        place = max((n for n, unit in enumerate(units) if f"{module}.".startswith(f"{unit.name}.")), default=place)
        unit_of[layer.name] = place
    backward, parts = dict.fromkeys(unit_of.values(), 0.0), dict.fromkeys(unit_of.values(), 0)
    for number, unit in enumerate(units):  # those without a layer count with the one before
        owner = max((one for one in backward if one <= number), default=min(backward))
        backward[owner] += unit.input_gradient_seconds + unit.weight_gradient_seconds
    for layer in layers:
        parts[unit_of[layer.name]] += bytes_of(layer.parameters)
    shares = (bytes_of(layer.parameters) / max(parts[unit_of[layer.name]], 1) for layer in layers)
    seconds = tuple(share * backward[unit_of[layer.name]] for share, layer in zip(shares, layers, strict=True))
    return sum(unit.forward_seconds for unit in units), seconds


def stage_seconds(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], stages: int, **options: Any
) -> list[tuple[float, float]]:
    """The seconds of each stage's forward and whole backward for one microbatch. Changes nothing, as `layer_seconds`.

    Raises:
        ArgumentError: the weights are missing.
    """
    _check_weights(model)
    partition = record(model, args, kwargs, stages, **options).partition
    given = partition.arrange(flatten((tuple(args), dict(kwargs))).leaves)
    values: dict[tuple[int, str], Tensor] = {
        (MODEL_INPUT, i.name): x for i, x in zip(partition.stages[0].meta.inputs, given, strict=True)
    }
    measured = []
    with torch.enable_grad(), untouched_generators():
        for stage in partition.stages:
            unit = RunningUnit(stage, [values[i.source, i.name] for i in stage.meta.inputs], (), (), stage.device)
            unit.first()
            for _ in range(REPETITIONS):
                unit.run()
            times = unit.times()
            measured.append((times.forward, times.input_gradient + times.weight_gradient))
            values |= {(stage.meta.index, o.name): x for o, x in zip(stage.meta.outputs, unit.outputs, strict=True)}
    return measured


def _check_weights(model: nn.Module) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ArgumentError(
            "compute='measure' runs the model, whose parameters are on the meta device; give it weights, or pass the "
            "seconds of a stage's forward"
        )
