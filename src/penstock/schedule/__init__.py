"""What runs where, and in which order. Pure values and functions; standard library only."""

from penstock.schedule.action import Action, Op, Overlap
from penstock.schedule.check import Violation, check, in_flight_by_stage, peak_activations, summary
from penstock.schedule.communication import add_communication
from penstock.schedule.csv import Format, from_csv, read_csv, to_csv, write_csv
from penstock.schedule.dependencies import Dependencies, stages_with_backward
from penstock.schedule.generators import CHUNKS, MICROBATCHES, Generator, generate, generator, generators, names
from penstock.schedule.grid import grid
from penstock.schedule.order import linearize
from penstock.schedule.passes import (
    drop_backward,
    drop_communication,
    first_microbatches,
    forward_only,
    merge_backward,
    reduce_replicas,
    reduce_ties,
    split_backward,
)
from penstock.schedule.placement import Placement
from penstock.schedule.row import Row
from penstock.schedule.schedule import Schedule
from penstock.schedule.sharding import add_sharding, whole_last_backward

__all__ = [
    "CHUNKS",
    "MICROBATCHES",
    "Action",
    "Dependencies",
    "Format",
    "Generator",
    "Op",
    "Overlap",
    "Placement",
    "Row",
    "Schedule",
    "Violation",
    "add_communication",
    "add_sharding",
    "check",
    "drop_backward",
    "drop_communication",
    "first_microbatches",
    "forward_only",
    "from_csv",
    "generate",
    "generator",
    "generators",
    "grid",
    "in_flight_by_stage",
    "linearize",
    "merge_backward",
    "names",
    "peak_activations",
    "read_csv",
    "reduce_replicas",
    "reduce_ties",
    "split_backward",
    "stages_with_backward",
    "summary",
    "to_csv",
    "whole_last_backward",
    "write_csv",
]
