"""Runs one unit once on made-up real tensors to get the shapes of its result if fake tensors cannot.

A mixture of experts, for example, asks which experts the values chose. Inside a unit that is fine: it runs as a whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from penstock.compat import FakeTensor, generator_of, storage_of, unset_fake_temporarily
from penstock.errors import PartitionError
from penstock.partition.run.loan import Loan, Snapshot, fake_value
from penstock.partition.state.taken import attributes_of
from penstock.partition.units.units import Call, Unit, has_forward
from penstock.partition.values.memory import extent, same_bits
from penstock.partition.values.objects import tensors_in
from penstock.partition.values.passed import Passed
from penstock.partition.watch.observer import Observer
from penstock.trees import map_tensors


def run_for_real(
    original: Call,
    unit: Unit,
    args: Any,
    kwargs: Any,
    loan: Loan,
    device: torch.device,
    observer: Observer,
    reason: Exception,
    taken: Collection[str] = (),
) -> tuple[Any, list[Any], frozenset[int]]:
    """The unit's result as fake tensors, which of its modules drew, and the (fake) memory that it wrote.

    Parameters and buffers are copies, so that none is updated, or made up if they are on `meta`. Attributes in `taken`
    keep what the unit leaves there, even without a gradient.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}  # id of the fake -> fake, real
    modules = list(unit.module.modules())
    snapshot = Snapshot(unit.module)

    def real(fake: Tensor) -> Tensor:
        if id(fake) not in made:
            known = not isinstance(fake, FakeTensor)
            made[id(fake)] = fake, fake.clone() if known else _make(fake, loan.originals.get(id(fake)), device)
        return made[id(fake)][1]

    with unset_fake_temporarily() as mode, _same_draws(device):
        try:
            with observer.not_counting():
                real_args, real_kwargs = map_tensors(real, (args, kwargs))
                for module in modules:
                    for slots in (module._parameters, module._buffers):
                        slots.update({k: real(t) for k, t in slots.items() if t is not None})  # type: ignore[misc]
                    if isinstance(module, nn.RNNBase):
                        module._flat_weights = [getattr(module, n, None) for n in module._flat_weights_names]
                given = Passed(real_args, real_kwargs)
                versions = {key: r._version for key, (_, r) in made.items()}
                before = {key: r.detach().clone() for key, (_, r) in made.items()}
            observer.take(keep=False)  # making tensors up writes to them
            result = original(unit.module, *real_args, **real_kwargs)
            observer.saved.follow(tensors_in((result, given.containers)))
            with observer.not_counting():  # numpy writes past torch's operators
                other = {key for key, copied in before.items() if not same_bits(copied, made[key][1])}
        except PartitionError:
            raise
        except Exception as error:
            first, again = (f"{type(one).__name__}: {one}" for one in (error, reason))
            fake = "" if first == again else f" (on fake tensors: {again})"
            raise PartitionError(f"{unit.name!r} fails on inputs like the given ones: {first}{fake}") from error
        finally:
            wanted = {id(value) for attribute, value in attributes_of(unit.module, unit.name, taken)}
            observer.gone += snapshot.restore_tensors(
                lambda value: id(value) in wanted or _is_made_to_learn(observer, value)
            )
    drew, seen = observer.take(keep=False)  # batch norm updates its running statistics without a new version
    written, root = set(), observer.provenance.root  # the run on fakes may have given it other memory
    for key, (f, r) in made.items():
        if r._version != versions.get(key, r._version):
            torch.autograd.graph.increment_version(f)
            written.add(root(f))
        elif storage_of(r) in seen or key in other:
            written.add(root(f))
        observer.stands_for(r, f)
    back = _back_to_fakes(list(made.values()), observer, mode, device)
    left = map_tensors(back, (result, given.containers))
    for module, name, value in list(snapshot.changed()):
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor):
            vars(module)[name] = back(value)
    Passed(args, kwargs).write_back(given.changed(), left[1])
    return left[0], drew, frozenset(written)


def _is_made_to_learn(observer: Observer, value: Any) -> bool:
    """Whether an attribute was set to something the unit made that requires a gradient: an auxiliary loss, not a table.

    It stays, so that whatever finds it can be told where it is from.
    """
    tensors = list(tensors_in(value))
    return any(t.requires_grad for t in tensors) and all(map(observer.provenance.maker, tensors))


@contextmanager
def _same_draws(device: torch.device) -> Iterator[None]:
    """Makes what is made up and drawn the same in every run, so that runs can be compared."""
    seed = torch.initial_seed()
    generators = tuple(dict.fromkeys([torch.default_generator, generator_of(device)]))
    before = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            if generator.initial_seed() == seed:  # otherwise the unit has seeded, which must stay visible
                generator.set_state(state)


def on_other_values(run: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """The same run, on other made-up values."""

    def other(args: Any, kwargs: Any) -> Any:
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(torch.initial_seed() ^ 1)
        try:
            return run(args, kwargs)
        finally:
            torch.set_rng_state(before)

    return other


def may_draw(unit: nn.Module, drew: Sequence[nn.Module | None]) -> list[nn.Module | None]:
    """The modules that drew, and those that might for other values: a mixture called only some of its experts.

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


def _back_to_fakes(
    made: list[tuple[Tensor, Tensor]], observer: Observer, mode: Any, device: torch.device
) -> Callable[[Tensor], Tensor]:
    by_id = {id(real): fake for fake, real in made}
    by_storage = {storage_of(real): fake for fake, real in made}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) in by_id:
            return by_id[id(tensor)]
        base = by_storage.get(storage_of(tensor))
        if base is not None and base.dtype == tensor.dtype:
            return base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        new = fake_value(tensor, mode, device)
        observer.stands_for(tensor, new)
        return new

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
