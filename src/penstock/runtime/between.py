"""What a module keeps in its attributes, or in a plain object there, from its forward for its own backward.

A reversible block notes the state of the random generators, to draw the same again when it runs itself again in
backward. In plain training the backward of a microbatch follows its forward; in a pipeline other forwards may come
between the two, and write over what was noted. So the attributes that a forward sets are kept for each microbatch, and
put back for its backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

Attributes = dict[tuple[int, str], Any]
"""By the `id` of the dict that holds it, and the attribute's name."""

_MISSING = object()
_NOT_PLAIN = (nn.Module, Tensor, type, FunctionType, ModuleType)


class Between:
    """The attributes of one stage's modules between forward and backward.

    Which ones a forward sets is found out once: by comparing before and after, until the first backward.

    Args:
        modules: whose forward the stage runs.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(dict.fromkeys(modules))
        self._holders: dict[int, dict[str, Any]] = {}  # the dicts of what is in `_set`
        self._set: set[tuple[int, str]] = set()
        self._learning = True
        self._kept: dict[int, Attributes] = {}

    def begin_step(self) -> None:
        """Drops what a step that raised may have left."""
        self._kept.clear()

    @contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        """Around a forward: keeps what it sets."""
        before = [(held, dict(held)) for held in self._attributes()] if self._learning else []
        yield
        for held, old in before:
            for name, value in held.items():
                if old.get(name, _MISSING) is not value:
                    self._holders[id(held)] = held
                    self._set.add((id(held), name))
        if self._set:
            self._kept[microbatch] = self._now()

    @contextmanager
    def backward(self, microbatch: int) -> Iterator[None]:
        """Around a backward: what its forward has set is there meanwhile."""
        self._learning = False
        kept = self._kept.pop(microbatch, None)
        if kept is None:
            yield
            return
        now = self._now()
        self._put(kept)
        try:
            yield
        finally:
            if self._kept:  # else this was the last forward as well, and what backward left is what plain torch leaves
                self._put(now)

    def _attributes(self) -> Iterator[dict[str, Any]]:
        """Those of the modules, and of the plain objects in them."""
        seen: set[int] = set()
        for module in self._modules:
            yield module.__dict__
            for value in list(module.__dict__.values()):
                held = getattr(value, "__dict__", None)
                if isinstance(held, dict) and not isinstance(value, _NOT_PLAIN) and id(held) not in seen:
                    seen.add(id(held))
                    yield held

    def _now(self) -> Attributes:
        return {(holder, name): self._holders[holder].get(name, _MISSING) for holder, name in self._set}

    def _put(self, attributes: Attributes) -> None:
        for (holder, name), value in attributes.items():
            if value is _MISSING:
                self._holders[holder].pop(name, None)
            else:
                self._holders[holder][name] = value
