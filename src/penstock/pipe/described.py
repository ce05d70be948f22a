"""A pipeline as the folder of its run describes it, and the beginning of its recording."""

from __future__ import annotations

import math
import os
import socket
import uuid
import weakref
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from penstock._base import __version__, owner
from penstock._base.errors import ArgumentError, warn
from penstock._base.gradients import gradient_bytes
from penstock.partition.stages.stage import Gate
from penstock.partition.units.chain import unwrapped
from penstock.pipe.forecast import activation_bytes, memory_after_actions, optimizer_bytes, predicted
from penstock.pipe.recorder import Recorder
from penstock.pipe.session import Session
from penstock.pipe.verified import passed
from penstock.plan import Plan
from penstock.runtime.front_end import Stage
from penstock.trace.runs.about import RunInfo
from penstock.trace.runs.folder import PREDICTED, PREDICTED_MEMORY
from penstock.trace.runs.option import RunConfig
from penstock.trace.runs.writer import earlier_run


def record(session: Session, asked: RunConfig, plan: Plan | None = None) -> None:
    """Record the session's steps from now on, as far as this process has a part in it. Every rank calls it.

    Args:
        plan: what the pipeline follows.

    Raises:
        ArgumentError: the folder has a run of another version or tool, or another job writes there.
    """
    engine = session.engine
    path, refusal = Path(asked.path), None
    if engine.world.is_first:
        try:
            owner.claim(path, session, f"run_dir={str(path)!r}")
        except ArgumentError as error:
            refusal = str(error)
        except OSError as error:
            if os.path.isdir(path):  # otherwise the recorder warns of it; training goes on
                warn(f"run_dir={str(path)!r}: {error}; a second job in this folder will not be detected")
    run_id, refusal = engine.control.share_with_all((uuid.uuid4().hex, refusal))
    if refusal is not None:
        raise ArgumentError(refusal)
    about = earlier = None
    before: dict[str, Any] = {}
    with engine.control.agreed():
        if engine.world.is_first:
            earlier = earlier_run(path)
            about = describe(session, asked, run_id, plan)
            before = _before(session, about, plan)
    mark = engine.control.share_with_all("" if earlier is None else earlier.verified)
    passed.update({mark} & {session.fingerprint()})
    recorder = Recorder(asked, run_id, about, earlier, before, engine.world, engine.control.watchdog, engine.devices)
    weakref.finalize(session, recorder.end_now)  # if it is dropped, or the program ends, without `close`
    session.before_close(recorder.close)
    session.recorder = recorder


def _before(session: Session, about: RunInfo, plan: Plan | None) -> dict[str, Any]:
    """Return what is known before the first step, by file."""
    files: dict[str, Any] = {}
    if (step := predicted(session, plan)) is not None:
        files[PREDICTED] = {
            "source": step.source,
            "step_seconds": step.step_seconds,
            "stage_seconds": [*step.stage_seconds],
            "timeline": step.timeline.to_dict(),
        }
    if about.activation_bytes:
        states = [optimizer_bytes(stage.parameters.values()) for stage in session.partition.stages]
        held = [sum(each) for each in zip(about.parameter_bytes, about.gradient_bytes, states, strict=True)]
        files[PREDICTED_MEMORY] = memory_after_actions(session.schedule, about.activation_bytes, held)
    return files


def describe(session: Session, asked: RunConfig, run_id: str, plan: Plan | None = None) -> RunInfo:
    """Return what does not change in a run that begins now, with the plan that it follows."""
    options, order, world, partition = session.options, session.order, session.engine.world, session.partition
    place, device = order.placement, session.device
    parameters = [[*stage.parameters.values()] for stage in partition.stages]
    limit = options.memory_limit
    if plan is not None and len({*plan.limit_bytes}) == 1 and math.isfinite(plan.limit_bytes[0]):
        limit = plan.limit_bytes[0]
    trained = [[one for one in held if one.requires_grad] for held in parameters]
    return RunInfo(
        name=os.path.basename(os.path.abspath(asked.path)),
        id=run_id,
        started=datetime.now(UTC).isoformat(timespec="milliseconds"),
        resumed=(),
        penstock=__version__,
        torch=str(torch.__version__),
        host=socket.gethostname(),
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
        device=device.type if device.type != "cuda" else f"cuda: {torch.cuda.get_device_name(device)}",
        model=type(session.split.model).__name__,
        ranks=world.ranks,
        replicas=world.data_parallel,
        processes=1 if world.is_local else len(world.everyone),
        chunks=place.depth // world.ranks,
        schedule=order.name,
        microbatches=order.microbatches,
        rows=session.rows * world.data_parallel,
        placement=str(place),
        cuts=tuple(session.split.cuts),
        units=tuple(modules_of(stage) for stage in partition.stages),
        parameters=sum(one.numel() for one in session.split.model.parameters()),
        parameter_bytes=tuple(sum(one.nbytes for one in held) for held in parameters),
        gradient_bytes=tuple(gradient_bytes(held, options.grad_dtype) for held in trained),
        activation_bytes=activation_bytes(session),
        memory_limit=limit,
        total_steps=asked.total_steps,
    )


def modules_of(stage: Stage) -> tuple[str, ...]:
    """Return the names of the modules that run on a stage, none within another; none where it has no graph."""
    module, names = stage.module, dict[str, None]()
    graph: Any = getattr(module, "graph", None)
    for node in () if graph is None else graph.nodes:
        if node.op == "call_module":
            called = module.get_submodule(str(node.target))
            inside = called.inside.graph.nodes if isinstance(called, Gate) else (node,)
            names.update({unwrapped(str(n.target)): None for n in inside if n.op == "call_module"})
    return tuple(names)
