"""Fake tensors that outlive a recording in the cache of a function, where they would meet real ones later."""

from __future__ import annotations

import functools
import gc
from collections.abc import Collection, Sequence
from types import ModuleType
from typing import Any

from penstock.partition._compat import FakeTensor, WeakStorage, storage_of


def empty_caches(made: Sequence[WeakStorage]) -> None:
    """Empties the caches of functions (`lru_cache`) that hold fake tensors."""
    if not any(memory.is_alive for memory in made):
        return
    gc.collect()
    alive = {memory.number for memory in made if memory.is_alive}
    if not alive:
        return
    for cache in [thing for thing in gc.get_objects() if type(thing) is functools._lru_cache_wrapper]:
        if cache.cache_info().currsize and _holds(cache, alive):
            cache.cache_clear()


def _holds(cache: Any, memory: Collection[int], depth: int = 5) -> bool:
    """Whether a cache holds one of these fake tensors."""
    level, seen = [cache], set[int]()
    for _ in range(depth):
        level = [t for t in gc.get_referents(*level) if id(t) not in seen and not isinstance(t, (ModuleType, type))]
        level = [t for t in level if not (isinstance(t, dict) and "__builtins__" in t)][:4096]
        seen |= set(map(id, level))
        if any(type(t) is FakeTensor and storage_of(t) in memory for t in level):
            return True
    return False
