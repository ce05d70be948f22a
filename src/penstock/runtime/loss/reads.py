"""Makes sure that a loss function reads nothing from the model except what the last stage has.

A penalty on all weights (`sum(p.square().sum() for p in model.parameters())`) would train only those of the last stage,
or use meta-device stand-ins for those of other ranks. The first loss of a bound schedule is watched for this.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from penstock.errors import ArgumentError
from penstock.partition import leaves_of, tensors_in


class _Watch(TorchFunctionMode):
    def __init__(self, elsewhere: Mapping[int, str]) -> None:
        super().__init__()
        self._elsewhere = elsewhere

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            result = func(*args, **(kwargs or {}))
        except Exception:
            self._refuse(args, kwargs)
            raise
        if isinstance(result, Tensor):
            self._refuse(args, kwargs)
        return result

    def _refuse(self, args: Any, kwargs: Any) -> None:
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) in self._elsewhere:
                raise _refusal(self._elsewhere[id(tensor)])


@contextmanager
def watching(elsewhere: Mapping[int, str]) -> Iterator[None]:
    """Wraps the loss function: raises ArgumentError if it reads one of these tensors.

    Args:
        elsewhere: `id` -> name of the model's parameters and updated buffers that are not on the last stage.
    """
    with _Watch(elsewhere):
        yield


def check_graph(loss: Tensor, elsewhere: Mapping[int, str]) -> None:
    """Raises ArgumentError if a gradient would flow from the loss directly into one of these tensors."""
    for leaf in leaves_of([loss]):
        if id(leaf) in elsewhere:
            raise _refusal(elsewhere[id(leaf)])


def _refusal(name: str) -> ArgumentError:
    return ArgumentError(
        f"the loss reads {name!r} of the model, which is not on the last stage, where the loss is computed: its value "
        "there would be out of date, and its gradient would be lost. Compute this term in the forward and return "
        "it (or leave it in an attribute), or give the optimizer weight_decay=... for a penalty on weights"
    )
