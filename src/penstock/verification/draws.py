"""Sets the pipeline's random streams around the unsplit model's own forward.

The recording has the calls outside of units that draw, their streams and their order. Nothing is replayed: each
draw of the forward is recognized by its line, each unit by its name, and only the generators are set.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.partition.record import python_draws
from penstock.partition.record.op_work import argument_names, is_seeded
from penstock.partition.stages.stage import Gate
from penstock.partition.units import intercept
from penstock.partition.user_code import is_ours
from penstock.runtime.exact.streams import Streams
from penstock.runtime.front_end import Partition


class _Event(NamedTuple):
    """A draw outside of units, by its line and stream, or a call of a unit, by its name; and the gate around it."""

    key: str
    stream: str
    gate: Gate | None


class ReferenceDraws(TorchFunctionMode):
    """The draws of one microbatch's forward and backward. Use `drawing`."""

    def __init__(self, model: nn.Module, streams: Streams, partition: Partition) -> None:
        super().__init__()
        self._model, self._streams = model, streams
        self._single_calls: set[FunctionType] = set()  # functions that were recorded as one call
        self._events = [event for stage in partition.stages for event in self._read_events(stage.module, None)]
        self._units = {id(model.get_submodule(key)): key for key, stream, _ in self._events if not stream}
        self._position, self._entered_gates = 0, set[Gate | None]()
        self._depth = 0  # of units and of such functions
        self._has_stream = True  # whether the running call has its stream
        self._drawn: dict[tuple[str, int], str] = {}
        self._in_backward = False

    @contextmanager
    def drawing(self, *, backward: bool = False) -> Iterator[None]:
        """Wrap the forward, or the `backward`, in which checkpoints draw the same numbers again."""
        self._in_backward = backward
        calls = {function: self._as_one_call(function) for function in self._single_calls}
        units = map(self._model.get_submodule, self._units.values())
        with (
            python_draws.redirect_draws(self._model, self._foreign, calls, torch.from_numpy),
            intercept(units, self._unit),
        ):
            with _Operators(self), self:
                yield

    def _read_events(self, code: nn.Module, gate: Gate | None) -> Iterator[_Event]:
        """Yield the events of a stage's code, in order."""
        stream = ""
        for node in code.graph.nodes if isinstance(code, fx.GraphModule) else ():
            if node.op == "call_method" and node.target == "enter":
                stream = str(node.args[1])
            elif stream and node.op != "get_attr":
                yield _Event(node.meta["where"][1], stream, gate)
                stream = ""
                if isinstance(node.target, FunctionType) and not _is_library(node.target):
                    self._single_calls.add(node.target)
            elif node.op == "call_module":
                module = code.get_submodule(str(node.target))
                gated_events = self._read_events(module.inside, module) if isinstance(module, Gate) else None
                yield from gated_events or [_Event(str(node.target), "", gate)]

    def draw(self) -> None:
        """Set the stream of the running call, if that is outside of units and has not drawn yet."""
        if self._has_stream and not self._in_backward:
            return
        self._has_stream = True
        lines = _running_lines()
        key = next(iter(lines)), self._streams.generator_seed
        stream = self._drawn.get(key, "") if self._in_backward else self._advance(lambda e: e.stream and e.key in lines)
        if stream:
            self._drawn[key] = stream
            self._streams.enter(stream)

    def _advance(self, matches: Callable[[_Event], Any]) -> str:
        """Advance to the next matching event, past branches that did not run, and return its stream."""
        remaining = range(self._position, len(self._events))
        index = next((i for i in remaining if matches(self._events[i]) and self._may_run(i)), None)
        if index is None:
            return ""
        reached_event = self._events[index]
        self._entered_gates.add(reached_event.gate)
        for gate in dict.fromkeys(e.gate for e in self._events[self._position : index]):
            if gate is not None and gate not in self._entered_gates:
                self._streams.pass_by(gate.calls)
        self._position = index + 1
        return reached_event.stream

    def _may_run(self, index: int) -> bool:
        """Whether the event comes first in its branch, or the branch is known to run."""
        gate = self._events[index].gate
        return gate is None or gate in self._entered_gates or not index or self._events[index - 1].gate is not gate

    # -- what torch, units and other generators call ------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._has_stream = self._has_stream and self._depth > 0
        return func(*args, **(kwargs or {}))

    def _unit(self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        name = self._units.get(id(module))
        if name is None or self._depth or self._in_backward:
            return original(module, *args, **kwargs)
        self._advance(lambda event: not event.stream and event.key == name)
        with self._nested(has_stream=True):
            return original(module, *args, **kwargs)

    def _as_one_call(self, function: FunctionType) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self._nested(has_stream=self._depth > 0):
                self.draw()
                return function(*args, **kwargs)

        return call

    def _foreign(self, name: str, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._has_stream = self._has_stream and self._depth > 0
        self.draw()
        return function(*args, **kwargs)

    @contextmanager
    def _nested(self, *, has_stream: bool) -> Iterator[None]:
        outer = self._depth, self._has_stream
        self._depth, self._has_stream = self._depth + 1, has_stream
        try:
            yield
        finally:
            self._depth, self._has_stream = outer


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `draw` before operators of torch that draw."""

    supports_higher_order_operators = True

    def __init__(self, draws: ReferenceDraws) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws = draws

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_seeded(func) and isinstance(func, torch._ops.OpOverload):
            arguments = {**dict(zip(argument_names(func), args, strict=False)), **(kwargs or {})}
            if arguments.get("generator") is None and arguments.get("dropout_p", 1.0):
                self._draws.draw()
        return func(*args, **(kwargs or {}))


def _is_library(function: FunctionType) -> bool:
    """Whether the function is torch's or Penstock's."""
    return function.__module__.partition(".")[0] in ("torch", "penstock")


def _running_lines() -> dict[str, None]:
    """`file:line` of every running call outside of Penstock and torch, the innermost first."""
    lines: dict[str, None] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_ours(frame.f_code.co_filename):
            lines[f"{frame.f_code.co_filename}:{frame.f_lineno}"] = None
        frame = frame.f_back
    return lines or {"unknown": None}
