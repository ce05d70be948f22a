"""Any model, unedited -> a list of stages."""

from penstock.partition.chance.gate import gates_of
from penstock.partition.cut.balance import Balance, TooFewLayersError
from penstock.partition.partitioner import KEPT_PARTITIONS, Partitioner, default_kwargs
from penstock.partition.recording.recording import RandomSource
from penstock.partition.stages.partition import Origin, Partition, check_alike
from penstock.partition.stages.stage import INPUT_OVERWRITTEN, OVERWRITTEN_BY, RUNS_AGAIN, Stage, retarget
from penstock.partition.values.leaves import leaves_of
from penstock.partition.values.objects import tensors_in

__all__ = [
    "INPUT_OVERWRITTEN",
    "KEPT_PARTITIONS",
    "OVERWRITTEN_BY",
    "RUNS_AGAIN",
    "Balance",
    "Origin",
    "Partition",
    "Partitioner",
    "RandomSource",
    "Stage",
    "TooFewLayersError",
    "check_alike",
    "default_kwargs",
    "gates_of",
    "leaves_of",
    "retarget",
    "tensors_in",
]
