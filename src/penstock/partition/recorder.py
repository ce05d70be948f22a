"""Writes what a running forward calls into a graph.

A mode sees every torch call, the classes of the units send their calls here, and an observer below says which memory
each call wrote and whether it drew random numbers. `record` sets the stage for it.
"""

from __future__ import annotations

import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from penstock.errors import PartitionError
from penstock.partition import calls, source
from penstock.partition._compat import (
    FakeTensor,
    FakeTensorMode,
    flatten,
    in_checkpoint,
    quiet,
    storage_of,
    unset_fake_temporarily,
)
from penstock.partition.chance import Chance, holds_drawn, node_of_drawn, stand_ins
from penstock.partition.guards import Guard, make_guard
from penstock.partition.hooked import Hook
from penstock.partition.known import Known
from penstock.partition.lost import Seeds
from penstock.partition.modes import Entry
from penstock.partition.objects import (
    CONSTANTS,
    OPAQUE,
    child_items,
    free_name,
    hides_tensors,
    holds_tensors,
    is_named_tuple,
    rebuilt,
    tensors_in,
)
from penstock.partition.observer import Observer
from penstock.partition.obstacle import Obstacle
from penstock.partition.opening import Opening
from penstock.partition.passed import Passed, kept_by
from penstock.partition.provenance import Call as Running
from penstock.partition.reach import Reach
from penstock.partition.real import may_draw, run_for_real
from penstock.partition.recording import Fact, Kind, tensor_meta
from penstock.partition.returned import Returned
from penstock.partition.sideways import Sideways
from penstock.partition.state import Loan
from penstock.partition.trees import LEAF, Flat
from penstock.partition.units import Call, Leak, Regroup, Unit

Seen = tuple[Tensor, fx.Node, bool]
"""A tensor that the forward handles (kept alive, so that its id stays its own), its node, and its requires_grad."""


class Recorder(TorchFunctionMode):
    """Writes the calls of one forward. Use `record`."""

    READS: ClassVar[frozenset[str]] = frozenset(
        {"shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout"}
    )

    def __init__(
        self,
        model: nn.Module,
        units: dict[int, Unit],
        loan: Loan,
        entry: Entry,
        names: dict[int, str],
        mode: FakeTensorMode,
        fake_calls: frozenset[int],
        reach: Reach,
        choices: Mapping[int, bool],
        opening: Opening,
        *,
        once: bool = False,
    ) -> None:
        super().__init__()
        self.opening, self.reach = opening, reach
        self.model, self.units, self.loan, self.entry, self.module_names = model, units, loan, entry, names
        self.graph = fx.Graph()
        self.facts: dict[fx.Node, Fact] = {}
        self.seeds = Seeds()
        self.observer = Observer(names, self.seeds)
        self.observer.provenance.held = {storage_of(fake): name for name, fake in loan.fakes.items()}
        self.observer.provenance.own = frozenset(map(storage_of, loan.originals.values()))
        self.sideways = Sideways(model, units, reach, self.observer, once=once)
        self.known = Known(self.observer, mode, fake_calls)
        self.chance = Chance(self, choices)
        self.constants: dict[str, object] = {}
        self.notes: list[str] = []
        self.guards: list[Guard] = []
        self.inputs: dict[fx.Node, int] = {}  # placeholder -> its place among the leaves of (args, kwargs)
        self.drawing: dict[str, nn.Module] = {}
        self.real: set[str] = set()  # units that ran for real, on made-up inputs
        self.returned = Returned(opening)
        self._seen: dict[int, Seen] = {}
        self.on_memory: dict[int, list[int]] = {}  # storage -> ids of the tensors seen on it
        self._attributes: dict[str, fx.Node] = {}
        self._constants = free_name(model, "constants")
        self._constant_ids: dict[int, str] = {}
        self._draws: Counter[str] = Counter()
        self._kept = kept_by(model)
        self._passed: dict[int, fx.Node] = {}  # for the call that is being written: id of what it is given -> its node
        self._opaque: dict[int, tuple[object, fx.Node]] = {}  # what a call made that hides tensors, by its id
        self._thread = threading.get_ident()
        self._paused = False
        self._numbers = count()

    # -- what torch, the units and autograd functions call ----------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            if func is Tensor.register_hook:
                self.sideways.note_hook(Hook.of(*args, **kwargs))
            return func(*args, **kwargs)
        if calls.name_of(func) == "__iter__":  # else the mode would be off while the caller iterates
            return iter(self._call(torch.Tensor.unbind, args, {}))
        return self._call(func, args, kwargs)

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_answer, answer = self.chance.read(function, args)
        if is_answer:
            return answer
        with self._pause():
            if getattr(function, "__name__", "") == "__get__" and calls.name_of(function) in self.READS:
                self._shapes_read(args, kwargs)
                return function(*args, **kwargs)
            why = calls.refusal(function, args, kwargs)
            if why is not None:
                raise Obstacle(f"{self._here()} {why}, which cannot be replayed on a stage", self.scope)
            if calls.gradient_wanted(function, args, kwargs) is not None:
                return self._take_gradient(function, args, kwargs)
            stale = self._stale_gradient(args, kwargs)
            by_chance = self.chance.held and holds_drawn((args, kwargs))
            plain = stand_ins((args, kwargs)) if by_chance else (args, kwargs)
            with self._running(args, kwargs) as call:
                result, drew, writes, reads_inputs = self.known.run(function, *plain, is_unknown=by_chance)
            if not isinstance(result, Tensor):
                self._shapes_read(args, kwargs)
            self.seeds.check(drew, self._here(), self.scope)
            self.sideways.check_call(call)
            target = calls.target_of(function, args, kwargs)
            if by_chance and not holds_tensors(result):
                self.chance.refuse("a random number in a call that gives no tensor")
            if writes or holds_tensors(result):
                if stale:
                    raise PartitionError(stale)
                self._write(target, "call", result, bool(drew), writes)
            elif reads_inputs:
                target = calls.Target(*target[:2], *self._arguments(*target[2:]))
                self.guards.append(make_guard(target, result, self.facts, self.inputs, source.current_line()))
            return result

    def _take_gradient(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An activation shall take a gradient from here on: a value of its own, which the same tensor stands for."""
        tensor, before = args[0], args[0].requires_grad
        if not before and id(tensor) not in self._seen:  # a parameter or buffer, or what only the forward holds
            raise Obstacle(f"{self._here()} {calls.REFUSED['requires_grad_']}", self.scope)
        result = function(*args, **kwargs)
        if tensor.requires_grad != before:
            old = self._seen[id(tensor)][1]
            node = self.graph.call_function(calls.taking_gradient, (old,))
            self._fact(node, "call", tensor)
            self._see(tensor, node)
        return result

    def call_unit(self, original: Call, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A module's `__call__` during the recording: a unit becomes one node."""
        unit = self.units.get(id(module))
        if unit is None or self._paused or threading.get_ident() != self._thread:
            return original(module, *args, **kwargs)
        if self.chance.held and holds_drawn((args, kwargs)):
            self.chance.refuse(f"a random number as an argument of {unit.name!r}, which runs as a whole,")
        with self._pause():
            stale = self._stale_gradient(args, kwargs)
            if stale:
                raise PartitionError(stale)
            leaves = flatten((args, kwargs)).leaves
            for leaf in leaves:
                if (refusal := self._hidden(leaf)) is not None:
                    raise Regroup(refusal, opened=[unit.name])
            self.known.expose(leaf for leaf in leaves if isinstance(leaf, Tensor))
            given = Passed(args, kwargs, self._kept)
            self.chance.check_generators()
            seeded, first_call = self.seeds.were_set, len(self.observer.calls)
            with self._running(args, kwargs, unit):
                result, drew, writes = self.sideways.run_unit(
                    unit, args, kwargs, lambda a, k: self._run_unit(original, unit, a, k)
                )
                self.observer.provenance.read(list(tensors_in((result, given.containers))))
            if self.chance.after_unit():
                drew = [*drew, module]
            self.seeds.check(drew if seeded else (), f"{unit.name!r}", self.scope)
            self.known.refuse_writes(writes)
            for inner in drew:
                inner = inner or module
                self.drawing.setdefault(self.module_names[id(inner)], inner)
            with self._passing(given, unit):
                target = calls.Target("call_module", unit.name, *self._arguments(args, kwargs))
                fact = self._write(target, "unit", result, False, writes)
            fact.runs_again = in_checkpoint()
            self.observer.place_calls(first_call, fact.index)  # nodes for its arguments stand before it
            fact.depends_on_values = unit.name in self.real
            self.returned.note(fact, result)
            return result

    def call_autograd_function(self, original: Callable[..., Any], cls: type, args: Any, kwargs: Any) -> Any:
        """`Function.apply` during the recording: outside the units it is one call."""
        if threading.get_ident() != self._thread:
            return original(*args, **kwargs)
        if self._paused:
            with self.observer.in_function():
                return original(*args, **kwargs)
        with self._pause(), self.observer.in_function():
            with self._running(args, kwargs) as call:
                result, drew, writes, _ = self.known.run(original, args, kwargs)
            self.seeds.check(drew, self._here(), self.scope)
            self.sideways.check_call(call)
            self._write(calls.Target("call_method", "apply", (cls, *args), kwargs), "call", result, bool(drew), writes)
            return result

    @contextmanager
    def _running(self, args: Any, kwargs: Any, unit: Unit | None = None) -> Iterator[Running]:
        """Around a call that will be a node: what it reads, it must have been given."""
        provenance = self.observer.provenance
        given = provenance.roots(tensors_in((args, kwargs)))
        if unit is not None:
            given |= self.sideways.held_by(unit)
        call = Running(next(self._numbers), self.scope if unit is None else unit.name, unit is not None, given)
        with provenance.calling(call):
            yield call

    @contextmanager
    def _pause(self) -> Iterator[None]:
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _run_unit(
        self, original: Call, unit: Unit, args: Any, kwargs: Any
    ) -> tuple[tuple[Any, list[Any], frozenset[int]], bool]:
        """The unit's result, what in it drew, and what it wrote; and whether it could run on fake tensors.

        One that cannot runs for real.
        """
        depth, called, work = len(self.observer.stack), len(self.observer.calls), self.observer.work
        try:
            with quiet():
                return (original(unit.module, *args, **kwargs), *self.observer.take()), True
        except PartitionError:
            raise
        except Exception as error:  # whatever a fake kernel raises; if the unit itself is wrong it raises again
            del self.observer.stack[depth:], self.observer.calls[called:]
            self.observer.take()
            self.observer.work = work
            result, drew, writes = run_for_real(
                original, unit, args, kwargs, self.loan, self.entry.device, self.observer, error
            )
            self.real.add(unit.name)
            reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
            self.notes.append(
                f"block {unit.name!r} ran once for real, on made-up inputs, since it cannot run on fake tensors "
                f"({type(error).__name__}: {reason})"
            )
            return (result, may_draw(unit.module, drew), writes), False

    def _shapes_read(self, args: Any, kwargs: Any) -> None:
        if self.real:
            tensors = (self._seen.get(id(tensor)) for tensor in tensors_in((args, kwargs)))
            where = source.current_line(), self.scope
            self.returned.shapes_read += [(seen[1], *where) for seen in tensors if seen is not None]

    # -- writing nodes ----------------------------------------------------------------------------------------------

    def add_input(self, name: str, tensor: Tensor, index: int) -> None:
        node = self.graph.placeholder(name)
        self.inputs[node] = index
        self._fact(node, "input", tensor)
        self._see(tensor, node)
        self.observer.provenance.add_input(tensor)

    def _write(self, target: calls.Target, kind: Kind, result: Any, draws: bool, writes: frozenset[int]) -> Fact:
        args, kwargs = target.args, target.kwargs
        if kind != "unit":
            args, kwargs = self._arguments(args, kwargs)
        node = self.graph.create_node(target.op, target.function, args, kwargs)
        fact = self._fact(node, kind, result)
        fact.writes, fact.draws = writes, draws
        if draws:
            fact.stream = self._stream(fact)
        if kind == "unit":
            fact.scope = str(target.function)
        self._bind(result, node, writes, alone=True)
        for storage in writes:  # an update in place may make aliases take a gradient, or change their strides
            for key in self.on_memory.get(storage, ()):
                tensor, known, _ = self._seen[key]
                self._seen[key] = (tensor, known, tensor.requires_grad)
                if known is not node:
                    self.facts[known].updates.append((fact.index, tensor_meta(tensor)))
        return fact

    def write_number(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: Any = None, *, draws: bool = False
    ) -> fx.Node:
        """A call that gives a number (or an array) by chance, which every stage that needs it makes for itself."""
        node = self.graph.create_node(op, target, args, kwargs or {})
        fact = self._fact(node, "call", None)
        fact.draws, fact.is_anywhere = draws, True
        if draws:
            fact.stream = self._stream(fact)
        return node

    def _fact(self, node: fx.Node, kind: Kind, result: Any) -> Fact:
        tensors = [leaf for leaf in flatten(result).leaves if isinstance(leaf, Tensor)]
        fact = self.facts[node] = Fact(
            index=self.observer.position,
            kind=kind,
            scope=self.scope,
            meta=tensor_meta(result) if isinstance(result, Tensor) else None,
            storages=frozenset(storage_of(t) for t in tensors),
            takes_gradient=any(t.requires_grad for t in tensors),
            modes=self.entry.difference(),
            source_line=source.current_line(),
            work=self.observer.work,
        )
        self.observer.position += 1
        self.observer.work = 0
        return fact

    def _stream(self, fact: Fact) -> str:
        """The stream of a draw in a module's own forward: numbered there, so that it is the same whatever is opened."""
        self.opening.refuse_draw(fact.scope, fact.source_line)
        self._draws[fact.scope] += 1
        return f"{fact.scope}()#{self._draws[fact.scope] - 1}"

    def _bind(self, result: Any, node: fx.Node, writes: frozenset[int], alone: bool = False) -> None:
        """Remember which tensors a node made; those inside its result get a node of their own.

        A tensor that comes back as it went in, beside others, keeps the node that made it.
        """
        if isinstance(result, Tensor):
            new = id(result) not in self._seen or storage_of(result) in writes
            if id(result) not in self.loan.names and (alone or new):
                self._see(result, node)
            return
        parts = list(child_items(result))
        if not parts and hides_tensors(result, fake_only=True):
            self._opaque[id(result)] = result, node
            node.meta[OPAQUE] = type(result).__name__
        for access, key, item in parts:
            if holds_tensors(item):
                child = self.graph.call_function(access, (node, key))
                self._fact(child, "call", item)
                self._bind(item, child, writes)

    @contextmanager
    def _passing(self, given: Passed, unit: Unit) -> Iterator[None]:
        """Around the writing of a call, which has been made: what it was given is made for it before, and what it left
        in that is taken out behind."""
        changed = given.changed()
        made, flat = given.given(changed)
        for value in (given.containers[index] for index in changed):
            if id(value) in self._kept:
                raise PartitionError(
                    f"{unit.name!r} changes an argument, a {type(value).__name__}, that the model keeps for its next "
                    "call, which a stage cannot replay. Make a new one in each forward"
                )
        if made:
            node = self._made(flat)
            for index in made:
                part = self.graph.call_function(operator.getitem, (node, index))
                self._fact(part, "object", flat.leaves)
                self._passed[id(given.containers[index])] = part
        yield
        for index in changed:
            value, node = given.containers[index], self._passed.pop(id(given.containers[index]))
            for access, key, item in child_items(value):
                if self._is_new(item):
                    child = self.graph.call_function(access, (node, key))
                    self._fact(child, "call", item)
                    self._bind(item, child, frozenset())
        self._passed.clear()

    def _is_new(self, value: Any) -> bool:
        """Whether there is anything in a value that no recorded call has made so far."""
        return any(
            id(leaf) not in self._seen and id(leaf) not in self.loan.names
            if isinstance(leaf, Tensor)
            else id(leaf) not in self._opaque and hides_tensors(leaf, fake_only=True)
            for leaf in flatten(value).leaves
        )

    def _made(self, flat: Flat) -> fx.Node:
        """A node that puts an object together."""
        leaves = [self._argument(leaf) for leaf in flat.leaves]
        structure = self._constant(flat.structure, "structure")
        node = self.graph.call_function(rebuilt, (structure, *leaves))
        self._fact(node, "object", flat.leaves)
        return node

    def _see(self, tensor: Tensor, node: fx.Node) -> None:
        self._seen[id(tensor)] = (tensor, node, tensor.requires_grad)
        self.on_memory.setdefault(storage_of(tensor), []).append(id(tensor))

    # -- values to nodes --------------------------------------------------------------------------------------------

    def _arguments(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(self._argument(a) for a in args), {k: self._argument(v) for k, v in kwargs.items()}

    def _argument(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Tensor):
            return self.node_of(value)
        if self.chance.held and (drawn := node_of_drawn(value)) is not None:
            return drawn
        if kind in CONSTANTS:
            return value
        if id(value) in self._passed:
            return self._passed[id(value)]
        if kind is torch.Size or kind is tuple:
            return tuple(self._argument(v) for v in value)
        if is_named_tuple(value):
            return kind(*(self._argument(v) for v in value))
        if kind is list:
            return [self._argument(v) for v in value]
        if kind is dict:
            return {k: self._argument(v) for k, v in value.items()}
        if kind is slice:
            return slice(self._argument(value.start), self._argument(value.stop), self._argument(value.step))
        flat = flatten(value)
        if flat.structure != LEAF:
            return self._made(flat)
        if id(value) in self._opaque:
            return self._opaque[id(value)][1]
        if (refusal := self._hidden(value)) is not None:
            raise Obstacle(refusal, self.scope)
        return self._constant(value, kind.__name__ if not isinstance(value, type) else value.__name__)

    def seen(self, tensor: Tensor) -> bool:
        """Whether a node stands for a tensor."""
        return id(tensor) in self._seen

    def _hidden(self, value: Any) -> str | None:
        """Why a leaf cannot be passed on, if it is no plain value and no recorded call returned it: a closure."""
        if isinstance(value, Tensor) or type(value) in CONSTANTS or id(value) in self._opaque:
            return None
        if not hasattr(type(value), "__next__") and not hides_tensors(value, fake_only=True):
            return None
        return f"{self._here()} passes on a {type(value).__name__}, from which tensors cannot be taken out"

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node that stands for a tensor. Raises PartitionError for one whose origin was not recorded."""
        seen = self._seen.get(id(tensor))
        if seen is not None:
            return seen[1]
        name = self.loan.names.get(id(tensor))
        if name is not None:
            return self._attribute(name, "parameter" if isinstance(tensor, nn.Parameter) else "buffer", tensor)
        if isinstance(tensor, FakeTensor):
            refusal = (
                f"{self._here()} uses a tensor of shape {tuple(tensor.shape)} that no recorded call made: "
                f"{self._holder_of(tensor) or 'a block left it in an attribute, or compiled code made it'}. "
                "Return it from the block"
            )
            if id(tensor) in self.observer.returned:
                raise Leak(type(self.observer.returned[id(tensor)][1]), refusal)
            self.sideways.open_maker(tensor, refusal)
            raise Obstacle(refusal, self.scope)
        if tensor.requires_grad:
            raise PartitionError(
                f"{self._here()} uses a tensor of shape {tuple(tensor.shape)} that requires a gradient but is no "
                f"parameter{': ' + held if (held := self._holder_of(tensor)) else ''}. Register it as an nn.Parameter"
            )
        return self._constant(tensor, (self._holder_of(tensor) or "tensor").rpartition(".")[2])

    def _constant(self, value: object, hint: str) -> fx.Node:
        name = self._constant_ids.get(id(value))
        if name is None:
            hint = "".join(c if c.isalnum() else "_" for c in hint)
            name, count = f"{self._constants}.{hint}", 1
            while name in self.constants:
                name, count = f"{self._constants}.{hint}_{count}", count + 1
            self._constant_ids[id(value)], self.constants[name] = name, value
        return self._attribute(name, "constant", value)

    def _attribute(self, path: str, kind: Kind, value: object) -> fx.Node:
        if path not in self._attributes:
            self._attributes[path] = node = self.graph.create_node("get_attr", path)
            self._fact(node, kind, value if isinstance(value, Tensor) else None)
        return self._attributes[path]

    call = _call

    def arguments(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's arguments as those of a node."""
        return self._arguments(args, kwargs)

    def argument(self, value: Any) -> Any:
        return self._argument(value)

    def run_known(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of a function that draws, run for real. Raises PartitionError if it takes values not known."""
        with self._pause():
            if not self.known.are_known(args, kwargs):
                raise PartitionError(
                    f"{self._here()} calls {function.__name__}, which draws random numbers, with a tensor whose values "
                    "are not known when the forward is recorded. Switch it off, or do it outside of the model"
                )
            with unset_fake_temporarily():
                value = function(*args, **kwargs)
            self.observer.take(keep=False)
            return value

    def is_seen(self, tensor: Tensor) -> bool:
        return id(tensor) in self._seen

    @property
    def is_paused(self) -> bool:
        return self._paused

    def here(self) -> str:
        """The line that runs, and its module."""
        return self._here()

    def note_unchecked(self) -> None:
        """Tell that a distribution's arguments are not checked, where it is made outside of the units."""
        if not self._paused:
            self.notes.append(
                f"the distribution at {source.current_line()} is recorded as if validate_args=False, since its checks "
                "read values"
            )

    # -- messages ---------------------------------------------------------------------------------------------------

    @property
    def scope(self) -> str:
        """The name of the innermost running module that is the model's: a forward may make others."""
        registered = (self.module_names.get(id(module)) for module in reversed(self.observer.stack))
        return next((name for name in registered if name is not None), "")

    def _here(self) -> str:
        return f"{source.current_line()}, in {f'module {self.scope!r}' if self.scope else 'the model'},"

    def _holder_of(self, tensor: Tensor) -> str:
        for name, module in self.model.named_modules():
            for attribute, value in module.__dict__.items():
                if value is tensor:
                    return f"{name}.{attribute}" if name else attribute
        return ""

    def _stale_gradient(self, args: Any, kwargs: Any) -> str | None:
        for leaf in flatten((args, kwargs)).leaves:
            seen = self._seen.get(id(leaf)) if isinstance(leaf, Tensor) else None
            if seen is not None and seen[2] != leaf.requires_grad:
                return (
                    f"{self._here()} uses {seen[1].name}, whose requires_grad was {seen[2]} when it was made and is "
                    f"now {leaf.requires_grad}. A stage cannot replay that: use .detach() instead"
                )
        return None
