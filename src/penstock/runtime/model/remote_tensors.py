"""Parameters and buffers whose values are on other ranks: a training script that computes with them gets an error.

They are on the meta device, and torch does not always raise: `local.add_(remote)` leaves `local` as it is. A teacher's
moving average of a student on another rank would merely shrink.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.compat import plain_tensors
from penstock._base.errors import ArgumentError
from penstock.partition import tensors_in

WRITE_ALL = (
    "call penstock.checkpoint.export_safetensors(path, pipe) on every rank (for torch.save: pipe.all_gather_object("
    "pipe.state_dict()) on every rank is a list of each one's part); to resume, penstock.checkpoint.save(folder, pipe, "
    "optimizer)"
)
"""What writes the stages of every rank: `pipe.state_dict()` is only those of this one."""


class RemoteTensor(Tensor):
    """A tensor on the meta device, or one computed from it; it carries the name of the missing tensor."""

    penstock_name = "a parameter"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with plain_tensors():
            return _run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Return another stand-in: an average of the weights starts with a copy of the model
        (`AveragedModel(pipe.model)`)."""
        copied: Tensor = memo.setdefault(id(self), make_remote(self, self.penstock_name))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ArgumentError(
            f"{self.penstock_name!r} has no values on this rank, so that a file of the model would lack them: to "
            f"write the whole model, {WRITE_ALL}"
        )


class RemoteParameter(RemoteTensor, nn.Parameter):
    """The same for a parameter."""


def make_remote(tensor: Tensor, name: str) -> Tensor:
    """Return a stand-in for the parameter or buffer of that name, whose values are on another rank."""
    empty = torch.empty_like(tensor, device="meta").detach()
    if isinstance(tensor, nn.Parameter):
        parameter = RemoteParameter(empty, tensor.requires_grad)
        parameter.penstock_name = name
        return parameter
    marked: Tensor = _mark_remote(empty, name)
    return marked


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    inputs = list(tensors_in((args, kwargs)))
    name = next(tensor.penstock_name for tensor in inputs if isinstance(tensor, RemoteTensor))
    if any(map(_has_values, _written_tensors(func, args, kwargs))):
        raise _no_values_error(name)
    if _fills_randomly(func):
        raise ArgumentError(
            f"{name!r} has no values on this rank, so that nothing would be drawn for it, and the random numbers of "
            "this rank's own parameters would differ from plain torch's. Initialize the model before "
            "pipeline(...), from the same seed on every rank; to draw for this rank's parameters alone, loop over "
            "pipe.named_parameters()"
        )
    try:
        result = func(*args, **kwargs)
    except (NotImplementedError, RuntimeError) as error:
        raise _no_values_error(name) from error
    if any(map(_has_values, inputs)) and any(map(_has_values, tensors_in(result))):
        raise _no_values_error(name)
    if type(result) in (tuple, list):
        return type(result)(_mark_remote(item, name) for item in result)
    return _mark_remote(result, name)


def _fills_randomly(func: Any) -> bool:
    """Whether a function fills its tensor with random numbers, as PyTorch's DCGAN example does once the model is
    wrapped: `netG.apply(weights_init)`."""
    name = getattr(func, "__name__", "")
    if getattr(func, "__module__", "") == "torch.nn.init":
        return name not in ("constant_", "ones_", "zeros_", "eye_", "dirac_")
    if name == "__get__":  # torch.nn.init asks whether a tensor is on the meta device, and then does nothing
        return getattr(func, "__self__", None) is Tensor.is_meta and _is_asked_by_init()
    return name in _DRAWING


def _is_asked_by_init() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == nn.init.__file__


def _mark_remote(value: Any, name: str) -> Any:
    if not isinstance(value, Tensor) or isinstance(value, RemoteTensor) or _has_values(value):
        return value
    marked = value.as_subclass(RemoteTensor)
    marked.penstock_name = name
    return marked


def _written_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an in-place operation writes to."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE
    return list(tensors_in((args[0] if in_place and args else (), kwargs.get("out"))))


def _has_values(tensor: Tensor) -> bool:
    return tensor.device.type != "meta"


def _no_values_error(name: str) -> ArgumentError:
    return ArgumentError(
        f"{name!r} has no values on this rank: it belongs to a stage of another one. To run the model, call "
        f"pipe.predict; to save it, {WRITE_ALL}. In a loop over parameters, use those of pipe.named_parameters(), "
        "which are this rank's. Make an average of the weights from the pipeline, not before: "
        "AveragedModel(pipe.model). What combines parameters of several ranks (an average that a part of the model "
        "keeps of another part) belongs in the model's forward, under torch.no_grad(), where stages get what they read"
    )


_DRAWING = {
    *("normal_", "uniform_", "random_", "exponential_", "log_normal_", "cauchy_", "geometric_", "bernoulli_"),
    *("rand_like", "randn_like", "randint_like", "bernoulli", "multinomial", "normal", "poisson"),
    *("dropout", "alpha_dropout", "feature_dropout", "dropout_", "rrelu", "rrelu_"),
}

_IN_PLACE = {
    *("__iadd__", "__isub__", "__imul__", "__imatmul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__imod__"),
    *("__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__setitem__"),
}
