"""Writes what a running forward calls into a graph.

A mode sees every torch call, the units' classes send their calls here, and an observer at the operator level says which
memory each call wrote and whether it drew random numbers. `record` sets all this up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from penstock._base.closures import replace_functions
from penstock._base.compat import DATA_DEPENDENT, quiet, storage_id, unset_fake_temporarily
from penstock._base.errors import PartitionError
from penstock._base.formatting import collapse_ranges
from penstock._base.marks import cut
from penstock._base.pytree import flatten, leaf_tensors
from penstock.partition.nested import MutableArguments, hides_tensors, holds_tensors, tensors_in
from penstock.partition.obstacles import Obstacle
from penstock.partition.record.call_targets import (
    REFUSED,
    Target,
    called,
    function_name,
    make_target,
    refusal_reason,
    requested_gradient,
    taking_gradient,
)
from penstock.partition.record.drawn_values import Chance, holds_drawn, replace_drawn
from penstock.partition.record.fakes import Loan
from penstock.partition.record.graph_writer import Writer
from penstock.partition.record.known_values import CallResult, KnownValues
from penstock.partition.record.operator_effects import Call
from penstock.partition.record.run_for_real import find_attributes, find_drawing_modules, run_for_real, taken
from penstock.partition.recording import Guard, walk
from penstock.partition.result_checks import ShapeRead, set_pattern
from penstock.partition.state.reachable import Reach
from penstock.partition.units import Lesson, Unit, UnitCall, UnitSpec
from penstock.partition.user_code import current_line

Blanks = dict[fx.Node, list[fx.Node]]
"""Nodes whose values do not matter, only their shapes, each with an earlier value that has as many rows, if any."""

SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
"""What `tensor.data = other` calls."""


@dataclass(frozen=True)
class Attempt:
    """One attempt to record `model(*args, **kwargs)`.

    Attributes:
        units: the modules that run as a whole, by their `id`.
        unit_spec: what led to these units.
    """

    model: nn.Module
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    units: dict[int, Unit]
    unit_spec: UnitSpec


def _blank(shape: Sequence[int], dtype: torch.dtype, device: torch.device, *like: Tensor) -> Tensor:
    """Return zeros that take no memory, with as many rows as `like`."""
    return torch.zeros((), dtype=dtype, device=device).expand(*map(len, like), *shape)


class Recorder(Writer, TorchFunctionMode):
    """Writes the calls of one forward. Use `record`."""

    READS = frozenset({"shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "layout"})

    def __init__(
        self, attempt: Attempt, loan: Loan, reach: Reach, choices: Mapping[int, bool], unknown: frozenset[int]
    ) -> None:
        super().__init__(attempt.model, attempt.units, loan, reach, attempt.unit_spec.opening)
        self.known_values = KnownValues(self.observer, loan.mode, unknown)
        self.chance = Chance(self, self.known_values, self.call, choices)
        self.notes: list[str] = []
        self.guards: list[Guard] = []
        self.sized: dict[fx.Node, int] = {}  # values whose shapes depend on those of inputs -> their guards
        self.blanks: Blanks = {}
        self._sized_by_rows: dict[torch.Size, fx.Node] = {}  # number of rows -> the last of `sized` with that
        self.reads: set[int] = set()  # memory of buffers and constants whose values were read
        self.drawing: dict[str, nn.Module] = {}
        self.may_draw: set[str] = set()  # those of `drawing` that did not when they were recorded
        self.ran_for_real: set[str] = set()  # units that ran for real, on made-up inputs
        self.attributes_read = {*attempt.unit_spec.attributes_read}  # names, after the calls of such units
        self._real_runs: dict[str, list[str]] = {}  # reason -> their names
        self.shapes_read: list[ShapeRead] = []
        self._numbers = count()

    # -- what torch, the units and autograd functions call ----------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_paused:
            if func == SET_DATA and id(args[0]) in self.loan.names:
                with self.observer.exchanging(args[0]):
                    return func(*args, **kwargs)
            return func(*args, **kwargs)
        if function_name(func) == "__iter__":  # or the mode would be off while the caller iterates
            return iter(self.call(torch.Tensor.unbind, args, {}))
        return self.call(func, args, kwargs)

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if function is torch.ops.higher_order.cond:  # which trains only as `torch.cond` calls it
            function = torch.cond
        # Hooks, which only run later, are refused.
        leaves = flatten((args, kwargs)).leaves if function_name(function) not in REFUSED else ()
        if any(isinstance(x, (FunctionType, partial)) and hides_tensors(x) for x in leaves):
            function, args, kwargs = called, replace_functions((function, *args)), replace_functions(kwargs)
        if (answer := self.chance.read(function, args)) is not None:
            return answer
        with self.pause():
            if getattr(function, "__name__", "") == "__get__" and function_name(function) in self.READS:
                self._note_shapes_read(args, kwargs)
                return function(*args, **kwargs)
            reason = refusal_reason(function, args, kwargs)
            if reason is not None and function == SET_DATA and (name := self.loan.names.get(id(args[0]))) is not None:
                raise Obstacle(
                    f"{self.current_position()} assigns to `.data` of {name!r}, which cannot be replayed on a "
                    "stage. Update it in place: .data.copy_(...), .data.mul_(...)",
                    self.scope,
                )
            if reason is not None:
                raise Obstacle(f"{self.current_position()} {reason}, which cannot be replayed on a stage", self.scope)
            if requested_gradient(function, args, kwargs) is not None:
                return self._take_gradient(function, args, kwargs)
            has_drawn = self.chance.has_drawn and holds_drawn((args, kwargs))
            call_arguments = replace_drawn((args, kwargs)) if has_drawn else (args, kwargs)
            target = make_target(function, args, kwargs)
            try:
                result, drew, writes, reads_inputs = self._run(function, *call_arguments, is_unknown=has_drawn)
            except DATA_DEPENDENT as error:
                return self._read_held(target, error)
            if not (isinstance(result, Tensor) or reads_inputs):
                self._note_shapes_read(args, kwargs)
            if has_drawn and not holds_tensors(result):
                self.chance.refuse("a random number in a call that gives no tensor")
            if writes or holds_tensors(result):
                self._write(target, "call", result, bool(drew), writes)
            if reads_inputs:
                self._guard(target, result, args, kwargs)
            return result

    def _guard(self, target: Target, result: Any, args: Any, kwargs: Any) -> None:
        """Write guards for what a call read from inputs: a plain value, or the shapes of its tensors."""
        if not holds_tensors(result):
            target = Target(*target[:2], *self.arguments(*target[2:]))
            self.guards.append(self._make_guard(target, result, self.blanks))
            return
        for tensor in self.known_values.unknown(args, kwargs):
            node, earlier = self.get_node(tensor), self._sized_by_rows.get(tensor.shape[:1])
            if node not in self.sized:
                self.blanks[node] = [earlier] if earlier and self.facts[earlier].index < self.facts[node].index else []
        for tensor in leaf_tensors(result):
            node = self._sized_by_rows[tensor.shape[:1]] = self.get_node(tensor)
            self.sized[node] = len(self.guards)
            target = Target("call_function", getattr, (node, "shape"), {})
            self.guards.append(self._make_guard(target, tensor.shape, self.blanks))

    def _make_guard(
        self, target: Target, result: object, blanks: Blanks, tensors: Mapping[str, object] | None = None
    ) -> Guard:
        """Make a guard for a call that the graph leaves out because its result is not a tensor; `tensors`: the buffers
        and constants that it reads. It makes its constants where its inputs are: values on the host can be read before
        they travel, without waiting for a device."""
        needed_nodes, device = self._ancestors(target, blanks), self.loan.device
        graph = fx.Graph()
        input_nodes = [node for node in self.inputs if node in needed_nodes and node not in blanks]
        device_node = graph.placeholder("device")
        new = {node: graph.placeholder(node.name) for node in input_nodes}

        def to_device_node(value: Any) -> Any:
            return device_node if isinstance(value, torch.device) and value == device else value

        for node, fact in self.facts.items():
            if node in needed_nodes and node in blanks and fact.meta is not None:
                dtype, like = getattr(torch, fact.meta.dtype), [new[earlier] for earlier in blanks[node]]
                new[node] = graph.call_function(_blank, (fact.meta.shape[len(like) :], dtype, device_node, *like))
            elif node in needed_nodes and node not in new:
                new[node] = graph.node_copy(node, new.__getitem__)
                new[node].args, new[node].kwargs = map_aggregate((new[node].args, new[node].kwargs), to_device_node)
        args, kwargs = map_aggregate(fx.map_arg((target.args, target.kwargs), new.__getitem__), to_device_node)
        graph.output(graph.create_node(target.op, target.function, args, kwargs))
        module = fx.GraphModule(dict(tensors or {}), graph, "guard")
        indices = tuple(self.inputs[node] for node in input_nodes)
        return Guard(module, indices, result, current_line(), device)

    def _ancestors(self, target: Target, blanks: Blanks) -> set[fx.Node]:
        """Return the nodes that the call's arguments depend on, including those that update them in place."""

        def needed_by(node: fx.Node) -> Sequence[fx.Node]:
            if node in blanks:
                return blanks[node]
            storages = self.facts[node].storages
            return [*node.all_input_nodes, *(n for n, fact in self.facts.items() if fact.writes & storages)]

        arguments: list[fx.Node] = []
        fx.map_arg((target.args, target.kwargs), arguments.append)
        return walk(arguments, needed_by)

    def _read_held(self, target: Target, error: Exception) -> Any:
        """Return what a call reads from buffers and constants alone, such as whether a mask is causal
        (`nn.TransformerEncoder` asks). Raise `error` for anything else."""
        target = Target(*target[:2], *self.arguments(*target[2:]))
        nodes = self._ancestors(target, {})
        facts = [self.facts[node] for node in nodes]
        if any(fact.kind in ("input", "parameter", "unit") or fact.draws or fact.writes for fact in facts):
            raise error
        tensors = {**self.constants, **{name: self.loan.originals[id(fake)] for name, fake in self.loan.fakes.items()}}
        tensors = {str(node.target): tensors[str(node.target)] for node in nodes if node.op == "get_attr"}
        guard = self._make_guard(target, None, {}, tensors)
        with unset_fake_temporarily(), self.observer.trial(), suppress(RuntimeError):  # on the meta device
            guard = replace(guard, expected=guard.module.forward(guard.device))
        if type(result := guard.expected) not in (bool, int, float):
            raise error
        self.guards.append(guard)
        self.reads |= {storage for fact in facts if fact.kind in ("buffer", "constant") for storage in fact.storages}
        return result

    def _take_gradient(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record that an activation requires a gradient from here on (wav2vec 2.0's first one does, for checkpoints):
        the same tensor now stands for a new value."""
        tensor, required_grad = args[0], args[0].requires_grad
        if not required_grad and id(tensor) not in self._seen:  # a parameter or buffer, or known to the forward alone
            raise Obstacle(f"{self.current_position()} {REFUSED['requires_grad_']}", self.scope)
        result = function(*args, **kwargs)
        if tensor.requires_grad != required_grad:
            old_node = self._seen[id(tensor)][1]
            node = self.graph.call_function(taking_gradient, (old_node,))
            self._fact(node, "call", tensor)
            self._see(tensor, node)
        return result

    def call_unit(self, original: UnitCall, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Replace a module's `__call__` during the recording: a unit becomes one node."""
        unit = self.units.get(id(module))
        if unit is None or self.is_paused or self.observer.is_elsewhere:
            return original(module, *args, **kwargs)
        if self.chance.has_drawn and holds_drawn((args, kwargs)):
            self.chance.refuse(f"a random number as an argument of {unit.name!r}, which runs as a whole,")
        with self.pause():
            leaves = flatten((args, kwargs)).leaves
            for leaf in leaves:
                if (refusal := self._hidden_refusal(leaf)) is not None:
                    parent = unit.name.rpartition(".")[0]
                    siblings = (u for u in self.units.values() if u.name.rpartition(".")[0] == parent)
                    opened = [u.name for u in siblings if type(u.module) is type(module)]  # they would be next
                    raise Lesson(refusal, opened=[unit.name], likely=opened)
            self.known_values.expose(leaf for leaf in leaves if isinstance(leaf, Tensor))
            mutable = MutableArguments(args, kwargs, self._model_objects)
            self.chance.check_generators()
            seeded, first_call = self.observer.seed_is_set, len(self.observer.calls)
            with self._as_running_call(args, kwargs, unit):
                result, drew, writes = self.side_effects.run_unit(
                    unit, args, kwargs, lambda a, k: self._run_unit(original, unit, a, k)
                )
                self.observer.read(list(tensors_in((result, mutable.containers))))
            if self.chance.after_unit():
                drew = [*drew, module]
                self.may_draw.discard(unit.name)
            self._check_seeds(drew if seeded else (), f"{unit.name!r}")
            self.known_values.refuse_writes(writes)
            for inner in drew:
                inner = inner or module
                self.drawing.setdefault(self.module_names[id(inner)], inner)
            with self._rebuilt_arguments(mutable, unit):
                target = Target("call_module", unit.name, *self.arguments(args, kwargs))
                node = self._write(target, "unit", result, False, writes)
            fact = self.facts[node]
            inner_calls = self.observer.calls[first_call:]  # nodes for its arguments come before it
            self.observer.calls[first_call:] = [(inner, fact.index) for inner, _ in inner_calls]
            fact.depends_on_values = unit.name in self.ran_for_real
            set_pattern(fact, result, self.opening)
            if fact.depends_on_values:
                self._extract_attributes(node, unit)
            return result

    def mark(self, marker: Callable[[], object]) -> None:
        """Write a mark (`penstock.cut()`) as a call that does nothing. A unit with one is opened. Refuses to be asked
        for the current microbatch outside units."""
        unit = self.observer.call.unit
        if self.observer.is_elsewhere or (unit and marker is not cut):
            return
        if marker is not cut:
            reason = f"{current_line()} calls penstock.{marker.__name__}(), whose value would be frozen"
            raise Obstacle(
                reason, self.scope, alternative="Call it in a module of its own, and name that in leaf_modules=[...]"
            )
        if unit:
            raise Lesson(f"{current_line()}, in {unit!r}, marks where a stage may begin", opened=[unit])
        self._write(Target("call_function", cut, (), {}), "call", None, False, frozenset())

    def _extract_attributes(self, node: fx.Node, unit: Unit) -> None:
        """Write a node that reads what a unit that cannot be opened left in attributes."""
        for attribute, value in find_attributes(unit.module, unit.name, self.attributes_read):
            if self._is_new(value):
                self.attributes_read.add(attribute.name)
                attribute_node = self._constant(attribute, attribute.key)
                child = self.graph.call_function(taken, (node, attribute_node))
                self._fact(child, "call", value)
                self._bind(value, child, frozenset(), alone=True)

    def call_autograd_function(self, original: Callable[..., Any], cls: type, args: Any, kwargs: Any) -> Any:
        """Replace `Function.apply` during the recording: outside the units it is one call."""
        if self.observer.is_elsewhere:
            return original(*args, **kwargs)
        if self.is_paused:
            with self.observer.in_function():
                return original(*args, **kwargs)
        with self.pause(), self.observer.in_function():
            result, drew, writes, _ = self._run(original, args, kwargs)
            self._write(Target("call_method", "apply", (cls, *args), kwargs), "call", result, bool(drew), writes)
            return result

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any, *, is_unknown: bool = False) -> CallResult:
        """Run a call that is no unit, and check what it drew and read."""
        with self._as_running_call(args, kwargs) as call:
            result = self.known_values.run(function, args, kwargs, is_unknown=is_unknown)
        self._check_seeds(result.drew, self.current_position())
        self.side_effects.check_call(call)
        return result

    @contextmanager
    def _as_running_call(self, args: Any, kwargs: Any, unit: Unit | None = None) -> Iterator[Call]:
        """Wrap a call that will be a node: it may read only what it was given."""
        tensors = () if unit is None else (*unit.module.parameters(), *unit.module.buffers())
        readable = self.observer.roots(tensors_in((args, kwargs))) | {storage_id(tensor) for tensor in tensors}
        call = Call(next(self._numbers), self.scope if unit is None else unit.name, unit is not None, readable)
        with self.observer.calling(call):
            yield call

    def _check_seeds(self, drew: Collection[Any], where: str) -> None:
        """Raise Obstacle if a recorded call drew after the forward had seeded the generator."""
        if drew and self.observer.seed_is_set:
            raise Obstacle(f"{where} draws random numbers after the forward has seeded torch's generator", self.scope)

    def _run_unit(self, call: UnitCall, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, list[Any], frozenset[int]]:
        """Run a unit on fake tensors or, if that fails, for real.

        Returns its result, which of its modules drew, and what it wrote.
        """
        rollback = self.observer.mark()
        try:
            with quiet():
                return call(unit.module, *args, **kwargs), *self.observer.take_effects()
        except PartitionError:
            raise
        except Exception as error:  # anything a fake kernel raises; if the unit itself is wrong, it raises again
            rollback()
            self.reach.cached.forget()  # what it cached from fakes before it failed
            result, drew, writes = run_for_real(
                call, unit, args, kwargs, self.loan, self.observer, error, self.attributes_read
            )
            self.ran_for_real.add(unit.name)
            reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
            self._real_runs.setdefault(f"{type(error).__name__}: {reason}", []).append(unit.name)
            draws, others = find_drawing_modules(unit.module, drew)
            self.may_draw |= {self.module_names[id(module)] for module in others} - self.drawing.keys()
            return result, [*draws, *others], writes

    def _note_shapes_read(self, args: Any, kwargs: Any) -> None:
        if self.ran_for_real or self.sized:
            tensors = (self._seen.get(id(tensor)) for tensor in tensors_in((args, kwargs)))
            where = current_line(), self.scope
            self.shapes_read += [(entry[1], *where) for entry in tensors if entry is not None]

    @property
    def all_notes(self) -> tuple[str, ...]:
        """What the user should know about this recording, without repeats."""
        runs = [(", ".join(collapse_ranges(dict.fromkeys(units))), reason) for reason, units in self._real_runs.items()]
        notes = [f"{names} ran once for real, on made-up inputs: fake tensors will not do ({e})" for names, e in runs]
        return tuple(dict.fromkeys([*notes, *self.notes]))
