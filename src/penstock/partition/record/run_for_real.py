"""Runs a unit that does not run on fake tensors once on made-up real ones, to get its result's shapes.

A mixture of experts, for example, asks which experts the values chose. Inside a unit, which runs as a whole, that is
fine. Most blocks that leave a tensor in an attribute (`self.l_aux` of DeepSpeed's and fairscale's experts) are opened,
so that nothing is left anywhere (`side_effects`). From one that runs for real the tensor is taken right after each
call, and is then a value like any other (`LeftInAttribute`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from penstock._base.compat import FakeTensor, storage_id, unset_fake_temporarily
from penstock._base.errors import PartitionError
from penstock._base.memory import extent
from penstock._base.pytree import map_tensors
from penstock.partition.nested import MutableArguments, tensors_in
from penstock.partition.record.fakes import Loan, Snapshot, fake_value, install_tensors, made_by_call
from penstock.partition.record.operator_effects import Observer
from penstock.partition.units import Unit, UnitCall, has_forward

PLAIN = (bool, int, float, complex, str)


def run_for_real(
    original: UnitCall,
    unit: Unit,
    args: Any,
    kwargs: Any,
    loan: Loan,
    observer: Observer,
    reason: Exception,
    attributes_read: Collection[str] = (),
) -> tuple[Any, list[Any], frozenset[int]]:
    """Run a unit for real. Return its result as fake tensors, which of its modules drew, and the (fake) memory that it
    wrote.

    Parameters and buffers are copied, so that the model's own are not updated; if they are on `meta`, they are made up.
    Attributes in `attributes_read` keep what the unit leaves there, even without a gradient.
    """
    pairs: dict[int, tuple[Tensor, Tensor]] = {}  # id of a fake -> the fake, and the real tensor that stands in for it

    def make_real(fake: Tensor) -> Tensor:
        if id(fake) not in pairs:
            is_known = not isinstance(fake, FakeTensor)
            stand_in = fake.clone() if is_known else _make_stand_in(fake, loan.originals.get(id(fake)), loan.device)
            pairs[id(fake)] = fake, stand_in
        return pairs[id(fake)][1]

    snapshot = Snapshot(unit.module)
    with unset_fake_temporarily() as mode:
        try:
            with observer.trial():  # making up tensors writes to them
                real_args, real_kwargs = map_tensors(make_real, (args, kwargs))
                install_tensors(unit.module, make_real)
                mutable = MutableArguments(real_args, real_kwargs)
                versions = [stand_in._version for _, stand_in in pairs.values()]
            result = original(unit.module, *real_args, **real_kwargs)
        except PartitionError:
            raise
        except Exception as error:
            cause = "" if type(error) is type(reason) else f" (on fake tensors: {type(reason).__name__}: {reason})"
            raise PartitionError(
                f"{unit.name!r} fails on inputs like the given ones: {type(error).__name__}: {error}{cause}"
            ) from error
        finally:
            keep = {id(value) for attribute, value in find_attributes(unit.module, unit.name, attributes_read)}
            # what requires a gradient, such as a loss term, stays, so that its finder can be told where it came from
            keep |= {id(value) for *_, value in snapshot.changed() if any(t.requires_grad for t in tensors_in(value))}
            snapshot.restore(lambda value: isinstance(value, PLAIN) or id(value) in keep)
    drew, writes = observer.take_effects(keep=False)
    written = set[int]()
    for (original_fake, stand_in), version in zip(pairs.values(), versions, strict=True):
        if stand_in._version != version:
            torch.autograd.graph.increment_version(original_fake)
        if stand_in._version != version or storage_id(stand_in) in writes:  # batch norm does not count as a new version
            written.add(observer.root(original_fake))  # the run on fakes may have given it other memory
    to_fake = _make_converter(list(pairs.values()), mode, loan.device)
    converted = map_tensors(to_fake, (result, mutable.containers))
    for module, name, value in list(snapshot.changed()):
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            vars(module)[name] = to_fake(value)
    MutableArguments(args, kwargs).write_back(mutable.changed(), converted[1])
    return converted[0], drew, frozenset(written)


def find_drawing_modules(unit: nn.Module, drew: Sequence[nn.Module | None]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules that draw when called (a mixture calls only some of its experts), and those that might: what
    a forward outside torch does for other values is unknown."""
    called = [unit if module is None else module for module in drew]
    kinds = {type(module) for module in drew if module is not None}
    draws = dict.fromkeys([*called, *(m for m in unit.modules() if type(m) in kinds or _draws(m))])
    return [*draws], [m for m in unit.modules() if m not in draws and _is_foreign(m)]


def _is_foreign(module: nn.Module) -> bool:
    is_scripted = isinstance(module, torch.jit.ScriptModule)  # its hooks would have to be compiled
    return not (is_scripted or type(module).__module__.startswith("torch.nn.")) and has_forward(module)


def _draws(module: nn.Module) -> bool:
    if not type(module).__module__.startswith("torch.nn."):
        return False
    if isinstance(module, _DropoutNd):
        return module.training and module.p > 0
    return isinstance(module, nn.RReLU) or bool(getattr(module, "dropout", 0.0))


def _make_converter(pairs: list[tuple[Tensor, Tensor]], mode: Any, device: torch.device) -> Callable[[Tensor], Tensor]:
    by_id = {id(real): fake for fake, real in pairs}
    by_storage = {storage_id(real): fake for fake, real in pairs}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) in by_id:
            return by_id[id(tensor)]
        base = by_storage.get(storage_id(tensor))
        if base is not None and base.dtype == tensor.dtype:
            return base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        return fake_value(tensor, mode, device)

    return fake


def _make_stand_in(fake: Tensor, original: Tensor | None, device: torch.device) -> Tensor:
    """Make a real tensor to stand in for a fake one: a copy of the model's parameter or buffer, or an arbitrary one."""
    with torch.no_grad():
        if original is not None and original.device == device:
            return copy.deepcopy(original) if isinstance(original, nn.Parameter) else original.clone()
        if original is not None and not original.is_meta:
            moved = original.detach().to(device)
            return nn.Parameter(moved, original.requires_grad) if isinstance(original, nn.Parameter) else moved
        memory = torch.empty(extent(fake.size(), fake.stride()), dtype=fake.dtype, device=fake.device)
        if fake.is_floating_point() or fake.is_complex():
            memory.normal_(std=1.0 if original is None else 0.02)
        else:
            memory.fill_(fake.dtype == torch.bool)  # a mask that is all False would leave nothing to attend to
        tensor = memory.as_strided(fake.size(), fake.stride()).detach()
    tensor.requires_grad_(fake.requires_grad)
    return tensor if fake.is_leaf or not fake.requires_grad else made_by_call(tensor)


@dataclass(frozen=True, slots=True)
class LeftInAttribute:
    """An attribute that each call of a block sets anew.

    Attributes:
        name: where a user finds it.
        entries: its module's attributes. Not the module: a stage would then hold its parameters twice.
        key: its own name.
    """

    name: str
    entries: Mapping[str, Any]
    key: str


def taken(result: Any, attribute: LeftInAttribute) -> Tensor:
    """Return what the call that returned `result` left in an attribute."""
    value: Tensor = attribute.entries[attribute.key]
    return value


def find_attributes(
    block: nn.Module, name: str, attributes_read: Collection[str]
) -> Iterator[tuple[LeftInAttribute, Tensor]]:
    """Yield the attributes of a block's modules that hold tensors to take, apart from parameters and buffers.

    These are tensors that require a gradient, and those in `attributes_read`, which did so in another recording: the
    loss of an evaluation reads them too.
    """
    for inner, module in block.named_modules(prefix=name):
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and (value.requires_grad or f"{inner}.{key}" in attributes_read):
                yield LeftInAttribute(f"{inner}.{key}", vars(module), key), value
