"""Any model, unedited -> a list of stages."""

from penstock.partition.cut import Balance
from penstock.partition.partition import Origin, Partition
from penstock.partition.partitioner import KEPT_PARTITIONS, Partitioner, default_kwargs
from penstock.partition.recording import RandomSource
from penstock.partition.stage import Stage, retarget

__all__ = [
    "KEPT_PARTITIONS",
    "Balance",
    "Origin",
    "Partition",
    "Partitioner",
    "RandomSource",
    "Stage",
    "default_kwargs",
    "retarget",
]
