"""Fake tensors that outlive a recording in a place that nobody thought of, where they would meet real ones later."""

from __future__ import annotations

import functools
import gc
from collections.abc import Collection, Sequence
from types import FrameType, ModuleType
from typing import Any

from penstock.errors import PartitionError
from penstock.partition._compat import FakeTensor, WeakStorage, storage_of


def empty_caches(made: Sequence[WeakStorage]) -> set[int]:
    """Empties the caches of functions (`lru_cache`) that hold fake tensors; returns the memory that is still alive."""
    if not any(memory.is_alive for memory in made):
        return set()
    gc.collect()
    alive = {memory.number for memory in made if memory.is_alive}
    if not alive:
        return set()
    for cache in [thing for thing in gc.get_objects() if type(thing) is functools._lru_cache_wrapper]:
        if cache.cache_info().currsize and _holds(cache, alive):
            cache.cache_clear()
    return {memory.number for memory in made if memory.is_alive}


def refuse_strays(made: Sequence[WeakStorage]) -> None:
    """Raises PartitionError, naming the place, if fake tensors are still held behind a recording."""
    alive = empty_caches(made)
    for fake in _fakes(alive)[:4] if alive else ():
        place = _place(fake)
        if place:
            raise PartitionError(
                f"the forward leaves a tensor of shape {tuple(fake.shape)} in {place}, where a recording cannot take "
                "it back; keep it in an attribute of a module, or return it from the forward"
            )


def _fakes(memory: Collection[int]) -> list[FakeTensor]:
    return [thing for thing in gc.get_objects() if type(thing) is FakeTensor and storage_of(thing) in memory]


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


def _place(thing: Any, depth: int = 4) -> str:
    """Where something is held, as far as that can be told."""
    holders = [thing]
    for _ in range(depth):
        following = []
        for holder in gc.get_referrers(*holders):
            if isinstance(holder, dict) and "__name__" in holder and "__builtins__" in holder:
                names = [k for k, v in holder.items() if any(v is h for h in holders)]
                return f"{holder['__name__']}.{names[0]}" if names else str(holder["__name__"])
            if not isinstance(holder, (FrameType, ModuleType)) and holder is not holders:
                following.append(holder)
        named = [h for h in following if hasattr(h, "__dict__") and not isinstance(h, (FakeTensor, type))]
        if named and type(named[0]).__module__.partition(".")[0] not in ("torch", "penstock"):
            return f"an attribute of a {type(named[0]).__qualname__}"
        holders = following[:64]
        if not holders:
            break
    return ""
