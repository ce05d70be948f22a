"""Fake tensors that outlive a recording in a place that nobody thought of, where they would meet real ones later."""

from __future__ import annotations

import functools
import gc
from collections.abc import Collection, Sequence
from types import FrameType, ModuleType
from typing import Any

from penstock.errors import PartitionError
from penstock.partition._compat import FakeTensor, WeakStorage, storage_of


def refuse_strays(made: Sequence[WeakStorage]) -> None:
    """Empties caches of functions that hold fake tensors; raises PartitionError, naming the place, for all others."""
    if not any(memory.is_alive for memory in made):
        return
    gc.collect()
    alive = {memory.number for memory in made if memory.is_alive}
    if not alive:
        return
    for fake in _fakes(alive):
        for cache in _caches(fake):
            cache.cache_clear()
    for fake in _fakes(alive):
        place = _place(fake)
        if place:
            raise PartitionError(
                f"the forward leaves a tensor of shape {tuple(fake.shape)} in {place}, where a recording cannot take "
                "it back; keep it in an attribute of a module, or return it from the forward"
            )


def _fakes(memory: Collection[int]) -> list[FakeTensor]:
    return [thing for thing in gc.get_objects() if type(thing) is FakeTensor and storage_of(thing) in memory]


def _caches(thing: Any, depth: int = 4) -> list[Any]:
    """The caches of functions (`functools.lru_cache`) that hold something."""
    found, holders = [], [thing]
    for _ in range(depth):
        holders = [h for h in gc.get_referrers(*holders) if not isinstance(h, (FrameType, ModuleType))][:64]
        found += [h for h in holders if isinstance(h, functools._lru_cache_wrapper)]
    return found


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
