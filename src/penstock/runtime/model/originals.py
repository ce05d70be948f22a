"""The parameters and buffers that a pipeline was made with, and what a step that raises has done to a model, undone.

Stages and state dicts have the original tensors, so whatever takes their place is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Set
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_

from torch import Tensor, nn

from penstock._base.errors import ArgumentError, PartitionError


class Originals:
    """The tensors of one model.

    Args:
        model: the model.
        opened: by id, the modules that are no blocks. Tables that blocks compute (non-persistent buffers in them) may
            be replaced.

    Attributes:
        parameters: every parameter, once.
    """

    def __init__(self, model: nn.Module, opened: Collection[int]) -> None:
        self._model = model
        self.parameters = list(model.parameters())
        self._modules = list(model.modules())
        self._contents = self._current_contents()
        self._names = [name for name, _ in model.named_parameters()]
        self._slots = [
            (f"{name}.{key}".lstrip("."), module, key)
            for name, module in model.named_modules()
            for key in module._buffers
            if id(module) in opened or key not in module._non_persistent_buffers_set
        ]
        self._buffers = self._current_buffers()

    def check_unchanged(self) -> None:
        """Check, before a step, that the model still holds these parameters and buffers. Raise ArgumentError if it does
        not."""
        for (name, _, _), before, buffer in zip(self._slots, self._buffers, self._current_buffers(), strict=True):
            if buffer is not before:
                raise ArgumentError(_replaced(name, before, buffer))
        contents = self._current_contents()
        if len(contents) == len(self._contents) and all(map(is_, contents, self._contents)):
            return
        current = list(self._model.parameters())
        if len(current) == len(self.parameters) and all(map(is_, current, self.parameters)):
            self._modules = list(self._model.modules())
            self._contents = self._current_contents()
            return
        original_ids, current_ids = {id(p) for p in self.parameters}, {id(p) for p in current}
        new = [name for name, parameter in self._model.named_parameters() if id(parameter) not in original_ids]
        missing = [name for name, p in zip(self._names, self.parameters, strict=True) if id(p) not in current_ids]
        if new or missing:
            raise ArgumentError(
                "the model no longer holds the parameters that the pipeline was made with: "
                f"{f'{new[0]!r} is new' if new else f'{missing[0]!r} is gone'}. A module or parameter "
                "that is put in place later belongs to no stage, and no optimizer made from pipe.parameters() has it: "
                "make a new pipeline, and a new optimizer. Values can be changed in place (load_state_dict, copy_)"
            )

    def settle(self) -> None:
        """Check, after a step, that its forwards replaced no buffer that state dicts hold. Raise PartitionError if they
        did."""
        now = self._current_buffers()
        for (name, module, key), before, buffer in zip(self._slots, self._buffers, now, strict=True):
            if buffer is not before and before is not None and key not in module._non_persistent_buffers_set:
                raise PartitionError(
                    f"the forward replaced buffer {name!r} by a new tensor, which a recording did not show: stages and "
                    f"state dicts hold the one from before. Update it in place: self.{key}.copy_(...); if it is a "
                    "cache of constants, register it with persistent=False"
                )
        self._buffers = now  # a forward may replace a buffer of constants that it computes

    def _current_contents(self) -> list[object]:
        """Return the parameters and modules that each module holds. If they are the same, so are the model's
        parameters, which take longer to find."""
        return [
            *chain.from_iterable(map(dict.values, map(_parameters, self._modules))),
            *chain.from_iterable(map(dict.values, map(_children, self._modules))),
        ]

    def _current_buffers(self) -> list[Tensor | None]:
        return [module._buffers.get(key) for _, module, key in self._slots]


_parameters, _children = attrgetter("_parameters"), attrgetter("_modules")


def _replaced(name: str, before: Tensor | None, after: Tensor | None) -> str:
    if before is not None and after is not None and (before.dtype, before.device) != (after.dtype, after.device):
        old, new = (f"{str(tensor.dtype).removeprefix('torch.')} on {tensor.device}" for tensor in (before, after))
        return (
            f"buffer {name!r} was {old} when the pipeline was made, and is {new} now: the model was converted "
            "(.double(), .half(), .to(...)), which puts new buffers in place of those that stages and state dicts "
            "have. Convert it before penstock.pipeline, or make a new pipeline"
        )
    return (
        f"buffer {name!r} has been replaced by another tensor since the last step: stages and state dicts have the one "
        "from before. Change its values in place (copy_), or make a new pipeline"
    )


_DICTS = ("_buffers", "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@contextmanager
def undo_on_error(
    modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter], updated: Set[Tensor] | None, *, local: bool
) -> Iterator[None]:
    """Wrap a step: undoes what one that raises has done to the model.

    In several processes, where the run then ends, only gradients that were None are so again.

    Args:
        updated: what the step may update besides gradients; None in an evaluation, which updates nothing.
        local: whether one process drives all ranks.
    """
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    existing = {grad for _, grad in gradients if grad is not None}
    changeable = updated | existing if local and updated is not None else ()
    copies = [(tensor.detach(), tensor.detach().clone()) for tensor in changeable]
    states = [d for m in modules for d in (vars(m), *(vars(m).get(name, {}) for name in _DICTS))] if local else []
    attributes = [state.copy() for state in states]
    try:
        yield
    except BaseException as error:
        for state, before in zip(states, attributes, strict=True):
            state.clear()
            state.update(before)
        if existing and not local:
            error.add_note("penstock: gradients from before this step may hold part of it; call zero_grad()")
        for parameter, grad in gradients:
            if local or grad is None:
                parameter.grad = grad
        for tensor, copy in copies:
            tensor.copy_(copy)
        raise
