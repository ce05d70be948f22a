"""What a module keeps in its attributes from its forward for its own backward.

A reversible block notes the state of the random generators, to draw the same again when it runs itself again in
backward. In plain training the backward of a microbatch follows its forward; in a pipeline other forwards may come
between the two, and write over what was noted. So the attributes that a forward sets are kept for each microbatch, and
put back for its backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Attributes = dict[tuple[int, str], Any]
"""By the module's place among those of the stage, and the attribute's name."""

_MISSING = object()


class Between:
    """The attributes of one stage's modules between forward and backward.

    Which ones a forward sets is found out once: by comparing before and after, until the first backward.

    Args:
        modules: whose forward the stage runs.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(dict.fromkeys(modules))
        self._set: set[tuple[int, str]] = set()
        self._learning = True
        self._kept: dict[int, Attributes] = {}

    def begin_step(self) -> None:
        """Drops what a step that raised may have left."""
        self._kept.clear()

    @contextmanager
    def forward(self, microbatch: int) -> Iterator[None]:
        """Around a forward: keeps what it sets."""
        before = [dict(module.__dict__) for module in self._modules] if self._learning else []
        yield
        for place, attributes in enumerate(before):
            for name, value in self._modules[place].__dict__.items():
                if attributes.get(name, _MISSING) is not value:
                    self._set.add((place, name))
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

    def _now(self) -> Attributes:
        return {(place, name): self._modules[place].__dict__.get(name, _MISSING) for place, name in self._set}

    def _put(self, attributes: Attributes) -> None:
        for (place, name), value in attributes.items():
            if value is _MISSING:
                self._modules[place].__dict__.pop(name, None)
            else:
                self._modules[place].__dict__[name] = value
