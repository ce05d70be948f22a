"""Treats torch's older checkpoint (`use_reentrant=True`, its default) as the newer one, whose calls can be recorded.

Both compute the same values. But the older one trains nothing if none of its arguments requires a gradient, and it adds
each checkpoint's gradients to `.grad` separately, so the terms of a parameter that is also used elsewhere come in
another order.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from penstock.errors import PartitionError
from penstock.partition import source
from penstock.partition.recorder.recorder import Recorder
from penstock.partition.recording.facts import Fact


class _Checkpoint(NamedTuple):
    """A line that calls a checkpoint, and the nodes of its calls."""

    line: str
    nodes: frozenset[fx.Node]


class Reentrant:
    """The older checkpoints of a recording."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._checkpoints: list[_Checkpoint] = []

    def run(self, function: Any, preserves_generators: bool, *args: Any) -> Any:
        """Runs an older checkpoint, as `CheckpointFunction.apply` would."""
        line, before = source.current_line(), len(self._recorder.facts)
        if torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            result = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserves_generators)
        else:
            with torch.no_grad():
                result = function(*args)
        nodes = frozenset(islice(self._recorder.facts, before, None))
        self._checkpoints.append(_Checkpoint(line, nodes))
        return result

    def check(self) -> None:
        """Raises PartitionError for what would differ from plain torch. Call this when the forward has ended."""
        if not self._checkpoints:
            return
        facts, parameters = self._recorder.facts, self._recorder.loan.names
        users: dict[int, set[fx.Node]] = {}
        for node, fact in facts.items():
            if fact.kind == "parameter":
                users.setdefault(id(self._recorder.loan.fakes[str(node.target)]), set()).update(node.users)
            for parameter in self._trained(fact):
                users.setdefault(id(parameter), set()).add(node)
        for one in self._checkpoints:
            for key, nodes in users.items():
                if nodes & one.nodes and not nodes <= one.nodes:
                    raise PartitionError(
                        f"{parameters[key]!r} is used in the torch.utils.checkpoint at {one.line} and outside of "
                        "it, and use_reentrant=True, its default, adds up such gradients in an order of its own. Pass "
                        "it use_reentrant=False"
                    )

    def _trained(self, fact: Fact) -> Iterable[Tensor]:
        modules = [self._recorder.model.get_submodule(name) for name in fact.units]
        return (p for module in modules for p in module.parameters() if p.requires_grad)
