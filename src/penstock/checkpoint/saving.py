"""Saves a run: every rank collects, checks and writes its part; the first one then turns the parts into a checkpoint.

With `blocking=False` a thread writes copies while training goes on. Its collectives have their own process group: on a
group that training uses, ranks could issue collectives in different orders and wait for each other forever.
"""

from __future__ import annotations

import atexit
import pickle
import shutil
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from penstock._base import owner
from penstock._base.errors import ArgumentError
from penstock._base.second_names import also
from penstock.checkpoint import folders, storage
from penstock.checkpoint.all_or_none import OWN_PART, attempt, in_words, on_first, together
from penstock.checkpoint.averages import Divided, check_shared
from penstock.checkpoint.contents import (
    REST,
    Names,
    Optimizers,
    Rest,
    by_label,
    entries,
    group_names,
    group_options,
    merge_groups,
    model_state,
    optimizer_state,
)
from penstock.distributed.groups import is_part_of_job, new_group
from penstock.pipe.pipeline import Pipeline

_LOOK_SECONDS = 0.1
"""How often a rank that waits for its thread checks whether the thread is working or waiting for other ranks."""


@dataclass(slots=True)
class Background:
    """What a pipeline's background saves use, kept among the companions of its session.

    Attributes:
        group: the process group of the thread's collectives; None: this process is alone.
        under_way: the checkpoint that the thread is writing.
        works: set while the thread's work waits for no other rank.
    """

    thread: ThreadPoolExecutor
    group: ProcessGroup | None
    under_way: tuple[Path, Future[None]] | None = None
    works: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Marks, in the thread, work that waits for no other rank."""
        self.works.set()
        try:
            yield
        finally:
            self.works.clear()

    def wait(self, pipe: Pipeline, future: Future[None]) -> None:
        """Wait for the thread's work to end, telling the other ranks meanwhile whether it is working or waiting."""
        while not future.done():
            works = self.works.is_set()
            with pipe.session.control.working(OWN_PART) if works else pipe.session.control.waiting("a checkpoint"):
                while works == self.works.is_set() and wait_for([future], _LOOK_SECONDS).not_done:
                    pass

    def say_what_failed(self) -> None:
        """Report a failed save when a script exits without closing its pipeline. The thread has ended by then."""
        if self.under_way is not None:
            path, future = self.under_way
            if future.done() and (error := future.exception()):
                print(f"penstock: cannot write {path}: {in_words(error, 0)[1]}", file=sys.stderr)


@also(others="stateful", wait="blocking", keep="keep_last")
def save(
    folder: str | Path,
    pipe: Pipeline,
    optimizer: Optimizers | None = None,
    *,
    stateful: Mapping[str, Any] | None = None,
    extra: Any = None,
    keep_last: int | None = 2,
    blocking: bool = True,
) -> Path:
    """Write `folder/step-N`, where N is the number of steps the pipeline has taken. Every rank calls it.

    Parameters, persistent buffers and optimizer state are stored under the unsplit model's names, tied parameters
    under their first name. Each rank writes what it holds to a folder that all ranks can see. Older checkpoints are
    deleted once the new one is complete. Only one save runs at a time: a second one waits for the first.

    Args:
        folder: the folder for this run's checkpoints; created if missing.
        pipe: the pipeline, between two steps.
        optimizer: an optimizer over `pipe.parameters()`, or over groups of `pipe.named_parameters()`, with the same
            number of groups on every rank; or a list or dict of several.
        stateful: under names of your choice, also in lists and dicts: schedulers, scalers, `RngState()`, of which rank
            0's are saved; and averages of the weights, of which each rank's own part is saved: a dict of tensors by
            parameter name, `AveragedModel(pipe.model)`, or what has one, or a list in the order of the parameters, in
            its `state_dict()`.
        extra: anything that can be pickled, such as the position in the data. Rank 0's is saved.
        keep_last: how many checkpoints to keep, at least 1; None keeps all.
        blocking: if False, return once everything is copied to host memory, and write while training goes on. The next
            `save`, `finish` or `pipe.close()` waits for that write, and raises its error if it failed.

    Returns:
        The checkpoint's path. With `blocking=False` it exists only once the write has ended.

    Raises:
        ArgumentError: on every rank, if an argument is wrong on any rank, or another job saves into the folder.
        CheckpointError: on every rank, if something cannot be written. The last checkpoint is unchanged.
    """
    wait_for_save(pipe)
    storage.hush()
    state = _collect(pipe, optimizer, stateful, extra, keep_last)
    parent = Path(folder).absolute()  # a write in the background may outlive a chdir
    path = parent / folders.name_of(pipe.step_count)
    if not blocking:
        state = together(pipe, lambda: {key: _copy(value) for key, value in state.items()}, f"cannot copy {path}")

    def prepare() -> Path:
        owner.claim(parent, pipe.session, f"checkpoints in {parent}")
        return folders.prepare(parent, pipe.step_count)

    aside = on_first(pipe, prepare, f"cannot write checkpoints to {parent}")
    act = partial(_write, aside, state, pipe.is_main_process, keep_last)
    control = pipe.session.control
    if blocking:
        with control.waiting("a checkpoint"):
            future = attempt(partial(act, control.control_group, partial(control.working, OWN_PART)))
        together(pipe, future.result, f"cannot write {path}")
    else:
        background = _background(pipe)
        background.under_way = path, background.thread.submit(act, background.group, background.working)
    return path


def wait_for_save(pipe: Pipeline) -> Path | None:
    """Wait until the save under way is complete. Every rank calls it.

    Returns its path, or None if no save was under way. Raises CheckpointError on every rank if it could not be written.
    """
    if not isinstance(pipe, Pipeline):
        raise ArgumentError(
            f"pipe: expected a Pipeline, not a {type(pipe).__name__}; save and load take the folder before it"
        )
    background: Background | None = pipe.session.companions.get(Background)
    if background is None or background.under_way is None:
        return None
    (path, future), background.under_way = background.under_way, None
    background.wait(pipe, future)
    together(pipe, future.result, f"cannot write {path}")
    return path


def _collect(
    pipe: Pipeline, optimizer: Optimizers | None, others: Mapping[str, Any] | None, extra: Any, keep: int | None
) -> dict[str, Any]:
    """Return what this process has to write, once every rank has checked its own part. Tensors are live, not copies."""

    def parts() -> tuple[dict[str, Any], dict[str, Divided], Names]:
        if keep is not None and keep < 1:
            raise ArgumentError(f"keep_last={keep}: expected an integer >= 1, or None to keep all")
        optimizers, rest = by_label(optimizer, others)
        divided = {label: Divided(item, pipe) for label, item in rest.items()}
        return optimizers, divided, group_names(pipe, optimizers)

    optimizers, divided, names = together(pipe, parts, "cannot save")
    of_ranks = pipe.all_gather_object((names, {label: part.digest() for label, part in divided.items()}))
    groups = merge_groups([names for names, _ in of_ranks])
    check_shared([digests for _, digests in of_ranks])

    def own_state() -> dict[str, Any]:
        state = model_state(pipe)
        for label, one in optimizers.items():
            state |= entries(label, optimizer_state(pipe, one, label))
        for label, part in divided.items():
            state |= entries(label, part.own)
        if pipe.is_main_process:
            rest = Rest(
                step=pipe.step_count,
                seed=pipe.seed,
                extra=extra,
                others={label: part.rest for label, part in divided.items()},
                ties=pipe.session.ties(),
                optimizers={
                    label: (type(one).__name__, list(zip(groups[label], group_options(one), strict=True)))
                    for label, one in optimizers.items()
                },
            )
            state[REST] = pickle.dumps(vars(rest))  # bytes: torch would split a dict into one entry per item
        return state

    return together(pipe, own_state, "cannot save")


def _write(
    aside: Path,
    state: dict[str, Any],
    is_first: bool,
    keep: int | None,
    group: ProcessGroup | None,
    alone: storage.Around,
) -> None:
    try:
        files = storage.write(aside, state, group, alone)
        if is_first:
            with alone():
                folders.publish(aside, keep, files)
    except BaseException:  # of storage.write: on every rank, once all have stopped writing
        if is_first:
            shutil.rmtree(aside, ignore_errors=True)
        raise


# -- in the background ------------------------------------------------------------------------------------------------


def _background(pipe: Pipeline) -> Background:
    """Return the pipeline's thread and process group: made at its first background save, closed with the pipeline."""
    background: Background | None = pipe.session.companions.get(Background)
    if background is None:
        control = pipe.session.control.control_group
        group = None
        if control is not None:
            members = dist.get_process_group_ranks(control)
            with pipe.session.control.waiting("process groups"):
                group = new_group(members, "gloo", members_only=is_part_of_job(members))
        background = pipe.session.companions[Background] = Background(
            ThreadPoolExecutor(1, "penstock-checkpoint"), group
        )
        if pipe.is_main_process:  # which knows of every rank's error
            atexit.register(background.say_what_failed)
        pipe.session.on_close(partial(_close, pipe, background))
    return background


def _close(pipe: Pipeline, background: Background) -> None:
    try:
        wait_for_save(pipe)
    finally:
        del pipe.session.companions[Background]
        atexit.unregister(background.say_what_failed)
        background.thread.shutdown()
        group = background.group
        if group is not None and not is_part_of_job(dist.get_process_group_ranks(group)):
            dist.destroy_process_group(group)


def _copy(value: Any) -> Any:
    """Copy a tensor to host memory; return any other value unchanged."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if value.device.type == "cpu" else value.cpu()
