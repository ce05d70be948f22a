"""Saves a run: every rank collects, checks and writes its part; the first one then publishes the checkpoint.

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
from penstock._base.aliases import accept_aliases
from penstock._base.errors import ArgumentError
from penstock.checkpoint import folders, storage
from penstock.checkpoint.averages import PartitionedState, check_shared
from penstock.checkpoint.collective import CHECKPOINT_IO, attempt, describe_error, run_on_all_ranks, run_on_rank0
from penstock.checkpoint.contents import (
    GLOBAL_STATE,
    GlobalState,
    Names,
    Optimizers,
    entries,
    group_names,
    group_options,
    label_objects,
    merge_groups,
    model_state,
    optimizer_state,
)
from penstock.distributed.groups import is_part_of_job, new_group
from penstock.pipe.pipeline import Pipeline

_POLL_SECONDS = 0.1
"""Interval at which a rank that waits for its thread checks whether the thread is working or waiting for ranks."""


@dataclass(slots=True)
class AsyncSaver:
    """The thread and process group of a pipeline's background saves, kept among its session's companions.

    Attributes:
        group: the process group of the thread's collectives; None: this process is alone.
        pending: the checkpoint that the thread is writing.
        busy: set while the thread's work waits for no other rank.
    """

    thread: ThreadPoolExecutor
    group: ProcessGroup | None
    pending: tuple[Path, Future[None]] | None = None
    busy: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Mark, in the thread, work that waits for no other rank."""
        self.busy.set()
        try:
            yield
        finally:
            self.busy.clear()

    def wait(self, pipe: Pipeline, future: Future[None]) -> None:
        """Wait for the thread's work to end, telling the other ranks meanwhile whether it is working or waiting."""
        while not future.done():
            busy = self.busy.is_set()
            with pipe.session.control.working(CHECKPOINT_IO) if busy else pipe.session.control.waiting("a checkpoint"):
                while busy == self.busy.is_set() and wait_for([future], _POLL_SECONDS).not_done:
                    pass

    def report_failure(self) -> None:
        """Report a failed save when a script exits without closing its pipeline. The thread has ended by then."""
        if self.pending is not None:
            path, future = self.pending
            if future.done() and (error := future.exception()):
                print(f"penstock: cannot write {path}: {describe_error(error, 0)[1]}", file=sys.stderr)


@accept_aliases(others="stateful", wait="blocking", keep="keep_last")
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
    storage.silence_warnings()
    state = _collect(pipe, optimizer, stateful, extra, keep_last)
    parent = Path(folder).absolute()  # a write in the background may outlive a chdir
    path = parent / folders.folder_name(pipe.step_count)
    if not blocking:
        state = run_on_all_ranks(
            pipe, lambda: {key: _copy(value) for key, value in state.items()}, f"cannot copy {path}"
        )

    def prepare() -> Path:
        owner.claim(parent, pipe.session, f"checkpoints in {parent}")
        return folders.prepare(parent, pipe.step_count)

    temporary = run_on_rank0(pipe, prepare, f"cannot write checkpoints to {parent}")
    write = partial(_write, temporary, state, pipe.is_main_process, keep_last)
    control = pipe.session.control
    if blocking:
        with control.waiting("a checkpoint"):
            future = attempt(partial(write, control.mesh_group, partial(control.working, CHECKPOINT_IO)))
        run_on_all_ranks(pipe, future.result, f"cannot write {path}")
    else:
        saver = _async_saver(pipe)
        saver.pending = path, saver.thread.submit(write, saver.group, saver.working)
    return path


def wait_for_save(pipe: Pipeline) -> Path | None:
    """Wait until the save under way is complete. Every rank calls it.

    Returns its path, or None if no save was under way. Raises CheckpointError on every rank if it could not be written.
    """
    if not isinstance(pipe, Pipeline):
        raise ArgumentError(
            f"pipe: expected a Pipeline, not a {type(pipe).__name__}; save and load take the folder before it"
        )
    saver: AsyncSaver | None = pipe.session.companions.get(AsyncSaver)
    if saver is None or saver.pending is None:
        return None
    (path, future), saver.pending = saver.pending, None
    saver.wait(pipe, future)
    run_on_all_ranks(pipe, future.result, f"cannot write {path}")
    return path


def _collect(
    pipe: Pipeline, optimizer: Optimizers | None, stateful: Mapping[str, Any] | None, extra: Any, keep: int | None
) -> dict[str, Any]:
    """Return this process's part of a checkpoint, once every rank has checked its own. Tensors are live, not copies."""

    def check_arguments() -> tuple[dict[str, Any], dict[str, PartitionedState], Names]:
        if keep is not None and keep < 1:
            raise ArgumentError(f"keep_last={keep}: expected an integer >= 1, or None to keep all")
        optimizers, objects = label_objects(optimizer, stateful)
        partitioned = {label: PartitionedState(item, pipe) for label, item in objects.items()}
        return optimizers, partitioned, group_names(pipe, optimizers)

    optimizers, partitioned, names = run_on_all_ranks(pipe, check_arguments, "cannot save")
    gathered = pipe.all_gather_object((names, {label: part.digest() for label, part in partitioned.items()}))
    groups = merge_groups([names for names, _ in gathered])
    check_shared([digests for _, digests in gathered])

    def local_state() -> dict[str, Any]:
        state = model_state(pipe)
        for label, opt in optimizers.items():
            state |= entries(label, optimizer_state(pipe, opt, label))
        for label, part in partitioned.items():
            state |= entries(label, part.local)
        if pipe.is_main_process:
            global_state = GlobalState(
                step=pipe.step_count,
                seed=pipe.seed,
                extra=extra,
                others={label: part.shared for label, part in partitioned.items()},
                ties=pipe.session.ties(),
                optimizers={
                    label: (type(opt).__name__, list(zip(groups[label], group_options(opt), strict=True)))
                    for label, opt in optimizers.items()
                },
            )
            state[GLOBAL_STATE] = pickle.dumps(vars(global_state))  # bytes: torch would split a dict
        return state

    return run_on_all_ranks(pipe, local_state, "cannot save")


def _write(
    temporary: Path,
    state: dict[str, Any],
    is_first: bool,
    keep: int | None,
    group: ProcessGroup | None,
    working: storage.WorkContext,
) -> None:
    try:
        files = storage.write(temporary, state, group, working)
        if is_first:
            with working():
                folders.publish(temporary, keep, files)
    except BaseException:  # storage.write raises on every rank, once all have stopped writing
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


# -- in the background ------------------------------------------------------------------------------------------------


def _async_saver(pipe: Pipeline) -> AsyncSaver:
    """Return the pipeline's thread and process group: made at its first background save, closed with the pipeline."""
    saver: AsyncSaver | None = pipe.session.companions.get(AsyncSaver)
    if saver is None:
        mesh_group = pipe.session.control.mesh_group
        group = None
        if mesh_group is not None:
            members = dist.get_process_group_ranks(mesh_group)
            with pipe.session.control.waiting("process groups"):
                group = new_group(members, "gloo", members_only=is_part_of_job(members))
        saver = pipe.session.companions[AsyncSaver] = AsyncSaver(ThreadPoolExecutor(1, "penstock-checkpoint"), group)
        if pipe.is_main_process:  # it receives every rank's error
            atexit.register(saver.report_failure)
        pipe.session.on_close(partial(_close, pipe, saver))
    return saver


def _close(pipe: Pipeline, saver: AsyncSaver) -> None:
    try:
        wait_for_save(pipe)
    finally:
        del pipe.session.companions[AsyncSaver]
        atexit.unregister(saver.report_failure)
        saver.thread.shutdown()
        group = saver.group
        if group is not None and not is_part_of_job(dist.get_process_group_ranks(group)):
            dist.destroy_process_group(group)


def _copy(value: Any) -> Any:
    """Copy a tensor to host memory; return any other value unchanged."""
    if not isinstance(value, Tensor):
        return value
    return value.clone() if value.device.type == "cpu" else value.cpu()
