"""Any model, unedited -> a list of stages."""

from penstock.partition.chance.gate import gates_of
from penstock.partition.complete import leaves_of
from penstock.partition.cut import Balance, TooFewLayersError
from penstock.partition.objects import tensors_in
from penstock.partition.partition import Origin, Partition
from penstock.partition.partitioner import KEPT_PARTITIONS, Partitioner, default_kwargs
from penstock.partition.recording import RandomSource
from penstock.partition.stage import INPUT_OVERWRITTEN, OVERWRITTEN_BY, Stage, Surroundings, retarget
from penstock.partition.state.left_behind import Left
from penstock.partition.state.reach import Trace
from penstock.partition.state.remembered import Remembered
from penstock.partition.trees import Flat

__all__ = [
    "INPUT_OVERWRITTEN",
    "KEPT_PARTITIONS",
    "OVERWRITTEN_BY",
    "Balance",
    "Flat",
    "Left",
    "Origin",
    "Partition",
    "Partitioner",
    "RandomSource",
    "Remembered",
    "Stage",
    "Surroundings",
    "TooFewLayersError",
    "Trace",
    "default_kwargs",
    "gates_of",
    "leaves_of",
    "retarget",
    "tensors_in",
]
