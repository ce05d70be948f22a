"""Pipeline parallelism for PyTorch: any model, any schedule, the same gradients as on one device.

Names and subpackages are loaded on first use: `penstock.schedule` works without an import of its own, and does not
load torch.
"""

from __future__ import annotations

from penstock._base import __version__ as __version__
from penstock._base.lazy import TYPE_CHECKING, face, lent, moved

if TYPE_CHECKING:
    from penstock._base.errors import ArgumentError as ArgumentError
    from penstock._base.errors import CheckpointError as CheckpointError
    from penstock._base.errors import ClosedError as ClosedError
    from penstock._base.errors import FabricError as FabricError
    from penstock._base.errors import MissingExtraError as MissingExtraError
    from penstock._base.errors import NonFiniteError as NonFiniteError
    from penstock._base.errors import PartitionError as PartitionError
    from penstock._base.errors import PenstockError as PenstockError
    from penstock._base.errors import PipelineFailure as PipelineFailure
    from penstock._base.errors import PlanError as PlanError
    from penstock._base.errors import ScheduleError as ScheduleError
    from penstock._base.errors import ShapeError as ShapeError
    from penstock._base.errors import VerificationError as VerificationError
    from penstock._base.marks import current_microbatch as current_microbatch
    from penstock._base.marks import current_stage as current_stage
    from penstock._base.marks import cut as cut
    from penstock.costs.profile import Profile as Profile
    from penstock.pipe.build import pipeline as pipeline
    from penstock.pipe.inspection import Inspection as Inspection
    from penstock.pipe.inspection import inspect as inspect
    from penstock.pipe.pipeline import Pipeline as Pipeline
    from penstock.pipe.profiling import profile as profile
    from penstock.pipe.result import StepResult as StepResult
    from penstock.pipe.scaler import GradScaler as GradScaler
    from penstock.runtime.batch.batch_dims import BatchDims as BatchDims
    from penstock.runtime.batch.batch_dims import Microbatches as Microbatches
    from penstock.runtime.batch.cutting import Microbatch as Microbatch
    from penstock.schedule import Schedule as Schedule
    from penstock.schedule.timeline import Timeline as Timeline
    from penstock.verification.comparison import Report as Report
    from penstock.verification.verify import verify as verify

_HOMES = {
    "pipe.pipeline": "Pipeline",
    "pipe.build": "pipeline",
    "_base.marks": "cut current_microbatch current_stage",
    "_base.errors": (
        "ArgumentError CheckpointError ClosedError FabricError MissingExtraError NonFiniteError "
        "PartitionError PenstockError PipelineFailure PlanError ScheduleError ShapeError VerificationError"
    ),
    "pipe.result": "StepResult",
    "runtime.batch.batch_dims": "BatchDims Microbatches",
    "runtime.batch.cutting": "Microbatch",
    "pipe.scaler": "GradScaler",
    "schedule": "Schedule",
    "schedule.timeline": "Timeline",
    "verification.comparison": "Report",
    "pipe.inspection": "Inspection inspect",
    "costs.profile": "Profile",
    "pipe.profiling": "profile",
    "verification.verify": "verify",
}

_SUBPACKAGES = frozenset(
    (
        *("checkpoint", "costs", "integrations", "network", "plan", "report", "schedule", "simulate"),
        *("testing", "trace", "verification"),
    )
)

moved.update(  # until 0.2
    {
        **{
            f"penstock.explain.{name}": f"penstock.trace.{name}"
            for name in ("chrome", "clocks", "event", "measured", "names", "around")
        },
        "penstock.explain.columns": "penstock.trace.tables",
        "penstock.explain.reading": "penstock.trace.files",
        "penstock.balance": "penstock.costs",
        "penstock.blame": "penstock.verification.blame",
        "penstock.errors": "penstock._base.errors",
        "penstock.explain": "penstock.plan.explain",
        "penstock.fabric": "penstock.network.fabric",
        "penstock.hardware": "penstock.costs.hardware",
        "penstock.integrations.tensorboard": "penstock.integrations.loggers",
        "penstock.launch": "penstock.distributed.launch",
        "penstock.runs.reading": "penstock.trace.runs.reader",
        "penstock.runs": "penstock.trace.runs",
        "penstock.search": "penstock.simulate.search",
        "penstock.transformer": "penstock.plan.transformer",
    }
)

lent.update(drawing="penstock.report.plot", verification="penstock.verification.verify")

_OLD = {name.rpartition(".")[2] for name in moved if name.count(".") == 1}

__all__, __getattr__, __dir__ = face(__name__, _HOMES, _SUBPACKAGES | _OLD)
