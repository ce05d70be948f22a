"""Which models, schedules and options have passed `verify`: in this process, or in the run that a folder continues."""

from __future__ import annotations

from hashlib import sha256
from types import CodeType, FunctionType
from typing import Any

import torch

from penstock.pipe.options import Options
from penstock.runtime.execute.engine import Engine
from penstock.runtime.model.split_model import SplitModel
from penstock.schedule import Schedule

verified_fingerprints: set[str] = set()
"""The fingerprints of what has passed."""

UNVERIFIED = "unverified: this model, schedule and options have not passed penstock.verify"
"""The note of a pipeline whose fingerprint has not passed."""

_OPTIONS = (
    *("loss_fn", "reduction", "batch_dims", "split_fn", "merge_fn", "leaf_modules", "split_inside", "transport"),
    *("parallelize", "unshard_window", "recompute", "offload", "deferred_batch_norm", "compile", "grad_dtype"),
)
"""The options that change what is computed, or where."""


def compute_fingerprint(split: SplitModel, engine: Engine, order: Schedule, options: Options) -> str:
    """Identify a model, schedule and options: modules with the code of their methods; shapes, dtypes and
    `requires_grad` of parameters and buffers; each rank's actions; cuts, replicas, types of devices, options.

    Values, plain attributes, seeds, shapes of batches and functions that methods call do not count.
    """
    modules, world = dict(split.model.named_modules()), engine.world
    tensors = (*split.model.named_parameters(), *split.model.named_buffers())
    classes = dict.fromkeys(base for module in modules.values() for base in type(module).__mro__)
    facts = (
        [(name, str(type(module)), module.extra_repr()) for name, module in modules.items()],
        [_text(method) for kind in classes if not kind.__module__.startswith("torch.") for method in _methods(kind)],
        [(name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors],
        (order.name, str(order.placement), order.microbatches, split.cuts, torch.__version__),
        [(row.stage, row.op, row.microbatch, row.joined) for row in order.rows],
        (world.is_local, world.data_parallel, len(world.column), [device.type for device in engine.devices]),
        [_text(getattr(options, name)) for name in _OPTIONS],
        [_text(make) for make in options.features if not str(make.__module__).startswith("penstock.verification.")],
    )
    return sha256(repr(facts).encode()).hexdigest()[:16]


def _text(value: Any) -> str:
    """Return a text that is the same for a copy, and in every process."""
    if isinstance(value, (list, tuple)):
        return str([_text(item) for item in value])
    value = getattr(value, "func", value)  # of functools.partial
    if hasattr(value, "__code__"):
        return f"{value.__module__}.{value.__qualname__} {_code(value.__code__)}"
    text = repr(value)
    return f"{type(value)} {[_text(method) for method in _methods(type(value))]}" if " at 0x" in text else text


def _methods(kind: type) -> list[FunctionType]:
    return [value for value in vars(kind).values() if isinstance(value, FunctionType)]


def _code(code: CodeType) -> str:
    constants = [_code(value) if isinstance(value, CodeType) else _constant(value) for value in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


def _constant(value: object) -> str:
    return str(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)
