"""What runs where, and in which order. Pure values and functions; standard library only.

In come a name and numbers of ranks and microbatches, or a CSV of torch's; out comes a `Schedule`, checked and printed.

>>> schedule = generate("1f1b", ranks=2, microbatches=3)
>>> print(schedule)
1f1b: 3 microbatches, stages on ranks 0 1
rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
rank 1: 1F0 1B0 1F1 1B1 1F2 1B2
>>> check(schedule)
[]
"""

from penstock._base.lazy import find_old_names
from penstock.schedule.action import Action, Op, Overlap
from penstock.schedule.check import Violation, check, in_flight_by_stage, peak_activations, summary
from penstock.schedule.communication import add_communication
from penstock.schedule.csv import Format, from_csv, read_csv, to_csv, write_csv
from penstock.schedule.dependencies import Dependencies, stages_with_backward
from penstock.schedule.generators import (
    MICROBATCHES,
    MICROBATCHES_HINT,
    ScheduleSpec,
    generate,
    names,
    schedule_spec,
    schedule_specs,
)
from penstock.schedule.grid import grid
from penstock.schedule.order import linearize
from penstock.schedule.passes import (
    drop_backward,
    drop_communication,
    forward_only,
    merge_backward,
    reduce_replicas,
    reduce_ties,
    split_backward,
    truncate_microbatches,
)
from penstock.schedule.placement import Placement
from penstock.schedule.row import Row
from penstock.schedule.schedule import Schedule
from penstock.schedule.sharding import add_sharding, merge_last_backward

__all__ = [
    "MICROBATCHES",
    "MICROBATCHES_HINT",
    "Action",
    "Dependencies",
    "Format",
    "Op",
    "Overlap",
    "Placement",
    "Row",
    "Schedule",
    "ScheduleSpec",
    "Violation",
    "add_communication",
    "add_sharding",
    "check",
    "drop_backward",
    "drop_communication",
    "forward_only",
    "from_csv",
    "generate",
    "grid",
    "in_flight_by_stage",
    "linearize",
    "merge_backward",
    "merge_last_backward",
    "names",
    "peak_activations",
    "read_csv",
    "reduce_replicas",
    "reduce_ties",
    "schedule_spec",
    "schedule_specs",
    "split_backward",
    "stages_with_backward",
    "summary",
    "to_csv",
    "truncate_microbatches",
    "write_csv",
]

generators = schedule_specs  # until 0.2; hides the package of that name
__getattr__ = find_old_names(__name__)
