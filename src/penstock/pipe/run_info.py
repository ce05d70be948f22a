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
from penstock.partition.names import unwrapped
from penstock.partition.stages.stage import Gate
from penstock.pipe.predictions import activation_bytes, optimizer_bytes, predict_step
from penstock.pipe.run_recorder import Recorder
from penstock.pipe.session import Session
from penstock.pipe.verified import verified_fingerprints
from penstock.plan import Plan
from penstock.runtime.front_end import Stage
from penstock.simulate.memory_use import memory_after_actions
from penstock.trace.runs.about import RunInfo
from penstock.trace.runs.folder import PREDICTED, PREDICTED_MEMORY
from penstock.trace.runs.option import RunConfig
from penstock.trace.runs.writer import earlier_run


def record(session: Session, config: RunConfig, plan: Plan | None = None) -> None:
    """Record the session's steps from now on, as far as this process has a part in it. Every rank calls it.

    Args:
        plan: what the pipeline follows.

    Raises:
        ArgumentError: the folder has a run of another version or tool, or another job writes there.
    """
    engine = session.engine
    path, refusal = Path(config.path), None
    if engine.world.is_first:
        try:
            owner.claim(path, session, f"run_dir={str(path)!r}")
        except ArgumentError as error:
            refusal = str(error)
        except OSError as error:
            if os.path.isdir(path):  # otherwise the recorder warns of it; training goes on
                warn(f"run_dir={str(path)!r}: {error}; a second job in this folder will not be detected")
    run_id, refusal = engine.control.share((uuid.uuid4().hex, refusal), role="everyone")
    if refusal is not None:
        raise ArgumentError(refusal)
    info = previous = None
    initial: dict[str, Any] = {}
    with engine.control.agreed():
        if engine.world.is_first:
            previous = earlier_run(path)
            info = describe(session, config, run_id, plan)
            initial = _initial_files(session, info, plan)
    verified_mark = engine.control.share("" if previous is None else previous.verified, role="everyone")
    verified_fingerprints.update({verified_mark} & {session.fingerprint()})
    recorder = Recorder(config, run_id, info, previous, initial, engine.world, engine.control.watchdog, engine.devices)
    weakref.finalize(session, recorder.end_now)  # if it is dropped, or the program ends, without `close`
    session.on_close(recorder.close)
    session.recorder = recorder


def _initial_files(session: Session, info: RunInfo, plan: Plan | None) -> dict[str, Any]:
    """Return what is known before the first step, by file."""
    files: dict[str, Any] = {}
    if (step := predict_step(session, plan)) is not None:
        files[PREDICTED] = {
            "source": step.source,
            "step_seconds": step.step_seconds,
            "stage_seconds": [*step.stage_seconds],
            "timeline": step.timeline.to_dict(),
        }
    if info.activation_bytes:
        states = [optimizer_bytes(stage.parameters.values()) for stage in session.partition.stages]
        static_bytes = [sum(sizes) for sizes in zip(info.parameter_bytes, info.gradient_bytes, states, strict=True)]
        files[PREDICTED_MEMORY] = memory_after_actions(session.schedule, info.activation_bytes, static_bytes)
    return files


def describe(session: Session, config: RunConfig, run_id: str, plan: Plan | None = None) -> RunInfo:
    """Return what does not change in a run that begins now, with the plan that it follows."""
    options, order, world, partition = session.options, session.order, session.engine.world, session.partition
    placement, device = order.placement, session.device
    parameters = [[*stage.parameters.values()] for stage in partition.stages]
    limit = options.memory_limit
    if plan is not None and len({*plan.limit_bytes}) == 1 and math.isfinite(plan.limit_bytes[0]):
        limit = plan.limit_bytes[0]
    trained = [[p for p in stage_parameters if p.requires_grad] for stage_parameters in parameters]
    return RunInfo(
        name=os.path.basename(os.path.abspath(config.path)),
        id=run_id,
        started=datetime.now(UTC).isoformat(timespec="milliseconds"),
        resumed=(),
        penstock=__version__,
        torch=str(torch.__version__),
        host=socket.gethostname(),
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
        device=device.type if device.type != "cuda" else f"cuda: {torch.cuda.get_device_name(device)}",
        model=type(session.model_parts.model).__name__,
        ranks=world.ranks,
        replicas=world.data_parallel,
        processes=1 if world.is_local else len(world.everyone),
        chunks=placement.depth // world.ranks,
        schedule=order.name,
        microbatches=order.microbatches,
        rows=session.rows * world.data_parallel,
        placement=str(placement),
        cuts=tuple(session.model_parts.cuts),
        units=tuple(module_names(stage) for stage in partition.stages),
        parameters=sum(p.numel() for p in session.model_parts.model.parameters()),
        parameter_bytes=tuple(sum(p.nbytes for p in stage_parameters) for stage_parameters in parameters),
        gradient_bytes=tuple(gradient_bytes(stage_parameters, options.grad_dtype) for stage_parameters in trained),
        activation_bytes=activation_bytes(session),
        memory_limit=limit,
        total_steps=config.total_steps,
    )


def module_names(stage: Stage) -> tuple[str, ...]:
    """Return the names of the modules that run on a stage, none within another; none where it has no graph."""
    module, names = stage.module, dict[str, None]()
    graph: Any = getattr(module, "graph", None)
    for node in () if graph is None else graph.nodes:
        if node.op == "call_module":
            submodule = module.get_submodule(str(node.target))
            nodes = submodule.inside.graph.nodes if isinstance(submodule, Gate) else (node,)
            names.update({unwrapped(str(n.target)): None for n in nodes if n.op == "call_module"})
    return tuple(names)
