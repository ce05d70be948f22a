"""Watches the operators below torch's functions: which draw random numbers, which write, and in which module.

`Seeds` refuses a forward's own seeds and generators if recorded calls would draw other numbers.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from penstock._base.compat import storage_of
from penstock._base.marks import cut
from penstock._base.trees import flatten
from penstock.errors import PartitionError
from penstock.partition.obstacle import Obstacle
from penstock.partition.state.provenance import OVERWRITES, Provenance, is_seeded, is_view, tensors_of
from penstock.partition.watch.work import Operation, work_of

RUNNING = ("running_mean", "running_var")
"""Arguments of batch norm that are updated only in training, whatever the schema says."""


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects what operators do until `take` is called.

    Attributes:
        stack: the modules whose forward is running, outermost first.
        calls: every module called so far, with the value of `position` at that time.
        returned: for the `id` of each tensor that a module returned, the tensor and the innermost module to return it.
        position: set by the owner: the index of the node that is being recorded.
        work: the work since the owner last set it to 0; see `work_of`.
        provenance: where tensors come from.
    """

    supports_higher_order_operators = True

    def __init__(self, registered: Collection[int] | None = None, seeds: Seeds | None = None) -> None:
        """`registered`: ids of the model's modules; draws in a module made by the forward count as its caller's.

        `seeds`: told of the generators that operators get.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._registered, self._seeds = registered, seeds
        self.stack: list[nn.Module] = []
        self.calls: list[tuple[nn.Module, int]] = []
        self.returned: dict[int, tuple[Tensor, nn.Module]] = {}
        self.position = 0
        self.work = 0
        self._inside_function = False
        self.provenance = Provenance()
        self._drew: list[nn.Module | None] = []
        self._written: dict[int, Any] = {}  # storage number -> the object that holds the memory
        self.kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "pippy":  # torch's pipe_split()
            cut()
        if func.namespace == "prim":  # most calls only ask for a device
            return func(*args, **kwargs)
        writing: list[Tensor] = []
        overwrites = False
        is_plain = isinstance(func, torch._ops.OpOverload)
        if is_plain and (is_seeded(func) or written_arguments(func)):
            names = argument_names(func)
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            drops = "dropout_p" not in names or given.get("dropout_p")
            if is_seeded(func) and drops:
                if self._seeds is not None and (generator := given.get("generator")) is not None:
                    self._seeds.check_generator(generator, *self.provenance.place)
                self._drew.append(next((m for m in reversed(self.stack) if self._is_registered(m)), None))
            overwrites = func._opname in OVERWRITES or "out" in written_arguments(func)
            for name in written_arguments(func):
                value = given.get(name)
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(tensor, Tensor) and (name not in RUNNING or given.get("training", True)):
                        self._written[storage_of(tensor)] = tensor
                        writing.append(tensor)
        given_tensors = tensors_of((*args, *kwargs.values()))
        taken = self.provenance.read(given_tensors)
        if not (is_plain and is_view(func)):
            self.provenance.looks_at(given_tensors, [t for t in writing if overwrites])
        for tensor in writing:
            self.provenance.writing(tensor)
        sets = is_plain and func._opname == "set_"
        with self.exchanging(args[0]) if sets else nullcontext():
            result = func(*args, **kwargs)
        made = tensors_of(result if isinstance(result, (list, tuple)) else (result,))
        self.provenance.wrote(func, taken, made)
        if is_plain:
            trains = self._inside_function or torch.is_grad_enabled()
            self.work += work_of(Operation(func, args, kwargs, result), given_tensors, made, trains)
        return result

    @contextmanager
    def exchanging(self, tensor: Tensor) -> Iterator[None]:
        """A context for anything that gives a tensor other memory (`.data = ...`). Counts as an in-place update."""
        memory, root = tensor.untyped_storage(), self.provenance.root(tensor)
        yield
        self._written[root] = memory
        self.provenance.exchanged(tensor, root)

    @contextmanager
    def not_counting(self) -> Iterator[None]:
        """A context in which operators do not count as the model's."""
        work = self.work
        try:
            yield
        finally:
            self.work = work

    @contextmanager
    def in_function(self) -> Iterator[None]:
        """A context for the forward of an autograd function, which records no gradients, yet has a backward."""
        before, self._inside_function = self._inside_function, self._inside_function or torch.is_grad_enabled()
        try:
            yield
        finally:
            self._inside_function = before

    def draw(self) -> None:
        """Call this when the running module draws outside operators: Python's or numpy's random numbers."""
        self._drew.append(next((m for m in reversed(self.stack) if self._is_registered(m)), None))

    def _is_registered(self, module: nn.Module) -> bool:
        return self._registered is None or id(module) in self._registered

    def take(self, keep: bool = True) -> tuple[list[nn.Module | None], frozenset[int]]:
        """Returns and forgets the modules that drew and the memory that was written since the last call.

        `keep`: keep that memory alive, so that its number cannot be reused later.
        """
        drew, written = self._drew, frozenset(self._written)
        if keep:
            self.kept += self._written.values()
        self._drew, self._written = [], {}
        return drew, written

    def place_calls(self, first: int, position: int) -> None:
        """Attributes the calls from number `first` on to the node at that index."""
        self.calls[first:] = [(module, position) for module, _ in self.calls[first:]]

    @contextmanager
    def following_modules(self) -> Iterator[None]:
        """Keeps `stack` and `calls` up to date with this thread's module calls."""
        thread = threading.get_ident()

        def enter(module: nn.Module, _args: Any) -> None:
            if threading.get_ident() == thread:
                self.stack.append(module)
                self.calls.append((module, self.position))

        def leave(module: nn.Module, _args: Any, result: Any) -> None:
            if threading.get_ident() == thread:
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


@functools.cache
def argument_names(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


@functools.cache
def written_arguments(func: Any) -> tuple[str, ...]:
    """The arguments that an operator updates in place.

    These include batch norm's running statistics, although the schemas of some of its operators do not say so.
    """
    return tuple(
        argument.name
        for argument in func._schema.arguments
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (argument.name in RUNNING and "batch_norm" in func._schema.name)
    )


SEED = 0x2D1B6A0F93C5E847
"""A seed that no forward would set. The same for every recording, so that made-up values are too."""


class Seeds:
    """Watches torch's generators while a forward is recorded: a forward that seeds them wants particular numbers.

    Recorded draws come from keyed streams, which would give different ones.
    """

    def __init__(self) -> None:
        """Create this only where the generators' states are restored afterwards."""
        torch.default_generator.manual_seed(SEED)
        self.users: dict[int, tuple[object, str]] = {}  # each kept alive so that its id is not reused

    @property
    def were_set(self) -> bool:
        """Whether the forward seeds the generator, or has set its state."""
        return torch.default_generator.initial_seed() != SEED

    def check(self, drew: Collection[Any], here: str, scope: str) -> None:
        """Raises Obstacle if a recorded call drew after the forward had seeded the generator."""
        if drew and self.were_set:
            raise Obstacle(f"{here} draws random numbers after the forward has seeded torch's generator", scope)

    def check_generator(self, generator: object, unit: str, scope: str) -> None:
        """Raises PartitionError if operators outside the units, or in two of them, draw from a generator of their own.

        Args:
            generator: the generator that the operator was given, if any.
            unit: the unit that it runs in; empty outside the units.
            scope: the name of the module that it runs in.
        """
        if not isinstance(generator, torch.Generator) or generator is torch.default_generator:
            return
        where = f"module {scope!r}" if scope else "the model's own forward"
        if not unit:
            raise Obstacle(f"{where} draws from a torch.Generator of its own, which stages cannot keep in step", scope)
        user = self.users.setdefault(id(generator), (generator, unit))[1]
        if user != unit:
            raise PartitionError(
                f"{where} draws from the same torch.Generator as {user!r}: on stages of their "
                "own they would draw in another order. Give each a generator of its own, or none"
            )
