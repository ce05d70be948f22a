"""Writes a forward's calls as nodes of a graph, and knows which node stands for each value that the forward handles.

`recorder` decides what counts as a call; this module writes it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock._base.compat import FakeTensor, in_checkpoint, storage_id
from penstock._base.errors import PartitionError
from penstock._base.pytree import LEAF, Flat, flatten, leaf_tensors
from penstock.partition.names import canonical_names
from penstock.partition.nested import (
    CONSTANTS,
    MutableArguments,
    NodeValue,
    child_items,
    free_name,
    hidden_tensors,
    hides_tensors,
    holds_tensors,
    is_named_tuple,
    rebuilt,
)
from penstock.partition.obstacles import Obstacle
from penstock.partition.record.call_targets import Target
from penstock.partition.record.fakes import Loan
from penstock.partition.record.operator_effects import Observer
from penstock.partition.record.side_effects import SideEffects
from penstock.partition.recording import Kind, Modes, NodeInfo, tensor_meta
from penstock.partition.state.reachable import Reach
from penstock.partition.units import Lesson, Opening, Unit
from penstock.partition.user_code import current_line


class Writer:
    """The graph of a recording, and what is known about its nodes."""

    def __init__(self, model: nn.Module, units: Mapping[int, Unit], loan: Loan, reach: Reach, opening: Opening) -> None:
        super().__init__()
        self.model, self.units, self.loan, self.reach, self.opening = model, units, loan, reach, opening
        self._entry_modes, self.module_names = Modes.now(loan.device), canonical_names(model)
        names = {storage_id(fake): name for name, fake in loan.fakes.items()}
        self.observer = Observer(self.module_names, names, frozenset(map(storage_id, loan.originals.values())))
        self.side_effects = SideEffects(model, units, reach, self.observer)
        self.graph = fx.Graph()
        self.facts: dict[fx.Node, NodeInfo] = {}
        self.constants: dict[str, object] = {}
        self.inputs: dict[fx.Node, int] = {}  # placeholder -> its position among the leaves of (args, kwargs)
        self.is_paused = False
        """Whether a recorded call is running; what happens inside it is not recorded."""
        self._seen: dict[int, tuple[Tensor, fx.Node]] = {}  # by the tensor's id, which lives as long as the tensor
        self.on_memory: dict[int, list[int]] = {}  # storage -> ids of the tensors seen on it
        self._attributes: dict[str, fx.Node] = {}
        self._constants = free_name(model, "constants")
        self._constant_ids: dict[int, str] = {}
        self._draws: Counter[str] = Counter()
        attributes = (value for module in model.modules() for value in vars(module).values())
        self._model_objects = {id(v): v for v in attributes if not (isinstance(v, Tensor) or type(v) in CONSTANTS)}
        self._argument_nodes: dict[int, fx.Node] = {}  # for the call being written: id of each argument -> its node

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Surround a recorded call."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    # -- writing nodes ----------------------------------------------------------------------------------------------

    def add_input(self, name: str, tensor: Tensor, index: int) -> None:
        node = self.graph.placeholder(name)
        self.inputs[node] = index
        self._fact(node, "input", tensor)
        self._see(tensor, node)
        self.observer.add_input(tensor)

    def _write(self, target: Target, kind: Kind, result: Any, draws: bool, writes: frozenset[int]) -> fx.Node:
        args, kwargs = target.args, target.kwargs
        if kind != "unit":
            args, kwargs = self.arguments(args, kwargs)
        node = self.graph.create_node(target.op, target.function, args, kwargs)
        fact = self._fact(node, kind, result)
        fact.writes, fact.draws = writes, draws
        if draws:
            fact.stream = self._stream(fact)
        if kind == "unit":
            fact.scope, fact.runs_again = str(target.function), in_checkpoint() and fact.takes_gradient
        self._bind(result, node, writes, alone=True)
        for storage in writes:  # an in-place update may make aliases require a gradient, or change their strides
            for key in self.on_memory.get(storage, ()):
                tensor, other_node = self._seen[key]
                if other_node is not node:
                    self.facts[other_node].updates.append((fact.index, tensor_meta(tensor)))
        return node

    def write_number(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: Any = None, *, draws: bool = False
    ) -> fx.Node:
        """Write a call that returns a random number or array. Every stage that needs it makes the call itself."""
        node = self.graph.create_node(op, target, args, kwargs or {})
        fact = self._fact(node, "call", None)
        fact.draws, fact.on_every_stage = draws, True
        if draws:
            fact.stream = self._stream(fact)
        return node

    def _fact(self, node: fx.Node, kind: Kind, result: Any) -> NodeInfo:
        tensors = leaf_tensors(result)
        fact = self.facts[node] = NodeInfo(
            index=self.observer.position,
            kind=kind,
            scope=self.scope,
            meta=tensor_meta(result) if isinstance(result, Tensor) else None,
            storages=frozenset(storage_id(t) for t in tensors),
            takes_gradient=any(t.requires_grad for t in tensors),
            modes=Modes.now(self.loan.device, self._entry_modes),
            source_line=current_line(),
            work=self.observer.work,
        )
        self.observer.position += 1
        self.observer.work = 0
        return fact

    def _stream(self, fact: NodeInfo) -> str:
        """Return the stream for a draw in a module's own forward. Numbered per module, so the opening does not affect
        it."""
        self.opening.refuse_draw(fact.scope, fact.source_line)
        self._draws[fact.scope] += 1
        return f"{fact.scope}()#{self._draws[fact.scope] - 1}"

    def _bind(self, result: Any, node: fx.Node, writes: frozenset[int], alone: bool = False) -> None:
        """Remember which tensors a node made; those inside its result get their own nodes.

        A tensor that is returned unchanged along with others keeps the node that made it.
        """
        if isinstance(result, Tensor):
            is_new = id(result) not in self._seen or storage_id(result) in writes
            if id(result) not in self.loan.names and (alone or is_new):
                self._see(result, node)
            return
        for access, key, item in child_items(result):
            if holds_tensors(item):
                child = self.graph.call_function(access, (node, key))
                self._fact(child, "call", item)
                self._bind(item, child, writes)

    @contextmanager
    def _rebuilt_arguments(self, mutable: MutableArguments, unit: Unit) -> Iterator[None]:
        """Surround writing a call: build its containers before it, and take out what it left in them after it."""
        changed = mutable.changed()
        indices, flat = mutable.to_rebuild(changed)
        for value in (mutable.containers[index] for index in changed):
            if id(value) in self._model_objects:
                raise PartitionError(
                    f"{unit.name!r} changes an argument, a {type(value).__name__}, that the model keeps for its next "
                    "call, which a stage cannot replay. Make a new one in each forward"
                )
        if indices:
            node = self._write_object(flat)
            for index in indices:
                part = self.graph.call_function(operator.getitem, (node, index))
                self._fact(part, "object", flat.leaves)
                self._argument_nodes[id(mutable.containers[index])] = part
        yield
        for index in changed:
            value, node = mutable.containers[index], self._argument_nodes.pop(id(mutable.containers[index]))
            for access, key, item in child_items(value):
                if self._is_new(item):
                    child = self.graph.call_function(access, (node, key))
                    self._fact(child, "call", item)
                    self._bind(item, child, frozenset())
        self._argument_nodes.clear()

    def _is_new(self, value: Any) -> bool:
        """Whether a value contains anything that no recorded call has made so far."""
        return any(
            id(leaf) not in self._seen and id(leaf) not in self.loan.names
            if isinstance(leaf, Tensor)
            else hides_tensors(leaf, fake_only=True)
            for leaf in flatten(value).leaves
        )

    def _write_object(self, flat: Flat) -> fx.Node:
        """Write a node that builds an object."""
        leaves = [self.argument(leaf) for leaf in flat.leaves]
        structure = self._constant(flat.structure, "structure")
        node = self.graph.call_function(rebuilt, (structure, *leaves))
        self._fact(node, "object", flat.leaves)
        return node

    def _see(self, tensor: Tensor, node: fx.Node) -> None:
        self._seen[id(tensor)] = (tensor, node)
        self.on_memory.setdefault(storage_id(tensor), []).append(id(tensor))

    # -- values to nodes --------------------------------------------------------------------------------------------

    def arguments(self, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert a call's arguments to those of a node."""
        return tuple(self.argument(a) for a in args), {k: self.argument(v) for k, v in kwargs.items()}

    def argument(self, value: Any) -> Any:
        kind = type(value)
        if isinstance(value, Tensor):
            return self.get_node(value)
        if isinstance(value, NodeValue):
            return value.node
        if kind in CONSTANTS:
            return value
        if id(value) in self._argument_nodes:
            return self._argument_nodes[id(value)]
        if kind is torch.Size or kind is tuple:
            return tuple(self.argument(v) for v in value)
        if is_named_tuple(value):
            return kind(*(self.argument(v) for v in value))
        if kind is list:
            return [self.argument(v) for v in value]
        if kind is dict:
            return {k: self.argument(v) for k, v in value.items()}
        if kind is slice:
            return slice(self.argument(value.start), self.argument(value.stop), self.argument(value.step))
        flat = flatten(value)
        if flat.structure != LEAF:
            return self._write_object(flat)
        if (refusal := self._hidden_refusal(value)) is not None:
            raise Obstacle(refusal, self.scope)
        return self._constant(value, kind.__name__ if not isinstance(value, type) else value.__name__)

    def is_seen(self, tensor: Tensor) -> bool:
        """Whether a node stands for a tensor."""
        return id(tensor) in self._seen

    def _hidden_refusal(self, value: Any) -> str | None:
        """Why a leaf (a closure, a generator) cannot be passed on; None if it can."""
        if isinstance(value, Tensor) or type(value) in CONSTANTS:
            return None
        # integers among the model's inputs are no fakes
        is_hidden = any(isinstance(t, FakeTensor) or self.is_seen(t) for t in hidden_tensors(value))
        if not is_hidden and not hasattr(type(value), "__next__"):
            return None
        return f"{self.current_position()} passes on a {type(value).__name__}, from which tensors cannot be taken out"

    def get_node(self, tensor: Tensor) -> fx.Node:
        """Return the node that stands for a tensor. Raise PartitionError for one whose origin was not recorded."""
        entry = self._seen.get(id(tensor))
        if entry is not None:
            return entry[1]
        name = self.loan.names.get(id(tensor))
        if name is not None:
            return self._attribute(name, "parameter" if isinstance(tensor, nn.Parameter) else "buffer", tensor)
        maker = self.observer.maker(tensor)
        if isinstance(tensor, FakeTensor) or (maker is not None and maker.call.unit):  # in a unit that ran for real
            refusal = (
                f"{self.current_position()} uses a tensor of shape {tuple(tensor.shape)} that no recorded call made: "
                f"{self._find_holder(tensor) or 'a block left it in an attribute, or compiled code made it'}. "
                "Return it from the block"
            )
            if id(tensor) in self.observer.returned:
                module = self.observer.returned[id(tensor)][1]  # others of its class will be used outside, too
                opened = self._modules_around(lambda inner: inner is module)
                raise Lesson(refusal, opened=opened, likely=self._modules_around(lambda m: type(m) is type(module)))
            if maker is not None and maker.call.unit:
                raise Lesson(f"{refusal}. It was made in {maker}", opened=[maker.call.unit])
            raise Obstacle(refusal, self.scope)
        if tensor.requires_grad:
            raise PartitionError(
                f"{self.current_position()} uses a tensor of shape {tuple(tensor.shape)} that requires a gradient but "
                f"is no parameter{': ' + at if (at := self._find_holder(tensor)) else ''}. Register it as an "
                "nn.Parameter"
            )
        return self._constant(tensor, (self._find_holder(tensor) or "tensor").rpartition(".")[2])

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

    def _modules_around(self, matches: Callable[[nn.Module], bool]) -> Iterator[str]:
        """Yield the names of units, and of modules in them, that enclose a module that matches."""
        for unit in self.units.values():
            for name, module in unit.module.named_modules(prefix=unit.name):
                if any(matches(inner) for inner in module.modules() if inner is not module):
                    yield name

    # -- messages ---------------------------------------------------------------------------------------------------

    @property
    def scope(self) -> str:
        """The name of the innermost running module of the model: a forward may make modules of its own."""
        registered = (self.module_names.get(id(module)) for module in reversed(self.observer.stack))
        return next((name for name in registered if name is not None), "")

    def current_position(self) -> str:
        """Return the running line, and its module."""
        return f"{current_line()}, in {f'module {self.scope!r}' if self.scope else 'the model'},"

    def _find_holder(self, tensor: Tensor) -> str:
        entries = ((name, *entry) for name, module in self.model.named_modules() for entry in vars(module).items())
        return next((f"{name}.{key}".lstrip(".") for name, key, value in entries if value is tensor), "")
