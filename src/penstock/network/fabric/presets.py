"""Workloads by name. What a layer sends follows from its widths, so neither a model nor torch is needed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from penstock._base.errors import ArgumentError
from penstock.network.fabric.workload import Transfer, Workload

MLP_WIDTHS = (784, 256, 128, 64, 10)
"""The layer widths, input first, of the classic classifier of 28 x 28 images into ten digits."""

FLOAT32_BYTES = 4


def mlp() -> Workload:
    """Returns data-parallel training of fully connected layers, which all-reduces one layer's gradients after another.

    The backward pass computes the last layer's gradients first, so a step sends fc4, fc3, fc2, fc1: 2600, 33024, 131584
    and 803840 bytes.
    """
    layers = [(f"fc{number}", (fed + 1) * made) for number, (fed, made) in enumerate(pairwise(MLP_WIDTHS), start=1)]
    return Workload(
        name=f"mlp {'-'.join(map(str, MLP_WIDTHS))}",
        transfers=tuple(Transfer(name, count * FLOAT32_BYTES) for name, count in reversed(layers)),
        notes=("each layer's weight and bias gradients in float32, in the order the backward computes them",),
    )


PRESETS: dict[str, Callable[[], Workload]] = {"mlp": mlp}


def preset(name: str) -> Workload:
    """Returns the workload with this name. Raises ArgumentError if there is none."""
    if name not in PRESETS:
        raise ArgumentError(f"there is no preset {name!r}: pass one of {', '.join(PRESETS)}")
    return PRESETS[name]()
