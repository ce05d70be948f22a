"""Runs a unit once on made-up real tensors, to get its result's shapes if fake tensors cannot give them.

A mixture of experts, for example, asks which experts the values chose. Inside a unit, which runs as a whole, that is
fine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from penstock._base.compat import FakeTensor, storage_of, unset_fake_temporarily
from penstock._base.errors import PartitionError
from penstock._base.trees import map_tensors
from penstock.partition.run.loan import Loan, Snapshot, fake_value
from penstock.partition.state.left_behind import attributes_of
from penstock.partition.units.units import Call, Unit, has_forward
from penstock.partition.values.memory import extent
from penstock.partition.values.objects import tensors_in
from penstock.partition.values.passed import Passed
from penstock.partition.watch.observer import Observer

PLAIN = (bool, int, float, complex, str)


def run_for_real(
    original: Call,
    unit: Unit,
    args: Any,
    kwargs: Any,
    loan: Loan,
    observer: Observer,
    reason: Exception,
    taken: Collection[str] = (),
) -> tuple[Any, list[Any], frozenset[int]]:
    """Runs a unit for real. Returns its result as fake tensors, which of its modules drew, and the (fake) memory that
    it wrote.

    Parameters and buffers are copied, so that the model's own are not updated; if they are on `meta`, they are made up.
    Attributes in `taken` keep what the unit leaves there, even without a gradient.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}  # id of a fake -> the fake, and the real tensor that stands in for it

    def real(fake: Tensor) -> Tensor:
        if id(fake) not in made:
            known = not isinstance(fake, FakeTensor)
            stand_in = fake.clone() if known else _make(fake, loan.originals.get(id(fake)), loan.device)
            made[id(fake)] = fake, stand_in
        return made[id(fake)][1]

    snapshot = Snapshot(unit.module)
    with unset_fake_temporarily() as mode:
        try:
            with observer.trial():  # making up tensors writes to them
                real_args, real_kwargs = map_tensors(real, (args, kwargs))
                _fill(unit.module, real)
                given = Passed(real_args, real_kwargs)
                before = [stand_in._version for _, stand_in in made.values()]
            result = original(unit.module, *real_args, **real_kwargs)
        except PartitionError:
            raise
        except Exception as error:
            fake = "" if type(error) is type(reason) else f" (on fake tensors: {type(reason).__name__}: {reason})"
            raise PartitionError(
                f"{unit.name!r} fails on inputs like the given ones: {type(error).__name__}: {error}{fake}"
            ) from error
        finally:
            wanted = {id(value) for attribute, value in attributes_of(unit.module, unit.name, taken)}
            snapshot.restore(lambda value: isinstance(value, PLAIN) or id(value) in wanted or _learns(value))
    drew, seen = observer.take(keep=False)
    written = set[int]()
    for (stand_for, stand_in), version in zip(made.values(), before, strict=True):
        if stand_in._version != version:
            torch.autograd.graph.increment_version(stand_for)
        if stand_in._version != version or storage_of(stand_in) in seen:  # batch norm does not count as a new version
            written.add(observer.root(stand_for))  # the run on fakes may have given it other memory
    back = _back_to_fakes(list(made.values()), mode, loan.device)
    left = map_tensors(back, (result, given.containers))
    for module, name, value in list(snapshot.changed()):
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            vars(module)[name] = back(value)
    Passed(args, kwargs).write_back(given.changed(), left[1])
    return left[0], drew, frozenset(written)


def _fill(unit: nn.Module, real: Callable[[Tensor], Tensor]) -> None:
    """Puts real tensors in place of the unit's parameters and buffers."""
    for module in list(unit.modules()):
        for slots in (module._parameters, module._buffers):
            slots.update({k: real(t) for k, t in slots.items() if t is not None})  # type: ignore[misc]
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, n, None) for n in module._flat_weights_names]


def _learns(value: Any) -> bool:
    """Whether an attribute was set to something that requires a gradient, such as a loss term. It stays, so that code
    that finds it can be told where it came from."""
    return any(t.requires_grad for t in tensors_in(value))


def may_draw(unit: nn.Module, drew: Sequence[nn.Module | None]) -> list[nn.Module | None]:
    """The modules that drew, and those that might for other values: a mixture calls only some of its experts.

    What a forward outside torch does for other values is unknown.
    """
    kinds = {type(module) for module in drew if module is not None}
    return list(dict.fromkeys([*drew, *(m for m in unit.modules() if type(m) in kinds or _may_draw(m))]))


def _may_draw(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return False  # its hooks would have to be compiled
    if not type(module).__module__.startswith("torch.nn."):
        return has_forward(module)
    if isinstance(module, _DropoutNd):
        return module.training and module.p > 0
    return isinstance(module, nn.RReLU) or bool(getattr(module, "dropout", 0.0))


def _back_to_fakes(made: list[tuple[Tensor, Tensor]], mode: Any, device: torch.device) -> Callable[[Tensor], Tensor]:
    by_id = {id(real): fake for fake, real in made}
    by_storage = {storage_of(real): fake for fake, real in made}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) in by_id:
            return by_id[id(tensor)]
        base = by_storage.get(storage_of(tensor))
        if base is not None and base.dtype == tensor.dtype:
            return base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        return fake_value(tensor, mode, device)

    return fake


def _make(fake: Tensor, original: Tensor | None, device: torch.device) -> Tensor:
    """A real tensor to stand in for a fake one: a copy of the model's parameter or buffer, or made up."""
    with torch.no_grad():
        if original is not None and original.device == device:
            return copy.deepcopy(original) if isinstance(original, nn.Parameter) else original.clone()
        if original is not None and not original.is_meta:
            there = original.detach().to(device)
            return nn.Parameter(there, original.requires_grad) if isinstance(original, nn.Parameter) else there
        memory = torch.empty(extent(fake.size(), fake.stride()), dtype=fake.dtype, device=fake.device)
        if fake.is_floating_point() or fake.is_complex():
            memory.normal_(std=1.0 if original is None else 0.02)
        else:
            memory.fill_(fake.dtype == torch.bool)  # a mask that is all False would leave nothing to attend to
        tensor = memory.as_strided(fake.size(), fake.stride()).detach()
    if fake.is_leaf or not fake.requires_grad:
        return tensor.requires_grad_(fake.requires_grad)
    with torch.enable_grad():
        value = tensor.requires_grad_().clone()  # not a leaf, so that it may be updated in place
        return value if value.stride() == tensor.stride() else tensor.view_as(tensor)
