"""Pipeline parallelism for PyTorch: any model, any schedule, the same gradients as on one device.

Names and subpackages are loaded on first use: `penstock.schedule` works without an import of its own, and does not
load torch.
"""

from __future__ import annotations

from penstock._base import __version__ as __version__
from penstock._base.lazy import TYPE_CHECKING, lazy_exports, moved, providers, renamed

if TYPE_CHECKING:
    from penstock._base.errors import ArgumentError as ArgumentError
    from penstock._base.errors import CheckpointError as CheckpointError
    from penstock._base.errors import FabricError as FabricError
    from penstock._base.errors import MissingExtraError as MissingExtraError
    from penstock._base.errors import NonFiniteError as NonFiniteError
    from penstock._base.errors import PartitionError as PartitionError
    from penstock._base.errors import PenstockError as PenstockError
    from penstock._base.errors import PipelineClosedError as PipelineClosedError
    from penstock._base.errors import PlanError as PlanError
    from penstock._base.errors import RankFailedError as RankFailedError
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
    from penstock.pipe.scaler import GradScaler as GradScaler
    from penstock.runtime.batch.batch_dims import BatchDims as BatchDims
    from penstock.runtime.batch.batch_dims import Microbatches as Microbatches
    from penstock.runtime.batch.cut import Microbatch as Microbatch
    from penstock.runtime.step.results import StepResult as StepResult
    from penstock.schedule import Schedule as Schedule
    from penstock.schedule.timeline import Timeline as Timeline
    from penstock.verification.comparison import VerificationReport as VerificationReport
    from penstock.verification.verify import verify as verify

_HOMES = {
    "pipe.pipeline": "Pipeline",
    "pipe.build": "pipeline",
    "_base.marks": "cut current_microbatch current_stage",
    "_base.errors": (
        "ArgumentError CheckpointError PipelineClosedError FabricError MissingExtraError NonFiniteError "
        "PartitionError PenstockError RankFailedError PlanError ScheduleError ShapeError VerificationError"
    ),
    "runtime.batch.batch_dims": "BatchDims Microbatches",
    "runtime.batch.cut": "Microbatch",
    "runtime.step.results": "StepResult",
    "pipe.scaler": "GradScaler",
    "schedule": "Schedule",
    "schedule.timeline": "Timeline",
    "verification.comparison": "VerificationReport",
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
            for name in ("chrome", "clocks", "event", "measured", "names")
        },
        "penstock.explain.around": "penstock.trace.outside_pipeline",
        "penstock.explain.case": "penstock.plan.explain.replay",
        "penstock.explain.columns": "penstock.trace.columns",
        "penstock.explain.reading": "penstock.trace.formats",
        "penstock.explain.where": "penstock.plan.explain.breakdown",
        "penstock.balance": "penstock.costs",
        "penstock.blame": "penstock.verification.blame",
        "penstock.errors": "penstock._base.errors",
        "penstock.explain": "penstock.plan.explain",
        "penstock.fabric": "penstock.network.fabric",
        "penstock.fabric.emulation.signals": "penstock.network.fabric.emulation.trials",
        "penstock.fabric.forecast": "penstock.network.fabric.alpha_beta",
        "penstock.fabric.warmup": "penstock.network.fabric.statistics",
        "penstock.hardware": "penstock.costs.hardware",
        "penstock.integrations.tensorboard": "penstock.integrations.loggers",
        "penstock.launch": "penstock.distributed.launch",
        "penstock.runs.reading": "penstock.trace.runs.reader",
        "penstock.runs": "penstock.trace.runs",
        "penstock.search.found": "penstock.simulate.search.result",
        "penstock.search": "penstock.simulate.search",
        "penstock.transformer": "penstock.plan.transformer",
    }
)

renamed.update(  # until 0.2
    {
        f"{package}.{pair.partition('=')[0]}": pair.partition("=")[2]
        for package, pairs in {
            "penstock": ("Report=VerificationReport PipelineFailure=RankFailedError ClosedError=PipelineClosedError"),
            "penstock.plan": (
                "Choice=ParallelConfig choices=enumerate_configs Wanted=FixedNumbers Lost=RejectedConfig "
                "Planned=PlanResult Kind=DevicePool"
            ),
            "penstock.plan.explain": (
                "Predicted=Prediction Recording=TraceData Run=TraceSteps read_run=load_trace run_of=steps_of_trace"
            ),
            "penstock.plan.transformer": (
                "Job=TrainingConfig Layout=ParallelLayout Machine=ClusterSpec Step=StepEstimate "
                "Transformer=TransformerConfig"
            ),
            "penstock.costs": (
                "Problem=CutProblem best_starts=best_cuts estimated=estimate fitted=fit_efficiency "
                "counted_again=tied_bytes_overcount MadeFor=ModelFingerprint Operations=OpCounts"
            ),
            "penstock.costs.hardware": (
                "Cable=Interconnect Device=DeviceSpec USUAL=DEFAULT_EFFICIENCY reported_as=device_by_reported_name "
                "calibrated=calibrate"
            ),
            "penstock.simulate": ("Cause=IdleCause idle=idle_time_by_cause"),
            "penstock.simulate.search": ("Found=SearchResult"),
            "penstock.schedule": (
                "Generator=ScheduleSpec generator=schedule_spec whole_last_backward=merge_last_backward "
                "first_microbatches=truncate_microbatches"
            ),
            "penstock.trace.runs": (
                "RunRead=RecordedRun About=RunInfo Memory=MemoryTrace Predicted=RecordedPrediction RunFolder=RunConfig"
            ),
            "penstock.checkpoint": ("Generators=RngState finish=wait_for_save"),
            "penstock.testing": ("Finished=JobResult why_no_bad_network=bad_network_unavailable_reason"),
            "penstock.report": ("panel_of=make_panel Moment=SlotActivity"),
        }.items()
        for pair in pairs.split()
    }
)

providers.update(drawing="penstock.report.svg", verification="penstock.verification.verify")

_OLD = {name.rpartition(".")[2] for name in moved if name.count(".") == 1}

__all__, __getattr__, __dir__ = lazy_exports(__name__, _HOMES, _SUBPACKAGES | _OLD)
