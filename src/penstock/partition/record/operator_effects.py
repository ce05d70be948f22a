"""The one pass of effects: what operators draw and write, in which module, and where their tensors come from.

A stage replays a call with its arguments. A tensor that reaches the call in any other way (an attribute, a closure, a
list that other code fills, a module among the constants) is missing in the replay, or belongs to another microbatch.
Python does not show such ways, but the operators below torch's functions receive their tensors however they came.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from penstock._base.compat import WeakStorage, storage_bytes, storage_id, unset_fake_temporarily
from penstock._base.errors import PartitionError
from penstock._base.marks import cut
from penstock._base.pytree import flatten
from penstock.partition.obstacles import Obstacle, describe_scope
from penstock.partition.record.op_work import (
    RUNNING,
    OpCall,
    OpTraits,
    argument_names,
    count_work,
    get_traits,
    list_tensors,
)
from penstock.partition.user_code import current_line

SEED = 0x2D1B6A0F93C5E847
"""A seed that no forward would set. The same for every recording, so that made-up values are too."""


@dataclass(frozen=True, slots=True)
class Call:
    """A recorded call while it runs.

    Attributes:
        number: its node's number; negative if it is only tried.
        scope: the name of the module that it is in; for a unit, the unit's own name.
        is_unit: whether it is a unit.
        inputs: the memory of its arguments, and of what its own module holds.
    """

    number: int
    scope: str = ""
    is_unit: bool = False
    inputs: frozenset[int] = frozenset()

    @property
    def unit(self) -> str:
        """The unit that it is; empty if it is none."""
        return self.scope if self.is_unit else ""


OUTSIDE = Call(-1)
"""Stands for code between the calls, and for what made the model's inputs."""


@dataclass(frozen=True, slots=True)
class Location:
    """Where something happened: in a recorded call, on a line, in a module (the innermost that ran)."""

    call: Call
    line: str = ""
    module: nn.Module | None = None

    def __str__(self) -> str:
        module = describe_scope(self.call.scope)
        return f"{module} ({self.line})" if self.line else module


@dataclass(frozen=True, slots=True)
class ForeignRead:
    """A call read a tensor that it was not given: the parameter or buffer `held`, or one that was made at `origin`."""

    reader: Location
    storage: int
    shape: tuple[int, ...]
    held: str | None
    origin: Location | None


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operator, and hears about every recorded call from the recorder.

    Args:
        registered: ids of the model's modules; draws in a module made by the forward count as its caller's.
        held: the name of each parameter and buffer, by its memory.
        real: the memory of the real parameters and buffers, for which those in `held` stand in.

    Attributes:
        stack: the modules whose forward is running, outermost first.
        calls: every module called so far, with the value of `position` at that time.
        returned: for the `id` of each tensor that a module returned, the tensor and the innermost module to return it.
        position: set by the owner: the index of the node that is being recorded.
        work: the work since the owner last set it to 0; see `count_work`.
        call: the recorded call that is running.
        touched: the names of the parameters and buffers that any operator took.
        foreign: what was read besides arguments, once for each call and memory.
        contents_read: the memory whose contents were taken before anything overwrote them.
        generators: generators of the model's own, each kept alive so that its id is not reused, and their units.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        registered: Collection[int] = (),
        held: Mapping[int, str] | None = None,
        real: frozenset[int] = frozenset(),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._registered, self.held, self._real = registered, held or {}, real
        self.stack: list[nn.Module] = []
        self.calls: list[tuple[nn.Module, int]] = []
        self.returned: dict[int, tuple[Tensor, nn.Module]] = {}
        self.position = 0
        self.work = 0
        self.call = OUTSIDE
        self.touched: set[str] = set()
        self.foreign: dict[tuple[int, int], ForeignRead] = {}
        self.contents_read: set[int] = set()
        self.generators: dict[int, tuple[object, str]] = {}
        self._inside_function, self._thread = False, threading.get_ident()
        self._drew: list[nn.Module | None] = []
        self._written: dict[int, Any] = {}  # storage number -> the object that holds the memory
        self._alive: list[Any] = []  # what holds memory whose number must not be used again
        self._makers: dict[int, Location] = {}
        self._roots: dict[int, int] = {}  # memory that stands for other memory
        self._fixed: set[int] = set()
        self._steady: set[int] = set()
        self._backups: dict[int, tuple[Any, Any]] = {}  # older tensors that the forward writes to: memory, and a copy
        self._overwritten: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "pippy":  # torch's pipe_split()
            cut()
        if func.namespace == "prim":  # most calls only ask for a device
            return func(*args, **kwargs)
        is_plain = isinstance(func, torch._ops.OpOverload)
        traits = get_traits(func)
        writing = self._effects(func, traits, args, kwargs) if is_plain and (traits.draws or traits.writes) else []
        tensors = list_tensors((*args, *kwargs.values()))
        roots = self.read(tensors)
        if not traits.is_view:
            if traits.overwrites:
                self._overwritten |= self.roots(t for t in writing if t.numel() * t.itemsize == storage_bytes(t))
            self.contents_read |= {*roots} - self._overwritten
        for tensor in writing:
            self._keep_contents(tensor)
        is_set = is_plain and func._opname == "set_"
        with self.exchanging(args[0]) if is_set else nullcontext():
            result = func(*args, **kwargs)
        results = list_tensors(result if isinstance(result, (list, tuple)) else (result,))
        self._note_made(func, traits, roots, results)
        if is_plain:
            trains = self._inside_function or torch.is_grad_enabled()
            self.work += count_work(OpCall(func, args, kwargs, result), tensors, results, trains)
        return result

    # -- what is drawn and written ----------------------------------------------------------------------------------

    def _effects(self, func: Any, traits: OpTraits, args: Any, kwargs: Any) -> list[Tensor]:
        """Note that an operator draws, and return the tensors that it writes to."""
        writing: list[Tensor] = []
        names = argument_names(func)
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        if traits.draws and ("dropout_p" not in names or arguments.get("dropout_p")):
            self._check_generator(arguments.get("generator"))
            self.draw()
        for name in traits.writes:
            value = arguments.get(name)
            for tensor in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(tensor, Tensor) and (name not in RUNNING or arguments.get("training", True)):
                    self._written[storage_id(tensor)] = tensor
                    writing.append(tensor)
        return writing

    def draw(self) -> None:
        """Note a draw by the running module; of Python's or numpy's random numbers, the recorder calls this."""
        registered = (m for m in reversed(self.stack) if not self._registered or id(m) in self._registered)
        self._drew.append(next(registered, None))

    def take_effects(self, keep: bool = True) -> tuple[list[nn.Module | None], frozenset[int]]:
        """Return and forget the modules that drew and the memory that was written since the last call.

        `keep`: keep that memory alive, so that its number cannot be reused later.
        """
        drew, written = self._drew, frozenset(self._written)
        if keep:
            self._alive += self._written.values()
        self._drew, self._written = [], {}
        return drew, written

    @contextmanager
    def exchanging(self, tensor: Tensor) -> Iterator[None]:
        """Surround anything that gives a tensor other memory (`.data = ...`). It counts as an in-place update."""
        memory, root = tensor.untyped_storage(), self.root(tensor)
        yield
        self._written[root] = memory
        self._makers.pop(storage_id(tensor), None)
        self.alias(tensor, root)

    def _keep_contents(self, tensor: Tensor) -> None:
        """Keep what a tensor that is older than the forward holds, before an operator writes to it."""
        root = storage_id(tensor)
        if root in self._roots or any(root in table for table in (self._makers, self.held, self._real, self._backups)):
            return
        memory = tensor.untyped_storage()
        with unset_fake_temporarily():
            self._backups[root] = memory, memory.clone()  # type: ignore[no-untyped-call]

    def restore(self) -> None:
        """Undo what the forward wrote to tensors that existed before."""
        for memory, copy in self._backups.values():
            memory.copy_(copy)

    # -- seeds and generators ---------------------------------------------------------------------------------------

    @property
    def seed_is_set(self) -> bool:
        """Whether the forward seeds torch's generator (Reformer's hashes), or has set its state: it wants particular
        numbers, and recorded draws come from keyed streams."""
        return torch.default_generator.initial_seed() != SEED

    def _check_generator(self, generator: object) -> None:
        """Raise PartitionError if operators outside the units, or in two of them, draw from a generator of their
        own."""
        if not isinstance(generator, torch.Generator) or generator is torch.default_generator:
            return
        caller, unit = Location(self.call), self.call.unit
        if not unit:
            scope = self.call.scope
            raise Obstacle(f"{caller} draws from a torch.Generator of its own, which stages cannot keep in step", scope)
        user = self.generators.setdefault(id(generator), (generator, unit))[1]
        if user != unit:
            raise PartitionError(
                f"{caller} draws from the same torch.Generator as {user!r}: on stages of their "
                "own they would draw in another order. Give each a generator of its own, or none"
            )

    # -- where tensors come from ------------------------------------------------------------------------------------

    def root(self, tensor: Tensor) -> int:
        """Return the number of a tensor's memory; for a fake that stands in for a real tensor, the real one's."""
        number = storage_id(tensor)
        return self._roots.get(number, number)

    def roots(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        return frozenset(map(self.root, tensors))

    def add_input(self, tensor: Tensor) -> None:
        """Note a tensor that enters the model."""
        self._makers[storage_id(tensor)] = Location(OUTSIDE)

    def maker(self, tensor: Tensor) -> Location | None:
        """Return what made a tensor during this forward; None for others."""
        return self._makers.get(self.root(tensor))

    def is_fixed(self, tensor: Tensor) -> bool:
        """Whether a tensor was made from numbers in the program alone, and so is the same in every forward."""
        return self.root(tensor) in self._fixed

    def is_steady(self, root: int) -> bool:
        """Whether every forward makes the contents of this memory alike: from numbers in the program, from what the
        model holds, or from tensors' shapes.
        """
        return root in self._fixed or root in self._steady

    def read(self, tensors: Collection[Tensor]) -> list[int]:
        """Note the tensors that an operator takes, and return their memory."""
        call, roots = self.call, [self.root(tensor) for tensor in tensors]
        for root, tensor in zip(roots, tensors, strict=True):
            name, maker = self.held.get(root), self._makers.get(root)
            if name is not None:
                self.touched.add(name)
            if call is OUTSIDE or root in call.inputs or (maker.call is call if maker is not None else name is None):
                continue
            if (call.number, root) not in self.foreign:
                location = Location(call, current_line())
                self.foreign[call.number, root] = ForeignRead(location, root, tuple(tensor.shape), name, maker)
        return roots

    def forget_contents(self) -> None:
        """Begin to note anew whose contents are taken."""
        self.contents_read, self._overwritten = set(), set()

    def _note_made(self, operator: Any, traits: OpTraits, roots: list[int], results: Iterable[Tensor]) -> None:
        """Note what an operator that took `roots` returned."""
        fixed = not traits.draws and self._fixed.issuperset(roots)
        known = (self.is_steady(root) or root in self.held or root in self._real for root in roots)
        steady = not traits.draws and (traits.takes_shapes or all(known))
        for tensor in results:
            root = self.root(tensor)
            (self._fixed.add if fixed else self._fixed.discard)(root)
            (self._steady.add if steady else self._steady.discard)(root)
            if root in roots:
                continue
            if (roots and traits.aliases) or self._is_cached_cast(operator, roots):
                self.alias(tensor, roots[0])
                continue
            number = storage_id(tensor)
            self._roots.pop(number, None)
            module = self.stack[-1] if self.stack else None
            self._makers[number] = Location(self.call, current_line() if self.call.is_unit else "", module)
            self._alive.append(WeakStorage(tensor))

    def alias(self, tensor: Tensor, root: int) -> None:
        """Note that a tensor stands for other memory, such as that of a real tensor for which the mode uses it."""
        number = storage_id(tensor)
        if number != root:
            self._roots[number] = root
            self._alive.append(WeakStorage(tensor))

    def _is_cached_cast(self, operator: Any, roots: list[int]) -> bool:
        """Whether this is autocast's half-precision copy of a parameter, which it keeps for the next use."""
        cast = operator is torch.ops.aten._to_copy.default and torch.is_autocast_cache_enabled()
        return cast and bool(roots) and roots[0] in self.held

    # -- calls, modules and trials ----------------------------------------------------------------------------------

    @contextmanager
    def calling(self, call: Call) -> Iterator[None]:
        """Surround a recorded call."""
        before, self.call = self.call, call
        try:
            yield
        finally:
            self.call = before

    def mark(self) -> Callable[[], None]:
        """Return a function that forgets the modules, calls, draws, writes and work that come from here on. Where
        tensors come from and which modules returned them stays known: hooks may have kept them."""
        depth, num_calls, num_kept = len(self.stack), len(self.calls), len(self._alive)
        drew, written, work = self._drew.copy(), self._written.copy(), self.work

        def rollback() -> None:
            del self.stack[depth:], self.calls[num_calls:]
            self._alive[num_kept:] = [item for item in self._alive[num_kept:] if isinstance(item, WeakStorage)]
            self._drew, self._written, self.work = drew, written, work

        return rollback

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Surround operators that do not belong to the forward."""
        rollback, returned = self.mark(), self.returned.copy()
        self.take_effects()
        try:
            yield
        finally:
            rollback()
            self.returned = returned
            self.foreign = {key: foreign for key, foreign in self.foreign.items() if key[0] >= 0}

    @contextmanager
    def in_function(self) -> Iterator[None]:
        """Surround the forward of an autograd function, which records no gradients, yet has a backward."""
        before, self._inside_function = self._inside_function, self._inside_function or torch.is_grad_enabled()
        try:
            yield
        finally:
            self._inside_function = before

    @property
    def is_elsewhere(self) -> bool:
        """Whether this thread, a data loader's, say, is not the one that records."""
        return threading.get_ident() != self._thread

    @contextmanager
    def following_modules(self) -> Iterator[None]:
        """Keep `stack` and `calls` up to date with the recording thread's module calls."""

        def enter(module: nn.Module, _args: Any) -> None:
            if not self.is_elsewhere:
                self.stack.append(module)
                self.calls.append((module, self.position))

        def leave(module: nn.Module, _args: Any, result: Any) -> None:
            if not self.is_elsewhere:
                for leaf in (result,) if isinstance(result, Tensor) else flatten(result).leaves:
                    if isinstance(leaf, Tensor):
                        self.returned.setdefault(id(leaf), (leaf, module))
                while self.stack and self.stack.pop() is not module:  # those above it were left by an exception
                    pass

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
