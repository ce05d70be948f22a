"""Refuses hooks on the gradients of modules that do not run as a whole: nothing would call them."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from penstock.compat import has_global_backward_hooks
from penstock.errors import PartitionError
from penstock.partition.obstacle import Obstacle

BACKWARD_HOOKS = ("_backward_hooks", "_backward_pre_hooks")


def refuse_backward_hooks(model: nn.Module, units: Collection[int]) -> None:
    """Raises Obstacle if a module that does not run as a whole has hooks on its gradients."""
    if has_global_backward_hooks() and id(model) not in units:
        raise PartitionError(
            "hooks on the gradients of all modules are registered (register_module_full_backward_hook), but a pipeline "
            "does not call modules that it records call by call, the model itself among them, so that nothing would "
            "call the hooks for those. Register them on the blocks: block.register_full_backward_hook(...)"
        )
    pending = [("", model)]
    while pending:
        name, module = pending.pop(0)
        if any(getattr(module, hooks) for hooks in BACKWARD_HOOKS):
            what = f"module {name!r}" if name else "the model"
            raise Obstacle(
                f"{what} has a backward hook, but does not run as a whole, so that nothing would call the hook", name
            )
        inside = ((f"{name}.{n}" if name else n, child) for n, child in module.named_children())
        pending += [(n, child) for n, child in inside if id(child) not in units]
