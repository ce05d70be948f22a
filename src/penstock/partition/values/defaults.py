"""Keyword arguments that a pipeline adds to the caller's, and settings that would help: of `transformers` models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn


def default_kwargs(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Keyword arguments that a pipeline adds to the caller's: `use_cache=False` for `transformers` models.

    A key-value cache is useless in training, and everything that a block writes into it would cross every later cut.
    Pass the same to the unsplit model when comparing.
    """
    if "use_cache" in (kwargs or {}) or not hasattr(model, "config") or not _keeps_a_cache(model):
        return {}
    signature = _signature(model)
    if "use_cache" in signature.parameters:
        given = "use_cache" in signature.bind_partial(*args, **(kwargs or {})).arguments
        return {} if given else {"use_cache": False}
    # A wrapper, such as that of `peft` or of a vision-language model, passes keyword arguments on to the model inside.
    hands_on = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    return {"use_cache": False} if hands_on else {}


def _keeps_a_cache(model: nn.Module) -> bool:
    """Whether the model, or one inside it, makes a key-value cache unless told not to."""
    configured = (m for m in model.modules() if getattr(getattr(m, "config", None), "use_cache", False))
    return any("use_cache" in _signature(m).parameters for m in configured)


def _signature(module: nn.Module) -> inspect.Signature:
    forward: Callable[..., Any] = module.forward
    return inspect.signature(forward)
