"""Preserves the state of a pipeline's modules across an evaluation, and loads it from a state dict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from penstock._base.errors import ArgumentError
from penstock.runtime.gradients.dtensors import copy_into
from penstock.runtime.model.split_model import SplitModel


@contextmanager
def evaluating(split: SplitModel, loss: object = None) -> Iterator[None]:
    """Wrap an evaluation: modules, and a loss that is one, are in evaluation mode. Restores modes and buffers."""
    extra = loss if isinstance(loss, nn.Module) else nn.Module()
    modes = {m: m.training for m in (*split.modules, *split.model.modules(), *extra.modules())}  # some may come later
    kept_buffers = [*(buffer for _, buffer in split.held_buffers()), *extra.buffers()]
    buffers = [(buffer, buffer.detach().clone(), buffer._version) for buffer in kept_buffers]
    try:
        for module in modes:
            module.training = False
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for module in {*split.model.modules()} - modes.keys():  # put there meanwhile, as by BigBird for short inputs
            module.training = split.model.training
        for buffer, before, version in buffers:
            if buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(before)


def load_into(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor], accepted: Set[str], *, strict: bool) -> None:
    """Copy the values of `state` into `tensors`.

    Args:
        tensors: the tensors to fill, by name.
        state: the values, by name.
        accepted: every name that the model has.
        strict: whether all of `tensors` must be in `state`, and all of `state` must be accepted.

    Raises:
        ArgumentError: a name is missing or unknown, or a shape differs.
    """
    missing = [name for name in tensors if name not in state]
    unexpected = [name for name in state if name not in accepted]
    if strict and (missing or unexpected):
        lacks, has = (", ".join(names[:4]) or "none" for names in (missing, unexpected))
        raise ArgumentError(
            f"the state does not fit the model (missing: {lacks}; unknown to the model: {has}); pass the state of this "
            "model, or strict=False to load the tensors that both have"
        )
    matching = {name: tensor for name, tensor in tensors.items() if name in state}
    for name, tensor in matching.items():
        if state[name].shape != tensor.shape:
            raise ArgumentError(
                f"{name} has shape {tuple(state[name].shape)} in the state and {tuple(tensor.shape)} in the model; "
                "build the model with the sizes that it was saved with, or leave this tensor out and pass strict=False"
            )
    for name, tensor in matching.items():
        copy_into(tensor, state[name])
