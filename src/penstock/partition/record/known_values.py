"""Values that the forward may branch on, which stay real while the rest of the recording is fake.

Some follow from the program alone, such as position ids. Without them a library that asks "is this mask trivial?" would
take a different path from the one in training. Others follow from integer inputs, such as padding masks: a branch on
those is recorded for the given values, with a guard that says for which other values the recording holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock._base.compat import FakeTensorMode, quiet, storage_id, unset_fake_temporarily
from penstock._base.memory import extent, same_bits
from penstock._base.pytree import flatten, leaf_tensors, map_tensors, unflatten
from penstock.partition.nested import holds_tensors
from penstock.partition.record.fakes import fake_value
from penstock.partition.record.operator_effects import Call, Observer
from penstock.partition.units import Lesson

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
        """Return the result of comparing uniform numbers with a bound if that is certain; otherwise None."""
        if len(args) != 2 or id(args[0]) not in self._uniform or not isinstance(args[1], (int, float)):
            return None
        outcome = compare_drawn(getattr(function, "__name__", ""), args[1])
        if outcome is None:
            return None
        with unset_fake_temporarily():
            return torch.full(args[0].shape, outcome, device=args[0].device)

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
        """Raise Lesson if real values were overwritten with something unknown."""
        stale = frozenset(self._origins[s] for s in writes if s in self._origins)
        if stale:
            raise Lesson(unknown=self._fake_calls | stale)

    def _reads_values(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> bool:
        """Whether the result depends on values, which it finds out by computing it without them.

        If the result is a tensor whose shape depends on values, raises what fake tensors raise.
        """
        fake_args, fake_kwargs = map_tensors(self._mode.from_tensor, (args, kwargs))
        try:
            with self._observer.trial(), self._observer.calling(Call(-1)), quiet():
                function(*fake_args, **fake_kwargs)
        except Exception:
            leaves = flatten(result).leaves
            if not (holds_tensors(result) or all(isinstance(leaf, (bool, int, float)) for leaf in leaves)):
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


def compare_drawn(name: str, bound: float, low: float = 0.0, high: float = 1.0, *, closed: bool = False) -> bool | None:
    """Return what `number < bound` gives, or another comparison, if that is certain for a number in [low, high), as for
    layer drop at rate 0; None otherwise, as for those in place (`lt_`). `closed`: the number may also be `high`."""
    name = name.removeprefix("__").removesuffix("__")
    if name not in ("lt", "le", "gt", "ge"):
        return None
    equal_is_above = name in ("lt", "ge")
    if high < bound or (high == bound and not (closed and equal_is_above)):
        return name in ("lt", "le")
    if low > bound or (low == bound and equal_is_above):
        return name in ("gt", "ge")
    return None


def _make_numbers(tensor: Tensor, scale: int) -> Tensor:
    memory = torch.arange(extent(tensor.size(), tensor.stride()), device=tensor.device).mul(scale).to(tensor.dtype)
    return memory.as_strided(tensor.size(), tensor.stride()).requires_grad_(tensor.requires_grad)
