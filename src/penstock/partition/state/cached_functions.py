"""Empties functions under `functools.cache` or `lru_cache`, which may keep fake tensors from a recording.

A table of positions that a block makes during a recording must not stay: neither for the next plain forward, nor for
another block, where it would look like a tensor passed behind the model's back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.partition.state.names_in_classes import CACHED
from penstock.partition.values.objects import hides_tensors


class CachedFunctions:
    """The caching functions among those that a model's code names (see `named_by`).

    Their entries are looked at only if there are new ones.
    """

    def __init__(self, named: Iterable[Any]) -> None:
        cached = [value for value in named if type(value) is CACHED]
        self._misses = {function: function.cache_info().misses for function in cached}

    def forget(self) -> None:
        """Empties those that have cached something new that contains a tensor."""
        for function, before in self._misses.items():
            now = function.cache_info().misses
            if now != before:
                if hides_tensors(function):
                    function.cache_clear()
                    now = 0
                self._misses[function] = now
