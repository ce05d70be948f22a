"""What functions under `functools.cache` or `lru_cache` have kept from a recording: fake tensors, for later calls.

A table of positions that a block makes while it is recorded must not stay: not for the next plain forward, nor for
another block, which would take it for a tensor that was passed behind the model's back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.partition.state.names_in_classes import CACHED
from penstock.partition.values.objects import hides_tensors


class CachedFunctions:
    """The functions that keep results among those that a model's code names (see `named_by`).

    Their entries are not looked at until there are more of them.
    """

    def __init__(self, named: Iterable[Any]) -> None:
        cached = [value for value in named if type(value) is CACHED]
        self._misses = {function: function.cache_info().misses for function in cached}

    def forget(self) -> None:
        """Empties those that have kept something since the last time, if it contains a tensor."""
        for function, before in self._misses.items():
            now = function.cache_info().misses
            if now != before:
                if hides_tensors(function):
                    function.cache_clear()
                    now = 0
                self._misses[function] = now
