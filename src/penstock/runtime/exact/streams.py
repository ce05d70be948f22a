"""Penstock's own random streams, so that masks do not depend on the number of stages, the schedule or recomputation.

Each draw comes from a stream keyed by (seed, step, microbatch, module, how often the module was called before in this
microbatch). Hooks on the modules that draw set the stream: unlike a mode, a hook still works inside backward, where
recomputation must draw the same mask again. Outside a pipeline step the hooks do nothing.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from penstock._base.compat import device_generator

_MASK = (1 << 64) - 1


def mix(*words: int) -> int:
    """Return a 64-bit hash of some integers (splitmix64's finalizer, applied word by word)."""
    state = 0
    for word in words:
        state = (state + word + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def hash_name(name: str) -> int:
    """Return a 64-bit hash of a name that is the same in every process (`hash` is not)."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


_LOSS = hash_name("the loss function")
_ENTRY = hash_name("the entry of a stage")


class Streams:
    """The streams of one pipeline in one process.

    A step runs inside `drawing(step)`; each forward or backward of a microbatch begins with `begin(microbatch, ...)`.
    `enter(name)` sets the stream of a module, or of a random call outside all called modules.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.first_microbatch = 0
        """The number of this replica's first microbatch in the whole batch: a replica draws what one device would."""
        self.seeds_foreign = False
        """Whether Python's and numpy's generators are set like torch's: only if a bound model draws from them. For a
        loss function of the user's own, which may draw from anything, they always are."""
        self._keys: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._drawn: dict[tuple[str, int], int] = {}
        self._is_rerun = False
        self._step = -1
        self._base: int | None = None
        self._foreign: tuple[Any, Any] | None = None  # Python's and numpy's states before they were set
        self._generators: tuple[torch.Generator, ...] = ()
        self._handles: list[RemovableHandle] = []
        self._hooked: set[int] = set()

    def watch(self, modules: Mapping[str, nn.Module]) -> None:
        """Put a hook on each module that draws, unless it already has one."""
        for name, module in modules.items():
            if id(module) not in self._hooked:
                self._hooked.add(id(module))
                self._handles.append(module.register_forward_pre_hook(Hook(partial(self._on_forward, name))))

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()

    @contextmanager
    def drawing(self, step: int, devices: tuple[torch.device, ...]) -> Iterator[None]:
        """Wrap a step: draws come from these streams. Restore the user's generators afterwards."""
        # Always includes the CPU's: checkpointing restores that one, whatever the device.
        self._generators = tuple(dict.fromkeys([torch.default_generator, *map(device_generator, devices)]))
        self._drawn.clear()
        states = [generator.get_state() for generator in self._generators]
        self._step, self._foreign = step, None
        try:
            yield
        finally:
            self._base = None
            self._restore_foreign()
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)

    def begin(self, microbatch: int, offsets: Mapping[str, int], *, stage: int = 0, is_rerun: bool = False) -> None:
        """Start a microbatch on a stage.

        Args:
            offsets: how often each module was called on earlier stages, if at all.
            is_rerun: whether this is in backward, where recomputation must draw the same numbers again.
        """
        self._base = mix(self.seed, self._step, self.first_microbatch + microbatch)
        self._calls = dict(offsets)
        self._is_rerun = is_rerun
        if not is_rerun:  # so that `enter` finds the same state each time this forward runs
            self._seed(mix(self._base, _ENTRY, stage))

    def begin_loss(self, microbatch: int, *, foreign: bool = True) -> None:
        """Set the stream of a loss function, which may draw. `foreign`: also as Python and numpy do."""
        self._seed(mix(self.seed, self._step, self.first_microbatch + microbatch, _LOSS), foreign=foreign)

    def enter(self, name: str) -> None:
        """Set the stream of the next call of `name`."""
        if self._base is None:
            return
        # Checkpointing restores the generator's state: its seed identifies which of a module's calls runs again.
        key = name, self.generator_seed
        seed = self._drawn.get(key) if self._is_rerun else None
        if seed is None:
            seed = self._drawn[key] = mix(self._base, self._key(name), self._count(name))
        self._seed(seed)

    def _on_forward(self, name: str, module: nn.Module, args: Any) -> None:
        self.enter(name)

    @property
    def generator_seed(self) -> int:
        """The seed that torch's generator was last set to."""
        return self._generators[0].initial_seed()

    def pass_by(self, calls: Mapping[str, int]) -> None:
        """Count calls that a branch left out, so later calls of the same modules draw what they otherwise would."""
        for name, count in calls.items():
            self._calls[name] = self._calls.get(name, 0) + count

    def _key(self, name: str) -> int:
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = hash_name(name)
        return key

    def _count(self, name: str) -> int:
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        return call

    def _seed(self, seed: int, *, foreign: bool = False) -> None:
        for generator in self._generators:
            generator.manual_seed(seed)
        if foreign or self.seeds_foreign:
            numpy = sys.modules.get("numpy")
            if self._foreign is None:
                self._foreign = random.getstate(), numpy.random.get_state() if numpy else None
            random.seed(seed)
            if numpy is not None:
                numpy.random.seed((seed & 0xFFFFFFFF, seed >> 32))

    def _restore_foreign(self) -> None:
        if self._foreign is not None:
            random.setstate(self._foreign[0])
            if self._foreign[1] is not None:
                sys.modules["numpy"].random.set_state(self._foreign[1])


class Hook:
    """A hook on a module. A deep copy of the module (a reference model, say) has one that does nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()
