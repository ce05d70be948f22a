"""Records inputs, outputs and gradients of modules in a step of a pipeline or an unsplit model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock._base.pytree import leaf_tensors

FORWARD = ("what enters {}", "what leaves {}", "what leaves {} when it runs again")
BACKWARD = "the gradient that reaches {}"


class ValueKey(NamedTuple):
    """Identifies a value: its kind, the call of a module, the leaf and the microbatch."""

    kind: str
    module: str
    call: int
    leaf: int
    microbatch: int

    @property
    def text(self) -> str:
        return self.kind.format(repr(self.module))


@dataclass(slots=True)
class ModuleTrace:
    """The values that the pipeline or the unsplit model computed in one step.

    Attributes:
        step: the step's number.
        order: the modules to trace, in dataflow order; names may repeat.
        values: inputs and outputs of modules, and the gradients that reached them.
        terms: for each parameter, each microbatch's term of its gradient.
        uses: for each tied parameter, the sum of each use's terms; the last use comes first.
        stages: the stage of each value's call.
        random: states of the generator with which calls of modules begin, by module, call and microbatch.
        notes_random: whether to record these states for calls that draw; if not, they are set, to draw the same.
        active: whether forwards and terms are recorded.
        microbatch: the running microbatch.
    """

    step: int
    order: Sequence[str] = ()
    values: dict[ValueKey, Tensor] = field(default_factory=dict)
    terms: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    uses: Mapping[str, Mapping[int, Tensor]] = field(default_factory=dict)
    stages: dict[ValueKey, int] = field(default_factory=dict)
    random: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)
    notes_random: bool = False
    active: bool = True
    microbatch: int = 0
    _stage: int = 0
    _is_recomputing: bool = False
    _calls: dict[int, Counter[str]] = field(default_factory=dict)
    _calls_at_start: dict[tuple[int, int], Counter[str]] = field(default_factory=dict)
    _states: list[Tensor] = field(default_factory=list)

    def begin(self, microbatch: int, stage: int = 0, *, backward: bool = False) -> None:
        """Set what runs next; in a backward, the forward may be recomputed."""
        self.microbatch, self._stage, self._is_recomputing = microbatch, stage, backward
        if backward:
            self._calls[microbatch] = Counter(self._calls_at_start.get((microbatch, stage), Counter()))
        else:
            self._calls_at_start[microbatch, stage] = Counter(self._calls.setdefault(microbatch, Counter()))

    @contextmanager
    def attach(self, model: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
        """Attach the hooks for a step."""
        handles: list[Any] = []
        for name in {*self.order, *(name for name, *_ in self.random)}:
            module = model.get_submodule(name)
            handles.append(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(self._leave, name)))
        for name, tensor in parameters.items():
            if tensor.requires_grad:
                handles.append(tensor.register_hook(partial(self._add_term, name)))  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def next_step(self) -> None:
        """Clear the trace for the next step."""
        self.step += 1
        self.values, self.terms, self.stages, self.random, self._calls, self._calls_at_start = {}, {}, {}, {}, {}, {}

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.notes_random:
            self._states.append(torch.get_rng_state())
        if self.active and not self._is_recomputing:
            self._record(FORWARD[0], name, (args, kwargs))
            saved_state = None if self.notes_random else self.random.get(self._call_key(name))
            if saved_state is not None:
                torch.set_rng_state(saved_state)

    def _leave(self, name: str, module: nn.Module, args: Any, result: Any) -> None:
        state = self._states.pop() if self.notes_random else None
        if not self.active:
            return
        if state is not None and not self._is_recomputing and not torch.equal(state, torch.get_rng_state()):
            self.random[self._call_key(name)] = state
        for key, tensor in self._record(FORWARD[1 + self._is_recomputing], name, result):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(partial(self._store, key._replace(kind=BACKWARD)))  # type: ignore[no-untyped-call]
        self._calls[self.microbatch][name] += 1

    def _call_key(self, name: str) -> tuple[str, int, int]:
        return name, self._calls.setdefault(self.microbatch, Counter())[name], self.microbatch

    def _record(self, kind: str, name: str, value: Any) -> list[tuple[ValueKey, Tensor]]:
        call, tensors = self._call_key(name)[1], enumerate(leaf_tensors(value))
        if name not in self.order:  # it only has a hook to set the generator's state
            return []
        entries = [(ValueKey(kind, name, call, leaf, self.microbatch), tensor) for leaf, tensor in tensors]
        for key, tensor in entries:
            self._store(key, tensor)
            self.stages[key] = self.stages[key._replace(kind=BACKWARD)] = self._stage
        return entries

    def _store(self, key: ValueKey, tensor: Tensor) -> None:
        self.values[key] = tensor.detach().clone()

    def _add_term(self, name: str, term: Tensor) -> None:
        if not self.active:
            return
        terms, copied = self.terms.setdefault(name, {}), term.detach().clone()
        terms[self.microbatch] = terms[self.microbatch] + copied if self.microbatch in terms else copied
