"""Records what a rank of any pipeline computes in its first steps, without an edit of its script.

Each module that is called from outside of any other, with gradients enabled, is a root: a stage, or a part of one. Its
first call in a step is microbatch 0. A step ends when the weights have changed and a root is called again. Schedules of
`torch.distributed.pipelining` say which stage and microbatch it is (`pipelining`).
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from penstock._base.compat import in_backward
from penstock._base.memory import same_bits
from penstock._base.pytree import leaf_tensors
from penstock.verification.first_difference import FORWARD, ModuleTrace, ValueKey

FOLDER, STEPS = "PENSTOCK_BLAME", "PENSTOCK_BLAME_STEPS"
"""Environment variables: the folder for ranks' records, and the number of steps to record."""
SENT = "the gradient that {} sends back"
_CLIPS = ("clip_grad_norm_", "clip_grads_with_norm_")


@dataclass
class Step:
    """The record of a root in one step.

    Attributes:
        stage, names: its number, and the unsplit model's names of its modules, if known.
        before, after: its parameters and buffers.
        modules: the class of each of its modules.
        trained: the parameters that take a gradient.
        values: inputs and outputs of modules, and the gradients that reached them; in a file, as pairs.
        count: its forwards; `extra`: those besides microbatches.
        grads: the accumulated gradients; `unclipped`: those before clipping, if torch clipped them.
        overwritten: the microbatches whose inputs had changed when their backward began.
        lost: the parameters whose gradient is gone when an optimizer steps.
        random: the generator's state with which a call of a module began that drew, by module, call and microbatch.
        training: the mode of each module.
        autocast: its dtype, if it is on.
        ran: its computations, as ("F" or "B", microbatch, start, end) in nanoseconds of its host's clock.
    """

    stage: int | None
    names: dict[str, str]
    before: dict[str, Tensor]
    after: dict[str, Tensor] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    trained: list[str] = field(default_factory=list)
    values: dict[ValueKey, Tensor] = field(default_factory=dict)
    count: int = 0
    extra: int = 0
    grads: dict[str, Tensor] = field(default_factory=dict)
    unclipped: dict[str, Tensor] = field(default_factory=dict)
    overwritten: list[int] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    random: dict[tuple[str, int, int], Tensor] = field(default_factory=dict)
    training: dict[str, bool] = field(default_factory=dict)
    autocast: str = ""
    ran: list[tuple[str, int, int, int]] = field(default_factory=list)

    @classmethod
    def from_file(cls, record: Mapping[str, Any]) -> Step:
        return cls(**{**record, "values": {ValueKey(*key): value for key, value in record["values"]}})


class Root:
    """A module that is called from outside of any other. `record`: its present step."""

    def __init__(self, module: nn.Module, stage: int | None, names: Mapping[str, str], hooks: ExitStack) -> None:
        self.module, self.stage, self.names = module, stage, dict(names)
        self.tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        self.tensors |= dict(module.named_buffers(remove_duplicate=False))
        self.submodules = dict(module.named_modules(remove_duplicate=False))
        self.ids = {id(part) for part in self.submodules.values()}
        self.trace = ModuleTrace(0, [*self.submodules], notes_random=True)
        hooks.enter_context(self.trace.attach(module, {}))
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                hook = partial(self._record_gradient, name)
                hooks.callback(parameter.register_post_accumulate_grad_hook(hook).remove)  # type: ignore[no-untyped-call]
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        self.trace.next_step()
        self.record = Step(self.stage, self.names, self._copy_tensors())

    def _copy_tensors(self) -> dict[str, Tensor]:
        return {name: _copy_to_cpu(tensor) for name, tensor in self.tensors.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Copy the accumulated gradients."""
        return {name: _copy_to_cpu(tensor.grad) for name, tensor in self.tensors.items() if tensor.grad is not None}

    def has_ended(self) -> bool:
        """Whether weights have changed since the step began, or its gradients are gone."""
        trained = [(name, tensor) for name, tensor in self.tensors.items() if tensor.requires_grad]
        if any(not same_bits(tensor, self.record.before[name].to(tensor.device)) for name, tensor in trained):
            return True
        return not any(t.grad is not None and t.grad.any() for name, t in trained if name in self.record.grads)

    def call(self, microbatch: int, run: Callable[[], Any], inputs: Sequence[Tensor]) -> Any:
        """Run and record a forward."""
        record = self.record
        self.trace.begin(microbatch, self.stage or 0)
        record.count += 1
        record.training = {name: part.training for name, part in self.submodules.items()}
        device = next(iter(self.tensors.values())).device.type
        record.autocast = str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else ""
        for leaf, tensor in enumerate(inputs):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._record_sent, leaf))  # type: ignore[no-untyped-call]
            if tensor.requires_grad and tensor.is_leaf:  # a script sends the accumulated gradient
                tensor.register_post_accumulate_grad_hook(lambda t, leaf=leaf: self._record_sent(leaf, t.grad))  # type: ignore[no-untyped-call]

        def begin(_: Tensor) -> None:
            self.trace.begin(microbatch, self.stage or 0, backward=True)
            self._record_time("B", microbatch)
            for leaf, tensor in enumerate(inputs):
                entered = self.trace.values.get(ValueKey(FORWARD[0], "", 0, leaf, microbatch), tensor)
                self.record.overwritten += [] if same_bits(tensor, entered) else [microbatch]

        self._record_time("F", microbatch)
        output = run()
        self._record_time("F", microbatch)
        for tensor in leaf_tensors(output):
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(begin)  # type: ignore[no-untyped-call]
        return output

    def _record_time(self, op: str, microbatch: int) -> None:
        """Record that an op runs now: extend its latest entry, or add one."""
        times, now = self.record.ran, time.time_ns()
        entry = times.pop() if times and times[-1][:2] == (op, microbatch) else (op, microbatch, now, now)
        times.append((*entry[:3], now))

    def _record_sent(self, leaf: int, gradient: Tensor) -> None:
        if self.trace.active:
            self._record_time("B", self.trace.microbatch)
            self.trace.values[ValueKey(SENT, "", 0, leaf, self.trace.microbatch)] = gradient.detach().clone()

    def _record_gradient(self, name: str, parameter: Tensor) -> None:
        if self.trace.active and parameter.grad is not None:
            self._record_time("B", self.trace.microbatch)
            self.record.grads[name] = _copy_to_cpu(parameter.grad)

    def to_record(self) -> dict[str, Any]:
        """Return the present step as plain values for a file."""
        modules = {name: type(part).__name__ for name, part in self.submodules.items()}
        trained = [name for name, tensor in self.tensors.items() if tensor.requires_grad]
        values = [(tuple(key), value.cpu()) for key, value in self.trace.values.items()]
        extra = {"modules": modules, "trained": trained, "values": values, "after": self._copy_tensors()}
        return {**vars(self.record), **extra, "random": self.trace.random}


class Watch:
    """The recorder of one process."""

    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps, self.step = folder, steps, 0
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.roots: dict[int, Root] = {}
        self.microbatch: Callable[[], int | None] | None = None
        self.paused = self.is_scheduled = self._inside = False
        self.finds_roots = True
        self._hooks = ExitStack()
        self._begin()
        call, clips = nn.Module.__call__, {name: getattr(nn.utils, name) for name in _CLIPS if hasattr(nn.utils, name)}
        nn.Module.__call__ = lambda module, *args, **kwargs: self._call_module(call, module, args, kwargs)  # type: ignore[method-assign]
        self._hooks.callback(setattr, nn.Module, "__call__", call)
        for name, clip in clips.items():
            setattr(nn.utils, name, partial(self._clip, clip))
            self._hooks.callback(setattr, nn.utils, name, clip)
        self._hooks.callback(register_optimizer_step_pre_hook(self._before_update).remove)
        self._hooks.callback(register_optimizer_step_post_hook(self._after_update).remove)
        self._hooks.callback(atexit.unregister, self.flush)
        atexit.register(self.flush)

    def track(self, module: nn.Module, stage: int | None = None, names: Mapping[str, str] | None = None) -> Root | None:
        """Record a module as a root; return it. None if it is part of another root, or has no parameters."""
        owners = [part for part in module.modules() if [*part.parameters(recurse=False)]]
        outer = next((r for r in self.roots.values() if owners and all(id(part) in r.ids for part in owners)), None)
        if outer is not None and outer.module is not module and (stage is not None or not outer.record.grads):
            outer.trace.active = False  # a run of the whole model without training, e.g. to find shapes
            del self.roots[id(outer.module)]
            outer = None
        if outer is None and owners:
            self.roots[id(module)] = Root(module, stage, names or {}, self._hooks)
        return self.roots.get(id(module))

    def enter_step(self) -> None:
        """Call this when forwards begin: if the weights have changed since the last ones, begin a step."""
        if self._has_ended():
            self.flush()
            self.step += 1
            self._begin()
            for root in self.roots.values():
                root.begin()
            if self.step == self.steps:
                self.folder.joinpath(f"done-{self.rank}-{self.world}").touch()
                self._hooks.close()

    def _has_ended(self) -> bool:
        return self._updated or any(root.record.grads and root.has_ended() for root in self.roots.values())

    def without_recording(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call something that does not train."""
        was_paused, self.paused = self.paused, True
        try:
            return call(*args, **kwargs)
        finally:
            self.paused = was_paused

    def flush(self) -> None:
        """Write the present step to a file."""
        if distributed.is_initialized():  # torch.multiprocessing sets no environment
            self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        if any(root.record.count for root in self.roots.values()) and self.step < self.steps:
            suffix = f"{self.step}-{self.rank}-{os.getpid()}"  # one that starts ranks may train before
            record = {name: getattr(self, name) for name in ("rank", "world", "step", "clips", "updates")}
            record |= {"threads": torch.get_num_threads(), "is_complete": self._has_ended()}
            record["roots"] = [root.to_record() for root in self.roots.values()]
            file = self.folder / f"step-{suffix}.pt"
            torch.save(record, file.with_suffix(".part"))
            file.with_suffix(".part").rename(file)

    def _begin(self) -> None:
        self._updated = False
        self.clips: list[float] = []
        self.updates: list[dict[str, Any]] = []

    def _call_module(self, call: Any, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._inside or in_backward() or torch.compiler.is_compiling() or torch.compiler.is_exporting():
            return call(module, *args, **kwargs)
        is_recorded = torch.is_grad_enabled() and not self.paused
        if is_recorded and not self.is_scheduled:
            self.enter_step()
        root = self.roots.get(id(module)) or (self.track(module) if is_recorded and self.finds_roots else None)
        microbatch = None if root is None else root.record.count if self.microbatch is None else self.microbatch()
        is_recorded = is_recorded and microbatch is not None and self.step < self.steps
        if root is None:
            return call(module, *args, **kwargs)
        self._inside, root.trace.active = True, is_recorded
        root.record.extra += not is_recorded and torch.is_grad_enabled()
        try:
            run = partial(call, module, *args, **kwargs)
            return root.call(microbatch or 0, run, leaf_tensors((args, kwargs))) if is_recorded else run()
        finally:
            self._inside, root.trace.active = False, True

    def _clip(self, clip: Any, parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        for root in self.roots.values():
            root.record.unclipped = root.gradients()
        self.clips.append(float(max_norm))
        return clip(parameters, max_norm, *args, **kwargs)

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Record the gradients, parameters and options of an optimizer's step."""
        roots = [*self.roots.values()]
        slots = {id(tensor): (i, name) for i, root in enumerate(roots) for name, tensor in root.tensors.items()}
        for root in [] if self._updated else roots:
            grads, old = root.gradients(), root.record.grads
            root.record.lost = [n for n, grad in old.items() if grad.any() and (n not in grads or not grads[n].any())]
            root.record.grads = grads
        optimizer_type, groups = type(optimizer), list[dict[str, Any]]()
        for group in optimizer.param_groups:
            options = {key: _to_plain(value) for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({"params": [slots[id(p)] for p in group["params"] if id(p) in slots], "options": options})
        self.updates.append({"kind": (optimizer_type.__module__, optimizer_type.__qualname__), "groups": groups})

    def _after_update(self, *_: Any) -> None:
        self._updated = True
        self.flush()  # the job may be ended now, and one that hangs is judged by this


WATCH: list[Watch] = []
"""The watch of this process, if any."""


def get_watch() -> Watch | None:
    """Return this process's watch, which records from now on; None if the environment names no folder."""
    if not WATCH and (folder := os.environ.get(FOLDER)):
        WATCH.append(Watch(Path(folder), int(os.environ.get(STEPS, "3"))))
    return WATCH[0] if WATCH else None


@contextmanager
def capture(
    module: nn.Module,
    *,
    stage: int | None = None,
    names: Mapping[str, str] | None = None,
    microbatch: Callable[[], int | None] | None = None,
) -> Iterator[None]:
    """Wrap the training loop of a stage, for `penstock blame`; without that, does nothing. Only needed where calls of
    the stage's module alone do not tell what it is.

    Args:
        module: what the stage computes.
        stage: its number.
        names: the unsplit model's names of its modules: `{"layers.0": "layers.4"}`; by default found by the weights.
        microbatch: returns the number of the microbatch that runs, or None while none does; by default forwards are
            counted in each step.
    """
    watch = get_watch()
    if watch is not None:
        watch.track(module, stage, names)
        watch.finds_roots = False
        watch.microbatch = microbatch or watch.microbatch
    yield


def _copy_to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().cpu()


def _to_plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else None
    return value if isinstance(value, int | float | str | bool | tuple | None) else None
