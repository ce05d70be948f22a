"""Values that the forward may branch on, which stay real while the rest of the recording is fake.

Some follow from the program alone, such as position ids. Without them a library that asks "is this mask trivial?" would
take a different path from the one in training. Others follow from integer inputs, such as padding masks: a branch on
those is recorded for the given values, with a guard that says for which other values the recording holds.

A unit that does not run on fake tensors at all runs once on made-up real ones (`run_for_real`), to get its result's
shapes. A mixture of experts, for example, asks which experts the values chose. Inside a unit, which runs as a whole,
that is fine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from penstock._base.compat import FakeTensor, FakeTensorMode, quiet, storage_id, unset_fake_temporarily
from penstock._base.errors import PartitionError
from penstock._base.pytree import flatten, leaf_tensors, map_tensors, unflatten
from penstock.partition.run.loan import Loan, Snapshot, fake_value, made_by_call
from penstock.partition.state.remembered import find_attributes
from penstock.partition.units.units import RecordAgain, Unit, UnitCall, has_forward
from penstock.partition.values.memory import extent, same_bits
from penstock.partition.values.objects import MutableArguments, holds_tensors, tensors_in
from penstock.partition.watch.observer import Call, Observer

FILLING = frozenset({"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"})
"""Functions that take of a tensor its shape and kind alone."""


class CallResult(NamedTuple):
    """A call's result, the modules in which it drew random numbers, the memory that it wrote, and whether the result
    depends on the values of the model's inputs although it is not a tensor.
    """

    result: Any
    drew: list[nn.Module | None]
    writes: frozenset[int]
    reads_inputs: bool = False


class KnownValues:
    """Runs calls: for real if all their tensors are known, otherwise on fake tensors.

    Args:
        observer: sees what each call draws and writes.
        mode: the recording's fake mode.
        fake_calls: numbers of calls whose results must count as unknown, since unknown values are written into them
            later; negative ones are inputs.
    """

    def __init__(self, observer: Observer, mode: FakeTensorMode, fake_calls: frozenset[int]) -> None:
        self._observer, self._mode, self._fake_calls = observer, mode, fake_calls
        self._calls = 0
        self._real: dict[int, Tensor] = {}
        self._stand_ins: dict[int, Tensor] = {}  # by id of the real tensor; kept here, since the mode forgets them
        self._from_inputs: set[int] = set()  # storages
        self._uniform: dict[int, Tensor] = {}  # what torch.rand made
        self._origins: dict[int, int] = {}  # storage of a real tensor -> number of the call that made it

    def assume(self, value: Tensor, index: int) -> bool:
        """Treat an input's values as known, unless the forward writes unknown ones into it."""
        if -1 - index in self._fake_calls:
            return False
        self._real[id(value)] = value
        self._from_inputs.add(storage_id(value))
        self._origins[storage_id(value)] = -1 - index
        return True

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any, *, is_unknown: bool = False) -> CallResult:
        """Make a call. `is_unknown`: the arguments contain a stand-in for something that is drawn."""
        self._calls += 1
        tensors = [leaf for leaf in flatten((args, kwargs)).leaves if isinstance(leaf, Tensor)]
        self._observer.take_effects()
        if not is_unknown and all(id(t) in self._real for t in tensors) and self._calls not in self._fake_calls:
            with unset_fake_temporarily():
                result = function(*args, **kwargs)
            drew, writes = self._observer.take_effects()
            if not drew:
                from_inputs = any(storage_id(t) in self._from_inputs for t in tensors)
                reads_inputs = from_inputs and self._reads_values(function, args, kwargs, result)
                self._mark_known(result, from_inputs)
                if from_inputs:
                    self._from_inputs |= writes
                return CallResult(result, drew, writes, reads_inputs)
            self.refuse_writes(writes)  # what was drawn is unknown: draw again, on fake tensors
        value = self._run_fill(function, args, kwargs)
        if value is None:
            self.expose(tensors)
            value = self._decide_comparison(function, args)
        if value is not None:
            self._mark_known(value, from_inputs=False)
            return CallResult(value, [], frozenset())
        try:
            result = function(*args, **kwargs)
        except Exception as error:  # a result without a fake: its shape follows from values
            return self._run_sized(function, args, kwargs, error)
        drew, writes = self._observer.take_effects()
        self.refuse_writes(writes)
        if function is torch.rand:
            self._uniform[id(result)] = result
        return CallResult(result, drew, writes)

    def unknown(self, args: Any, kwargs: Any) -> list[Tensor]:
        """Return the tensors among these arguments whose values are unknown."""
        return [tensor for tensor in leaf_tensors((args, kwargs)) if id(tensor) not in self._real]

    def _run_sized(self, function: Callable[..., Any], args: Any, kwargs: Any, error: Exception) -> CallResult:
        """Make a call whose result's shape known values decide, as in `h[mask]` and `pack_padded_sequence`: for real,
        with two sets of made-up numbers for the unknown ones. Raise `error` if anything but numbers differs."""
        inputs, runs = leaf_tensors((args, kwargs)), []
        if len(unknown := self.unknown(args, kwargs)) == len(inputs) or not all(map(Tensor.is_floating_point, unknown)):
            raise error
        with unset_fake_temporarily(), self._observer.trial():
            for scale in (0, 1):
                numbers = {id(tensor): _make_numbers(tensor, scale) for tensor in unknown}
                trial = map_tensors(lambda t, numbers=numbers: numbers.get(id(t), t), (args, kwargs))
                self._observer.take_effects(keep=False)
                result = flatten(function(*trial[0], **trial[1]))
                drew, writes = self._observer.take_effects()
                runs.append([t.to("meta") if t.is_floating_point() else t for t in leaf_tensors(result.leaves)])
                if drew or writes & {*map(storage_id, leaf_tensors(trial))} or len(runs[-1]) < len(result.leaves):
                    raise error
            if not all(map(same_bits, *runs)):
                raise error
        from_inputs = any(storage_id(tensor) in self._from_inputs for tensor in inputs)
        leaves = [fake_value(t, self._mode, t.device) if t.is_floating_point() else t for t in result.leaves]
        self._mark_known([t for t in leaves if not t.is_floating_point()], from_inputs)
        return CallResult(unflatten(leaves, result.structure), [], frozenset(), from_inputs)

    def _run_fill(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Tensor | None:
        """Whole numbers that fill a tensor like another one, whose values do not matter: wav2vec 2.0 makes its mask of
        ones like the sound, and counts them for its loss. None for any other call."""
        like = args[0] if args and getattr(function, "__name__", "") in FILLING else None
        if not isinstance(like, Tensor) or self._calls in self._fake_calls or len(leaf_tensors((args, kwargs))) > 1:
            return None
        dtype = kwargs.get("dtype") or like.dtype
        if dtype.is_floating_point or dtype.is_complex or like.device.type == "meta":
            return None
        with unset_fake_temporarily(), self._observer.trial():
            memory = torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=like.device)
            value: Tensor = function(memory, *args[1:], **kwargs)
        return value

    def _decide_comparison(self, function: Callable[..., Any], args: Any) -> Tensor | None:
        """Return the result of comparing uniform numbers in [0, 1) with a bound if that is certain, as for layer drop
        at rate 0; otherwise None."""
        if len(args) != 2 or id(args[0]) not in self._uniform or not isinstance(args[1], (int, float)):
            return None
        below, above = ("lt", "__lt__"), ("ge", "__ge__")
        name = getattr(function, "__name__", "")
        if name not in (*below, *above) or 0 < args[1] < 1:
            return None
        with unset_fake_temporarily():
            return torch.full(args[0].shape, (args[1] >= 1) == (name in below), device=args[0].device)

    def expose(self, tensors: Iterable[Tensor]) -> None:
        """Call this before known values are used together with unknown ones: fakes then stand in for the known ones.

        While a stand-in lives, the mode uses it whenever it meets the tensor.
        """
        for tensor in tensors:
            if id(tensor) in self._real:
                fake = self._stand_ins[id(tensor)] = self._mode.from_tensor(tensor)
                self._observer.alias(fake, self._observer.root(tensor))
                self._origins.setdefault(storage_id(fake), self._origins[storage_id(tensor)])
        self._observer.take_effects()

    def refuse_writes(self, writes: frozenset[int]) -> None:
        """Raise RecordAgain if real values were overwritten with something unknown."""
        stale = frozenset(self._origins[s] for s in writes if s in self._origins)
        if stale:
            raise RecordAgain(unknown=self._fake_calls | stale)

    def _reads_values(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> bool:
        """Whether the result depends on values, which it finds out by computing it without them.

        If the result is a tensor whose shape depends on values, raises what fake tensors raise.
        """
        fake_args, fake_kwargs = map_tensors(self._mode.from_tensor, (args, kwargs))
        try:
            with self._observer.trial(), self._observer.calling(Call(-1)), quiet():
                function(*fake_args, **fake_kwargs)
        except Exception:
            if not (holds_tensors(result) or _is_plain(result)):
                raise
            return True
        return False

    def _mark_known(self, result: Any, from_inputs: bool) -> None:
        for leaf in flatten(result).leaves:
            if isinstance(leaf, Tensor):
                self._real[id(leaf)] = leaf
                self._origins.setdefault(storage_id(leaf), self._calls)
                if from_inputs:
                    self._from_inputs.add(storage_id(leaf))


def _make_numbers(tensor: Tensor, scale: int) -> Tensor:
    memory = torch.arange(extent(tensor.size(), tensor.stride()), device=tensor.device).mul(scale).to(tensor.dtype)
    return memory.as_strided(tensor.size(), tensor.stride()).requires_grad_(tensor.requires_grad)


def _is_plain(value: Any) -> bool:
    return all(isinstance(leaf, (bool, int, float)) for leaf in flatten(value).leaves)


PLAIN = (bool, int, float, complex, str)


def run_for_real(
    original: UnitCall,
    unit: Unit,
    args: Any,
    kwargs: Any,
    loan: Loan,
    observer: Observer,
    reason: Exception,
    taken_names: Collection[str] = (),
) -> tuple[Any, list[Any], frozenset[int]]:
    """Run a unit for real. Return its result as fake tensors, which of its modules drew, and the (fake) memory that it
    wrote.

    Parameters and buffers are copied, so that the model's own are not updated; if they are on `meta`, they are made up.
    Attributes in `taken_names` keep what the unit leaves there, even without a gradient.
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
                _install_real(unit.module, make_real)
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
            keep = {id(value) for attribute, value in find_attributes(unit.module, unit.name, taken_names)}
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


def _install_real(unit: nn.Module, make_real: Callable[[Tensor], Tensor]) -> None:
    """Put real tensors in place of the unit's parameters and buffers."""
    for module in list(unit.modules()):
        for slots in (module._parameters, module._buffers):
            slots.update({k: make_real(t) for k, t in slots.items() if t is not None})  # type: ignore[misc]
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, n, None) for n in module._flat_weights_names]


def find_drawing_modules(unit: nn.Module, drew: Sequence[nn.Module | None]) -> list[nn.Module | None]:
    """Return the modules that drew, and those that might for other values: a mixture calls only some of its experts.

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
